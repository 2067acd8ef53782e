package config

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// fromFile sets what the YAML file at path holds: one document, a map from
// flag names to plain values, lists or maps of them.
func (l *loader) fromFile(path string) {
	raw, err := os.ReadFile(path)
	if err != nil {
		l.refuse("--%s: %w", FileFlag, err)
		return
	}
	settings := make(map[string]yaml.Node)
	decoder := yaml.NewDecoder(bytes.NewReader(raw))
	if err := decoder.Decode(&settings); err != nil && !errors.Is(err, io.EOF) {
		l.refuse("%s: %w", path, err)
		return
	}
	if err := decoder.Decode(&yaml.Node{}); !errors.Is(err, io.EOF) {
		l.refuse("%s: more than one document", path)
		return
	}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		node := settings[name]
		where := fmt.Sprintf("%s:%d: %s", path, node.Line, name)
		if _, known := l.flags[name]; !known || name == FileFlag {
			l.refuse("%s: no such setting", where)
			continue
		}
		assign, err := assignment(&node)
		if err != nil {
			l.refuse("%s: %w", where, err)
			continue
		}
		l.set(name, originFile, where, assign)
	}
}

// assignment returns what gives a flag the value of node, or what is wrong with
// its form.
func assignment(node *yaml.Node) (func(pflag.Value) error, error) {
	switch node.Kind {
	case yaml.ScalarNode:
		value, err := scalar(node)
		return func(v pflag.Value) error { return v.Set(value) }, err
	case yaml.SequenceNode:
		items := make([]string, 0, len(node.Content))
		for _, item := range node.Content {
			value, err := scalar(item)
			if err != nil {
				return nil, err
			}
			items = append(items, value)
		}
		return func(v pflag.Value) error { return setList(v, items) }, nil
	case yaml.MappingNode:
		pairs := make([]string, 0, len(node.Content)/2)
		for i := 0; i+1 < len(node.Content); i += 2 {
			value, err := scalar(node.Content[i+1])
			if err != nil {
				return nil, err
			}
			pairs = append(pairs, node.Content[i].Value+"="+value)
		}
		return func(v pflag.Value) error { return setMap(v, pairs) }, nil
	default:
		return nil, errors.New("not a plain value, list or map")
	}
}

func scalar(node *yaml.Node) (string, error) {
	if node.Kind != yaml.ScalarNode {
		return "", errors.New("a list or map may hold plain values only")
	}
	if node.ShortTag() == "!!null" {
		return "", errors.New(`there is no value; an empty one is ""`)
	}
	return node.Value, nil
}

func setList(v pflag.Value, items []string) error {
	list, ok := v.(pflag.SliceValue)
	if !ok {
		return fmt.Errorf("a list, but it takes one value (%s)", v.Type())
	}
	return list.Replace(items)
}

// setMap gives pairs of key=value to a flag of a type like stringToString, which
// reads them as one CSV record.
func setMap(v pflag.Value, pairs []string) error {
	if !strings.HasPrefix(v.Type(), "stringTo") {
		return fmt.Errorf("a map, but it takes no pairs (%s)", v.Type())
	}
	if len(pairs) == 0 {
		return nil
	}
	var record strings.Builder
	w := csv.NewWriter(&record)
	if err := w.Write(pairs); err != nil {
		return err
	}
	w.Flush()
	return v.Set(strings.TrimSuffix(record.String(), "\n"))
}
