package contract_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/testsize"
)

// viewer keeps a copy of what a watch shows.
type viewer struct {
	t         testing.TB
	stream    identityv1.IdentityService_WatchClient
	cancel    context.CancelFunc
	held      map[string]uint32
	revision  int64
	ledger    string
	snapshots int  // that are complete
	partial   bool // a snapshot has begun
	// settled is called whenever the copy is of one revision. May be nil.
	settled func(held map[string]uint32)
}

func watch(t testing.TB, on identityv1.IdentityServiceClient, open *identityv1.WatchOpen) *viewer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	stream, err := on.Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&identityv1.WatchRequest{Message: &identityv1.WatchRequest_Open{Open: open}}); err != nil {
		t.Fatal(err)
	}
	return &viewer{t: t, stream: stream, cancel: cancel, held: make(map[string]uint32), revision: open.GetResumeRevision()}
}

func (r *replica) watchCluster(t testing.TB) *viewer {
	t.Helper()
	return watch(t, r, &identityv1.WatchOpen{Scope: identityv1.WatchScope_WATCH_SCOPE_CLUSTER})
}

func (n *node) watchOwn() *viewer {
	n.t.Helper()
	return watch(n.t, n.on, &identityv1.WatchOpen{Session: n.session, Scope: identityv1.WatchScope_WATCH_SCOPE_SESSION})
}

// next takes in one message. Revisions never go back.
func (v *viewer) next() error {
	m, err := v.stream.Recv()
	if err != nil {
		return err
	}
	v.ledger = m.GetLedgerId()
	advance := func(revision int64) {
		if revision <= 0 || revision < v.revision {
			v.t.Errorf("revision %d after %d", revision, v.revision)
		}
		v.revision = revision
	}
	switch {
	case m.GetSnapshotPiece() != nil:
		v.begin()
		for _, p := range m.GetSnapshotPiece().GetPrefixes() {
			v.held[p.GetPrefix()] = p.GetNumber()
		}
		if n := len(m.GetSnapshotPiece().GetPrefixes()); n == 0 || n > 5000 {
			v.t.Errorf("a piece of %d prefixes", n)
		}
		return nil
	case m.GetSnapshotDone() != nil:
		v.begin() // It may have no pieces.
		v.partial = false
		v.snapshots++
		advance(m.GetSnapshotDone().GetRevision())
	default:
		advance(m.GetDelta().GetRevision())
		for _, p := range m.GetDelta().GetRemovals() {
			delete(v.held, p.GetPrefix())
		}
		for _, p := range m.GetDelta().GetUpserts() {
			v.held[p.GetPrefix()] = p.GetNumber()
		}
	}
	if v.settled != nil {
		v.settled(v.held)
	}
	return nil
}

func (v *viewer) begin() {
	if !v.partial {
		v.held, v.partial = make(map[string]uint32), true
	}
}

// until takes messages in until the copy is as wanted.
func (v *viewer) until(want map[string]uint32) {
	v.t.Helper()
	for v.partial || v.revision == 0 || !maps.Equal(v.held, want) {
		if err := v.next(); err != nil {
			v.t.Fatalf("%v; has %v, want %v", err, v.held, want)
		}
	}
}

// end takes messages in until the stream ends.
func (v *viewer) end() error {
	for {
		if err := v.next(); err != nil {
			return err
		}
	}
}

func (v *viewer) ack(revision int64, failures ...*identityv1.ProgramFailure) {
	v.t.Helper()
	ack := &identityv1.WatchAck{Revision: revision, Failures: failures}
	if err := v.stream.Send(&identityv1.WatchRequest{Message: &identityv1.WatchRequest_Ack{Ack: ack}}); err != nil {
		v.t.Fatal(err)
	}
}

func TestWatchShowsWhatIsHeld(t *testing.T) {
	s := newSpace()
	r, other := s.start(t, settings{}), s.start(t, settings{})
	a, b := r.node(t, "a"), other.node(t, "b")
	ten := a.hold(policy("one"), "10.0.0.0/8")[0]

	mine, all := a.watchOwn(), other.watchCluster(t)
	mine.until(map[string]uint32{"10.0.0.0/8": ten})
	all.until(map[string]uint32{"10.0.0.0/8": ten})
	if mine.ledger != a.ledger || a.ledger == "" {
		t.Errorf("ledger %q, the session said %q", mine.ledger, a.ledger)
	}

	eleven := b.hold(policy("two"), "11.0.0.0/8", "10.0.0.0/8")[0]
	all.until(map[string]uint32{"10.0.0.0/8": ten, "11.0.0.0/8": eleven})
	twelve := a.hold(policy("three"), "12.0.0.0/8")[0]
	mine.until(map[string]uint32{"10.0.0.0/8": ten, "12.0.0.0/8": twelve})
	a.drop(policy("one"))
	mine.until(map[string]uint32{"12.0.0.0/8": twelve})
	all.until(map[string]uint32{"10.0.0.0/8": ten, "11.0.0.0/8": eleven, "12.0.0.0/8": twelve}) // b holds it.
	b.drop(policy("two"))
	all.until(map[string]uint32{"12.0.0.0/8": twelve})
	if all.snapshots != 1 || mine.snapshots != 1 {
		t.Errorf("%d and %d snapshots", all.snapshots, mine.snapshots)
	}
	b.hold(policy("two"), "10.0.0.0/8")
	all.until(map[string]uint32{"10.0.0.0/8": ten, "12.0.0.0/8": twelve}) // Revived with its number.
}

// A watch that has reached the revision of an answer has seen the change.
func TestWatchReachesTheRevisionOfAnAnswer(t *testing.T) {
	r := newSpace().start(t, settings{})
	n := r.node(t, "a")
	v := n.watchOwn()
	for i := range 20 {
		prefix := fmt.Sprintf("10.%d.0.0/16", i)
		resp, err := n.on.SetHolding(t.Context(), n.request(policy("cnp"), wanted(prefix)))
		if err != nil {
			t.Fatal(err)
		}
		for v.partial || v.revision < resp.GetRevision() {
			if err := v.next(); err != nil {
				t.Fatal(err)
			}
		}
		if _, has := v.held[prefix]; !has || len(v.held) != 1 {
			t.Fatalf("at revision %d of %d: %v", v.revision, resp.GetRevision(), v.held)
		}
		// The same again changes nothing, and its answer names the same revision.
		req := n.request(policy("cnp"), wanted(prefix))
		req.Generation--
		n.generation--
		again, err := n.on.SetHolding(t.Context(), req)
		if err != nil || again.GetRevision() != resp.GetRevision() {
			t.Fatalf("again: %v, %v", again, err)
		}
	}
}

func TestWatchResumes(t *testing.T) {
	s := newSpace()
	r := s.start(t, settings{})
	n := r.node(t, "a")
	ten := n.hold(policy("one"), "10.0.0.0/8")[0]
	first := r.watchCluster(t)
	first.until(map[string]uint32{"10.0.0.0/8": ten})
	first.cancel()
	eleven := n.hold(policy("two"), "11.0.0.0/8")[0]
	n.drop(policy("one"))

	resume := func(on *replica, revision int64, ledger string) *viewer {
		return watch(t, on, &identityv1.WatchOpen{
			Scope: identityv1.WatchScope_WATCH_SCOPE_CLUSTER, ResumeRevision: revision, LedgerId: ledger,
		})
	}
	want := map[string]uint32{"11.0.0.0/8": eleven}
	v := resume(r, first.revision, first.ledger)
	v.held = maps.Clone(first.held)
	v.until(want)
	if v.snapshots != 0 {
		t.Errorf("a resumed watch sent %d snapshots", v.snapshots)
	}
	latest := v.revision

	for name, v := range map[string]*viewer{
		"of another ledger": resume(r, first.revision, "another"),
		"of the future":     resume(r, latest+1000, first.ledger),
		"without a ledger":  resume(r, first.revision, ""),
	} {
		v.revision = 0 // A snapshot may be older than what the client claims.
		v.until(want)
		if v.snapshots != 1 {
			t.Errorf("a revision %s: %d snapshots", name, v.snapshots)
		}
	}
	// A replica that started later does not know how it was before.
	v = resume(s.start(t, settings{}), first.revision, first.ledger)
	v.until(want)
	if v.snapshots != 1 {
		t.Errorf("a revision before the start of the replica: %d snapshots", v.snapshots)
	}
}

func TestWatchForgottenRevisionGetsASnapshot(t *testing.T) {
	r := newSpace().start(t, settings{history: 20})
	n := r.node(t, "a")
	want := make(map[string]uint32)
	n.hold(policy("cnp"), "10.0.0.0/8")
	v := r.watchCluster(t)
	for v.snapshots < 1 {
		if err := v.next(); err != nil {
			t.Fatal(err)
		}
	}
	v.cancel()
	for i := range 50 {
		prefix := fmt.Sprintf("10.%d.0.0/16", i)
		want = map[string]uint32{prefix: n.hold(policy("cnp"), prefix)[0]}
	}
	again := watch(t, r, &identityv1.WatchOpen{
		Scope: identityv1.WatchScope_WATCH_SCOPE_CLUSTER, ResumeRevision: v.revision, LedgerId: v.ledger,
	})
	again.until(want)
	if again.snapshots != 1 {
		t.Errorf("%d snapshots", again.snapshots)
	}
}

// A snapshot of many prefixes comes in pieces, in order.
func TestWatchSnapshotComesInPieces(t *testing.T) {
	r := newSpace().start(t, settings{txnOps: 1024})
	n := r.node(t, "a")
	prefixes := many(5001)
	numbers := n.hold(policy("cnp"), prefixes...)
	want := make(map[string]uint32)
	for i, p := range prefixes {
		want[p] = numbers[i]
	}
	n.watchOwn().until(want)
	r.watchCluster(t).until(want)
}

// Who does not read is cut, and others do not notice.
func TestWatchSlowReaderIsCut(t *testing.T) {
	r := newSpace().start(t, settings{history: 4000, txnOps: 1024})
	n := r.node(t, "a")
	slow, quick := r.watchCluster(t), r.watchCluster(t)
	for slow.snapshots < 1 {
		if err := slow.next(); err != nil {
			t.Fatal(err)
		}
	}
	ended := make(chan error, 1)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			if err := quick.next(); err != nil {
				ended <- err
				return
			}
		}
	}()
	prefixes := many(1000)
	for i := range 20 { // More than a connection buffers and the history keeps.
		n.hold(policy("cnp"), prefixes...)
		n.hold(policy("cnp"), fmt.Sprintf("11.0.%d.0/24", i))
		select {
		case err := <-ended:
			t.Fatalf("the quick reader ended: %v", err)
		default:
		}
	}
	wantRefusal(t, slow.end(), codes.ResourceExhausted, reason.SlowReader)
	close(done)
	n.hold(policy("cnp"), "12.0.0.0/8")
	select {
	case err := <-ended:
		t.Errorf("the quick reader ended: %v", err)
	default:
	}
	quick.cancel()
}

func TestWatchEndsWithTheEpoch(t *testing.T) {
	s := newSpace()
	r, other := s.start(t, settings{}), s.start(t, settings{})
	n := r.node(t, "a")
	v := n.watchOwn()
	v.until(map[string]uint32{})
	old := n.session
	n.on = other
	n.open()
	wantRefusal(t, v.end(), codes.FailedPrecondition, reason.StaleSession)
	v = watch(t, r, &identityv1.WatchOpen{Session: old, Scope: identityv1.WatchScope_WATCH_SCOPE_SESSION})
	wantRefusal(t, v.end(), codes.FailedPrecondition, reason.StaleSession)
}

func TestWatchBadMessages(t *testing.T) {
	r := newSpace().start(t, settings{})
	n := r.node(t, "a")
	cluster := identityv1.WatchScope_WATCH_SCOPE_CLUSTER
	v := watch(t, r, &identityv1.WatchOpen{Scope: identityv1.WatchScope_WATCH_SCOPE_SESSION})
	wantRefusal(t, v.end(), codes.InvalidArgument, reason.FieldInvalid)
	v = watch(t, r, &identityv1.WatchOpen{})
	wantRefusal(t, v.end(), codes.InvalidArgument, reason.FieldInvalid)
	v = watch(t, r, &identityv1.WatchOpen{Scope: cluster, ResumeRevision: -1})
	wantRefusal(t, v.end(), codes.InvalidArgument, reason.FieldInvalid)
	v = watch(t, r, &identityv1.WatchOpen{Scope: cluster, Session: &identityv1.Session{Id: "nobody", Epoch: 1}})
	wantRefusal(t, v.end(), codes.NotFound, reason.SessionUnknown)

	v = n.watchOwn()
	v.until(map[string]uint32{})
	v.ack(v.revision + 1) // Not sent yet.
	wantRefusal(t, v.end(), codes.InvalidArgument, reason.FieldInvalid)
	v = n.watchOwn()
	v.until(map[string]uint32{})
	v.ack(v.revision, &identityv1.ProgramFailure{Prefix: "x", Reason: 1})
	wantRefusal(t, v.end(), codes.InvalidArgument, reason.PrefixInvalid)

	stream, err := r.Watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&identityv1.WatchRequest{Message: &identityv1.WatchRequest_Ack{Ack: &identityv1.WatchAck{Revision: 1}}}); err != nil {
		t.Fatal(err)
	}
	_, err = stream.Recv()
	wantRefusal(t, err, codes.InvalidArgument, reason.FieldInvalid)
}

func TestWatchAcknowledgements(t *testing.T) {
	r := newSpace().start(t, settings{})
	n := r.node(t, "a")
	v := n.watchOwn()
	v.until(map[string]uint32{})
	v.ack(v.revision)
	number := n.hold(policy("cnp"), p)[0]
	v.until(map[string]uint32{p: number})
	v.ack(v.revision, &identityv1.ProgramFailure{Prefix: p, Reason: 123})
	n.drop(policy("cnp"))
	v.until(map[string]uint32{}) // The stream goes on.
}

// A set of any size appears, and is replaced, in one step for every reader. Two
// replicas, one of which is told to use the smallest transactions.
func TestBigSetIsAtomic(t *testing.T) {
	s := newSpace()
	r, other := s.start(t, settings{txnOps: 1024}), s.start(t, settings{})
	n := r.node(t, "a")
	size := testsize.Pick(5000, 100000)
	prefixes := many(size)
	half := prefixes[:size/2]

	sizes := make(chan int, 1000)
	v := other.watchCluster(t)
	v.settled = func(held map[string]uint32) { sizes <- len(held) }
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		_ = v.end()
	}()
	// Also a reader of single prefixes: once the first is live, the last is.
	polled := make(chan error, 1)
	poll, stopPolling := context.WithCancel(t.Context())
	go func() {
		get := func(p string) identityv1.IdentityState {
			resp, err := other.GetIdentity(poll, &identityv1.GetIdentityRequest{Key: &identityv1.GetIdentityRequest_Prefix{Prefix: p}})
			if err != nil {
				return identityv1.IdentityState_IDENTITY_STATE_UNSPECIFIED
			}
			return resp.GetIdentity().GetState()
		}
		for poll.Err() == nil {
			const live = identityv1.IdentityState_IDENTITY_STATE_LIVE
			if get(prefixes[0]) == live && get(prefixes[len(half)-1]) != live && poll.Err() == nil {
				polled <- fmt.Errorf("%s is live, %s is not", prefixes[0], prefixes[len(half)-1])
				return
			}
		}
		polled <- nil
	}()

	before := n.hold(policy("big"), half...)
	after := n.hold(policy("big"), prefixes...)
	stopPolling()
	if err := <-polled; err != nil {
		t.Error(err)
	}
	n.drop(policy("big"))
	n.hold(policy("big"), "11.0.0.0/8")
	if !slices.Equal(before, after[:len(half)]) {
		t.Error("numbers changed")
	}
	for seen := 0; seen != 1; {
		select {
		case seen = <-sizes:
		case <-time.After(30 * time.Second):
			t.Fatal("the watch stands still")
		}
		if seen > 1 && seen != len(half) && seen != size {
			t.Errorf("%d prefixes were held for a moment", seen)
		}
	}
	v.cancel()
	<-stopped
}
