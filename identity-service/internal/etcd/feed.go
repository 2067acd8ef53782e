package etcd

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/telemetry"
)

// formatVersion is that of the keys. A store of another one is not touched.
const formatVersion = 1

// Run reads the store into the index and keeps it up to date until ctx ends. It
// returns ErrForeign if the store is not, or no longer, ours; every other
// trouble is tried again.
func (s *Store) Run(ctx context.Context) error {
	const shortest, longest = 100 * time.Millisecond, 5 * time.Second
	pause := shortest
	for ctx.Err() == nil {
		begin := time.Now()
		err := s.follow(ctx)
		if errors.Is(err, ErrForeign) {
			return err
		}
		if ctx.Err() == nil {
			s.logger.WarnContext(ctx, "following the store ended, trying again", slog.Any(telemetry.KeyError, err))
		}
		if time.Since(begin) > longest {
			pause = shortest // It went well for a while.
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, longest)
	}
	return nil
}

// follow goes on where the index is, or reads everything first.
func (s *Store) follow(ctx context.Context) error {
	revision := s.index.Revision()
	if err := s.ensureMeta(ctx); err != nil {
		return err
	}
	if revision == 0 {
		if err := s.load(ctx); err != nil {
			return fmt.Errorf("read the store: %w", err)
		}
		revision = s.index.Revision()
	}
	err := s.watch(ctx, revision+1)
	if errors.Is(err, rpctypes.ErrCompacted) {
		if err := s.load(ctx); err != nil {
			return fmt.Errorf("read the store: %w", err)
		}
		err = s.watch(ctx, s.index.Revision()+1)
	}
	return err
}

// ensureMeta makes the record of the ledger if the store is empty, and checks
// that it is the one that we know.
func (s *Store) ensureMeta(ctx context.Context) error {
	limited, cancel := s.limit(ctx)
	defer cancel()
	want := metaValue{LedgerID: rand.Text(), Format: formatVersion, First: s.config.Range.First, Last: s.config.Range.Last}
	resp, err := s.kv.Txn(limited).
		If(clientv3.Compare(clientv3.ModRevision(Root).WithPrefix(), "=", 0)). // Holds if no key has a revision.
		Then(clientv3.OpPut(keyMeta, encode(want))).
		Else(clientv3.OpGet(keyMeta)).Commit()
	if err != nil {
		return fmt.Errorf("read the meta record: %w", translate(ctx, err))
	}
	known := s.index.Meta()
	if resp.Succeeded {
		if known.LedgerID != "" {
			return fmt.Errorf("%w: ledger %s is gone, the store is empty", ErrForeign, known.LedgerID)
		}
		s.logger.InfoContext(ctx, "new ledger", slog.String("ledger_id", want.LedgerID))
		return nil
	}
	kvs := resp.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return fmt.Errorf("%w: there are keys under %s, but %s is missing", ErrForeign, Root, keyMeta)
	}
	var have metaValue
	if err := json.Unmarshal(kvs[0].Value, &have); err != nil {
		return fmt.Errorf("%w: %s cannot be understood: %w", ErrForeign, keyMeta, err)
	}
	switch {
	case have.Format != formatVersion:
		return fmt.Errorf("%w: its format is %d, this program knows %d", ErrForeign, have.Format, formatVersion)
	case have.First != want.First || have.Last != want.Last:
		return fmt.Errorf("%w: it gives out %d..%d, the settings say %d..%d", ErrForeign, have.First, have.Last, want.First, want.Last)
	case known.LedgerID != "" && known.LedgerID != have.LedgerID:
		return fmt.Errorf("%w: ledger %s was replaced by %s", ErrForeign, known.LedgerID, have.LedgerID)
	}
	return nil
}

// segment is a part of the keys, and how many of them are read at once. etcd
// counts all that are left for every page, so pages are as big as the values
// allow: parts of sets have up to 150 kB, numbers some dozen bytes.
type segment struct {
	from, to string
	page     int64
}

// segments are everything under Root, without a gap, so that keys that nobody
// writes are found, too.
func segments() []segment {
	var out []segment
	at := Root
	for _, dir := range []segment{{dirHolding, "", 5000}, {dirNumber, "", 50000}, {dirPrefix, "", 50000}, {dirSet, "", 200}, {dirSession, "", 5000}} {
		dir.to = clientv3.GetPrefixRangeEnd(dir.from)
		out = append(out, segment{at, dir.from, 1000}, dir)
		at = dir.to
	}
	return append(out, segment{at, clientv3.GetPrefixRangeEnd(Root), 1000})
}

// load reads everything at one revision.
func (s *Store) load(ctx context.Context) error {
	var (
		records  []index.Record
		revision int64
	)
	for _, part := range segments() {
		for from := part.from; from != ""; {
			limited, cancel := s.limit(ctx)
			resp, err := s.kv.Get(limited, from, clientv3.WithRange(part.to), clientv3.WithLimit(part.page), clientv3.WithRev(revision))
			cancel()
			if err != nil {
				return translate(ctx, err)
			}
			if revision == 0 {
				revision = resp.Header.Revision
			}
			for _, kv := range resp.Kvs {
				records = append(records, decode(kv, false))
			}
			from = ""
			if resp.More {
				from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
			}
		}
	}
	s.index.Reset(revision, records)
	s.report(ctx)
	return nil
}

// watch feeds the index from a revision on until the watch breaks.
func (s *Store) watch(ctx context.Context, from int64) error {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	updates := s.watcher.Watch(ctx, Root, clientv3.WithPrefix(), clientv3.WithRev(from), clientv3.WithProgressNotify())
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.nudge:
			if err := s.watcher.RequestProgress(ctx); err != nil {
				return fmt.Errorf("ask the watch for progress: %w", err)
			}
		case resp, ok := <-updates:
			if !ok {
				return errors.New("the watch was closed")
			}
			if err := resp.Err(); err != nil {
				return fmt.Errorf("watch: %w", err)
			}
			if err := s.feed(ctx, resp); err != nil {
				return err
			}
		}
	}
}

// feed takes in one answer of the watch. All events of a revision come together.
func (s *Store) feed(ctx context.Context, resp clientv3.WatchResponse) error {
	if resp.IsProgressNotify() {
		s.index.Progress(resp.Header.Revision)
		return nil
	}
	for events := resp.Events; len(events) > 0; {
		revision := events[0].Kv.ModRevision
		var records []index.Record
		for len(events) > 0 && events[0].Kv.ModRevision == revision {
			e := events[0]
			r := decode(e.Kv, e.Type == clientv3.EventTypeDelete)
			if meta, is := r.(index.Meta); is {
				if known := s.index.Meta(); meta.Deleted || meta.LedgerID != known.LedgerID {
					return fmt.Errorf("%w: ledger %s was deleted or replaced", ErrForeign, known.LedgerID)
				}
			}
			if key := string(e.Kv.Key); s.index.IsBroken(key) {
				records = append(records, index.Malformed{Key: key}) // Unless r says that it still is.
			}
			records = append(records, r)
			events = events[1:]
		}
		s.index.Apply(revision, records)
	}
	s.report(ctx)
	return nil
}

// report logs what cannot be understood, once.
func (s *Store) report(ctx context.Context) {
	if s.index.BrokenCount() == len(s.reported) {
		return
	}
	broken := s.index.Broken()
	for name, why := range broken {
		if s.reported[name] != why {
			s.logger.ErrorContext(ctx, "a record in the store cannot be understood",
				slog.String("record", name), slog.String("why", why), slog.String(telemetry.KeyReason, reason.StoreCorrupt.String()))
		}
	}
	s.reported = broken
}

// Range is the range of numbers that the store was opened with.
func (s *Store) Range() ledger.Range { return s.config.Range }
