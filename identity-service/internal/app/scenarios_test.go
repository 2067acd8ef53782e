package app_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/identity-service/internal/app"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

// Tests named B<n> are public bug reports of systems like this, replayed; the
// link is beside each.

// https://github.com/cilium/cilium/issues/27210: the end of restore gave back a
// reference that it had never taken.
func TestB01RestoreDoesNotStealFromPolicy(t *testing.T) {
	n := open(t, start(t, defaults(t)), "n")
	number := n.acquire("cnp", "10.0.0.0/8")[0]
	n.reopen("n") // The agent restarts.
	n.gen = make(map[string]uint64)

	restore := &identityv1.Owner{Kind: identityv1.OwnerKind_OWNER_KIND_RESTORE, Name: "n", Uid: "restore"}
	req := n.setRequest(restore, "10.0.0.0/8")
	req.Prefixes[0].PreferredNumber = number
	resp, err := n.on.SetHolding(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if a := resp.GetAssignments()[0]; a.GetNumber() != number || a.GetPreferredRefused() != 0 {
		t.Fatalf("restore got %v, want %d", a, number)
	}
	if again := n.acquire("cnp", "10.0.0.0/8")[0]; again != number {
		t.Fatalf("after the restart the policy got %d, want %d", again, number)
	}
	n.gen["n"]++
	if _, err := n.on.DropHolding(t.Context(), &identityv1.DropHoldingRequest{RequestId: n.request(), Session: n.session, Owner: restore, Generation: n.gen["n"]}); err != nil {
		t.Fatal(err)
	}
	n.wantHolders("10.0.0.0/8", "cnp")
	if _, got := n.holders("10.0.0.0/8"); got != number {
		t.Fatalf("number %d, want %d", got, number)
	}
	n.release("cnp")
	n.wantHolders("10.0.0.0/8")
	if _, got := n.holders("10.0.0.0/8"); got != number {
		t.Fatalf("draining number %d, want %d kept", got, number)
	}
}

// https://github.com/cilium/cilium/pull/33120 and 34715: two ways to acquire,
// released in another order than acquired.
func TestB03B04AnyOrderOfTwoOwners(t *testing.T) {
	n := open(t, start(t, defaults(t)), "n")
	type event struct {
		owner   string
		acquire bool
	}
	orders := 0
	var walk func(done []event)
	walk = func(done []event) {
		if len(done) == 4 {
			orders++
			p := fmt.Sprintf("10.%d.0.0/16", orders)
			held := map[string]bool{}
			for _, e := range done {
				name := fmt.Sprintf("%s%d", e.owner, orders)
				if e.acquire {
					n.acquire(name, p)
				} else {
					n.release(name)
				}
				held[name] = e.acquire
				var want []string
				for o, holds := range held {
					if holds {
						want = append(want, o)
					}
				}
				slices.Sort(want)
				n.wantHolders(p, want...)
			}
			n.wantHolders(p)
			return
		}
		for _, e := range []event{{"legacy", true}, {"legacy", false}, {"meta", true}, {"meta", false}} {
			if slices.Contains(done, e) || (!e.acquire && !slices.Contains(done, event{e.owner, true})) {
				continue
			}
			walk(append(slices.Clone(done), e))
		}
	}
	walk(nil)
	if orders != 6 {
		t.Fatalf("%d orders, want 6", orders)
	}
}

// https://github.com/cilium/cilium/pull/43074: a counter was put in front of the
// owners, so that the same owner counted again and again.
func TestB05SameOwnerAThousandTimes(t *testing.T) {
	n := open(t, start(t, defaults(t)), "n")
	for range 1000 {
		n.acquire("o", "10.0.0.0/8")
	}
	n.wantHolders("10.0.0.0/8", "o")
	n.release("o")
	n.wantHolders("10.0.0.0/8")

	n.acquire("cnp", "11.0.0.0/8")
	n.acquire("fqdn", "11.0.0.0/8")
	n.release("cnp")
	n.wantHolders("11.0.0.0/8", "fqdn")
}

// https://github.com/cilium/cilium/issues/6017: a release without an acquire.
func TestB07ReleaseOfWhatIsNotHeld(t *testing.T) {
	n := open(t, start(t, defaults(t)), "n")
	n.acquire("o", "10.0.0.0/8")
	n.release("o")
	n.release("o")
	n.release("never")
	n.acquire("o2", "10.0.0.0/8")
	n.wantHolders("10.0.0.0/8", "o2")
	n.release("o")
	n.wantHolders("10.0.0.0/8", "o2")

	for _, world := range []string{"0.0.0.0/0", "::/0", "1.2.3.4/0", "::ffff:0.0.0.0/96"} {
		_, err := n.on.SetHolding(t.Context(), n.setRequest(policy("world"), world))
		if status.Code(err) != codes.InvalidArgument || rpc.ReasonOf(err) != reason.PrefixReserved {
			t.Errorf("%s: %v, want PREFIX_RESERVED", world, err)
		}
	}
}

// https://github.com/cilium/cilium/issues/5877: replacing a rule leaked the
// prefixes of the old one.
func TestB08ReplaceIsExact(t *testing.T) {
	n := open(t, start(t, defaults(t)), "n")
	first := n.acquire("rule", "10.1.0.0/16", "10.2.0.0/16")
	second := n.acquire("rule", "10.2.0.0/16", "10.3.0.0/16")
	if first[1] != second[0] {
		t.Errorf("10.2.0.0/16 changed from %d to %d", first[1], second[0])
	}
	n.wantHolders("10.1.0.0/16")
	n.wantHolders("10.2.0.0/16", "rule")
	n.wantHolders("10.3.0.0/16", "rule")
}

// https://github.com/cilium/cilium/issues/28620 and 21844: acquired under one
// spelling, released under another.
func TestB11B26aSpelling(t *testing.T) {
	n := open(t, start(t, defaults(t)), "n")
	resp, err := n.on.SetHolding(t.Context(), n.setRequest(policy("o"), "10.1.2.3/8", "::ffff:10.0.0.0/104", "10.0.0.0/8", "fd00::1/64", "FD00:0::/64"))
	if err != nil {
		t.Fatal(err)
	}
	if resp.GetDuplicates() != 3 || len(resp.GetAssignments()) != 5 {
		t.Fatalf("%d duplicates in %d assignments, want 3 in 5", resp.GetDuplicates(), len(resp.GetAssignments()))
	}
	for i, want := range []string{"10.0.0.0/8", "10.0.0.0/8", "10.0.0.0/8", "fd00::/64", "fd00::/64"} {
		if a := resp.GetAssignments()[i]; a.GetPrefix() != want || (i > 0 && i < 3 && a.GetNumber() != resp.GetAssignments()[0].GetNumber()) {
			t.Errorf("assignment %d is %v, want %s", i, a, want)
		}
	}
	n.acquire("o", "::ffff:10.9.9.9/104")
	n.wantHolders("10.255.0.0/8", "o")
	n.wantHolders("fd00::/64")
	n.release("o")
	n.wantHolders("::ffff:10.0.0.0/104")
}

// An object that was created again under the same name is another owner: the end
// of the old one takes nothing from the new one.
func TestRecreatedOwner(t *testing.T) {
	n := open(t, start(t, defaults(t)), "n")
	old, fresh := policy("p"), policy("p")
	fresh.Uid = "another"
	for i, o := range []*identityv1.Owner{old, fresh} {
		if _, err := n.on.SetHolding(t.Context(), &identityv1.SetHoldingRequest{
			RequestId: fmt.Sprint("s", i), Session: n.session, Owner: o, Generation: 1, Prefixes: []*identityv1.WantedPrefix{{Prefix: "10.0.0.0/8"}},
		}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := n.on.DropHolding(t.Context(), &identityv1.DropHoldingRequest{RequestId: "d", Session: n.session, Owner: old, Generation: 2}); err != nil {
		t.Fatal(err)
	}
	n.wantHolders("10.0.0.0/8", "p")
}

// https://github.com/cilium/cilium/issues/25251: thousands of nodes that start at
// once got thousands of numbers for one thing.
func TestB50OnePrefixManyClients(t *testing.T) {
	replicas := cluster(t, 3, nil)
	numbers := everybody(t, replicas, 100, func(int) string { return "10.0.0.0/8" })
	if distinct := compact(numbers); len(distinct) != 1 {
		t.Fatalf("one prefix has the numbers %v", distinct)
	}
	resp, err := replicas[0].GetIdentity(t.Context(), &identityv1.GetIdentityRequest{Key: &identityv1.GetIdentityRequest_Number{Number: numbers[0]}})
	if err != nil || resp.GetIdentity().GetHolderCount() != 100 {
		t.Fatalf("%v holders (%v), want 100", resp.GetIdentity().GetHolderCount(), err)
	}
}

// https://github.com/cilium/cilium/issues/7559: one number for two things. The
// range has hardly more numbers than there are prefixes, so that the first
// choices collide all the time.
func TestB51DistinctPrefixesManyClients(t *testing.T) {
	replicas := cluster(t, 3, func(c *app.Config) { c.Last = c.First + 127 })
	numbers := everybody(t, replicas, 100, func(i int) string { return fmt.Sprintf("10.%d.0.0/16", i) })
	if distinct := compact(numbers); len(distinct) != 100 {
		t.Fatalf("100 prefixes have %d numbers", len(distinct))
	}
}

// everybody lets n nodes acquire a prefix each at the same moment, spread over
// the replicas.
func everybody(t *testing.T, replicas []*instance, n int, prefix func(int) string) []uint32 {
	t.Helper()
	nodes := make([]*node, n)
	for i := range nodes {
		nodes[i] = open(t, replicas[i%len(replicas)], fmt.Sprintf("n%d", i))
	}
	numbers := make([]uint32, n)
	begin := make(chan struct{})
	var group sync.WaitGroup
	for i, one := range nodes {
		group.Add(1)
		go func() {
			defer group.Done()
			<-begin
			resp, err := one.on.SetHolding(t.Context(), one.setRequest(policy("p"), prefix(i)))
			if err != nil {
				t.Errorf("node %d: %v", i, err)
				return
			}
			numbers[i] = resp.GetAssignments()[0].GetNumber()
		}()
	}
	close(begin)
	group.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return numbers
}

func compact(numbers []uint32) []uint32 {
	sorted := slices.Clone(numbers)
	slices.Sort(sorted)
	return slices.Compact(sorted)
}

// A lost store gets its numbers back from the nodes.
func TestPreferredNumbers(t *testing.T) {
	n := open(t, start(t, defaults(t)), "n")
	first := uint32(1<<24 + 1)
	want := n.setRequest(policy("restore"), "10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16")
	for i, w := range want.Prefixes {
		w.PreferredNumber = first + uint32(i)
	}
	resp, err := n.on.SetHolding(t.Context(), want)
	if err != nil {
		t.Fatal(err)
	}
	for i, a := range resp.GetAssignments() {
		if a.GetNumber() != first+uint32(i) || a.GetPreferredRefused() != 0 {
			t.Errorf("%v, want %d", a, first+uint32(i))
		}
	}
	// Taken by another prefix, and another number than the prefix has.
	other := n.setRequest(policy("other"), "10.4.0.0/16", "10.1.0.0/16")
	other.Prefixes[0].PreferredNumber, other.Prefixes[1].PreferredNumber = first, first+9
	for range 2 { // A repeat answers the same.
		resp, err = n.on.SetHolding(t.Context(), other)
		if err != nil {
			t.Fatal(err)
		}
		a, b := resp.GetAssignments()[0], resp.GetAssignments()[1]
		if a.GetNumber() == first || a.GetNumber() == 0 || a.GetPreferredRefused() != reasonv1.Reason_REASON_NUMBER_TAKEN {
			t.Errorf("taken number: %v", a)
		}
		if b.GetNumber() != first || b.GetPreferredRefused() != reasonv1.Reason_REASON_NUMBER_TAKEN {
			t.Errorf("prefix with another number: %v", b)
		}
	}
	// A number that nobody holds is still its prefix's.
	n.release("restore")
	n.release("other")
	again := n.setRequest(policy("late"), "10.5.0.0/16")
	again.Prefixes[0].PreferredNumber = first + 1
	resp, err = n.on.SetHolding(t.Context(), again)
	if err != nil || resp.GetAssignments()[0].GetNumber() == first+1 {
		t.Errorf("a draining number was given away: %v, %v", resp, err)
	}
	if revived := n.acquire("back", "10.2.0.0/16")[0]; revived != first+1 {
		t.Errorf("the prefix came back with %d, want %d", revived, first+1)
	}
}

func TestExhaustion(t *testing.T) {
	config := defaults(t)
	config.Last = config.First + 2
	n := open(t, start(t, config), "n")
	n.acquire("a", "10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16")
	n.acquire("a", "10.1.0.0/16")
	for _, more := range [][]string{{"10.4.0.0/16"}, {"10.1.0.0/16", "10.5.0.0/16"}} {
		_, err := n.on.SetHolding(t.Context(), n.setRequest(policy("b"), more...))
		if status.Code(err) != codes.ResourceExhausted || rpc.ReasonOf(err) != reason.NumbersExhausted {
			t.Fatalf("%v, want NUMBERS_EXHAUSTED", err)
		}
		if m := rpc.MetadataOf(err); m["live"] != "1" || m["draining"] != "2" {
			t.Errorf("metadata %v, want 1 live, 2 draining", m)
		}
		if _, ok := rpc.RetryAfter(err); !ok {
			t.Error("no word on when to come back")
		}
	}
	n.wantHolders("10.1.0.0/16", "a")
	n.acquire("b", "10.2.0.0/16", "10.3.0.0/16") // What has a number needs none.
}
