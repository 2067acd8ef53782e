// Package condition is the board on which the parts of an agent say what is
// degraded, for the one who asks how it is. What to do about it belongs to them.
package condition

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/eniplane/eniplane/internal/reason"
)

// Condition is something that is not as it should be.
type Condition struct {
	// Reason is why.
	Reason reason.Reason
	// Message says it in one sentence.
	Message string
	// Since is since when it holds, however its message changed meanwhile.
	Since time.Time
}

// Dependency is a service that the agent calls.
type Dependency struct {
	// Name is its name.
	Name string
	// Available says whether the last call worked.
	Available bool
	// Since is since when that is so.
	Since time.Time
	// Message says why not. Empty if it is.
	Message string
}

// Board holds conditions and dependencies. It is safe for concurrent use.
type Board struct {
	now func() time.Time

	mu           sync.Mutex // guards what follows
	conditions   map[key]Condition
	dependencies map[string]Dependency
}

type key struct {
	reason reason.Reason
	about  string
}

// NewBoard returns an empty board that reads the time from now.
func NewBoard(now func() time.Time) *Board {
	return &Board{now: now, conditions: make(map[key]Condition), dependencies: make(map[string]Dependency)}
}

// Set says that a condition holds. Together with the reason, about tells it from
// others; it may be empty. Setting it again changes the message only.
func (b *Board) Set(r reason.Reason, about, message string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	k := key{r, about}
	c, ok := b.conditions[k]
	if !ok {
		c = Condition{Reason: r, Since: b.now()}
	}
	c.Message = message
	b.conditions[k] = c
}

// Clear says that a condition does not hold.
func (b *Board) Clear(r reason.Reason, about string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.conditions, key{r, about})
}

// ClearAbout clears every condition about one thing.
func (b *Board) ClearAbout(about string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k := range b.conditions {
		if k.about == about {
			delete(b.conditions, k)
		}
	}
}

// Conditions returns what holds, by reason and message.
func (b *Board) Conditions() []Condition {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make([]Condition, 0, len(b.conditions))
	for _, c := range b.conditions {
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b Condition) int {
		return cmp.Or(cmp.Compare(a.Reason, b.Reason), strings.Compare(a.Message, b.Message))
	})
	return all
}

// Depend says how the last call of a service went: nil means that it worked. It
// reports whether the service came or went by that.
func (b *Board) Depend(name string, err error) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, ok := b.dependencies[name]
	changed := !ok || d.Available != (err == nil)
	if changed {
		d = Dependency{Name: name, Available: err == nil, Since: b.now()}
	}
	d.Message = ""
	if err != nil {
		d.Message = err.Error()
	}
	b.dependencies[name] = d
	return changed
}

// Available reports whether the last call of a service worked. A service never
// called is not available.
func (b *Board) Available(name string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.dependencies[name].Available
}

// Dependencies returns all services called so far, by name.
func (b *Board) Dependencies() []Dependency {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make([]Dependency, 0, len(b.dependencies))
	for _, d := range b.dependencies {
		all = append(all, d)
	}
	slices.SortFunc(all, func(a, b Dependency) int { return strings.Compare(a.Name, b.Name) })
	return all
}
