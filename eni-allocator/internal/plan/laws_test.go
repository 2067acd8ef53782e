package plan

import (
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

// draw makes a world and a demand, both within reason but not always sound.
func draw(t *rapid.T) (*world, Demand) {
	w := newWorld(rapid.SampledFrom([]string{"t3.micro", "t3.medium", "m4.large", "m5.large", "m5.4xlarge"}).Draw(t, "type"))
	w.reading.ENIs = nil
	free := rapid.IntRange(0, 60)
	w.reading.Subnets = append(w.reading.Subnets,
		Subnet{ID: "subnet-3", VPC: "vpc-1", Zone: "a", CIDR: netip.MustParsePrefix("10.3.0.0/16"), Free: free.Draw(t, "free3")})
	w.subnet("subnet-1").Free = free.Draw(t, "free1")
	if rapid.Bool().Draw(t, "skipped") {
		w.subnet("subnet-3").SkippedUntil = start.Add(time.Duration(rapid.IntRange(-5, 500).Draw(t, "until")) * time.Second)
	}
	for i := range rapid.IntRange(1, w.limits.Interfaces).Draw(t, "attached") {
		e := w.eni(i, rapid.IntRange(0, w.limits.IPv4-1).Draw(t, "secondary"))
		switch rapid.IntRange(0, 9).Draw(t, "oddity") {
		case 0:
			e.Tags = map[string]string{"exclude": "yes"}
		case 1:
			e.Malformed = "flaw"
		case 2:
			e.Tags = map[string]string{TagCluster: "c", TagInstance: "i-1"}
			e.DeleteOnTermination = rapid.Bool().Draw(t, "dot")
		case 3:
			e.Subnet = "subnet-3"
		case 4:
			e.Leaving = true
		}
	}
	for range rapid.IntRange(0, 2).Draw(t, "spares") {
		e := spare(w, rapid.IntRange(0, w.limits.IPv4).Draw(t, "spare"))
		if rapid.Bool().Draw(t, "elsewhere") {
			e.Zone = "b"
		}
	}
	count := rapid.IntRange(0, 40)
	d := Demand{
		Node: "n", NodeUID: "u", FirstInterfaceIndex: index(rapid.IntRange(0, 3).Draw(t, "first")),
		ExcludeTags: map[string]string{"exclude": "yes"}, UsePrimary: rapid.Bool().Draw(t, "primary"), KeepOnTermination: rapid.Bool().Draw(t, "keep"),
		PreAllocate: count.Draw(t, "pre"), MinAllocate: count.Draw(t, "min"),
		MaxAllocate: count.Draw(t, "max"), MaxAboveWatermark: count.Draw(t, "above"),
		PendingPods: count.Draw(t, "pending"), Urgent: count.Draw(t, "urgent"), MaxPods: count.Draw(t, "pods"),
	}
	var addresses []netip.Addr
	for _, e := range w.reading.ENIs {
		addresses = append(addresses, e.Usable(true)...)
	}
	d.Used = addresses[:rapid.IntRange(0, len(addresses)).Draw(t, "used")]
	return w, d
}

// TestLaws carries out plans in a model of EC2 that refuses what EC2 refuses.
func TestLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w, d := draw(t)
		now := start.Add(time.Duration(rapid.IntRange(0, 120).Draw(t, "now")) * time.Second)
		had := 0
		for round := 0; ; round++ {
			p := Pool(w.reading, d, policy(), now)
			if round == 0 {
				had = p.Summary.Available
			}
			if diff := cmp.Diff(p, Pool(shuffled(t, w.reading), d, policy(), now)); diff != "" {
				t.Fatalf("the plan depends on the order of the reading:\n%s", diff)
			}
			if n := p.Summary; n.Available > n.Capacity || (d.MaxAllocate > 0 && n.Available > max(d.MaxAllocate, had)) ||
				(d.MaxPods > 0 && n.Available > max(d.MaxPods, d.PreAllocate, d.MinAllocate, had)) {
				t.Fatalf("too many addresses: %+v, %d at first", n, had)
			}
			if p.Blocked != nil && (p.Blocked.Reason == 0 || p.Blocked.Message == "") {
				t.Fatalf("blocked %+v", p.Blocked)
			}
			if len(p.Actions) == 0 {
				checkEnd(t, p, d)
				return
			}
			if round > 2*w.limits.Interfaces+4 {
				t.Fatalf("no end after %d rounds: %+v", round, p.Actions)
			}
			creates := 0
			for _, s := range p.Actions {
				if _, ok := s.(CreateENI); ok {
					creates++
				}
				if s.Account().Grounds == "" {
					t.Fatalf("no grounds for %+v", s)
				}
				if err := w.apply(s); err != nil {
					t.Fatalf("round %d, %+v: %v", round, s, err)
				}
			}
			if creates > 1 {
				t.Fatalf("%d ENIs created in one plan", creates)
			}
		}
	})
}

// checkEnd checks that a node without steps has what it wants, or knows why not.
func checkEnd(t *rapid.T, p Plan, d Demand) {
	if p.Blocked != nil {
		return
	}
	n := p.Summary
	if n.Needed > 0 || n.Free() < d.Urgent || n.Free() < d.PreAllocate || n.Available < d.MinAllocate {
		t.Fatalf("the node lacks addresses and does not know why: %+v", n)
	}
}

func shuffled(t *rapid.T, r Reading) Reading {
	random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
	r.ENIs = permute(random, r.ENIs)
	r.Subnets = permute(random, r.Subnets)
	r.Groups = permute(random, r.Groups)
	r.Tables = permute(random, r.Tables)
	return r
}

func permute[T any](random *rand.Rand, in []T) []T {
	out := make([]T, len(in))
	for i, j := range random.Perm(len(in)) {
		out[i] = in[j]
	}
	return out
}

func TestPlanLeavesItsArgumentsAlone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w, d := draw(t)
		deep := shuffled(t, w.reading)
		Pool(w.reading, d, policy(), start)
		byID := cmpopts.SortSlices(func(a, b ENI) bool { return a.ID < b.ID })
		subnets := cmpopts.SortSlices(func(a, b Subnet) bool { return a.ID < b.ID })
		if diff := cmp.Diff(deep, w.reading, byID, subnets, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
			t.Fatal(diff)
		}
	})
}
