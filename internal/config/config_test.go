package config_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/eniplane/eniplane/internal/config"
)

type settings struct {
	name    string
	timeout time.Duration
	tags    map[string]string
	list    []string
	token   string
}

func load(t *testing.T, file string, environ, args []string) (settings, config.Effective, error) {
	t.Helper()
	var s settings
	fs := pflag.NewFlagSet("x", pflag.ContinueOnError)
	fs.String(config.FileFlag, "", "")
	fs.StringVar(&s.name, "node-name", "default-name", "")
	fs.DurationVar(&s.timeout, "timeout", time.Second, "")
	fs.StringToStringVar(&s.tags, "tags", nil, "")
	fs.StringSliceVar(&s.list, "list", nil, "")
	fs.StringVar(&s.token, "token", "", "")
	if err := config.MarkSecret(fs, "token"); err != nil {
		t.Fatal(err)
	}
	if file != "" {
		path := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config="+path)
	}
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	effective, err := config.Load(fs, environ)
	return s, effective, err
}

func origins(e config.Effective) map[string]string {
	m := map[string]string{}
	for _, entry := range e {
		m[entry.Name] = entry.Origin
	}
	return m
}

func TestPrecedence(t *testing.T) {
	file := "node-name: from-file\ntimeout: 3s\ntags: {a: b}\nlist: [x, y]\n"
	s, effective, err := load(t, file, []string{"ENIPLANE_NODE_NAME=from-env", "ENIPLANE_TIMEOUT=2s", "HOME=/x"}, []string{"--node-name=from-flag"})
	if err != nil {
		t.Fatal(err)
	}
	if s.name != "from-flag" || s.timeout != 2*time.Second || s.tags["a"] != "b" || len(s.list) != 2 {
		t.Errorf("settings %+v", s)
	}
	want := map[string]string{"config": "flag", "list": "file", "node-name": "flag", "tags": "file", "timeout": "environment", "token": "default"}
	if diff := cmp.Diff(want, origins(effective)); diff != "" {
		t.Errorf("origins (-want +got):\n%s", diff)
	}
}

// Commas and equals signs in an item do not make two of it.
func TestItemsOfListsAndMapsStayWhole(t *testing.T) {
	s, _, err := load(t, "list: ['a,b', c]\ntags: {k: 'x,y=z', l: '1'}\n", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"a,b", "c"}, s.list); diff != "" {
		t.Errorf("list (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{"k": "x,y=z", "l": "1"}, s.tags); diff != "" {
		t.Errorf("tags (-want +got):\n%s", diff)
	}
	if s, _, err := load(t, "list: []\ntags: {}\n", nil, nil); err != nil || len(s.list)+len(s.tags) != 0 {
		t.Errorf("empty: %+v, %v", s, err)
	}
}

func TestRefusals(t *testing.T) {
	for _, tc := range []struct {
		name, file string
		environ    []string
		want       []string
	}{
		{name: "unknown key", file: "node-name: x\nnode-nmae: y\n", want: []string{":2", "node-nmae"}},
		{name: "unknown variable", environ: []string{"ENIPLANE_NOPE=1"}, want: []string{"ENIPLANE_NOPE"}},
		{name: "bad value in file", file: "timeout: soon\n", want: []string{":1", "timeout"}},
		{name: "bad value in environment", environ: []string{"ENIPLANE_TIMEOUT=soon"}, want: []string{"ENIPLANE_TIMEOUT"}},
		{name: "not YAML", file: "{", want: []string{"c.yaml"}},
		{name: "a list at the top", file: "- a\n", want: []string{"c.yaml"}},
		{name: "duplicate key", file: "timeout: 1s\ntimeout: 2s\n", want: []string{"timeout"}},
		{name: "nested", file: "list: [[a]]\n", want: []string{"list"}},
		{name: "list for one value", file: "node-name: [a, b]\n", want: []string{":1", "node-name", "list"}},
		{name: "map for one value", file: "node-name: {a: b}\n", want: []string{":1", "node-name", "map"}},
		{name: "map for a list", file: "list: {a: b}\n", want: []string{":1", "list", "map"}},
		{name: "no value", file: "node-name:\n", want: []string{":1", "node-name", "no value"}},
		{name: "null", file: "node-name: ~\n", want: []string{":1", "node-name", "no value"}},
		{name: "null in a list", file: "list: [~]\n", want: []string{":1", "list", "no value"}},
		{name: "help in file", file: "help: true\n", want: []string{":1", "help"}},
		{name: "version in environment", environ: []string{"ENIPLANE_VERSION=1"}, want: []string{"ENIPLANE_VERSION"}},
		{name: "empty variable", environ: []string{"ENIPLANE_TIMEOUT="}, want: []string{"ENIPLANE_TIMEOUT"}},
		{name: "two documents", file: "timeout: 1s\n---\ntimeout: 2s\n", want: []string{"document"}},
		{name: "config in config", file: "config: other.yaml\n", want: []string{"config"}},
		{name: "all at once", file: "a: 1\nb: 2\n", environ: []string{"ENIPLANE_C=3"}, want: []string{" a:", " b:", "ENIPLANE_C"}},
	} {
		_, _, err := load(t, tc.file, tc.environ, nil)
		if err == nil {
			t.Errorf("%s: taken", tc.name)
			continue
		}
		for _, w := range tc.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not name %q", tc.name, err, w)
			}
		}
	}
}

func TestMissingAndEmptyFiles(t *testing.T) {
	if _, _, err := load(t, "", nil, []string{"--config=/nonexistent/c.yaml"}); err == nil {
		t.Error("a missing file was taken")
	}
	if _, _, err := load(t, "# nothing\n", nil, nil); err != nil {
		t.Errorf("an empty file: %v", err)
	}
}

func TestSecretsAreRedacted(t *testing.T) {
	_, effective, err := load(t, "", []string{"ENIPLANE_TOKEN=hunter2"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range effective {
		if strings.Contains(e.Value, "hunter2") {
			t.Errorf("%s shows the secret", e.Name)
		}
		if e.Name == "token" && e.Value != "REDACTED" {
			t.Errorf("token = %q", e.Value)
		}
	}
}

// picky is a secret that repeats in its error what it refuses.
type picky struct{}

func (picky) String() string     { return "" }
func (picky) Type() string       { return "picky" }
func (picky) Set(v string) error { return fmt.Errorf("bad value %q", v) }

func TestRefusedSecretsAreNotShown(t *testing.T) {
	fs := pflag.NewFlagSet("x", pflag.ContinueOnError)
	fs.Var(picky{}, "token", "")
	if err := config.MarkSecret(fs, "token"); err != nil {
		t.Fatal(err)
	}
	_, err := config.Load(fs, []string{"ENIPLANE_TOKEN=hunter2"})
	if err == nil || strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), "ENIPLANE_TOKEN") {
		t.Errorf("error %v", err)
	}
	if err := config.MarkSecret(fs, "nope"); err == nil {
		t.Error("a flag that does not exist was marked")
	}
}

func TestToolVariablesAreNoSettings(t *testing.T) {
	if _, _, err := load(t, "", []string{"ENIPLANE_ETCD=/x", "ENIPLANE_TEST_SIZE=soak", "ENIPLANE_TEST_ANY=1", "ENIPLANE_BIN=/bin", "ENIPLANEX=1"}, nil); err != nil {
		t.Error(err)
	}
}
