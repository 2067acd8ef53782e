package condition

import (
	"errors"
	"testing"
	"time"

	"github.com/eniplane/eniplane/internal/reason"
)

func TestBoard(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	b := NewBoard(func() time.Time { return now })
	b.Set(reason.MapFull, "", "1 entry does not fit")
	began := now
	now = now.Add(time.Minute)
	b.Set(reason.MapFull, "", "2 entries do not fit")
	b.Set(reason.PrefixInvalid, "netpol/ns/a", "bad")
	b.Set(reason.PrefixInvalid, "netpol/ns/b", "worse")
	got := b.Conditions()
	if len(got) != 3 || got[0].Message != "bad" || got[2] != (Condition{reason.MapFull, "2 entries do not fit", began}) {
		t.Fatalf("conditions %v", got)
	}
	b.ClearAbout("netpol/ns/a")
	b.Clear(reason.MapFull, "")
	b.Clear(reason.MapFull, "never there")
	if got := b.Conditions(); len(got) != 1 || got[0].Message != "worse" {
		t.Errorf("conditions %v", got)
	}
}

func TestDependencies(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	b := NewBoard(func() time.Time { return now })
	if b.Available("x") {
		t.Error("available before any call")
	}
	for i, step := range []struct {
		err     error
		changed bool
	}{{errors.New("down"), true}, {errors.New("still down"), false}, {nil, true}, {nil, false}} {
		if got := b.Depend("x", step.err); got != step.changed {
			t.Errorf("step %d changed: %v", i, got)
		}
		now = now.Add(time.Minute)
	}
	want := Dependency{Name: "x", Available: true, Since: now.Add(-2 * time.Minute)}
	if got := b.Dependencies(); len(got) != 1 || got[0] != want {
		t.Errorf("dependencies %v, want %v", got, want)
	}
}
