package allocator

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.opentelemetry.io/otel/codes"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/telemetry"

	"github.com/eniplane/eniplane/eni-allocator/internal/ec2"
	"github.com/eniplane/eniplane/eni-allocator/internal/lease"
	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

const (
	// repeats is how often in one round a refusal is met by reading and planning
	// again at once, such as another device index.
	repeats = 5
	// invisible is how often EC2 may not know an ENI that it said it made before
	// that is believed: what it made shows late.
	invisible = 6
	// notable is from how many failures in a row on a condition says so. A denied
	// call says so at once.
	notable = 3
	// indexTaken is how long a device index is passed over that EC2 called taken.
	indexTaken = 2 * time.Minute
)

// decisions are what a worker remembers from one round to the next: what EC2 said
// that no reading shows.
type decisions struct {
	instance, uid string
	notBefore     time.Time // nothing is tried before
	rereadAt      time.Time // when the instance is read again; zero means not yet known
	failures      int       // in a row
	failure       plan.Blocked
	denied        bool
	attempt       int                // see plan.Demand.Attempt
	intentSince   time.Time          // see plan.Demand.IntentSince
	taken         map[int]time.Time  // device indexes, until when
	lost          map[plan.ENIID]int // ENIs that EC2 said it made and does not know
	mismatches    int                // of the client token, in a row
	most          int                // ENIs that EC2 allows, if fewer than the limits; 0 means unknown
	mostUntil     time.Time          // how long that is believed
	suspended     time.Time          // until when the instance is left alone
	since         map[reason.Reason]time.Time
}

func newDecisions() decisions {
	return decisions{taken: make(map[int]time.Time), lost: make(map[plan.ENIID]int), since: make(map[reason.Reason]time.Time)}
}

// follow forgets everything when the node becomes another one.
func (d *decisions) follow(demand *nodev1.NodeDemand) {
	if !d.about(demand) {
		*d = newDecisions()
		d.instance, d.uid = demand.GetInstanceId(), demand.GetUid()
	}
}

// about tells whether they are about the instance and object of a demand.
func (d *decisions) about(demand *nodev1.NodeDemand) bool {
	return d.instance == demand.GetInstanceId() && d.uid == demand.GetUid()
}

// amend adds to a demand what EC2 said.
func (d *decisions) amend(demand plan.Demand, now time.Time) plan.Demand {
	maps.DeleteFunc(d.taken, func(_ int, until time.Time) bool { return !now.Before(until) })
	demand.Attempt, demand.IntentSince, demand.SuspendedUntil = d.attempt, d.intentSince, d.suspended
	demand.TakenIndexes = slices.Sorted(maps.Keys(d.taken))
	return demand
}

// correct lowers the limits of a reading to what EC2 lets the instance have.
func (d *decisions) correct(r plan.Reading, now time.Time) plan.Reading {
	if d.most > 0 && now.Before(d.mostUntil) {
		r.Limits.Interfaces = min(r.Limits.Interfaces, d.most)
	}
	return r
}

// intend notes that the creation of an ENI is asked for.
func (d *decisions) intend(_ plan.CreateENI, now time.Time) {
	if d.intentSince.IsZero() {
		d.intentSince = now
	}
}

// attached notes that the set of attached ENIs changed: the next creation is
// another one.
func (d *decisions) attached() {
	d.attempt, d.intentSince, d.mismatches = 0, time.Time{}, 0
	clear(d.lost)
}

// abandon notes that the ENI of the present creation is gone.
func (d *decisions) abandon() {
	d.attempt++
	d.intentSince, d.mismatches = time.Time{}, 0
}

// persistent is the failure that a condition tells of; nil if there is none.
func (d *decisions) persistent() *plan.Blocked {
	if d.failures >= notable || (d.failures > 0 && d.denied) {
		return &d.failure
	}
	return nil
}

// actionError is an action that EC2 did not do.
type actionError struct {
	action plan.Action
	err    error
}

func (e *actionError) Error() string { return e.err.Error() } // It names the action.
func (e *actionError) Unwrap() error { return e.err }

// attachError is an attachment that EC2 did not do.
type attachError struct {
	eni   plan.ENIID
	index int
	err   error
}

func (e *attachError) Error() string {
	return fmt.Sprintf("%s at device index %d: %v", e.eni, e.index, e.err)
}
func (e *attachError) Unwrap() error { return e.err }

// react decides what follows from a failed action: it returns true to read and
// plan again at once, and false after it noted when to try again. A call that was
// throttled, denied or lost is tried again as itself later, and never answered
// with a call of another kind (invariant I4).
func (w *round) react(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		return false // The term is over, or the node is gone.
	}
	now := time.Now()
	d := &w.decided
	var attach *attachError
	isAttach := errors.As(err, &attach)
	var failed *actionError
	var assign plan.AssignAddresses
	var create plan.CreateENI
	isAssign, isCreate := false, false
	if errors.As(err, &failed) {
		assign, isAssign = failed.action.(plan.AssignAddresses)
		create, isCreate = failed.action.(plan.CreateENI)
	}

	again := false
	switch {
	case errors.Is(err, ec2.ErrThrottled), errors.Is(err, ec2.ErrDenied), errors.Is(err, lease.ErrLost):
		// Nothing happened. A Lease that was renewed late may still be held.
	case errors.Is(err, ec2.ErrNotLeading):
		w.stale = true // An attempt before the one that was not sent may have got through.
	case errors.Is(err, ec2.ErrUnavailable), errors.Is(err, ec2.ErrUnintelligible):
		w.stale = true // Something may have happened.
	case errors.Is(err, ec2.ErrSubnetFull):
		subnet := create.Subnet
		if isAssign {
			subnet = assign.Subnet
		}
		w.term.cache.Skip(subnet, now.Add(w.term.config.SkipSubnet))
		again = true
	case isAttach && errors.Is(err, ec2.ErrDeviceIndexTaken):
		d.taken[attach.index] = now.Add(indexTaken)
		w.stale, again = true, true
	case isAttach && errors.Is(err, ec2.ErrInUse):
		w.stale, again = true, true // It was attached before, and the answer was lost.
	case isAttach && errors.Is(err, ec2.ErrAttachmentLimit):
		again = w.drop(ctx, attach.eni)
		w.cap(now)
	case isAttach && errors.Is(err, ec2.ErrAddressLimit):
		w.drop(ctx, attach.eni) // It has more addresses than the instance allows.
		w.stale = true
	case errors.Is(err, ec2.ErrAddressLimit):
		w.stale, again = true, true // What we knew of the ENI is out of date.
	case errors.Is(err, ec2.ErrNotRunning):
		d.suspended = now.Add(w.term.config.Suspension)
		w.stale, again = true, true
	case isAttach && errors.Is(err, ec2.ErrNotFound) && ec2.Code(err) != "InvalidInstanceID.NotFound":
		if d.lost[attach.eni]++; d.lost[attach.eni] >= invisible {
			w.term.cache.Gone(now, attach.eni)
			delete(d.lost, attach.eni)
			d.abandon()
		}
	case isCreate && errors.Is(err, ec2.ErrTokenMismatch):
		// The reading shows by its tags what that token made. If nothing shows for
		// long, it is gone.
		if d.mismatches++; d.mismatches >= invisible {
			d.abandon()
		}
		w.stale = true
	default:
		w.stale = true
	}
	w.refusals++
	if again && w.refusals <= repeats {
		w.term.deps.Logger.InfoContext(ctx, "refused, planning again", telemetry.KeyNode, w.name, telemetry.KeyError, err)
		return true
	}
	w.fail(ctx, "act", err)
	return false
}

// drop deletes an ENI that we made and cannot attach, and tells whether that was
// done. If it was not, a later plan does it.
func (w *round) drop(ctx context.Context, id plan.ENIID) bool {
	w.stale = true
	w.decided.abandon()
	if w.term.Check() != nil {
		return false
	}
	err := w.term.deps.EC2.Delete(ctx, id)
	w.term.metrics.acted(actionName(plan.DeleteENI{}), err)
	if err != nil && !errors.Is(err, ec2.ErrNotFound) {
		w.term.deps.Logger.WarnContext(ctx, "an ENI that cannot be attached was not deleted", telemetry.KeyNode, w.name, telemetry.KeyENI, string(id), telemetry.KeyError, err)
		return false
	}
	w.term.cache.Deleted(time.Now(), id)
	return true
}

// cap believes EC2 that the instance can have no more ENIs than it has.
func (w *round) cap(now time.Time) {
	attached := 0
	r, _ := w.term.cache.Reading(plan.InstanceID(w.reported.GetInstanceId()))
	for _, e := range r.ENIs {
		if e.Instance == r.Instance.ID && e.Card == 0 {
			attached++
		}
	}
	w.decided.most, w.decided.mostUntil = max(attached, 1), now.Add(w.term.config.ResyncInterval)
}

// fail notes a failure and when to try again.
func (w *round) fail(ctx context.Context, what string, err error) {
	if ctx.Err() != nil {
		return
	}
	d := &w.decided
	d.failures++
	wait := w.term.config.Backoff.after(d.failures)
	d.notBefore = time.Now().Add(wait)
	d.failure = plan.Blocked{Reason: causeOf(err), Message: err.Error()}
	d.denied = errors.Is(err, ec2.ErrDenied)
	w.later(d.notBefore)
	w.mu.Lock()
	w.node.reread = w.node.reread || w.stale // Read it first, then.
	w.undone = &trouble{Blocked: d.failure, retryAt: d.notBefore}
	w.mu.Unlock()
	if w.span != nil {
		w.span.RecordError(err)
		w.span.SetStatus(codes.Error, d.failure.Reason.String())
	}
	w.term.deps.Logger.WarnContext(ctx, "work on a node failed", "step", what, telemetry.KeyNode, w.name,
		telemetry.KeyReason, d.failure.Reason.String(), telemetry.KeyError, err, "retry_in", wait.String())
	if d.denied {
		w.refuse(w.asking, d.failure, wait)
	}
	if r, known := w.term.cache.Reading(plan.InstanceID(w.reported.GetInstanceId())); known {
		w.offerPool(ctx, r, plan.Plan{})
	}
}

// succeeded notes that a plan was carried out, or that nothing is left to do.
func (w *round) succeeded() {
	w.decided.failures, w.decided.denied = 0, false
	w.mu.Lock()
	w.undone = nil
	w.mu.Unlock()
}
