// Package traces shows the spans that the programs of a local stack sent: from
// an OTLP receiver in this process, or from a Jaeger. It keeps and finds spans;
// what a good trace looks like is the caller's business.
package traces

import (
	"cmp"
	"slices"
	"time"
)

// Span is one finished span.
type Span struct {
	TraceID    string // 32 hex digits
	SpanID     string // 16 hex digits
	ParentID   string // 16 hex digits; empty for the root
	Service    string // the resource's service.name
	Name       string
	Start      time.Time
	End        time.Time
	Failed     bool              // the span's status is an error
	Attributes map[string]string // values as text
}

// Node is a span with those below it.
type Node struct {
	Span
	Depth int // 0 for a root
}

// Tree returns the spans of one trace as an indented list would show them: each
// before its children, siblings by start. A span whose parent is not among them
// counts as a root.
func Tree(spans []Span) []Node {
	known := make(map[string]bool, len(spans))
	for _, s := range spans {
		known[s.SpanID] = true
	}
	children := make(map[string][]Span)
	for _, s := range spans {
		parent := s.ParentID
		if !known[parent] || parent == s.SpanID {
			parent = ""
		}
		children[parent] = append(children[parent], s)
	}
	for _, c := range children {
		slices.SortFunc(c, func(a, b Span) int {
			return cmp.Or(a.Start.Compare(b.Start), cmp.Compare(a.SpanID, b.SpanID))
		})
	}
	nodes := make([]Node, 0, len(spans))
	var walk func(parent string, depth int)
	walk = func(parent string, depth int) {
		below := children[parent]
		// Taken out first, so that a cycle in bad data ends.
		delete(children, parent)
		for _, s := range below {
			nodes = append(nodes, Node{Span: s, Depth: depth})
			walk(s.SpanID, depth+1)
		}
	}
	walk("", 0)
	return nodes
}
