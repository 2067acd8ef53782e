// Package config finds the value of every setting of a program: flag before
// environment before file before default. Which settings there are does not
// belong here.
package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// EnvPrefix begins the name of every environment variable that is a setting:
// --node-syncer is ENIPLANE_NODE_SYNCER.
const EnvPrefix = "ENIPLANE_"

// FileFlag is the flag that names the configuration file.
const FileFlag = "config"

const secretAnnotation = "eniplane-secret"

// Variables with our prefix that are no settings of a program: they tell tests
// and the local stack where tools are.
var notSettings = []string{"ENIPLANE_TEST_SIZE", "ENIPLANE_KUBE_APISERVER", "ENIPLANE_KUBECTL", "ENIPLANE_ETCD", "ENIPLANE_GRPCURL", "ENIPLANE_JAEGER"}

// Entry is one setting in force.
type Entry struct {
	// Name is the flag's name without dashes in front.
	Name string
	// Value is its text; "REDACTED" for a secret that is set.
	Value string
	// Origin is "default", "file", "environment" or "flag".
	Origin string
}

// Effective is the configuration in force, sorted by name.
type Effective []Entry

// MarkSecret says that the value of a flag must never be shown. The flag must
// exist.
func MarkSecret(fs *pflag.FlagSet, name string) error {
	return fs.SetAnnotation(name, secretAnnotation, []string{"true"})
}

// EnvName returns the environment variable of a flag.
func EnvName(flag string) string {
	return EnvPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// Load sets every flag of fs that the arguments did not set, from environ
// ("KEY=value" lines) and then from the YAML file that --config names, if any.
// fs must be parsed already. Unknown keys in the file, unknown variables with
// our prefix, and values that a flag does not take are errors, all of them
// reported at once.
func Load(fs *pflag.FlagSet, environ []string) (Effective, error) {
	origin := make(map[string]string)
	fs.VisitAll(func(f *pflag.Flag) {
		origin[f.Name] = "default"
		if f.Changed {
			origin[f.Name] = "flag"
		}
	})
	var problems []error

	byVariable := make(map[string]*pflag.Flag)
	fs.VisitAll(func(f *pflag.Flag) { byVariable[EnvName(f.Name)] = f })
	for _, line := range environ {
		variable, value, _ := strings.Cut(line, "=")
		if !strings.HasPrefix(variable, EnvPrefix) || slices.Contains(notSettings, variable) {
			continue
		}
		flag, known := byVariable[variable]
		if !known {
			problems = append(problems, fmt.Errorf("environment variable %s: no such setting", variable))
			continue
		}
		if origin[flag.Name] != "default" {
			continue
		}
		if err := flag.Value.Set(value); err != nil {
			problems = append(problems, fmt.Errorf("environment variable %s: %w", variable, err))
		}
		origin[flag.Name] = "environment"
	}

	if f := fs.Lookup(FileFlag); f != nil && f.Value.String() != "" {
		problems = append(problems, loadFile(fs, f.Value.String(), origin)...)
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}

	var effective Effective
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" {
			return
		}
		value := f.Value.String()
		if _, secret := f.Annotations[secretAnnotation]; secret && value != "" {
			value = "REDACTED"
		}
		effective = append(effective, Entry{Name: f.Name, Value: value, Origin: origin[f.Name]})
	})
	slices.SortFunc(effective, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	return effective, nil
}

func loadFile(fs *pflag.FlagSet, path string, origin map[string]string) (problems []error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return []error{fmt.Errorf("--%s: %w", FileFlag, err)}
	}
	settings := make(map[string]yaml.Node)
	decoder := yaml.NewDecoder(bytes.NewReader(raw))
	if err := decoder.Decode(&settings); err != nil && !errors.Is(err, io.EOF) {
		return []error{fmt.Errorf("%s: %w", path, err)}
	}
	if err := decoder.Decode(&yaml.Node{}); !errors.Is(err, io.EOF) {
		return []error{fmt.Errorf("%s: more than one document", path)}
	}
	for _, name := range slices.Sorted(mapKeys(settings)) {
		node := settings[name]
		flag := fs.Lookup(name)
		if flag == nil || name == FileFlag || name == "help" {
			problems = append(problems, fmt.Errorf("%s:%d: %s: no such setting", path, node.Line, name))
			continue
		}
		value, err := text(&node)
		if err != nil {
			problems = append(problems, fmt.Errorf("%s:%d: %s: %w", path, node.Line, name, err))
			continue
		}
		if origin[name] != "default" {
			continue
		}
		if err := flag.Value.Set(value); err != nil {
			problems = append(problems, fmt.Errorf("%s:%d: %s: %w", path, node.Line, name, err))
		}
		origin[name] = "file"
	}
	return problems
}

func mapKeys(m map[string]yaml.Node) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// text renders a YAML value as a flag takes it: lists and maps of scalars become
// comma-separated.
func text(node *yaml.Node) (string, error) {
	switch node.Kind {
	case yaml.ScalarNode:
		return node.Value, nil
	case yaml.SequenceNode:
		parts := make([]string, 0, len(node.Content))
		for _, item := range node.Content {
			if item.Kind != yaml.ScalarNode {
				return "", errors.New("a list may hold plain values only")
			}
			parts = append(parts, item.Value)
		}
		return strings.Join(parts, ","), nil
	case yaml.MappingNode:
		parts := make([]string, 0, len(node.Content)/2)
		for i := 0; i+1 < len(node.Content); i += 2 {
			if node.Content[i+1].Kind != yaml.ScalarNode {
				return "", errors.New("a map may hold plain values only")
			}
			parts = append(parts, node.Content[i].Value+"="+node.Content[i+1].Value)
		}
		return strings.Join(parts, ","), nil
	default:
		return "", errors.New("not a plain value, list or map")
	}
}
