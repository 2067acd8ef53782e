package syncer_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/kube"
	"github.com/eniplane/eniplane/node-syncer/internal/syncer"
	"github.com/eniplane/eniplane/node-syncer/internal/view"
)

type addresses = map[string]ciliumnode.Allocation

func some(n int) addresses {
	out := addresses{}
	for i := range n {
		out[fmt.Sprintf("10.0.0.%d", 10+i)] = ciliumnode.Allocation{Owner: fmt.Sprintf("ns/pod-%d", i)}
	}
	return out
}

// server stands for the API server: it holds one object, refuses a patch of
// another version, and may do something right before it takes one.
type server struct {
	mu     sync.Mutex // guards the fields below
	object *ciliumnode.CiliumNode
	writes int
	before func() // called without the lock
}

func (s *server) CiliumNode(context.Context, string) (*ciliumnode.CiliumNode, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.object, nil
}

func (s *server) Patch(_ context.Context, have, want *ciliumnode.CiliumNode, _ kube.Part) (*ciliumnode.CiliumNode, error) {
	s.mu.Lock()
	before := s.before
	s.before = nil
	s.mu.Unlock()
	if before != nil {
		before()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if have.ResourceVersion != s.object.ResourceVersion {
		return nil, fmt.Errorf("%w: version %s", kube.ErrConflict, have.ResourceVersion)
	}
	s.store(want)
	s.writes++
	return s.object, nil
}

func (s *server) store(want *ciliumnode.CiliumNode) {
	version, _ := strconv.Atoi(s.object.ResourceVersion)
	s.object = want.DeepCopy()
	s.object.ResourceVersion = strconv.Itoa(version + 1)
}

func (s *server) LeaseAnnotation(context.Context, string, string, string) (string, bool, error) {
	return "", false, nil
}

func (s *server) now() (addresses, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.object.Status.IPAM.Used, s.writes
}

// meddle is a write by somebody else.
func (s *server) meddle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.store(s.object)
}

// scene runs f in a bubble with a registered node of ten pooled addresses that
// wants two free, and everything that writes its usage.
func scene(t *testing.T, f func(*server, *syncer.Store, func(sequence uint64, n int))) {
	synctest.Test(t, func(t *testing.T) {
		n := &ciliumnode.CiliumNode{ObjectMeta: metav1.ObjectMeta{
			Name: "n", UID: "u", ResourceVersion: "1", Annotations: map[string]string{view.RegisteredAnnotation: "true"},
		}}
		n.Spec.IPAM.PreAllocate, n.Spec.IPAM.Pool = 2, some(10)
		api, store := &server{object: n}, syncer.NewStore("test")
		store.CiliumNodeChanged(n)
		store.Synced()
		usage := syncer.NewUsage(api, store, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- usage.Run(ctx) }()
		f(api, store, func(sequence uint64, k int) {
			t.Helper()
			if err := usage.Report(ctx, "n", sequence, some(k), 0); err != nil {
				t.Fatal(err)
			}
		})
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestUsageIsCoalesced(t *testing.T) {
	scene(t, func(api *server, _ *syncer.Store, report func(uint64, int)) {
		for i := range 400 { // 20 s
			report(uint64(i+1), 1+i%7) //nolint:gosec // Small.
			time.Sleep(49 * time.Millisecond)
		}
		time.Sleep(5 * time.Second)
		got, writes := api.now()
		if writes < 4 || writes > 6 {
			t.Errorf("%d writes in 25 s, want one in five seconds", writes)
		}
		if !maps.Equal(got, some(1)) {
			t.Errorf("the last report is not stored, but %v", got)
		}
	})
}

func TestUsageIsWrittenAtOnceWhenAWatermarkIsCrossed(t *testing.T) {
	scene(t, func(api *server, _ *syncer.Store, report func(uint64, int)) {
		report(1, 1)
		for i, n := range []int{9, 7, 10} {
			report(uint64(i+2), n) //nolint:gosec // Small.
			if got, _ := api.now(); !maps.Equal(got, some(n)) {
				t.Errorf("%d in use: stored is %v", n, got)
			}
		}
		report(9, 9) // Crosses nothing.
		if got, _ := api.now(); !maps.Equal(got, some(10)) {
			t.Errorf("stored at once: %v", got)
		}
	})
}

// A report that comes while an older one is being written is not overwritten by it.
func TestOlderReportNeverLandsOnNewer(t *testing.T) {
	scene(t, func(api *server, _ *syncer.Store, report func(uint64, int)) {
		arrived := make(chan struct{})
		api.before = func() {
			api.meddle() // Makes the write in flight fail and try again.
			go func() {
				report(2, 9)
				close(arrived)
			}()
			synctest.Wait()
		}
		report(1, 3)
		<-arrived
		if got, writes := api.now(); !maps.Equal(got, some(9)) {
			t.Errorf("after %d writes, stored is %v", writes, got)
		}
	})
}

// A pod comes and goes before the informer tells of the first write.
func TestUsageThatReturnsIsStored(t *testing.T) {
	scene(t, func(api *server, store *syncer.Store, report func(uint64, int)) {
		report(1, 3)
		time.Sleep(6 * time.Second)
		report(2, 4)
		report(3, 3)
		time.Sleep(6 * time.Second)
		if got, _ := api.now(); !maps.Equal(got, some(3)) {
			t.Errorf("stored is %v", got)
		}
		// Another replica takes the next report: what it stores is what is shown.
		foreign, _ := api.CiliumNode(t.Context(), "n")
		foreign = foreign.DeepCopy()
		foreign.Status.IPAM.Used, foreign.ResourceVersion = some(7), "100"
		store.CiliumNodeChanged(foreign)
		if _, demand, err := store.Views("n"); err != nil || len(demand.GetUsed()) != 7 {
			t.Errorf("shown %v, %v", demand.GetUsed(), err)
		}
	})
}

// What we wrote is shown although the informer still tells of an older version.
func TestOwnWritesAreNotUndoneByLateNews(t *testing.T) {
	scene(t, func(api *server, store *syncer.Store, report func(uint64, int)) {
		first, _ := api.CiliumNode(t.Context(), "n")
		report(1, 3)
		store.CiliumNodeChanged(first)
		if _, demand, err := store.Views("n"); err != nil || demand.GetRevision() != "2" || len(demand.GetUsed()) != 3 {
			t.Errorf("shown %v, %v", demand, err)
		}
		if now, _ := api.CiliumNode(t.Context(), "n"); now != nil {
			store.CiliumNodeGone(now)
		}
		if _, _, err := store.Views("n"); !errors.Is(err, syncer.ErrNodeUnknown) {
			t.Errorf("gone: %v", err)
		}
	})
}

// What the agent of a replaced node said is not held against its successor.
func TestSuccessorStartsAfresh(t *testing.T) {
	scene(t, func(api *server, store *syncer.Store, report func(uint64, int)) {
		report(1000, 3)
		next, _ := api.CiliumNode(t.Context(), "n")
		next = next.DeepCopy()
		next.UID, next.ResourceVersion, next.Status = "v", "50", ciliumnode.Status{}
		store.CiliumNodeChanged(next)
		api.mu.Lock()
		api.object = next
		api.mu.Unlock()
		if _, demand, err := store.Views("n"); err != nil || len(demand.GetUsed()) != 0 {
			t.Errorf("shown %v, %v", demand.GetUsed(), err)
		}
		report(1, 2)
		if got, _ := api.now(); !maps.Equal(got, some(2)) {
			t.Errorf("stored is %v", got)
		}
	})
}
