// Package etcd is the one edge to etcd: how records are stored, how a decision
// of the ledger becomes one guarded transaction, and how the index is fed. It
// decides nothing. The etcd may run inside this process (Start) or elsewhere
// (Dial); the code above is the same.
package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

var (
	// ErrUnavailable says that etcd did not answer, has no quorum, or we are not up to
	// date with it. What was asked may or may not have happened.
	ErrUnavailable = errors.New("the store is unavailable")
	// ErrFull says that etcd is out of space.
	ErrFull = errors.New("the store is full")
	// ErrNotReady says that the store has not been read yet.
	ErrNotReady = errors.New("the store has not been read yet")
	// ErrForeign says that what is in the store was not written by this service, or not
	// with these settings, or is another ledger than a moment ago.
	ErrForeign = errors.New("the store is not ours")
)

// KV is what a Store needs of clientv3.KV.
type KV interface {
	Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error)
	Txn(ctx context.Context) clientv3.Txn
}

// Config is how a Store uses its etcd.
type Config struct {
	// Range is that of a new ledger. An old one must have the same.
	Range ledger.Range
	// MaxTxnOps is what etcd allows in one transaction; zero means 128, its
	// default.
	MaxTxnOps int
	// Timeout bounds one call to etcd; zero means 5 s.
	Timeout time.Duration
}

// Store reads and writes the ledger in etcd.
type Store struct {
	kv      KV
	watcher clientv3.Watcher
	index   *index.Index
	config  Config
	logger  *slog.Logger
	nudge   chan struct{}

	reported map[string]string // broken records that were logged; of Run alone
}

// NewStore returns a store that feeds the given index once it runs.
func NewStore(kv KV, watcher clientv3.Watcher, x *index.Index, config Config, logger *slog.Logger) *Store {
	if config.MaxTxnOps == 0 {
		config.MaxTxnOps = 128
	}
	if config.Timeout == 0 {
		config.Timeout = 5 * time.Second
	}
	return &Store{kv: kv, watcher: watcher, index: x, config: config, logger: logger, nudge: make(chan struct{}, 1)}
}

// fixedOps is what a commit needs at most beside its numbers: guards of the
// ledger, the session, the holding and the set, or a set and a holding.
const fixedOps = 8

// MaxGrants is how many numbers fit into one commit.
func (s *Store) MaxGrants() int { return max(1, (s.config.MaxTxnOps-fixedOps)/2) }

// partSize is how many prefixes are in one part of a set: at most 18 bytes each,
// far below etcd's limit of a request, 1.5 MiB.
const partSize = 8192

// Parts is in how many parts a set is stored; at least one.
func Parts(set ledger.Set) int { return max(1, (len(set.Prefixes)+partSize-1)/partSize) }

func part(set ledger.Set, i int) []byte {
	from, to := i*partSize, min((i+1)*partSize, len(set.Prefixes))
	return appendPrefixes(set.Prefixes[from:to])
}

func appendPrefixes(prefixes []netip.Prefix) []byte {
	b := make([]byte, 0, 18*len(prefixes))
	for _, p := range prefixes {
		b = ledger.AppendPrefix(b, p)
	}
	return b
}

// Guard is a condition of a commit: a key has not changed since it was read.
type Guard struct {
	key      string
	revision int64
}

// SessionAt guards a session; revision zero means that there is none.
func SessionAt(id ledger.SessionID, revision int64) Guard { return Guard{sessionKey(id), revision} }

// HoldingAt guards a holding; revision zero means that there is none.
func HoldingAt(id ledger.HoldingID, revision int64) Guard { return Guard{holdingKey(id), revision} }

// SetAt guards a set; revision zero means that it is not stored.
func SetAt(d ledger.Digest, revision int64) Guard { return Guard{setMetaKey(d), revision} }

// Commit makes events true in one transaction, if all guards hold, the ledger is
// the one that was read at metaRevision, and each number and prefix that is given
// to another has none. Sets in events must have one part; see WriteParts. It
// returns the revision of the store and whether the commit was made. After
// ErrUnavailable it may have been.
func (s *Store) Commit(ctx context.Context, metaRevision int64, guards []Guard, events ...ledger.Event) (int64, bool, error) {
	conditions := []clientv3.Cmp{unchanged(Guard{keyMeta, metaRevision})}
	for _, g := range guards {
		conditions = append(conditions, unchanged(g))
	}
	var puts []clientv3.Op
	for _, e := range events {
		switch e := e.(type) {
		case ledger.NumberGiven:
			p, n := prefixKey(e.Prefix), numberKey(e.Number)
			conditions = append(conditions, unchanged(Guard{p, 0}), unchanged(Guard{n, 0}))
			puts = append(puts, clientv3.OpPut(p, prefixValue(e.Grant, e.At)), clientv3.OpPut(n, numberValue(e.Grant)))
		case ledger.SetStored:
			if Parts(e.Set) != 1 {
				return 0, false, fmt.Errorf("a set of %d parts does not fit into a commit", Parts(e.Set))
			}
			puts = append(puts, clientv3.OpPut(chunkKey(e.Set.Digest, 0), string(part(e.Set, 0))), putSetMeta(e.Set, false))
		case ledger.SessionOpened:
			puts = append(puts, clientv3.OpPut(sessionKey(e.Session.ID), encodeSession(e.Session)))
		case ledger.HoldingChanged:
			puts = append(puts, clientv3.OpPut(holdingKey(e.ID), encodeHolding(e.Holding)))
		default:
			return 0, false, fmt.Errorf("cannot store %T", e)
		}
	}
	return s.txn(ctx, conditions, puts)
}

func unchanged(g Guard) clientv3.Cmp {
	return clientv3.Compare(clientv3.ModRevision(g.key), "=", g.revision)
}

func putSetMeta(set ledger.Set, condemned bool) clientv3.Op {
	v := setMetaValue{Parts: Parts(set), Prefixes: len(set.Prefixes), Condemned: condemned}
	return clientv3.OpPut(setMetaKey(set.Digest), encode(v))
}

func (s *Store) txn(ctx context.Context, conditions []clientv3.Cmp, ops []clientv3.Op) (int64, bool, error) {
	limited, cancel := s.limit(ctx)
	defer cancel()
	resp, err := s.kv.Txn(limited).If(conditions...).Then(ops...).Commit()
	if err != nil {
		return 0, false, fmt.Errorf("commit: %w", translate(ctx, err))
	}
	return resp.Header.Revision, resp.Succeeded, nil
}

// WriteParts stores a set of any size; its prefixes have numbers. Nobody sees it
// before its meta, which comes last, and only if the set is as it was when read
// at setRevision and no part was deleted since. It returns the revision of the
// store and whether it was made.
func (s *Store) WriteParts(ctx context.Context, metaRevision int64, set ledger.Set, setRevision int64) (int64, bool, error) {
	conditions := []clientv3.Cmp{
		unchanged(Guard{keyMeta, metaRevision}),
		unchanged(SetAt(set.Digest, setRevision)),
	}
	for i := range Parts(set) {
		key := chunkKey(set.Digest, i)
		ours := []clientv3.Cmp{unchanged(Guard{keyMeta, metaRevision})}
		revision, ok, err := s.txn(ctx, ours, []clientv3.Op{clientv3.OpPut(key, string(part(set, i)))})
		if err != nil || !ok {
			return revision, false, err
		}
		conditions = append(conditions, clientv3.Compare(clientv3.ModRevision(key), ">", revision-1))
	}
	return s.txn(ctx, conditions, []clientv3.Op{putSetMeta(set, false)})
}

// Condemn marks a set that nobody holds: from now on, whoever takes it up writes
// it again first. It reports the revision and whether the set was as read.
func (s *Store) Condemn(ctx context.Context, set ledger.Set, setRevision int64) (int64, bool, error) {
	return s.txn(ctx, []clientv3.Cmp{unchanged(SetAt(set.Digest, setRevision))}, []clientv3.Op{putSetMeta(set, true)})
}

// DeleteSet deletes a condemned set that is as read. With revision zero it
// deletes parts whose meta was never written.
func (s *Store) DeleteSet(ctx context.Context, d ledger.Digest, setRevision int64) (bool, error) {
	all := dirSet + d.String() + "/"
	_, ok, err := s.txn(ctx, []clientv3.Cmp{unchanged(SetAt(d, setRevision))}, []clientv3.Op{clientv3.OpDelete(all, clientv3.WithPrefix())})
	return ok, err
}

// DeleteHolding deletes the record of a dropped holding that is as read.
func (s *Store) DeleteHolding(ctx context.Context, id ledger.HoldingID, revision int64) (bool, error) {
	_, ok, err := s.txn(ctx, []clientv3.Cmp{unchanged(HoldingAt(id, revision))}, []clientv3.Op{clientv3.OpDelete(holdingKey(id))})
	return ok, err
}

// Barrier returns when the index shows everything that was committed by anybody
// before the call. It asks a quorum.
func (s *Store) Barrier(ctx context.Context) error {
	limited, cancel := s.limit(ctx)
	defer cancel()
	resp, err := s.kv.Get(limited, keyMeta, clientv3.WithKeysOnly())
	if err != nil {
		return fmt.Errorf("read the revision: %w", translate(ctx, err))
	}
	return s.wait(ctx, limited, resp.Header.Revision)
}

// Reach returns when the index has reached a revision.
func (s *Store) Reach(ctx context.Context, revision int64) error {
	limited, cancel := s.limit(ctx)
	defer cancel()
	return s.wait(ctx, limited, revision)
}

func (s *Store) wait(ctx, limited context.Context, revision int64) error {
	nudge := func() {
		select {
		case s.nudge <- struct{}{}:
		default:
		}
	}
	if err := s.index.Wait(limited, revision, nudge); err != nil {
		return fmt.Errorf("wait for revision %d: %w", revision, translate(ctx, err))
	}
	return nil
}

// limit bounds one call to etcd: by the configured time, and so that there is
// time left to tell the caller that etcd did not answer.
func (s *Store) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	timeout := s.config.Timeout
	if deadline, ok := ctx.Deadline(); ok {
		timeout = min(timeout, time.Until(deadline)*9/10)
	}
	return context.WithTimeout(ctx, timeout)
}

// translate tells errors of etcd apart. ctx is the caller's: if it ended, that
// is the error.
func translate(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, rpctypes.ErrNoSpace) {
		return fmt.Errorf("%w: %w", ErrFull, err)
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return fmt.Errorf("%w: no answer in time", ErrUnavailable)
	}
	code := status.Code(err)
	var known rpctypes.EtcdError
	if errors.As(err, &known) {
		code = known.Code()
	}
	switch code {
	case codes.InvalidArgument, codes.OutOfRange, codes.Unimplemented, codes.Internal:
		return err // A bug or a wrong setting; repeating helps nobody.
	default:
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
}
