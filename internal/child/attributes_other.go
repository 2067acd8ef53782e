//go:build unix && !linux

package child

import "syscall"

// Elsewhere nothing tells a child of its parent's death.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}
