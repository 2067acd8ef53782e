package contract_test

import (
	"fmt"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/testsize"
)

// These tests are named for bug reports against cilium/cilium: the same events
// must have the right result here.

const p = "192.0.2.0/24"

// cilium#30651: thousands of prefixes with several owners, a restart in the
// middle of acquiring them again, and the end of the grace period.
func TestB13RestartInTheMiddle(t *testing.T) {
	space := newSpace()
	r := space.start(t, settings{})
	n := r.node(t, "a")
	prefixes := many(testsize.Pick(1000, 5000))
	var before []uint32
	owners := []string{"o1", "o2", "o3"}
	for _, o := range owners {
		before = n.hold(policy(o), prefixes...)
	}
	n.open()
	n.hold(restored("a"), prefixes...)
	n.hold(policy("o1"), prefixes...)
	n.open() // Again, before o2 and o3 are back.
	r.stop()
	r = space.start(t, settings{})
	n.on = r
	n.hold(restored("a"), prefixes...)
	for _, o := range owners {
		if again := n.hold(policy(o), prefixes...); !slices.Equal(again, before) {
			t.Fatalf("%s got other numbers", o)
		}
	}
	n.drop(restored("a"))
	for _, i := range []int{0, len(prefixes) / 2, len(prefixes) - 1} {
		r.wantHolders(t, prefixes[i], 3)
	}
}

// cilium#35511: many owners of one prefix: one number, each a holder of its own.
func TestB17ManyOwnersOfOnePrefix(t *testing.T) {
	r := newSpace().start(t, settings{})
	n := r.node(t, "a")
	const owners = 200
	number := uint32(0)
	for i := range owners {
		got := n.hold(policy(fmt.Sprintf("o%d", i)), p)[0]
		if number == 0 {
			number = got
		}
		if got != number {
			t.Fatalf("owner %d got %d, the others %d", i, got, number)
		}
	}
	r.wantHolders(t, p, owners)
	for i := range owners - 1 {
		n.drop(policy(fmt.Sprintf("o%d", i)))
	}
	r.wantHolders(t, p, 1)
}

// cilium#7966: the late write of a zombie must be fenced off.
func TestB57ZombieIsFenced(t *testing.T) {
	s := newSpace()
	r, other := s.start(t, settings{}), s.start(t, settings{})
	n := r.node(t, "a")
	n.hold(policy("cnp"), p)
	zombie := *n
	n.open()
	zombie.on = other
	_, err := zombie.on.SetHolding(t.Context(), zombie.request(policy("cnp"), wanted("10.0.0.0/8")))
	wantRefusal(t, err, codes.FailedPrecondition, reason.StaleSession)
	_, err = zombie.on.DropHolding(t.Context(), &identityv1.DropHoldingRequest{
		RequestId: requestID(), Session: zombie.session, Owner: policy("cnp"), Generation: 99,
	})
	wantRefusal(t, err, codes.FailedPrecondition, reason.StaleSession)
	_, err = zombie.on.KeepAlive(t.Context(), &identityv1.KeepAliveRequest{Session: zombie.session})
	wantRefusal(t, err, codes.FailedPrecondition, reason.StaleSession)
	r.wantHolders(t, p, 1)
	if r.identity(t, "10.0.0.0/8") != nil {
		t.Error("a refused call gave a number")
	}
	// An epoch that was never given out belongs to another store.
	future := proto.CloneOf(n.session)
	future.Epoch += 5
	_, err = r.KeepAlive(t.Context(), &identityv1.KeepAliveRequest{Session: future})
	wantRefusal(t, err, codes.NotFound, reason.SessionUnknown)
	if _, err := r.KeepAlive(t.Context(), &identityv1.KeepAliveRequest{Session: n.session}); err != nil {
		t.Error(err)
	}
}

// many returns n distinct prefixes.
func many(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("10.%d.%d.%d/32", i>>16, i>>8&255, i&255)
	}
	return out
}
