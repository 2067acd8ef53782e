// Package query reads the request side of the EC2 query protocol: it turns
// form values such as "Filter.1.Name=vpc-id" into Go structs. It knows the
// grammar only; which parameters an action has is said by the struct, and what
// they mean is the business of the caller.
//
// A field takes part when it has a tag `query:"Name"`. Scalars are string,
// bool, int and named types of them, or pointers to those (nil means absent).
// A slice reads Name.1, Name.2 and so on in the order of the indices, gaps
// allowed; a struct reads Name.Field. A tag `query:",inline"` reads the fields
// of an embedded struct as if they stood in the outer one.
package query

import (
	"cmp"
	"fmt"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// maxDepth bounds how deep parameter names may nest; EC2's own go to six.
const maxDepth = 10

// maxIndex is the highest list index accepted.
const maxIndex = 100_000

// Params is one parsed request. It remembers which parameters were read, so
// that those nobody knew can be named.
type Params struct {
	root *node
}

type node struct {
	value    string
	hasValue bool
	read     bool
	children map[string]*node
}

// Problem says what was wrong with a parameter.
type Problem int

// The problems that a request can have.
const (
	// Duplicate: the parameter occurs twice.
	Duplicate Problem = iota + 1
	// Malformed: the parameter's name is not one the grammar allows.
	Malformed
	// NotBool and NotInt: the value does not have the wanted type.
	NotBool
	NotInt
	// Unknown: no field of the request reads the parameter.
	Unknown
)

// Error names one parameter and what is wrong with it.
type Error struct {
	Problem Problem
	Name    string
	Value   string
}

// Error implements error.
func (e *Error) Error() string {
	switch e.Problem {
	case Duplicate:
		return fmt.Sprintf("parameter %s occurs twice", e.Name)
	case Malformed:
		return fmt.Sprintf("parameter name %q is malformed", e.Name)
	case NotBool:
		return fmt.Sprintf("parameter %s: %q is not a boolean", e.Name, e.Value)
	case NotInt:
		return fmt.Sprintf("parameter %s: %q is not an integer", e.Name, e.Value)
	case Unknown:
		return fmt.Sprintf("parameter %s is not recognized", e.Name)
	}
	return fmt.Sprintf("parameter %s is invalid", e.Name)
}

// Parse builds Params from form values.
func Parse(values url.Values) (*Params, *Error) {
	p := &Params{root: &node{}}
	for _, name := range sortedKeys(values) {
		if len(values[name]) != 1 {
			return nil, &Error{Problem: Duplicate, Name: name}
		}
		parts := strings.Split(name, ".")
		if len(parts) > maxDepth || slices.Contains(parts, "") {
			return nil, &Error{Problem: Malformed, Name: name}
		}
		n := p.root
		for _, part := range parts {
			child := n.children[part]
			if child == nil {
				child = &node{}
				if n.children == nil {
					n.children = make(map[string]*node)
				}
				n.children[part] = child
			}
			n = child
		}
		n.value, n.hasValue = values[name][0], true
	}
	return p, nil
}

// Ignore marks the named top-level parameters, and everything below them, as
// read.
func (p *Params) Ignore(names ...string) {
	for _, name := range names {
		if n := p.root.children[name]; n != nil {
			n.readAll()
		}
	}
}

// Unread returns the first, in sorted order, of the parameters that no Decode
// has read, or nil if all were.
func (p *Params) Unread() *Error {
	if name, ok := p.root.unread(""); ok {
		return &Error{Problem: Unknown, Name: name}
	}
	return nil
}

// Decode fills the struct that into points to. Fields without a parameter keep
// their value.
func (p *Params) Decode(into any) *Error {
	return decodeStruct(p.root, "", reflect.ValueOf(into).Elem())
}

func decodeStruct(n *node, path string, v reflect.Value) *Error {
	t := v.Type()
	for i := range t.NumField() {
		tag, ok := t.Field(i).Tag.Lookup("query")
		if !ok {
			continue
		}
		if tag == ",inline" {
			if err := decodeStruct(n, path, v.Field(i)); err != nil {
				return err
			}
			continue
		}
		child := n.children[tag]
		if child == nil {
			continue
		}
		if err := decode(child, join(path, tag), v.Field(i)); err != nil {
			return err
		}
	}
	return nil
}

func decode(n *node, path string, v reflect.Value) *Error {
	switch v.Kind() {
	case reflect.Struct:
		return decodeStruct(n, path, v)
	case reflect.Slice:
		return decodeSlice(n, path, v)
	case reflect.Pointer:
		elem := reflect.New(v.Type().Elem())
		if elem.Elem().Kind() != reflect.Struct && !n.hasValue {
			return nil
		}
		if err := decode(n, path, elem.Elem()); err != nil {
			return err
		}
		v.Set(elem)
		return nil
	}
	if !n.hasValue {
		return nil
	}
	n.read = true
	switch v.Kind() {
	case reflect.String:
		v.SetString(n.value)
	case reflect.Bool:
		b, ok := parseBool(n.value)
		if !ok {
			return &Error{Problem: NotBool, Name: path, Value: n.value}
		}
		v.SetBool(b)
	case reflect.Int, reflect.Int32, reflect.Int64:
		i, err := strconv.ParseInt(n.value, 10, 32)
		if err != nil {
			return &Error{Problem: NotInt, Name: path, Value: n.value}
		}
		v.SetInt(i)
	default:
		panic("query: unsupported field type " + v.Type().String())
	}
	return nil
}

func decodeSlice(n *node, path string, v reflect.Value) *Error {
	if n.hasValue && n.value == "" {
		n.read = true // "Name=" is how some clients write an empty list
	}
	type element struct {
		index int
		key   string
	}
	var elements []element
	for key := range n.children {
		if index, ok := parseIndex(key); ok {
			elements = append(elements, element{index, key})
		}
	}
	slices.SortFunc(elements, func(a, b element) int { return cmp.Compare(a.index, b.index) })
	for _, e := range elements {
		elem := reflect.New(v.Type().Elem()).Elem()
		if err := decode(n.children[e.key], join(path, e.key), elem); err != nil {
			return err
		}
		v.Set(reflect.Append(v, elem))
	}
	return nil
}

// parseBool accepts the spellings that SDKs and people use, and says whether s
// is one of them.
func parseBool(s string) (bool, bool) {
	switch strings.ToLower(s) {
	case "true", "1":
		return true, true
	case "false", "0":
		return false, true
	}
	return false, false
}

func parseIndex(s string) (int, bool) {
	i, err := strconv.Atoi(s)
	if err != nil || i < 1 || i > maxIndex || strconv.Itoa(i) != s {
		return 0, false
	}
	return i, true
}

func (n *node) readAll() {
	n.read = true
	for _, child := range n.children {
		child.readAll()
	}
}

func (n *node) unread(path string) (string, bool) {
	if n.hasValue && !n.read {
		return path, true
	}
	for _, key := range sortedKeys(n.children) {
		if name, ok := n.children[key].unread(join(path, key)); ok {
			return name, true
		}
	}
	return "", false
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
