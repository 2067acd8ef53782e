// Package lease elects the one allocator that may write, and gives each of its
// terms an epoch (invariant I6). What a leader does does not belong here.
package lease

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"

	"github.com/eniplane/eniplane/internal/telemetry"
)

const (
	// Name is the name of the Lease.
	Name = "eniplane-eni-allocator"
	// EpochAnnotation holds the epoch of the term, in decimal. node-syncer reads
	// it where an object has lost its own.
	EpochAnnotation = "eniplane.dev/epoch"
)

// ErrLost is returned by Term.Check when the write role may be somebody else's.
var ErrLost = errors.New("write role may be lost")

// Config is where and how to campaign.
type Config struct {
	// Namespace is that of the Lease.
	Namespace string
	// Identity names this process. No other may ever have the same.
	Identity string
	// Duration is how long others wait for a leader that is silent; a whole
	// number of seconds. RenewDeadline is how long a leader acts without having
	// renewed, and RetryPeriod how often everybody tries. Zero means 15, 10 and 2
	// seconds.
	Duration, RenewDeadline, RetryPeriod time.Duration
}

// Election is one process's part in the election.
type Election struct {
	leases  coordination.LeasesGetter
	config  Config
	log     *slog.Logger
	current atomic.Pointer[leaderelection.LeaderElector]
	now     func() time.Time
}

// New returns an election that has not begun.
func New(leases coordination.LeasesGetter, config Config, log *slog.Logger) *Election {
	if config.Duration == 0 {
		config.Duration = 15 * time.Second
	}
	if config.RenewDeadline == 0 {
		config.RenewDeadline = 10 * time.Second
	}
	if config.RetryPeriod == 0 {
		config.RetryPeriod = 2 * time.Second
	}
	return &Election{leases: leases, config: config, log: log, now: time.Now}
}

// Leader names who led when the Lease was last read; "" if nobody is known to.
func (e *Election) Leader() string {
	if elector := e.current.Load(); elector != nil {
		return elector.GetLeader()
	}
	return ""
}

// Term is one time of leading.
type Term struct {
	// Epoch is greater than that of every term before, and at least the Unix time
	// in milliseconds at which the term began.
	Epoch uint64
	check func() error
}

// NewTerm returns a term for whoever needs no election, such as a test. A check
// of nil never fails.
func NewTerm(epoch uint64, check func() error) Term { return Term{Epoch: epoch, check: check} }

// Check returns ErrLost unless the Lease was renewed so recently that nobody
// else can lead yet. Ask right before each call that must not be made by two.
func (t Term) Check() error {
	if t.check == nil {
		return nil
	}
	return t.check()
}

// Run campaigns until ctx ends. Whenever this process leads it calls lead, with
// a context that ends with the term, and waits for it to return before the Lease
// is given up or fought for again. An error of lead ends the term, is logged and
// nothing more. Run returns nil when ctx ends.
func (e *Election) Run(ctx context.Context, lead func(context.Context, Term) error) error {
	for ctx.Err() == nil {
		if err := e.campaign(ctx, lead); err != nil && ctx.Err() == nil {
			e.log.ErrorContext(ctx, "term of leadership failed", telemetry.KeyError, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(e.config.RetryPeriod):
		}
	}
	return nil
}

// campaign waits for one term and sees it through.
func (e *Election) campaign(ctx context.Context, lead func(context.Context, Term) error) error {
	// The elector outlives ctx for as long as lead runs: it must not release the
	// Lease while somebody acts on it.
	electing, stop := context.WithCancel(klog.NewContext(context.WithoutCancel(ctx), logr.FromSlogHandler(e.log.Handler())))
	defer stop()

	var began atomic.Bool
	acquired := &recorder{Interface: &resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: e.config.Namespace, Name: Name},
		Client:     e.leases,
		LockConfig: resourcelock.ResourceLockConfig{Identity: e.config.Identity},
	}}
	acted := make(chan error, 1)
	var elector *leaderelection.LeaderElector
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Name: Name, Lock: acquired, ReleaseOnCancel: true,
		LeaseDuration: e.config.Duration, RenewDeadline: e.config.RenewDeadline, RetryPeriod: e.config.RetryPeriod,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(held context.Context) {
				defer stop()
				began.Store(true)
				acted <- e.act(ctx, held, elector, lead)
			},
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return fmt.Errorf("set up election: %w", err)
	}
	e.current.Store(elector)
	// If nobody acts yet, nobody will: act looks at ctx first.
	release := context.AfterFunc(ctx, func() {
		if !began.Load() {
			stop()
		}
	})
	defer release()

	elector.Run(electing)
	if !acquired.events.Load() {
		return nil
	}
	return <-acted
}

// act claims an epoch and leads until the term or ctx ends.
func (e *Election) act(ctx, held context.Context, elector *leaderelection.LeaderElector, lead func(context.Context, Term) error) error {
	leading, cancel := context.WithCancel(ctx)
	defer cancel()
	release := context.AfterFunc(held, cancel)
	defer release()
	if leading.Err() != nil {
		return nil
	}
	epoch, err := e.claim(leading)
	if err != nil {
		return err
	}
	e.log.InfoContext(ctx, "leading", "identity", e.config.Identity, telemetry.KeyEpoch, epoch)
	defer e.log.InfoContext(ctx, "no longer leading", "identity", e.config.Identity, telemetry.KeyEpoch, epoch)
	err = lead(leading, Term{Epoch: epoch, check: func() error {
		// Check alone allows for the whole duration; others wait for it from when
		// they saw the renewal, so what is left after the deadline is our margin.
		if !elector.IsLeader() || elector.Check(e.config.RenewDeadline-e.config.Duration) != nil || held.Err() != nil {
			return ErrLost
		}
		return nil
	}})
	if err != nil && leading.Err() == nil {
		return err
	}
	return nil
}

// claim writes the epoch of a new term to the Lease, by compare-and-swap, before
// anything else is done in it.
func (e *Election) claim(ctx context.Context) (uint64, error) {
	leases := e.leases.Leases(e.config.Namespace)
	for {
		lease, err := leases.Get(ctx, Name, metav1.GetOptions{})
		if err != nil {
			return 0, fmt.Errorf("read lease: %w", err)
		}
		if lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity != e.config.Identity {
			return 0, fmt.Errorf("claim epoch: %w", ErrLost)
		}
		epoch := Next(lease, e.now())
		if lease.Annotations == nil {
			lease.Annotations = make(map[string]string, 1)
		}
		lease.Annotations[EpochAnnotation] = strconv.FormatUint(epoch, 10)
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
		switch {
		case apierrors.IsConflict(err): // Renewed in between.
			continue
		case err != nil:
			return 0, fmt.Errorf("claim epoch: %w", err)
		}
		return epoch, nil
	}
}

// Next returns the epoch that follows the one on the Lease: the Unix time in
// milliseconds, or one more than before where that is greater. An annotation
// that is missing or unreadable counts as none.
func Next(lease *coordinationv1.Lease, now time.Time) uint64 {
	previous, err := strconv.ParseUint(lease.Annotations[EpochAnnotation], 10, 63)
	if err != nil {
		previous = 0
	}
	return max(previous+1, uint64(max(now.UnixMilli(), 0))) //nolint:gosec // Not negative; see max.
}

// recorder notes that the Lease was acquired: an elector records no event before.
type recorder struct {
	resourcelock.Interface
	events atomic.Bool
}

func (r *recorder) RecordEvent(string) { r.events.Store(true) }
