package wish

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/eniplane/eniplane/agent/internal/ipcache"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func policy(name string) ipcache.Owner {
	return ipcache.Owner{Kind: ipcache.KindNetworkPolicy, Namespace: "ns", Name: name, UID: name}
}

var restored = ipcache.Owner{Kind: ipcache.KindRestore, Name: "node-1", UID: "boot"}

func pfx(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func set(prefixes ...string) map[netip.Prefix]ipcache.Metadata {
	s := make(map[netip.Prefix]ipcache.Metadata)
	for _, p := range prefixes {
		s[pfx(p)] = ipcache.Metadata{}
	}
	return s
}

func (w *Wish) replace(name string, prefixes ...string) uint64 {
	return w.Replace(policy(name), set(prefixes...), trace.SpanContext{})
}

// next takes a task, which must be that of an owner.
func next(t *testing.T, w *Wish, owner ipcache.Owner) *Task {
	t.Helper()
	task, _ := w.Next(now)
	if task == nil || task.Owner != owner {
		t.Fatalf("task %+v, want one of %s", task, owner)
	}
	return task
}

func none(t *testing.T, w *Wish, wait time.Duration) {
	t.Helper()
	if task, left := w.Next(now); task != nil || left != wait {
		t.Fatalf("task %+v in %s, want none in %s", task, left, wait)
	}
}

func TestTasksInOrder(t *testing.T) {
	w := New(ipcache.NewCache(ipcache.Config{}), nil, nil)
	w.replace("a", "10.1.0.0/16")
	w.replace("b", "10.1.0.0/16", "0.0.0.0/0")
	w.Restore(restored, ipcache.Entries{pfx("10.1.0.0/16"): {Number: 1000}})
	w.replace("a", "10.1.0.0/16", "10.2.0.0/16")
	w.replace("a", "10.1.0.0/16", "10.2.0.0/16") // no change

	// What the map held comes first, and everybody prefers its numbers.
	task := next(t, w, restored)
	if len(task.Wanted) != 1 || task.Wanted[0] != (Wanted{pfx("10.1.0.0/16"), 1000}) {
		t.Errorf("task %+v", task)
	}
	w.Committed(task, task.Wanted, 1)
	task = next(t, w, policy("a"))
	if len(task.Wanted) != 2 || task.Wanted[0].Number != 1000 || task.Wanted[1].Number != 0 {
		t.Errorf("task %+v", task)
	}
	w.Committed(task, nil, 2)
	// The world has no number of the ledger.
	if task = next(t, w, policy("b")); len(task.Wanted) != 1 {
		t.Errorf("task %+v", task)
	}
	w.Committed(task, nil, 3)
	none(t, w, 0)
	if !w.Settled() {
		t.Error("not settled")
	}
}

func TestRetryWaitsUnlessTheOwnerChanges(t *testing.T) {
	w := New(ipcache.NewCache(ipcache.Config{}), nil, nil)
	v := w.replace("a", "10.1.0.0/16")
	w.replace("b", "10.1.0.0/16")
	boom := errors.New("boom")
	w.Retry(next(t, w, policy("a")), now.Add(time.Minute), boom)
	if done, err := w.Outcome(policy("a"), v); done || !errors.Is(err, boom) {
		t.Errorf("outcome %v, %v", done, err)
	}
	w.Committed(next(t, w, policy("b")), nil, 1)
	none(t, w, time.Minute)
	if w.Settled() {
		t.Error("settled with a failed owner")
	}
	v2 := w.replace("a", "10.2.0.0/16")
	if done, err := w.Outcome(policy("a"), v2); done || err != nil {
		t.Errorf("outcome of the change %v, %v", done, err)
	}
	w.Committed(next(t, w, policy("a")), nil, 2)
	if done, err := w.Outcome(policy("a"), v2); !done || err != nil {
		t.Errorf("outcome %v, %v", done, err)
	}
	none(t, w, 0)
	if !w.Settled() {
		t.Error("not settled")
	}
}

func TestChangeDuringATask(t *testing.T) {
	w := New(ipcache.NewCache(ipcache.Config{}), nil, nil)
	w.replace("a", "10.1.0.0/16")
	task := next(t, w, policy("a"))
	v := w.replace("a", "10.2.0.0/16")
	w.Committed(task, nil, 1)
	if done, _ := w.Outcome(policy("a"), v); done || w.Settled() {
		t.Error("the older set counts for the newer")
	}
	w.Committed(next(t, w, policy("a")), nil, 2)
	if done, _ := w.Outcome(policy("a"), v); !done || !w.Settled() {
		t.Error("not done")
	}
	// Removed while it is told: the removal must be told, too.
	w.replace("a", "10.3.0.0/16")
	task = next(t, w, policy("a"))
	w.Remove(policy("a"), trace.SpanContext{})
	w.Committed(task, nil, 3)
	if task = next(t, w, policy("a")); !task.Drop {
		t.Errorf("task %+v", task)
	}
	w.Committed(task, nil, 4)
	if owners, _ := w.Declared(0); len(owners) != 0 {
		t.Errorf("declared %v", owners)
	}
}

func TestOutcomeWhileTheLedgerIsAway(t *testing.T) {
	w := New(ipcache.NewCache(ipcache.Config{}), nil, nil)
	v := w.replace("a", "10.1.0.0/16")
	progress := w.Progress()
	away := errors.New("away")
	w.Away(away)
	select {
	case <-progress:
	default:
		t.Error("nobody is told")
	}
	if done, err := w.Outcome(policy("a"), v); done || !errors.Is(err, away) {
		t.Errorf("outcome %v, %v", done, err)
	}
	w.Away(nil)
	if done, err := w.Outcome(policy("a"), v); done || err != nil {
		t.Errorf("outcome %v, %v", done, err)
	}
}

func TestReplayAndLost(t *testing.T) {
	w := New(ipcache.NewCache(ipcache.Config{}), nil, nil)
	w.replace("a", "10.1.0.0/16")
	w.replace("b", "10.2.0.0/16")
	for _, name := range []string{"a", "b"} {
		w.Committed(next(t, w, policy(name)), []Wanted{{pfx("10.1.0.0/16"), 1000}}, 1)
	}
	missing := w.Unheld(func(p netip.Prefix) bool { return p != pfx("10.1.0.0/16") })
	if len(missing) != 1 || missing[0] != pfx("10.1.0.0/16") {
		t.Errorf("unheld %v", missing)
	}
	w.Lost(append(missing, pfx("192.0.2.0/24")))
	if task := next(t, w, policy("a")); task.Wanted[0].Number != 1000 {
		t.Errorf("task %+v does not prefer its number", task)
	} else {
		w.Committed(task, nil, 2)
	}
	none(t, w, 0)
	w.Replay()
	if w.Settled() {
		t.Error("settled in a new session")
	}
	w.Committed(next(t, w, policy("a")), nil, 3)
	w.Committed(next(t, w, policy("b")), nil, 3)
	none(t, w, 0)
}

func TestStaleOwnersAreDroppedOnceAllIsListed(t *testing.T) {
	w := New(ipcache.NewCache(ipcache.Config{}), []string{"networkpolicies"}, []ipcache.Owner{policy("gone"), policy("stays")})
	w.replace("stays", "10.1.0.0/16")
	w.Committed(next(t, w, policy("stays")), nil, 1)
	w.DropStale()
	none(t, w, 0)
	if w.Complete() || w.Settled() {
		t.Error("complete before the list")
	}
	w.Listed("something else")
	w.Listed("networkpolicies")
	if !w.Complete() || !w.Settled() {
		t.Error("not complete")
	}
	w.DropStale()
	task := next(t, w, policy("gone"))
	if !task.Drop {
		t.Errorf("task %+v", task)
	}
	w.Committed(task, nil, 2)
	owners, count := w.Declared(0)
	if len(owners) != 1 || owners[0] != policy("stays") {
		t.Errorf("declared %v", owners)
	}
	if again, same := w.Declared(count); again != nil || same != count {
		t.Errorf("declared again %v", again)
	}
}
