package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"time"
)

const unixScheme = "unix://"

// ownerOnly is the mode of a socket file.
const ownerOnly = 0o600

// listen opens a listener for host:port or unix:///path. A socket file that a
// dead process left is replaced; one that answers is not.
func listen(address string) (net.Listener, error) {
	path, isSocket := strings.CutPrefix(address, unixScheme)
	if !isSocket {
		return net.Listen("tcp", address)
	}
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = conn.Close()
		return nil, fmt.Errorf("listen on %s: another process answers there", path)
	}
	if info, err := os.Lstat(path); err == nil {
		if info.Mode()&os.ModeSocket == 0 {
			return nil, fmt.Errorf("listen on %s: the file is not a socket", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove stale socket: %w", err)
		}
	}
	// On Linux the file takes the mode that its socket has when it is bound, so
	// nobody else can connect even for a moment. Elsewhere Chmod is what counts.
	narrow := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		return raw.Control(func(fd uintptr) { _ = syscall.Fchmod(int(fd), ownerOnly) })
	}}
	l, err := narrow.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, ownerOnly); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}
