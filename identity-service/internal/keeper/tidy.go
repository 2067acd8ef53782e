package keeper

import (
	"context"
	"log/slog"
	"time"

	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/telemetry"
)

const (
	// tidyEvery is how often garbage is looked for. A set is deleted two rounds
	// after the last holder went, unless somebody takes it up meanwhile.
	tidyEvery = time.Minute
	// droppedFor is how long the record of a dropped holding refuses late calls
	// of older generations: far longer than any call may take.
	droppedFor = time.Hour
)

// Run deletes what nobody needs any more until ctx ends: sets without holders,
// and records of holdings dropped long ago. Every replica may run it. Numbers
// are not freed.
func (k *Keeper) Run(ctx context.Context) error {
	timer := time.NewTicker(tidyEvery)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
			if err := k.Tidy(ctx); err != nil && ctx.Err() == nil {
				k.logger.WarnContext(ctx, "garbage stays for another round", slog.Any(telemetry.KeyError, err))
			}
		}
	}
}

// Tidy makes one round. It stops at the first error of the store.
//
// A set without holders is condemned first. Whoever wants to hold it from then on
// writes it again in the commit, or before it, so a deletion that is guarded on
// the condemned revision cannot take a set away that somebody holds.
func (k *Keeper) Tidy(ctx context.Context) error {
	garbage := k.index.Garbage(k.millis() - ledger.Millis(droppedFor.Milliseconds()))
	for _, h := range garbage.Dropped {
		if _, err := k.store.DeleteHolding(ctx, h.ID, h.Revision); err != nil {
			return err
		}
	}
	for _, s := range garbage.Sets {
		if s.Condemned {
			if _, err := k.store.DeleteSet(ctx, s.Set.Digest, s.Revision); err != nil {
				return err
			}
		} else if _, _, err := k.store.Condemn(ctx, s.Set, s.Revision); err != nil {
			return err
		}
	}
	k.orphans = k.deleteOrphans(ctx, garbage.Parts)
	return nil
}

// deleteOrphans deletes parts of sets that were without meta a round ago, too:
// somebody died between the two. It returns what is without meta now.
func (k *Keeper) deleteOrphans(ctx context.Context, now []ledger.Digest) map[ledger.Digest]struct{} {
	left := make(map[ledger.Digest]struct{})
	for _, d := range now {
		if _, before := k.orphans[d]; before {
			if ok, err := k.store.DeleteSet(ctx, d, 0); err == nil && ok {
				continue
			}
		}
		left[d] = struct{}{}
	}
	return left
}
