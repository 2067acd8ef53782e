package contract_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"sync/atomic"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/identity-service/internal/etcd"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/testsize"
)

// mortal is a KV that dies at one commit, for good: as a process that is killed
// does, or one that loses etcd.
type mortal struct {
	etcd.KV
	armed atomic.Bool
	dead  atomic.Bool
	left  atomic.Int64 // commits until then
	// late lets etcd make the commit at which it dies: the answer is lost.
	late bool
}

// dieAt arms it: the nth commit from now, counted from 0, is the last.
func (m *mortal) dieAt(n int, late bool) {
	m.late = late
	m.left.Store(int64(n))
	m.armed.Store(true)
}

var errDead = status.Error(codes.Unavailable, "dead")

func (m *mortal) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	if m.dead.Load() {
		return nil, errDead
	}
	return m.KV.Get(ctx, key, opts...)
}

func (m *mortal) Txn(ctx context.Context) clientv3.Txn { return &mortalTxn{Txn: m.KV.Txn(ctx), m: m} }

type mortalTxn struct {
	clientv3.Txn
	m *mortal
}

func (t *mortalTxn) If(cs ...clientv3.Cmp) clientv3.Txn   { t.Txn = t.Txn.If(cs...); return t }
func (t *mortalTxn) Then(ops ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Then(ops...); return t }
func (t *mortalTxn) Else(ops ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Else(ops...); return t }

func (t *mortalTxn) Commit() (*clientv3.TxnResponse, error) {
	if t.m.dead.Load() {
		return nil, errDead
	}
	if t.m.armed.Load() && t.m.left.Add(-1) < 0 {
		t.m.dead.Store(true)
		if t.m.late {
			if _, err := t.Txn.Commit(); err != nil {
				return nil, err
			}
		}
		return nil, errDead
	}
	return t.Txn.Commit()
}

// identities lists everything that has a number.
func (r *replica) identities(t testing.TB) map[string]*identityv1.Identity {
	t.Helper()
	out := make(map[string]*identityv1.Identity)
	for token := ""; ; {
		resp, err := r.ListIdentities(t.Context(), &identityv1.ListIdentitiesRequest{PageSize: 10000, PageToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range resp.GetIdentities() {
			out[id.GetPrefix()] = id
		}
		if token = resp.GetNextPageToken(); token == "" {
			return out
		}
	}
}

func liveOf(identities map[string]*identityv1.Identity) map[string]uint32 {
	out := make(map[string]uint32)
	for p, id := range identities {
		if id.GetHolderCount() > 0 {
			out[p] = id.GetNumber()
		}
	}
	return out
}

// A failure between acquiring some prefixes of a set and the others must leave
// nothing behind (cilium#5783). The service is killed at every commit of a call,
// before and after etcd made it; another one takes over; the client calls again
// with the same request id.
func TestB09KilledAtEveryCommit(t *testing.T) {
	for _, tc := range []struct {
		name         string
		size, txnOps int
		// last is how many of the commits are tried, from the end; 0 means all.
		last int
	}{
		{"in one commit", 5, 0, 0},
		{"in several commits", 40, 32, 0},
		// Two parts of the set, its meta, the holding.
		{"in several parts", 8500, 1024, testsize.Pick(4, 0)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			// A lost race adds commits to a call; without one it has the fewest.
			commits := commitsOf(t, tc.size, tc.txnOps)
			for range 2 {
				commits = min(commits, commitsOf(t, tc.size, tc.txnOps))
			}
			first := 0
			if tc.last > 0 {
				first = commits - tc.last
			}
			for at := first; at < commits; at++ {
				if tc.last == 0 {
					killAt(t, at, false, tc.size, tc.txnOps)
				}
				killAt(t, at, true, tc.size, tc.txnOps)
			}
		})
	}
}

// commitsOf returns how many commits it takes to hold a set in place of another.
func commitsOf(t *testing.T, size, txnOps int) int {
	t.Helper()
	const plenty = 1 << 30
	var kv *mortal
	r := newSpace().start(t, settings{txnOps: txnOps, kv: func(k etcd.KV) etcd.KV { kv = &mortal{KV: k}; return kv }})
	n := r.node(t, "a")
	n.hold(policy("cnp"), p)
	kv.dieAt(plenty, false)
	n.hold(policy("cnp"), many(size)...)
	r.stop()
	return plenty - int(kv.left.Load())
}

// killAt kills the service at one of the commits.
func killAt(t *testing.T, at int, late bool, size, txnOps int) {
	t.Helper()
	name := fmt.Sprintf("commit %d, late %v", at, late)
	s := newSpace()
	var kv *mortal
	doomed := s.start(t, settings{txnOps: txnOps, kv: func(k etcd.KV) etcd.KV { kv = &mortal{KV: k}; return kv }})
	observer := s.start(t, settings{})
	n := doomed.node(t, "a")
	old := map[string]uint32{p: n.hold(policy("cnp"), p)[0]}
	prefixes := many(size)

	kv.dieAt(at, late)
	req := n.request(policy("cnp"), wanted(prefixes...))
	_, err := doomed.SetHolding(t.Context(), req)
	wantRefusal(t, err, codes.Unavailable, reason.StoreUnavailable)
	// Everybody else sees the old set or the new one, never a part.
	before := observer.identities(t)
	if live := liveOf(before); !maps.Equal(live, old) && (len(live) != size || !late) {
		t.Fatalf("%s: %d prefixes are live", name, len(live))
	}
	doomed.stop()

	next := s.start(t, settings{txnOps: txnOps})
	resp, err := next.SetHolding(t.Context(), req)
	if err != nil {
		t.Fatalf("%s: again: %v", name, err)
	}
	again, err := next.SetHolding(t.Context(), req)
	if err != nil || again.GetRevision() != resp.GetRevision() {
		t.Errorf("%s: the same call once more: revision %d, %v, was %d", name, again.GetRevision(), err, resp.GetRevision())
	}
	after := observer.identities(t)
	if live := liveOf(after); len(live) != size {
		t.Fatalf("%s: %d prefixes are live in the end", name, len(live))
	}
	for i, a := range resp.GetAssignments() {
		if id := after[prefixes[i]]; id.GetNumber() != a.GetNumber() || id.GetHolderCount() != 1 {
			t.Fatalf("%s: %s is %v, answered %d", name, prefixes[i], id, a.GetNumber())
		}
	}
	for prefix, id := range before {
		if after[prefix].GetNumber() != id.GetNumber() {
			t.Fatalf("%s: %s had %d and has %d", name, prefix, id.GetNumber(), after[prefix].GetNumber())
		}
	}
	if after[p].GetHolderCount() != 0 || len(after) != size+1 {
		t.Fatalf("%s: the old set is held by %d, %d identities", name, after[p].GetHolderCount(), len(after))
	}
	next.stop()
	observer.stop()
}

// A call whose answer was lost is answered the same by another replica.
func TestAnswersLostWithTheService(t *testing.T) {
	s := newSpace()
	var kv *mortal
	start := func() *replica {
		return s.start(t, settings{kv: func(k etcd.KV) etcd.KV { kv = &mortal{KV: k}; return kv }})
	}
	r := start()
	kv.dieAt(0, true)
	open := &identityv1.OpenSessionRequest{RequestId: requestID(), NodeName: "a", NodeUid: "u", BootId: "b"}
	_, err := r.OpenSession(t.Context(), open)
	wantRefusal(t, err, codes.Unavailable, reason.StoreUnavailable)
	r.stop()
	r = start()
	opened, err := r.OpenSession(t.Context(), open)
	if err != nil || opened.GetSession().GetEpoch() != 1 {
		t.Fatalf("opened %v, %v", opened, err)
	}

	hold := &identityv1.SetHoldingRequest{RequestId: requestID(), Session: opened.GetSession(), Owner: policy("cnp"), Generation: 1, Prefixes: wanted(p)}
	if _, err := r.SetHolding(t.Context(), hold); err != nil {
		t.Fatal(err)
	}
	kv.dieAt(0, true)
	drop := &identityv1.DropHoldingRequest{RequestId: requestID(), Session: opened.GetSession(), Owner: policy("cnp"), Generation: 2}
	_, err = r.DropHolding(t.Context(), drop)
	wantRefusal(t, err, codes.Unavailable, reason.StoreUnavailable)
	r.stop()
	r = start()
	first, err := r.DropHolding(t.Context(), drop)
	if err != nil {
		t.Fatal(err)
	}
	second, err := r.DropHolding(t.Context(), drop)
	if err != nil || first.GetRevision() != second.GetRevision() {
		t.Errorf("%v and %v, %v", first, second, err)
	}
	r.wantHolders(t, p, 0)
}

// Without its store the service promises nothing, not even what it knows.
func TestNoAnswerFromMemory(t *testing.T) {
	s := newSpace()
	var kv *mortal
	r := s.start(t, settings{kv: func(k etcd.KV) etcd.KV { kv = &mortal{KV: k}; return kv }})
	n := r.node(t, "a")
	n.hold(policy("cnp"), p)
	v := n.watchOwn()
	for v.snapshots == 0 {
		if err := v.next(); err != nil {
			t.Fatal(err)
		}
	}
	kv.dead.Store(true)
	same := n.request(policy("cnp"), wanted(p))
	same.Generation--
	for name, call := range map[string]func() error{
		"SetHolding, the same again": func() error { _, err := r.SetHolding(t.Context(), same); return err },
		"SetHolding, more":           func() error { _, err := r.SetHolding(t.Context(), n.request(policy("x"), wanted(p))); return err },
		"DropHolding": func() error {
			_, err := r.DropHolding(t.Context(), &identityv1.DropHoldingRequest{RequestId: "r", Session: n.session, Owner: policy("cnp"), Generation: 50})
			return err
		},
		"OpenSession": func() error {
			_, err := r.OpenSession(t.Context(), &identityv1.OpenSessionRequest{RequestId: "r", NodeName: "a", NodeUid: "uid-a", BootId: "boot"})
			return err
		},
		"KeepAlive": func() error {
			_, err := r.KeepAlive(t.Context(), &identityv1.KeepAliveRequest{Session: n.session})
			return err
		},
		"GetIdentity": func() error {
			_, err := r.GetIdentity(t.Context(), &identityv1.GetIdentityRequest{Key: &identityv1.GetIdentityRequest_Prefix{Prefix: p}})
			return err
		},
		"LookupIdentity": func() error {
			_, err := r.LookupIdentity(t.Context(), &identityv1.LookupIdentityRequest{Address: "192.0.2.1"})
			return err
		},
		"ListIdentities": func() error {
			_, err := r.ListIdentities(t.Context(), &identityv1.ListIdentitiesRequest{})
			return err
		},
		"Watch": func() error { return n.watchOwn().end() },
	} {
		err := call()
		if errors.Is(err, io.EOF) {
			err = nil
		}
		t.Run(name, func(t *testing.T) { wantRefusal(t, err, codes.Unavailable, reason.StoreUnavailable) })
	}
	kv.dead.Store(false)
	r.wantHolders(t, p, 1)
	want := map[string]uint32{p: v.held[p], "10.0.0.0/8": n.hold(policy("other"), "10.0.0.0/8")[0]}
	v.until(want) // The stream of before goes on.
}
