package syncer_test

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/plan"
	"github.com/eniplane/eniplane/node-syncer/internal/syncer"
	"github.com/eniplane/eniplane/node-syncer/internal/view"
)

// What was reported on a node is not written over another one that got its name,
// or that a cilium-agent took over, while the write was under way.
func TestReportLandsOnItsOwnNodeOnly(t *testing.T) {
	for name, edit := range map[string]func(*ciliumnode.CiliumNode){
		"the name is reused":             func(n *ciliumnode.CiliumNode) { n.UID = "v" },
		"a cilium-agent took it":         func(n *ciliumnode.CiliumNode) { n.Annotations = nil },
		"it is reused by a cilium-agent": func(n *ciliumnode.CiliumNode) { n.UID, n.Annotations = "v", nil },
	} {
		scene(t, func(api *server, _ *syncer.Store, report func(uint64, int)) {
			report(1, 1)
			time.Sleep(6 * time.Second)
			report(2, 1) // Nothing to write.
			report(3, 2) // Not urgent: the background writes it.
			api.mu.Lock()
			next := api.object.DeepCopy()
			next.Status = ciliumnode.Status{}
			edit(next)
			api.store(next)
			api.mu.Unlock()
			time.Sleep(20 * time.Second)
			if got, writes := api.now(); len(got) > 0 {
				t.Errorf("%s: %v was written (%d writes)", name, got, writes)
			}
		})
	}
}

// Once a cilium-agent has a node, what it writes is what is in use.
func TestForeignNodeIsShownAsStored(t *testing.T) {
	scene(t, func(api *server, store *syncer.Store, report func(uint64, int)) {
		report(1, 3)
		report(2, 4) // Waits to be written.
		foreign, _ := api.CiliumNode(t.Context(), "n")
		foreign = foreign.DeepCopy()
		foreign.Annotations, foreign.ResourceVersion, foreign.Status.IPAM.Used = nil, "90", some(7)
		store.CiliumNodeChanged(foreign)
		if _, demand, err := store.Views("n"); err != nil || len(demand.GetUsed()) != 7 {
			t.Errorf("shown %d, %v", len(demand.GetUsed()), err)
		}
	})
}

// A report that was taken is stored although the program stops right after.
func TestReportsSurviveAStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := object("n", "u", "1")
		n.Annotations = map[string]string{view.RegisteredAnnotation: "true"}
		n.Spec.IPAM.PreAllocate, n.Spec.IPAM.Pool = 2, some(10)
		api, store := &server{object: n}, syncer.NewStore("test")
		store.CiliumNodeChanged(n)
		store.Synced()
		usage := syncer.NewUsage(api, store, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- usage.Run(ctx) }()
		for i := range 3 {
			if err := usage.Report(ctx, "n", uint64(i+1), some(i+1), 0); err != nil { //nolint:gosec // Small.
				t.Fatal(err)
			}
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if got, _ := api.now(); !maps.Equal(got, some(3)) {
			t.Errorf("stored is %v", got)
		}
	})
}

func ownedBy(n *ciliumnode.CiliumNode, node string) *ciliumnode.CiliumNode {
	n.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: types.UID(node)}}
	return n
}

func kubeNode(uid string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: types.UID(uid)}}
}

// News of Nodes and of CiliumNodes come on different ways, in any order.
func TestNodeRemovalEndsTheWatchOfItsOwnAgent(t *testing.T) {
	for name, tc := range map[string]struct {
		owner string // of the object when the watch is opened
		news  func(*syncer.Store)
		gone  bool
	}{
		"its Node is gone":              {"old", func(s *syncer.Store) { s.NodeGone(kubeNode("old")) }, true},
		"the Node before is gone":       {"new", func(s *syncer.Store) { s.NodeGone(kubeNode("old")) }, false},
		"replaced, and told":            {"old", func(s *syncer.Store) { s.NodeGone(kubeNode("old")); s.NodeChanged(kubeNode("new")) }, true},
		"replaced, the end was missed":  {"old", func(s *syncer.Store) { s.NodeChanged(kubeNode("new")) }, true},
		"replaced, the object was soon": {"new", func(s *syncer.Store) { s.NodeChanged(kubeNode("new")) }, false},
	} {
		s := syncer.NewStore("test")
		s.Synced()
		s.NodeChanged(kubeNode("old"))
		s.CiliumNodeChanged(ownedBy(object("n", "u", "1"), tc.owner))
		w, err := s.WatchNode("n")
		if err != nil {
			t.Fatal(err)
		}
		tc.news(s)
		if _, gone := w.Next(); gone != tc.gone {
			t.Errorf("%s: gone is %v", name, gone)
		}
		w.Stop()
	}
}

// What is refused was never wanted.
func TestRefusedSnapshotIsNotWanted(t *testing.T) {
	n := object("n", "u", "1")
	n.Annotations = map[string]string{view.FenceAnnotation: "5.1"}
	n.Spec.ENI.InstanceID = "i-1" // The obsolete twin of spec.instance-id.
	api, store := &server{object: n}, syncer.NewStore("test")
	store.CiliumNodeChanged(n)
	store.Synced()
	s := syncer.NewSyncer(api, store, syncer.Lease{}, slog.New(slog.DiscardHandler))
	publish := func(instance string, epoch uint64) error {
		_, err := s.Publish(t.Context(), &nodev1.PoolSnapshot{NodeName: "n", InstanceId: instance, Fence: &nodev1.Fence{Epoch: epoch, Generation: 1}})
		return err
	}
	if err := publish("i-2", 9); !errors.Is(err, syncer.ErrInstanceMismatch) {
		t.Errorf("another instance: %v", err)
	}
	if err := publish("i-1", 4); !errors.Is(err, syncer.ErrStaleEpoch) {
		t.Errorf("an older epoch: %v", err)
	}
	if got := s.Progress("n").Wanted; got != (plan.Fence{}) {
		t.Errorf("wanted is %v", got)
	}
	if err := publish("i-1", 6); err != nil {
		t.Fatal(err)
	}
	if got := s.Progress("n").Wanted; got != (plan.Fence{Epoch: 6, Generation: 1}) {
		t.Errorf("wanted is %v", got)
	}
}
