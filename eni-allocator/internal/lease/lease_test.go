package lease_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/eniplane/eniplane/eni-allocator/internal/lease"
	"github.com/eniplane/eniplane/internal/localkube"
)

var cluster *localkube.Cluster

func TestMain(m *testing.M) {
	os.Exit(localkube.Shared(m, func(c *localkube.Cluster) { cluster = c }))
}

func client(t *testing.T) *coordination.CoordinationV1Client {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", cluster.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.QPS = -1 // Tests renew often.
	c, err := coordination.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	// Tests share one Lease: each begins without it.
	err = c.Leases("default").Delete(t.Context(), lease.Name, metav1.DeleteOptions{})
	if err != nil {
		t.Log(err)
	}
	return c
}

// candidate campaigns until its stop is called, which waits.
type candidate struct {
	*lease.Election
	leads atomic.Pointer[lease.Term] // nil while it does not lead
	stop  func()
}

func start(t *testing.T, c coordination.LeasesGetter, identity string) *candidate {
	t.Helper()
	p := &candidate{Election: lease.New(c, lease.Config{
		Namespace: "default", Identity: identity, Duration: 2 * time.Second, RenewDeadline: time.Second, RetryPeriod: 100 * time.Millisecond,
	}, slog.New(slog.DiscardHandler))}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- p.Run(ctx, func(ctx context.Context, term lease.Term) error {
			p.leads.Store(&term)
			<-ctx.Done()
			p.leads.Store(nil)
			return nil
		})
	}()
	var once atomic.Bool
	p.stop = func() {
		cancel()
		if once.CompareAndSwap(false, true) {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(p.stop)
	return p
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func epoch(t *testing.T, c coordination.LeasesGetter) uint64 {
	t.Helper()
	l, err := c.Leases("default").Get(t.Context(), lease.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.ParseUint(l.Annotations[lease.EpochAnnotation], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestTermsFollowEachOther(t *testing.T) {
	c := client(t)
	before := uint64(time.Now().UnixMilli())
	a := start(t, c, "a")
	eventually(t, "a leads", func() bool { return a.leads.Load() != nil })
	first := a.leads.Load()
	if first.Epoch < before || first.Epoch > uint64(time.Now().UnixMilli()) || epoch(t, c) != first.Epoch {
		t.Errorf("epoch %d, on the lease %d", first.Epoch, epoch(t, c))
	}
	if err := first.Check(); err != nil {
		t.Error(err)
	}

	b := start(t, c, "b")
	eventually(t, "b knows who leads", func() bool { return b.Leader() == "a" })
	if b.leads.Load() != nil {
		t.Error("two lead")
	}
	a.stop()
	eventually(t, "b leads", func() bool { return b.leads.Load() != nil })
	if got := b.leads.Load().Epoch; got <= first.Epoch {
		t.Errorf("epoch %d after %d", got, first.Epoch)
	}
	if err := first.Check(); !errors.Is(err, lease.ErrLost) {
		t.Errorf("the term that is over says %v", err)
	}
}

func TestLossEndsTheTerm(t *testing.T) {
	c := client(t)
	a := start(t, c, "a")
	eventually(t, "a leads", func() bool { return a.leads.Load() != nil })
	first := a.leads.Load()

	// Somebody else takes the lease for one second.
	eventually(t, "the lease is taken", func() bool {
		l, err := c.Leases("default").Get(t.Context(), lease.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		thief, seconds, now := "thief", int32(1), metav1.NowMicro()
		l.Spec = coordinationv1.LeaseSpec{HolderIdentity: &thief, LeaseDurationSeconds: &seconds, AcquireTime: &now, RenewTime: &now}
		_, err = c.Leases("default").Update(t.Context(), l, metav1.UpdateOptions{})
		return err == nil
	})
	eventually(t, "a stops", func() bool { return a.leads.Load() != first })
	if err := first.Check(); !errors.Is(err, lease.ErrLost) {
		t.Errorf("the term that is over says %v", err)
	}
	eventually(t, "a leads again", func() bool { return a.leads.Load() != nil })
	if got := a.leads.Load().Epoch; got <= first.Epoch {
		t.Errorf("epoch %d after %d", got, first.Epoch)
	}
}

func TestNoRenewalEndsTheTerm(t *testing.T) {
	c := client(t)
	a := start(t, c, "a")
	eventually(t, "a leads", func() bool { return a.leads.Load() != nil })
	first := a.leads.Load()
	cluster.StopAPIServer()
	eventually(t, "a stops", func() bool { return a.leads.Load() == nil })
	if err := first.Check(); !errors.Is(err, lease.ErrLost) {
		t.Errorf("the term that is over says %v", err)
	}
	if err := cluster.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a leads again", func() bool { return a.leads.Load() != nil })
	if got := a.leads.Load().Epoch; got <= first.Epoch {
		t.Errorf("epoch %d after %d", got, first.Epoch)
	}
}

func TestErrorEndsTheTerm(t *testing.T) {
	c := client(t)
	e := lease.New(c, lease.Config{Namespace: "default", Identity: "a", Duration: 2 * time.Second, RenewDeadline: time.Second, RetryPeriod: 50 * time.Millisecond}, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var epochs []uint64
	err := e.Run(ctx, func(_ context.Context, term lease.Term) error {
		epochs = append(epochs, term.Epoch)
		if len(epochs) == 2 {
			cancel()
		}
		return errors.New("out of office")
	})
	if err != nil || len(epochs) != 2 || epochs[1] <= epochs[0] {
		t.Errorf("epochs %v, error %v", epochs, err)
	}
}

func TestNext(t *testing.T) {
	now := time.UnixMilli(1000)
	for _, tt := range []struct {
		annotation string
		want       uint64
	}{
		{"", 1000},
		{"nonsense", 1000},
		{"-5", 1000},
		{"999", 1000},
		{"1000", 1001},
		{"5000", 5001}, // The clock of the leader before was ahead.
	} {
		l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{lease.EpochAnnotation: tt.annotation}}}
		if got := lease.Next(l, now); got != tt.want {
			t.Errorf("%q: got %d, want %d", tt.annotation, got, tt.want)
		}
	}
	if got := lease.Next(&coordinationv1.Lease{}, now); got != 1000 {
		t.Errorf("no annotations: got %d", got)
	}
}
