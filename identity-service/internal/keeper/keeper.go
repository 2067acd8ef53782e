// Package keeper carries operations out: it reads what an operation needs from
// the index, lets the ledger decide, and commits the decision guarded on exactly
// what was read. Whoever lost a race reads again. What an answer promises was
// either committed by it or read after asking a quorum. gRPC does not belong
// here.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/eniplane/eniplane/identity-service/internal/etcd"
	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

// ErrContended says that others changed the same keys each time that we tried.
var ErrContended = errors.New("the store is contended")

const (
	// maxTries bounds how often one call goes through read, decide, commit.
	maxTries = 40
	// maxPause bounds the pause between two tries.
	maxPause = 100 * time.Millisecond
)

// Keeper carries operations out. Methods may be called at the same time, but Run
// and Tidy by one goroutine.
type Keeper struct {
	store  *etcd.Store
	index  *index.Index
	now    func() time.Time
	logger *slog.Logger

	orphans map[ledger.Digest]struct{} // of Run alone
}

// New returns a keeper on a store and the index that it feeds.
func New(store *etcd.Store, x *index.Index, now func() time.Time, logger *slog.Logger) *Keeper {
	return &Keeper{store: store, index: x, now: now, logger: logger}
}

func (k *Keeper) millis() ledger.Millis { return ledger.Millis(k.now().UnixMilli()) }

// outcome is what one round of an operation came to. The zero value asks for
// another round on a reading that a quorum confirmed.
type outcome struct {
	// done ends the operation.
	done bool
	// lost is the revision at which a commit was refused: read again from there.
	lost int64
	// again runs the next step at once, as something was achieved.
	again bool
}

// run repeats a step until it is done. A refusal, or an answer without a commit,
// only stands if it was found on a reading that a quorum confirmed.
func (k *Keeper) run(ctx context.Context, step func(confirmed bool, try uint32) (outcome, error)) error {
	if k.index.Revision() == 0 {
		return etcd.ErrNotReady
	}
	confirmed := false
	for try := uint32(0); try < maxTries; {
		o, err := step(confirmed, try)
		switch {
		case err != nil && !confirmed && isRefusal(err):
			if err := k.store.Barrier(ctx); err != nil {
				return err
			}
			confirmed = true
		case err != nil:
			return err
		case o.done:
			return nil
		case o.again:
		case o.lost > 0:
			// What we lost to is in the index once it has reached that revision.
			if err := k.store.Reach(ctx, o.lost); err != nil {
				return err
			}
			try++
			if err := pause(ctx, try); err != nil {
				return err
			}
		default:
			if err := k.store.Barrier(ctx); err != nil {
				return err
			}
			confirmed = true
		}
	}
	return fmt.Errorf("%w: gave up after %d tries", ErrContended, maxTries)
}

// isRefusal reports whether an error comes from what was read.
func isRefusal(err error) bool {
	for _, refusal := range []error{
		ledger.ErrSessionUnknown, ledger.ErrStaleEpoch, ledger.ErrStaleGeneration, ledger.ErrGenerationReused,
		ledger.ErrRequestReused, ledger.ErrNumbersExhausted,
	} {
		if errors.Is(err, refusal) {
			return true
		}
	}
	return false
}

// pause waits a random while that grows, the first time not at all.
func pause(ctx context.Context, try uint32) error {
	if try < 2 {
		return ctx.Err()
	}
	limit := min(time.Millisecond<<min(try, 10), maxPause)
	timer := time.NewTimer(rand.N(limit))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Open opens the session of a node; see ledger.Open.
func (k *Keeper) Open(ctx context.Context, op ledger.Open) (ledger.Session, error) {
	id := ledger.SessionIDOf(op.Node, op.NodeUID)
	var session ledger.Session
	err := k.run(ctx, func(confirmed bool, _ uint32) (outcome, error) {
		r := k.index.Read(id)
		next, events, err := ledger.Apply(r.State, op)
		if err != nil {
			return outcome{}, err
		}
		session = *next.Session
		if len(events) == 0 {
			return outcome{done: confirmed}, nil
		}
		o, _, err := k.commit(ctx, r.MetaRevision, []etcd.Guard{etcd.SessionAt(id, r.SessionRevision)}, events)
		return o, err
	})
	return session, err
}

// Check returns nil if a caller that claims an epoch may act for a session.
func (k *Keeper) Check(ctx context.Context, id ledger.SessionID, epoch ledger.Epoch) error {
	return k.run(ctx, func(confirmed bool, _ uint32) (outcome, error) {
		return outcome{done: confirmed}, ledger.Fence(k.index.Read(id).State.Session, epoch)
	})
}

// Drop ends what an owner holds on a session; see ledger.Drop. It returns the
// revision of the commit that did.
func (k *Keeper) Drop(ctx context.Context, op ledger.Drop) (int64, error) {
	id := ledger.HoldingID{Session: op.Session, Owner: op.Owner.Key()}
	var revision int64
	err := k.run(ctx, func(confirmed bool, _ uint32) (outcome, error) {
		op.At = k.millis()
		r := k.index.ReadHolding(id)
		_, events, err := ledger.Apply(r.State, op)
		if err != nil {
			return outcome{}, err
		}
		if len(events) == 0 {
			revision = r.HoldingRevision
			return outcome{done: confirmed}, nil
		}
		guards := []etcd.Guard{etcd.SessionAt(id.Session, r.SessionRevision), etcd.HoldingAt(id, r.HoldingRevision)}
		o, at, err := k.commit(ctx, r.MetaRevision, guards, events)
		revision = at
		return o, err
	})
	return revision, err
}

func (k *Keeper) commit(ctx context.Context, meta int64, guards []etcd.Guard, events []ledger.Event) (outcome, int64, error) {
	revision, ok, err := k.store.Commit(ctx, meta, guards, events...)
	if err != nil {
		return outcome{}, 0, err
	}
	if !ok {
		return outcome{lost: revision}, 0, nil
	}
	return outcome{done: true}, revision, nil
}

// Held is the answer to Hold.
type Held struct {
	// Numbers are those of the set's prefixes, in its order.
	Numbers []ledger.Number
	// Revision is that of the commit that made the holding.
	Revision int64
}

// Hold makes an owner hold a set, all or nothing. wanted has the set's prefixes,
// in its order, with the numbers that are preferred; op.Set and op.At are filled
// in. A prefix that has a number keeps it.
func (k *Keeper) Hold(ctx context.Context, op ledger.Hold, set ledger.Set, wanted []ledger.Wanted) (Held, error) {
	id := ledger.HoldingID{Session: op.Session, Owner: op.Owner.Key()}
	op.Set = set.Digest
	var held Held
	err := k.run(ctx, func(confirmed bool, try uint32) (outcome, error) {
		op.At = k.millis()
		r := k.index.ReadSet(id, set)
		change, err := ledger.Admit(r.State, op)
		if err != nil {
			return outcome{}, err
		}
		if !change {
			held = Held{Numbers: r.Numbers, Revision: r.HoldingRevision}
			return outcome{done: confirmed}, nil
		}
		if r.Missing > k.store.MaxGrants() {
			return outcome{again: true}, k.allocate(ctx, r.MetaRevision, wanted)
		}
		if !r.State.SetStored && etcd.Parts(set) > 1 {
			if r.Missing > 0 {
				return outcome{again: true}, k.allocate(ctx, r.MetaRevision, wanted)
			}
			return k.writeParts(ctx, r, set)
		}
		o, at, err := k.holdAtOnce(ctx, id, op, set, wanted, &r, try)
		held = Held{Numbers: r.Numbers, Revision: at}
		return o, err
	})
	return held, err
}

// holdAtOnce gives the missing numbers, stores the set and makes the holding in
// one commit. It fills in r.Numbers.
func (k *Keeper) holdAtOnce(ctx context.Context, id ledger.HoldingID, op ledger.Hold, set ledger.Set, wanted []ledger.Wanted, r *index.Reading, try uint32) (outcome, int64, error) {
	ops := []ledger.Op{ledger.StoreSet{Set: set}, op}
	state := r.State
	if !state.SetStored {
		state.Numbers = known(set, r.Numbers)
	}
	if r.Missing > 0 {
		grants, err := k.index.Choose(wanted, try)
		if err != nil {
			return outcome{}, 0, err
		}
		if len(grants) != r.Missing {
			return outcome{again: true}, 0, nil // Some got one since we read.
		}
		ops = append([]ledger.Op{ledger.Allocate{Grants: grants, At: op.At}}, ops...)
		fill(r.Numbers, set, grants)
	}
	guards := []etcd.Guard{
		etcd.SessionAt(id.Session, r.SessionRevision),
		etcd.HoldingAt(id, r.HoldingRevision),
		etcd.SetAt(set.Digest, r.SetRevision),
	}
	var all []ledger.Event
	for _, one := range ops {
		next, events, err := ledger.Apply(state, one)
		if err != nil {
			return outcome{}, 0, err
		}
		state, all = next, append(all, events...)
	}
	return k.commit(ctx, r.MetaRevision, guards, all)
}
