// Package config finds the value of every setting of a program: flag before
// environment before file before default. Which settings there are does not
// belong here.
package config

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// EnvPrefix begins the name of every environment variable that is a setting:
// --node-syncer is ENIPLANE_NODE_SYNCER.
const EnvPrefix = "ENIPLANE_"

// FileFlag is the flag that names the configuration file.
const FileFlag = "config"

const secretAnnotation = "eniplane-secret"

// redacted stands for a secret that is set.
const redacted = "REDACTED"

// Where a value can come from.
const (
	originDefault     = "default"
	originFile        = "file"
	originEnvironment = "environment"
	originFlag        = "flag"
)

var errBadSecret = errors.New("not a value that it takes")

// testPrefix begins the variables that are for tests.
const testPrefix = EnvPrefix + "TEST_"

// notSettings are variables with our prefix that are for builds, tests and the
// local stack: they tell where programs and tools are.
var notSettings = []string{
	"ENIPLANE_BIN", "ENIPLANE_CI_RUN", "ENIPLANE_ETCD", "ENIPLANE_GRPCURL", "ENIPLANE_JAEGER", "ENIPLANE_KUBECTL", "ENIPLANE_KUBE_APISERVER",
}

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

func isSecret(f *pflag.Flag) bool {
	_, secret := f.Annotations[secretAnnotation]
	return secret
}

// EnvName returns the environment variable of a flag.
func EnvName(flag string) string {
	return EnvPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// Load sets every flag of fs that the arguments did not set, from environ
// ("KEY=value" lines, of which the first for a key counts) and then from the YAML
// file that --config names, if any. fs must be parsed already. Unknown keys in
// the file, unknown variables with our prefix, and values that a flag does not
// take are errors, all of them reported at once.
func Load(fs *pflag.FlagSet, environ []string) (Effective, error) {
	l := loader{flags: make(map[string]*pflag.Flag), origin: make(map[string]string)}
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" || f.Name == "version" {
			return // They ask for something; they set nothing.
		}
		l.flags[f.Name] = f
		l.origin[f.Name] = originDefault
		if f.Changed {
			l.origin[f.Name] = originFlag
		}
	})

	l.fromEnvironment(environ)
	if f, ok := l.flags[FileFlag]; ok && f.Value.String() != "" {
		l.fromFile(f.Value.String())
	}
	if err := errors.Join(l.problems...); err != nil {
		return nil, err
	}

	effective := make(Effective, 0, len(l.flags))
	for _, name := range slices.Sorted(maps.Keys(l.flags)) {
		value := l.flags[name].Value.String()
		if isSecret(l.flags[name]) && value != "" {
			value = redacted
		}
		effective = append(effective, Entry{Name: name, Value: value, Origin: l.origin[name]})
	}
	return effective, nil
}

// loader sets flags from one source after the other.
type loader struct {
	flags    map[string]*pflag.Flag // by name
	origin   map[string]string      // by name
	problems []error
}

func (l *loader) refuse(format string, args ...any) {
	l.problems = append(l.problems, fmt.Errorf(format, args...))
}

// set sets a flag that nothing of higher precedence has set, with assign. where
// begins an error.
func (l *loader) set(name, origin, where string, assign func(pflag.Value) error) {
	if l.origin[name] != originDefault {
		return
	}
	l.origin[name] = origin
	if err := assign(l.flags[name].Value); err != nil {
		if isSecret(l.flags[name]) {
			err = errBadSecret // The text of the error may hold the value.
		}
		l.refuse("%s: %w", where, err)
	}
}

func (l *loader) fromEnvironment(environ []string) {
	byVariable := make(map[string]string, len(l.flags))
	for name := range l.flags {
		byVariable[EnvName(name)] = name
	}
	for _, line := range environ {
		variable, value, _ := strings.Cut(line, "=")
		if !strings.HasPrefix(variable, EnvPrefix) || strings.HasPrefix(variable, testPrefix) || slices.Contains(notSettings, variable) {
			continue
		}
		name, known := byVariable[variable]
		if !known {
			l.refuse("environment variable %s: no such setting", variable)
			continue
		}
		l.set(name, originEnvironment, "environment variable "+variable, func(v pflag.Value) error { return v.Set(value) })
	}
}
