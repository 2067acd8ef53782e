package view_test

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/internal/pooldigest"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/plan"
	"github.com/eniplane/eniplane/node-syncer/internal/view"
)

func snapshot() *nodev1.PoolSnapshot {
	return &nodev1.PoolSnapshot{
		NodeName: "n", InstanceId: "i-1", Fence: &nodev1.Fence{Epoch: 1, Generation: 1},
		Enis: []*nodev1.Eni{{
			Id: "eni-1", Ip: "10.0.0.4", Mac: "02:00:00:00:00:01", AvailabilityZone: "z",
			Subnet: &nodev1.Subnet{Id: "subnet-1", Cidr: "10.0.0.0/24"}, Vpc: &nodev1.Vpc{Id: "vpc-1", PrimaryCidr: "10.0.0.0/16"},
			Addresses: []string{"10.0.0.11", "10.0.0.10"}, SecurityGroups: []string{"sg-2", "sg-1"},
		}},
		Pool: []*nodev1.PoolAddress{{Address: "10.0.0.10", EniId: "eni-1"}},
	}
}

// written returns n after all writes that bring it to s, and how many there were.
func written(n *ciliumnode.CiliumNode, s *nodev1.PoolSnapshot) (*ciliumnode.CiliumNode, int) {
	writes := plan.Sync(view.Stored(n), view.Wanted(s))
	for _, w := range writes {
		n = view.Edit(n, w)
	}
	return n, len(writes)
}

// Who compares digests and who plans writes must agree on what is stored: a
// difference that only the digest sees is published again for ever.
func TestNothingToWriteMeansEqualDigests(t *testing.T) {
	twice := func(s []string) []string { return append(s, s[0]) }
	for name, edit := range map[string]func(*ciliumnode.ENI){
		"as written":               func(*ciliumnode.ENI) {},
		"address twice":            func(e *ciliumnode.ENI) { e.Addresses = twice(e.Addresses) },
		"security group twice":     func(e *ciliumnode.ENI) { e.SecurityGroups = twice(e.SecurityGroups) },
		"order":                    func(e *ciliumnode.ENI) { e.Addresses[0], e.Addresses[1] = e.Addresses[1], e.Addresses[0] },
		"negative index":           func(e *ciliumnode.ENI) { e.Number = -1 },
		"empty tags":               func(e *ciliumnode.ENI) { e.Tags = map[string]string{} },
		"a foreign public address": func(e *ciliumnode.ENI) { e.PublicIP = "1.2.3.4" },
	} {
		s := snapshot()
		n, _ := written(&ciliumnode.CiliumNode{}, s)
		eni := n.Status.ENI.ENIs["eni-1"]
		edit(&eni)
		n.Status.ENI.ENIs["eni-1"] = eni
		n, _ = written(n, s)
		if _, again := written(n, s); again > 0 {
			t.Errorf("%s: %d writes although all is written", name, again)
		}
		if got, want := view.Demand(n, view.Surroundings{}).GetStored().GetDigest(), pooldigest.Of(s.GetEnis(), s.GetPool()); got != want {
			t.Errorf("%s: the digest of what is stored differs from that of the snapshot", name)
		}
	}
}

// A public address is not ours: it is kept, and is no reason to write.
func TestPublicAddressIsNoReasonToWrite(t *testing.T) {
	s := snapshot()
	n, _ := written(&ciliumnode.CiliumNode{}, s)
	eni := n.Status.ENI.ENIs["eni-1"]
	eni.PublicIP = "1.2.3.4"
	n.Status.ENI.ENIs["eni-1"] = eni
	if _, writes := written(n, s); writes > 0 {
		t.Errorf("%d writes of what is stored", writes)
	}
	s.Fence.Generation, s.Enis[0].Description = 2, "new"
	if n, _ = written(n, s); n.Status.ENI.ENIs["eni-1"].PublicIP != "1.2.3.4" {
		t.Error("the public address was lost")
	}
}

func TestConditionsRoundTrip(t *testing.T) {
	for name, tc := range map[string]struct {
		messages []string
		want     []string
	}{
		"plain":            {[]string{"a: b", "c"}, []string{"a: b", "c"}},
		"empty":            {[]string{"", ""}, []string{"", ""}},
		"separators":       {[]string{"a |", "| b", "c | d"}, []string{"a /", "/ b", "c / d"}},
		"lines":            {[]string{"a\nb"}, []string{"a b"}},
		"huge":             {[]string{strings.Repeat("x", 1<<20)}, []string{strings.Repeat("x", 1024)}},
		"huge, of letters": {[]string{strings.Repeat("ü", 1000) + "x"}, []string{strings.Repeat("ü", 512)}},
	} {
		for _, r := range []reasonv1.Reason{reasonv1.Reason_REASON_OUT_OF_ENIS, 9999, 1 << 20} {
			s := snapshot()
			for _, m := range tc.messages {
				s.Conditions = append(s.Conditions, &nodev1.Condition{Reason: r, Message: m})
			}
			n, _ := written(&ciliumnode.CiliumNode{}, s)
			got := view.Agent(n).GetConditions()
			if len(got) != len(tc.want) {
				t.Errorf("%s: %v", name, got)
				continue
			}
			for i, c := range got {
				if c.GetReason() != r || c.GetMessage() != tc.want[i] {
					t.Errorf("%s: %v became %v", name, s.GetConditions()[i], c)
				}
			}
		}
	}
}

// What nobody wrote as a fence is a lost one, which means: ask the Lease.
func TestFence(t *testing.T) {
	for text, want := range map[string]plan.Fence{
		"7.2": {Epoch: 7, Generation: 2}, "": {}, "7": {}, "x.y": {}, "7.2.1": {}, "-1.2": {}, "0.5": {}, "5.0": {},
		"99999999999999999999.1": {},
	} {
		n := &ciliumnode.CiliumNode{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{view.FenceAnnotation: text}}}
		if got := view.Fence(n); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
}

func TestObsoleteInstanceIDCounts(t *testing.T) {
	n := &ciliumnode.CiliumNode{}
	n.Spec.ENI.InstanceID = "i-1"
	if view.Agent(n).GetInstanceId() != "i-1" || view.Demand(n, view.Surroundings{}).GetInstanceId() != "i-1" {
		t.Error("the obsolete twin of spec.instance-id is not understood")
	}
}
