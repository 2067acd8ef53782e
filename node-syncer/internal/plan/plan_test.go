package plan_test

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/eniplane/eniplane/internal/testsize"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/plan"
)

// object gives the checker of the wire what a plan.Node stands for.
func object(n plan.Node) *ciliumnode.CiliumNode {
	o := &ciliumnode.CiliumNode{}
	o.Spec.IPAM.Pool = map[string]ciliumnode.Allocation{}
	for a, id := range n.Main.Pool {
		o.Spec.IPAM.Pool[a] = ciliumnode.Allocation{Resource: id}
	}
	o.Status.ENI.ENIs = n.Status.ENIs
	return o
}

func consistent(n plan.Node) bool { return len(ciliumnode.Violations(object(n))) == 0 }

func eni(id, tag string, addresses ...string) ciliumnode.ENI {
	e := ciliumnode.ENI{
		ID: id, Addresses: addresses,
		Subnet: ciliumnode.Subnet{ID: "subnet-1", CIDR: "10.0.0.0/24"},
		VPC:    ciliumnode.VPC{ID: "vpc-1", PrimaryCIDR: "10.0.0.0/16"},
	}
	if tag != "" {
		e.Tags = map[string]string{"k": tag}
	}
	return e
}

// place is where one address is: on which of two ENIs, and in the pool by which
// of them (1 or 2; 0 is not in the pool).
type place struct {
	on   [2]bool
	pool int
}

func (p place) consistent() bool { return p.pool == 0 || p.on[p.pool-1] }

// places returns every place, or every consistent one.
func places(broken bool) []place {
	var all []place
	for _, on := range [][2]bool{{}, {true, false}, {false, true}, {true, true}} {
		for pool := range 3 {
			if p := (place{on, pool}); broken || p.consistent() {
				all = append(all, p)
			}
		}
	}
	return all
}

// build returns the node with address i at places[i]. An ENI without addresses
// is there if bare says so.
func build(at []place, bare bool) plan.Node {
	n := plan.Node{Main: plan.Main{Pool: map[string]string{}}, Status: plan.Status{ENIs: map[string]ciliumnode.ENI{}}}
	for k, id := range []string{"eni-1", "eni-2"} {
		e := eni(id, "")
		for i, p := range at {
			address := fmt.Sprintf("10.0.0.%d", i+5)
			if p.on[k] {
				e.Addresses = append(e.Addresses, address)
			}
			if p.pool == k+1 {
				n.Main.Pool[address] = id
			}
		}
		if bare || len(e.Addresses) > 0 {
			n.Status.ENIs[id] = e
		}
	}
	return n
}

// pairs calls f with every have and want over n addresses and two ENIs. Which
// address is which makes no difference to Sync, so of those that are alike but
// for the names of addresses only one is built.
func pairs(n int, broken bool, f func(have, want plan.Node)) {
	type step struct{ have, want place }
	var steps []step
	for _, h := range places(broken) {
		for _, w := range places(false) {
			steps = append(steps, step{h, w})
		}
	}
	var haves, wants []place
	var choose func(from int)
	bares := 4
	if n > 2 {
		bares = 1 // Few addresses show what ENIs without one can do.
	}
	choose = func(from int) {
		if len(haves) == n {
			for bare := range bares {
				f(build(haves, bare&1 > 0), build(wants, bare&2 > 0))
			}
			return
		}
		for i := from; i < len(steps); i++ {
			haves, wants = append(haves, steps[i].have), append(wants, steps[i].want)
			choose(i)
			haves, wants = haves[:len(haves)-1], wants[:len(wants)-1]
		}
	}
	choose(0)
}

// fewest is the least number of writes for which an order exists, found apart
// from how Sync finds it: with two writes each part is written once, as wanted.
func fewest(have, want plan.Node) int {
	main, status := !reflect.DeepEqual(have.Main, want.Main), !reflect.DeepEqual(have.Status, want.Status)
	newEpoch := have.Main.Fence.Epoch != want.Main.Fence.Epoch
	poolMoves := !reflect.DeepEqual(have.Main.Pool, want.Main.Pool)
	switch {
	case !main && !status:
		return 0
	case !main || !status:
		return 1
	case consistent(plan.Node{Main: want.Main, Status: have.Status}):
		return 2
	case consistent(plan.Node{Main: have.Main, Status: want.Status}):
		if newEpoch && poolMoves {
			return 3
		}
		return 2
	case newEpoch:
		return 4
	default:
		return 3
	}
}

type failer interface {
	Helper()
	Fatalf(string, ...any)
}

// laws checks what Sync promises.
func laws(t failer, have, want plan.Node) {
	t.Helper()
	have, want = plan.Canonical(have), plan.Canonical(want)
	writes := plan.Sync(have, want)
	now, wasConsistent := have, consistent(have)
	violations := len(ciliumnode.Violations(object(have)))
	for i, w := range writes {
		if _, isStatus := w.(plan.StatusWrite); isStatus && now.Main.Fence.Epoch != want.Main.Fence.Epoch {
			t.Fatalf("write %d goes to the status before the epoch is claimed\nhave %+v\nwant %+v", i, have, want)
		}
		now = plan.Apply(now, w)
		left := len(ciliumnode.Violations(object(now)))
		if wasConsistent && left > 0 {
			t.Fatalf("inconsistent after write %d of %d: %v\nhave %+v\nwant %+v\nwrites %+v", i+1, len(writes), ciliumnode.Violations(object(now)), have, want, writes)
		}
		if left > violations {
			t.Fatalf("write %d made a broken node worse: %v\nhave %+v\nwant %+v", i+1, ciliumnode.Violations(object(now)), have, want)
		}
		violations = left
	}
	if !reflect.DeepEqual(plan.Canonical(now), want) {
		t.Fatalf("ended at %+v\nwant %+v", now, want)
	}
	if again := plan.Sync(now, want); len(again) > 0 {
		t.Fatalf("planning again wants %+v", again)
	}
	if wasConsistent {
		if got, least := len(writes), fewest(have, want); got != least {
			t.Fatalf("%d writes, %d would do\nhave %+v\nwant %+v\nwrites %+v", got, least, have, want, writes)
		}
	}
}

// Every pair of nodes over a few addresses and two ENIs, with the same fence, a
// newer generation, a newer epoch, and no fence before.
func TestSyncLawsExhaustively(t *testing.T) {
	fences := []struct{ have, want plan.Fence }{
		{plan.Fence{Epoch: 1, Generation: 1}, plan.Fence{Epoch: 1, Generation: 1}},
		{plan.Fence{Epoch: 1, Generation: 1}, plan.Fence{Epoch: 1, Generation: 2}},
		{plan.Fence{Epoch: 1, Generation: 9}, plan.Fence{Epoch: 2, Generation: 1}},
		{plan.Fence{}, plan.Fence{Epoch: 1, Generation: 1}},
	}
	for _, tc := range []struct {
		name      string
		addresses int
		broken    bool
	}{
		{"consistent", testsize.Pick(2, 4), false},
		{"broken before", testsize.Pick(2, 3), true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pairs(tc.addresses, tc.broken, func(have, want plan.Node) {
				for _, f := range fences {
					have.Main.Fence, want.Main.Fence = f.have, f.want
					laws(t, have, want)
				}
			})
		})
	}
}

func anyNode(broken bool) *rapid.Generator[plan.Node] {
	return rapid.Custom(func(t *rapid.T) plan.Node {
		n := plan.Node{
			Main:   plan.Main{Pool: map[string]string{}, Fence: plan.Fence{Epoch: rapid.Uint64Range(1, 3).Draw(t, "epoch"), Generation: rapid.Uint64Range(1, 3).Draw(t, "generation")}},
			Status: plan.Status{ENIs: map[string]ciliumnode.ENI{}, Error: rapid.SampledFrom([]string{"", "SUBNET_FULL"}).Draw(t, "error")},
		}
		var listed []string
		for i := range rapid.IntRange(0, 4).Draw(t, "enis") {
			id := fmt.Sprintf("eni-%d", i)
			addresses := rapid.SliceOfNDistinct(rapid.IntRange(5, 24), 0, 10, rapid.ID[int]).Draw(t, id)
			e := eni(id, rapid.SampledFrom([]string{"", "x", "y"}).Draw(t, "tag"))
			for _, a := range addresses {
				e.Addresses = append(e.Addresses, fmt.Sprintf("10.0.0.%d", a))
				listed = append(listed, fmt.Sprintf("10.0.0.%d", a))
			}
			if broken && rapid.Bool().Draw(t, "no cidr") {
				e.Subnet.CIDR = ""
			}
			n.Status.ENIs[id] = e
			for _, a := range e.Addresses {
				if rapid.Bool().Draw(t, "pooled") {
					n.Main.Pool[a] = id
				}
			}
		}
		if broken && len(listed) > 0 {
			n.Main.Pool[rapid.SampledFrom(listed).Draw(t, "dangling")] = "eni-gone"
		}
		return n
	})
}

func TestSyncLawsAtRandom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		laws(t, anyNode(false).Draw(t, "have"), anyNode(false).Draw(t, "want"))
	})
}

// An object that was found broken ends as wanted and never gets worse.
func TestSyncHealsBrokenNodes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		laws(t, anyNode(true).Draw(t, "have"), anyNode(false).Draw(t, "want"))
	})
}

func TestSyncOrders(t *testing.T) {
	fence := func(g uint64) plan.Fence { return plan.Fence{Epoch: 1, Generation: g} }
	node := func(g uint64, pool map[string]string, enis ...ciliumnode.ENI) plan.Node {
		n := plan.Node{Main: plan.Main{Pool: pool, Fence: fence(g)}, Status: plan.Status{ENIs: map[string]ciliumnode.ENI{}}}
		for _, e := range enis {
			n.Status.ENIs[e.ID] = e
		}
		return n
	}
	for _, tc := range []struct {
		name       string
		have, want plan.Node
		order      string
	}{
		{
			"cilium#19923: an ENI and its addresses appear",
			node(1, map[string]string{"10.0.0.5": "eni-1"}, eni("eni-1", "", "10.0.0.5")),
			node(2, map[string]string{"10.0.0.5": "eni-1", "10.0.0.6": "eni-2"}, eni("eni-1", "", "10.0.0.5"), eni("eni-2", "", "10.0.0.6")),
			"status main",
		},
		{
			"an address goes",
			node(1, map[string]string{"10.0.0.5": "eni-1", "10.0.0.6": "eni-1"}, eni("eni-1", "", "10.0.0.5", "10.0.0.6")),
			node(2, map[string]string{"10.0.0.5": "eni-1"}, eni("eni-1", "", "10.0.0.5")),
			"main status",
		},
		{
			"an address moves between ENIs",
			node(1, map[string]string{"10.0.0.5": "eni-1"}, eni("eni-1", "", "10.0.0.5"), eni("eni-2", "")),
			node(2, map[string]string{"10.0.0.5": "eni-2"}, eni("eni-1", ""), eni("eni-2", "", "10.0.0.5")),
			"status main status",
		},
		{
			"only a tag changes",
			node(1, map[string]string{"10.0.0.5": "eni-1"}, eni("eni-1", "", "10.0.0.5")),
			node(1, map[string]string{"10.0.0.5": "eni-1"}, eni("eni-1", "x", "10.0.0.5")),
			"status",
		},
	} {
		var order []byte
		for _, w := range plan.Sync(tc.have, tc.want) {
			if len(order) > 0 {
				order = append(order, ' ')
			}
			switch w.(type) {
			case plan.MainWrite:
				order = append(order, "main"...)
			case plan.StatusWrite:
				order = append(order, "status"...)
			}
		}
		if string(order) != tc.order {
			t.Errorf("%s: order %q, want %q", tc.name, order, tc.order)
		}
		laws(t, tc.have, tc.want)
	}
}

// The laws can fail: the writers that broke Cilium's nodes break them.
func TestNaiveOrdersBreakTheLaws(t *testing.T) {
	var specFirst, statusFirst int
	pairs(2, false, func(have, want plan.Node) {
		if !consistent(plan.Apply(have, plan.MainWrite{Main: want.Main})) {
			specFirst++
		}
		if !consistent(plan.Apply(have, plan.StatusWrite{Status: want.Status})) {
			statusFirst++
		}
	})
	if specFirst == 0 || statusFirst == 0 {
		t.Errorf("spec before status broke %d nodes, status before spec %d", specFirst, statusFirst)
	}
}

func TestArgumentsAreNotChanged(t *testing.T) {
	have := plan.Node{Main: plan.Main{Pool: map[string]string{"10.0.0.6": "eni-1"}}, Status: plan.Status{ENIs: map[string]ciliumnode.ENI{"eni-1": eni("eni-1", "", "10.0.0.6", "10.0.0.5")}}}
	want := plan.Node{Main: plan.Main{Pool: map[string]string{"10.0.0.7": "eni-1"}, Fence: plan.Fence{Epoch: 1, Generation: 1}}, Status: plan.Status{ENIs: map[string]ciliumnode.ENI{"eni-1": eni("eni-1", "", "10.0.0.7")}}}
	plan.Sync(have, want)
	if !slices.Equal(have.Status.ENIs["eni-1"].Addresses, []string{"10.0.0.6", "10.0.0.5"}) || !slices.Equal(want.Status.ENIs["eni-1"].Addresses, []string{"10.0.0.7"}) {
		t.Error("an argument was changed")
	}
}
