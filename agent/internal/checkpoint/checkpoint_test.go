package checkpoint

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

type content struct{ Owners map[string]string }

func open(t *testing.T, dir string, id Identity) *Folder {
	t.Helper()
	f, err := Open(dir, id)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

var node1 = Identity{NodeName: "node-1", InstanceID: "i-1"}

func TestSaveAndLoad(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	f := open(t, dir, node1)
	var got content
	if ok, err := f.Load("ipam.json", &got); ok || err != nil {
		t.Fatalf("loaded nothing: %v, %v", ok, err)
	}
	if _, ok := Peek(dir, "ipam.json"); ok {
		t.Fatal("peeked at nothing")
	}
	for _, owner := range []string{"a", "b"} {
		if err := f.Save("ipam.json", content{Owners: map[string]string{owner: "10.0.0.1"}}); err != nil {
			t.Fatal(err)
		}
	}
	if ok, err := open(t, dir, node1).Load("ipam.json", &got); !ok || err != nil || !maps.Equal(got.Owners, map[string]string{"b": "10.0.0.1"}) {
		t.Errorf("loaded %v, %v, %v", got, ok, err)
	}
	if id, ok := Peek(dir, "ipam.json"); !ok || id != node1 {
		t.Errorf("peeked %v, %v", id, ok)
	}
	info, err := os.Stat(filepath.Join(dir, "ipam.json"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 1 {
		t.Errorf("files %v, %v", files, err)
	}
}

func TestWhatIsRefusedIsKeptAside(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		identity   Identity
		err        error
	}{
		{name: "another node", identity: Identity{"node-2", "i-1"}, err: ErrForeign},
		{name: "another instance", identity: Identity{"node-1", "i-2"}, err: ErrForeign},
		{name: "cut off", text: `{"version":1,"node_name":"no`, err: ErrUnreadable},
		{name: "empty", text: " ", err: ErrUnreadable},
		{name: "newer", text: `{"version":2}`, err: ErrUnreadable},
		{name: "other content", text: `{"version":1,"node_name":"node-1","instance_id":"i-1","content":7}`, err: ErrUnreadable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			if tt.text == "" {
				if err := open(t, dir, tt.identity).Save("ipam.json", content{}); err != nil {
					t.Fatal(err)
				}
			} else if err := os.WriteFile(filepath.Join(dir, "ipam.json"), []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			before, err := os.ReadFile(filepath.Join(dir, "ipam.json"))
			if err != nil {
				t.Fatal(err)
			}
			f := open(t, dir, node1)
			for n := range 2 {
				var got content
				ok, err := f.Load("ipam.json", &got)
				if n == 0 && (ok || !errors.Is(err, tt.err)) || n == 1 && (ok || err != nil) {
					t.Fatalf("load %d: %v, %v", n, ok, err)
				}
			}
			after, err := os.ReadFile(filepath.Join(dir, "ipam.json.refused-1"))
			if err != nil || string(after) != string(before) {
				t.Errorf("kept %q, %v", after, err)
			}
		})
	}
}

// A reader at any moment finds one whole file.
func TestReplacedAtOnce(t *testing.T) {
	dir := t.TempDir()
	f := open(t, dir, node1)
	big := func(c string) content {
		return content{Owners: map[string]string{"o": strings.Repeat(c, 1<<20)}}
	}
	if err := f.Save("ipam.json", big("a")); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 10 {
			for _, c := range []string{"a", "b"} {
				if err := f.Save("ipam.json", big(c)); err != nil {
					t.Error(err)
				}
			}
		}
	})
	for range 20 {
		var got content
		if ok, err := f.Load("ipam.json", &got); !ok || err != nil {
			t.Fatalf("%v, %v", ok, err)
		}
		if !slices.Contains([]string{big("a").Owners["o"], big("b").Owners["o"]}, got.Owners["o"]) {
			t.Fatal("a mixture")
		}
	}
	wg.Wait()
}
