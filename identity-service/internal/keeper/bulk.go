package keeper

import (
	"context"
	"fmt"
	"net/netip"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

// parallelCommits is how many commits of one big set are under way at once.
const parallelCommits = 8

// fill sets the numbers of those prefixes of a set that are granted one. Both
// are in the same order.
func fill(numbers []ledger.Number, set ledger.Set, grants []ledger.Grant) {
	for i, p := range set.Prefixes {
		if len(grants) > 0 && grants[0].Prefix == p {
			numbers[i], grants = grants[0].Number, grants[1:]
		}
	}
}

// known returns the numbers that there are, by prefix.
func known(set ledger.Set, numbers []ledger.Number) map[netip.Prefix]ledger.Number {
	out := make(map[netip.Prefix]ledger.Number, len(numbers))
	for i, n := range numbers {
		if n != 0 {
			out[set.Prefixes[i]] = n
		}
	}
	return out
}

// allocate gives numbers to all that have none, in several commits that nobody
// sees. When it returns, the index knows them. An interruption leaves numbers
// that are found again by their prefixes.
func (k *Keeper) allocate(ctx context.Context, meta int64, wanted []ledger.Wanted) error {
	grants, err := k.index.Choose(wanted, 0)
	if err != nil {
		return err
	}
	missing := wantedOf(wanted, grants)
	var reached atomic.Int64
	size := k.store.MaxGrants()
	group, batchCtx := errgroup.WithContext(ctx)
	group.SetLimit(parallelCommits)
	for from := 0; from < len(grants); from += size {
		to := min(from+size, len(grants))
		group.Go(func() error {
			revision, err := k.allocateBatch(batchCtx, meta, missing[from:to], grants[from:to])
			for old := reached.Load(); revision > old && !reached.CompareAndSwap(old, revision); old = reached.Load() {
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("give %d numbers: %w", len(grants), err)
	}
	return k.store.Reach(ctx, reached.Load())
}

// wantedOf returns those of wanted that grants are for. Both are in the same
// order.
func wantedOf(wanted []ledger.Wanted, grants []ledger.Grant) []ledger.Wanted {
	out := make([]ledger.Wanted, 0, len(grants))
	for _, w := range wanted {
		if len(out) < len(grants) && grants[len(out)].Prefix == w.Prefix {
			out = append(out, w)
		}
	}
	return out
}

// allocateBatch commits one batch. What somebody else gave meanwhile is left out
// or chosen again.
func (k *Keeper) allocateBatch(ctx context.Context, meta int64, wanted []ledger.Wanted, grants []ledger.Grant) (int64, error) {
	var last int64
	for try := uint32(1); try < maxTries; try++ {
		if len(grants) == 0 {
			return last, nil
		}
		state := ledger.State{Range: k.store.Range()}
		_, events, err := ledger.Apply(state, ledger.Allocate{Grants: grants, At: k.millis()})
		if err != nil {
			return 0, err
		}
		revision, ok, err := k.store.Commit(ctx, meta, nil, events...)
		if err != nil {
			return 0, err
		}
		if ok {
			return revision, nil
		}
		last = revision
		if err := k.store.Reach(ctx, revision); err != nil {
			return 0, err
		}
		if err := pause(ctx, try); err != nil {
			return 0, err
		}
		if grants, err = k.index.Choose(wanted, try); err != nil {
			return 0, err
		}
	}
	return 0, fmt.Errorf("%w: gave up on %d numbers after %d tries", ErrContended, len(grants), maxTries)
}

// writeParts stores a set that is too big for one commit. When it returns, the
// index knows it.
func (k *Keeper) writeParts(ctx context.Context, r index.Reading, set ledger.Set) (outcome, error) {
	revision, ok, err := k.store.WriteParts(ctx, r.MetaRevision, set, r.SetRevision)
	if err != nil {
		return outcome{}, err
	}
	if !ok {
		return outcome{lost: revision}, nil
	}
	return outcome{again: true}, k.store.Reach(ctx, revision)
}
