package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/eniplane/eniplane/deploy/local/internal/ipcachemap"
	"github.com/eniplane/eniplane/deploy/local/internal/kube"
	"github.com/eniplane/eniplane/deploy/local/internal/stack"
	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
)

// numbers are what a node's map has for some prefixes; 0 means nothing. They
// are read from the kernel, or from the agent if its map is in memory.
func numbers(t *testing.T, node string, prefixes []netip.Prefix) map[netip.Prefix]uint32 {
	t.Helper()
	found := make(map[netip.Prefix]uint32)
	if pin := record(t, node).Pin; pin != "" {
		entries, err := ipcachemap.Read(pin)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			found[e.Prefix] = e.Number
		}
	} else {
		resp, err := agent(t, node).ListEntries(t.Context(), &agentv1.ListEntriesRequest{PageSize: 10000})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range resp.GetEntries() {
			found[netip.MustParsePrefix(e.GetPrefix())] = e.GetNumber()
		}
	}
	wanted := make(map[netip.Prefix]uint32)
	for _, p := range prefixes {
		wanted[p] = found[p]
	}
	return wanted
}

// applyPolicy applies an egress policy of a test's own and removes it at the
// end.
func applyPolicy(t *testing.T, name string, blocks ...kube.Block) {
	t.Helper()
	if err := st.Kube().ApplyPolicy(t.Context(), kube.EgressPolicy("default", name, blocks...)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { deletePolicy(t, name) })
}

func deletePolicy(t *testing.T, name string) {
	t.Helper()
	if err := st.Kube().DeletePolicy(context.Background(), "default", name); err != nil {
		t.Error(err)
	}
}

func parse(texts ...string) []netip.Prefix {
	var prefixes []netip.Prefix
	for _, text := range texts {
		prefixes = append(prefixes, netip.MustParsePrefix(text))
	}
	return prefixes
}

// programmed waits until nodes have numbers for all prefixes, all the same, and
// returns them.
func programmed(t *testing.T, prefixes []netip.Prefix, nodes ...string) map[netip.Prefix]uint32 {
	t.Helper()
	var first map[netip.Prefix]uint32
	eventually(t, "programmed on every node", func() string {
		first = nil
		for _, node := range nodes {
			got := numbers(t, node, prefixes)
			for p, n := range got {
				if n == 0 {
					return fmt.Sprintf("%s is not in the map of %s", p, node)
				}
			}
			if first == nil {
				first = got
			}
			if !maps.Equal(first, got) {
				t.Fatalf("%s has %v, %s has %v", nodes[0], first, node, got)
			}
		}
		return ""
	})
	return first
}

// mapWatch looks prefixes up in a pinned map, all the time, until it is stopped
// or sees a gap.
type mapWatch struct {
	cancel context.CancelFunc
	done   chan struct{}
	looks  int   // read after done
	gap    error // read after done
}

func watchMap(pin string, want map[netip.Prefix]uint32) *mapWatch {
	ctx, cancel := context.WithCancel(context.Background())
	w := &mapWatch{cancel: cancel, done: make(chan struct{})}
	prefixes := slices.SortedFunc(maps.Keys(want), netip.Prefix.Compare)
	go func() {
		defer close(w.done)
		for ; ctx.Err() == nil && w.gap == nil; w.looks++ {
			// The pin is opened anew each time: another map in its place must
			// hold the same.
			got, err := ipcachemap.Lookup(pin, prefixes...)
			if err != nil {
				w.gap = err
				return
			}
			for i, p := range prefixes {
				if got[i] != want[p] {
					w.gap = fmt.Errorf("look %d: %s has the number %d, want %d", w.looks, p, got[i], want[p])
				}
			}
		}
	}()
	return w
}

// ended tells whether it has seen a gap.
func (w *mapWatch) ended() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

// stop ends the watch and returns the first gap it saw.
func (w *mapWatch) stop() error {
	w.cancel()
	<-w.done
	if w.gap == nil && w.looks == 0 {
		return errors.New("the map was never looked at")
	}
	return w.gap
}

// TestWatchMapSeesGaps shows that the watch of the tests below can fail.
func TestWatchMapSeesGaps(t *testing.T) {
	if !st.HasPins() {
		t.Skip("no BPF file system")
	}
	prefix := netip.MustParsePrefix("10.0.0.0/8")
	key, value := ipcachemap.Key(prefix), [24]byte{7}
	for name, harm := range map[string]func(*ebpf.Map, string) error{
		"entry gone":     func(m *ebpf.Map, _ string) error { return m.Delete(&key) },
		"another number": func(m *ebpf.Map, _ string) error { return m.Put(&key, [24]byte{8}) },
		"pin gone":       func(m *ebpf.Map, _ string) error { return m.Unpin() },
		"another map":    replaceMap,
	} {
		t.Run(name, func(t *testing.T) {
			pin := filepath.Join(st.Record().PinRoot, "gaps")
			m, err := newMap(pin)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = errors.Join(m.Close(), os.RemoveAll(pin)) })
			if err := m.Put(&key, value); err != nil {
				t.Fatal(err)
			}
			watch := watchMap(pin, map[netip.Prefix]uint32{prefix: 7})
			if err := harm(m, pin); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the watch ends", func() string {
				if watch.ended() {
					return ""
				}
				return "it looks on"
			})
			if watch.stop() == nil {
				t.Error("the watch saw no gap")
			}
		})
	}
}

func newMap(pin string) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.LPMTrie, KeySize: 24, ValueSize: 24, MaxEntries: 10, Flags: unix.BPF_F_NO_PREALLOC})
	if err != nil {
		return nil, err
	}
	return m, m.Pin(pin)
}

// replaceMap pins an empty map where a full one was.
func replaceMap(m *ebpf.Map, pin string) error {
	if err := m.Unpin(); err != nil {
		return err
	}
	empty, err := newMap(pin)
	if err != nil {
		return err
	}
	return empty.Close()
}

// restored waits until an agent has given up what its map held before.
func restored(t *testing.T, node string) {
	t.Helper()
	eventually(t, "the restore deadline has passed", func() string {
		status, err := agent(t, node).GetStatus(t.Context(), &agentv1.GetStatusRequest{})
		switch {
		case err != nil:
			return err.Error()
		case status.GetRestoreDeadline() != nil:
			return "restored entries are kept until " + status.GetRestoreDeadline().AsTime().String()
		}
		return ""
	})
}

func TestAgentKilled(t *testing.T) {
	const node = "node-1"
	kept := parse("10.64.0.0/10", "10.64.0.0/16", "203.0.113.0/24", "2001:db8:64::/48")
	dropped := parse("10.65.1.0/24")
	added := parse("10.66.1.0/24")
	policy := func(prefixes ...netip.Prefix) []kube.Block {
		var blocks []kube.Block
		for _, p := range prefixes {
			blocks = append(blocks, kube.Block{CIDR: p.String()})
		}
		return blocks
	}
	applyPolicy(t, "agent-killed", policy(append(slices.Clone(kept), dropped...)...)...)
	before := programmed(t, append(slices.Clone(kept), dropped...), node)
	pod := allocate(t, node, "default/agent-killed")
	want := maps.Clone(before)
	for _, p := range dropped {
		delete(want, p)
	}

	var watch *mapWatch
	if pin := record(t, node).Pin; pin != "" {
		watch = watchMap(pin, want)
	}
	if err := st.Kill(stack.AgentOf(node)); err != nil {
		t.Fatal(err)
	}
	// While it is dead the policy loses a prefix and gets another.
	applyPolicy(t, "agent-killed", policy(append(slices.Clone(kept), added...)...)...)
	if err := st.Restart(t.Context(), stack.AgentOf(node)); err != nil {
		t.Fatal(err)
	}
	programmed(t, added, node)
	restored(t, node)
	eventually(t, "what no policy wants is gone", func() string {
		for p, n := range numbers(t, node, dropped) {
			if n != 0 {
				return fmt.Sprintf("%s still has the number %d", p, n)
			}
		}
		return ""
	})
	if watch != nil {
		if err := watch.stop(); err != nil {
			t.Errorf("a gap in the map: %v", err)
		}
		t.Logf("looked at the map %d times", watch.looks)
	}
	if d := cmp.Diff(want, numbers(t, node, kept), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); d != "" {
		t.Errorf("numbers changed: %s", d)
	}
	if again := allocate(t, node, "default/agent-killed"); again.GetAddress() != pod.GetAddress() {
		t.Errorf("the pod had %s, now %s", pod.GetAddress(), again.GetAddress())
	}
}

// identities are all prefixes that somebody holds, with their numbers.
func identities(t *testing.T) map[string]uint32 {
	t.Helper()
	all := make(map[string]uint32)
	client := identity(t)
	for token := ""; ; {
		resp, err := client.ListIdentities(t.Context(), &identityv1.ListIdentitiesRequest{
			PageToken: token, State: identityv1.IdentityState_IDENTITY_STATE_LIVE,
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range resp.GetIdentities() {
			all[id.GetPrefix()] = id.GetNumber()
		}
		if token = resp.GetNextPageToken(); token == "" {
			return all
		}
	}
}

func TestServiceKilled(t *testing.T) {
	nodes := []string{"node-1", "node-2"}
	for _, service := range []string{stack.NodeSyncer, stack.EniAllocator, stack.IdentityService} {
		t.Run(service, func(t *testing.T) {
			prefixes := parse("10.80.0.0/16", "10.80.7.0/24")
			applyPolicy(t, "killed-"+service, kube.Block{CIDR: "10.80.0.0/16", Except: []string{"10.80.7.0/24"}})
			before := programmed(t, prefixes, nodes...)
			for _, node := range nodes {
				settled(t, node)
			}
			held := identities(t)
			objects := map[string]pool{}
			for _, node := range nodes {
				objects[node] = poolOf(t, node)
			}

			if err := st.Kill(service); err != nil {
				t.Fatal(err)
			}
			// The node goes on: entries stay, and a pod gets an address that the
			// node has already.
			for _, node := range nodes {
				if got := numbers(t, node, prefixes); !maps.Equal(got, before) {
					t.Errorf("without %s, %s has %v; before %v", service, node, got, before)
				}
				allocate(t, node, "default/without-"+service)
			}
			if err := st.Restart(t.Context(), service); err != nil {
				t.Fatal(err)
			}

			for _, node := range nodes {
				settled(t, node)
				if got := numbers(t, node, prefixes); !maps.Equal(got, before) {
					t.Errorf("after %s came back, %s has %v; before %v", service, node, got, before)
				}
				// The pool may have grown by what was given meanwhile; it lost
				// nothing.
				after := poolOf(t, node)
				for address, eni := range objects[node] {
					if after[address] != eni {
						t.Errorf("%s had %s on %s, now %q", node, address, eni, after[address])
					}
				}
			}
			if got := identities(t); !maps.Equal(got, held) {
				t.Errorf("held after %s came back: %s", service, cmp.Diff(held, got))
			}
			// And everything works again, end to end.
			more := parse("10.81.0.0/16")
			applyPolicy(t, "after-"+service, kube.Block{CIDR: "10.81.0.0/16"})
			programmed(t, more, nodes...)
			for i := range 3 {
				allocate(t, nodes[0], fmt.Sprintf("default/after-%s-%d", service, i))
			}
		})
	}
}

// pool is address → ENI.
type pool map[string]string

func poolOf(t *testing.T, node string) pool {
	t.Helper()
	p := make(pool)
	for address, a := range object(t, node).Spec.IPAM.Pool {
		p[address] = a.Resource
	}
	return p
}

// settled waits until a node's object lists the same addresses as used as its
// agent, and has the wanted two free.
func settled(t *testing.T, node string) {
	t.Helper()
	eventually(t, node+" settles", func() string {
		resp, err := agent(t, node).ListIPs(t.Context(), &agentv1.ListIPsRequest{})
		if err != nil {
			return err.Error()
		}
		used := make(map[string]string)
		for _, ip := range resp.GetIps() {
			if ip.GetOwner() != "" {
				used[ip.GetAddress()] = ip.GetOwner()
			}
		}
		n := object(t, node)
		stored := make(map[string]string)
		for address, a := range n.Status.IPAM.Used {
			stored[address] = a.Owner
		}
		if !maps.Equal(used, stored) {
			return fmt.Sprintf("the agent uses %v, the object says %v", used, stored)
		}
		if free := len(n.Spec.IPAM.Pool) - len(used); free < 2 {
			return fmt.Sprintf("%d addresses are free", free)
		}
		return ""
	})
}
