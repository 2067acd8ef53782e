// Package checkpoint keeps on disk what an agent must know again after a
// restart, bound to the node that it is about. What that is belongs to whoever
// saves it.
package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

var (
	// ErrForeign says that the file is about another node or instance. It was kept aside.
	ErrForeign = errors.New("checkpoint of another node")
	// ErrUnreadable says that the file can not be understood. It was kept aside.
	ErrUnreadable = errors.New("checkpoint can not be read")
)

// version is the version of the files. Another one is not understood.
const version = 1

// Identity is whom a file is about. Two are the same node if both fields are.
type Identity struct {
	// NodeName is the Kubernetes node name.
	NodeName string `json:"node_name"`
	// InstanceID is EC2's instance id: a node of the same name on another
	// instance has other addresses.
	InstanceID string `json:"instance_id"`
}

// Folder is where the files of one node are.
type Folder struct {
	path     string
	identity Identity
}

// envelope is a file.
type envelope struct {
	Version int `json:"version"`
	Identity
	Content json.RawMessage `json:"content"`
}

// Open returns the folder at path for a node, making it if it is missing.
func Open(path string, identity Identity) (*Folder, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of checkpoints: %w", err)
	}
	return &Folder{path: path, identity: identity}, nil
}

// Load reads a file into content. It reports false if there is none, or none
// that may be used: then the error is ErrForeign or ErrUnreadable, wrapped with
// the place where the file is kept now, and the caller goes on without.
func (f *Folder) Load(name string, content any) (bool, error) {
	path := filepath.Join(f.path, name)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read a checkpoint: %w", err)
	}
	var e envelope
	err = json.Unmarshal(text, &e)
	switch {
	case err != nil:
		err = fmt.Errorf("%w: %w", ErrUnreadable, err)
	case e.Version != version:
		err = fmt.Errorf("%w: version %d, want %d", ErrUnreadable, e.Version, version)
	case e.Identity != f.identity:
		err = fmt.Errorf("%w: %s on %s, this is %s on %s", ErrForeign, e.NodeName, e.InstanceID, f.identity.NodeName, f.identity.InstanceID)
	default:
		if err = json.Unmarshal(e.Content, content); err != nil {
			err = fmt.Errorf("%w: %w", ErrUnreadable, err)
		}
	}
	if err != nil {
		aside, asideErr := keepAside(path)
		return false, errors.Join(fmt.Errorf("%w; kept as %s", err, aside), asideErr)
	}
	return true, nil
}

// Save replaces a file with content so that a reader, or a crash, finds the old
// one or the new one, and returns when it is on the disk.
func (f *Folder) Save(name string, content any) error {
	inner, err := json.Marshal(content)
	if err != nil {
		return fmt.Errorf("encode a checkpoint: %w", err)
	}
	text, err := json.Marshal(envelope{Version: version, Identity: f.identity, Content: inner})
	if err != nil {
		return fmt.Errorf("encode a checkpoint: %w", err)
	}
	if err := replace(f.path, name, text); err != nil {
		return fmt.Errorf("save checkpoint %s: %w", name, err)
	}
	return nil
}

func replace(dir, name string, text []byte) error {
	file, err := os.CreateTemp(dir, "."+name+".*") // mode 0600
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(file.Name()) }() // there only after an error
	_, err = file.Write(text)
	if err == nil {
		err = file.Sync()
	}
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	if err := os.Rename(file.Name(), filepath.Join(dir, name)); err != nil {
		return err
	}
	return syncDir(dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// keepAside renames a file to the first free name behind it.
func keepAside(path string) (string, error) {
	for n := 1; ; n++ {
		aside := fmt.Sprintf("%s.refused-%d", path, n)
		if _, err := os.Lstat(aside); errors.Is(err, fs.ErrNotExist) {
			return aside, os.Rename(path, aside)
		}
	}
}

// Peek returns whom a file in a folder is about, without using or moving it. It
// reports false if there is no file that says so.
func Peek(path, name string) (Identity, bool) {
	text, err := os.ReadFile(filepath.Join(path, name))
	if err != nil {
		return Identity{}, false
	}
	var e envelope
	if json.Unmarshal(text, &e) != nil || e.Version != version {
		return Identity{}, false
	}
	return e.Identity, true
}
