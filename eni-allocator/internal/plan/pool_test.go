package plan

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/eniplane/eniplane/internal/reason"
)

func demand() Demand {
	return Demand{Node: "n", NodeUID: "u", FirstInterfaceIndex: index(0), PreAllocate: 2}
}

func wantBlocked(t *testing.T, p Plan, want reason.Reason) {
	t.Helper()
	if len(p.Actions) > 0 || p.Blocked == nil || p.Blocked.Reason != want || p.Blocked.Message == "" {
		t.Errorf("actions %+v, blocked %+v; want none, blocked by %s", p.Actions, p.Blocked, want)
	}
}

func wantNothing(t *testing.T, p Plan) {
	t.Helper()
	if len(p.Actions) > 0 || p.Blocked != nil {
		t.Errorf("actions %+v, blocked %+v; want neither", p.Actions, p.Blocked)
	}
}

func created1(t *testing.T, p Plan) CreateENI {
	t.Helper()
	for _, a := range actions(p) {
		if c, ok := a.(CreateENI); ok {
			return c
		}
	}
	t.Fatalf("nothing is created: %+v, blocked %+v", p.Actions, p.Blocked)
	return CreateENI{}
}

func TestAssignOnExistingENI(t *testing.T) {
	w := newWorld("t3.medium")
	p := Pool(w.reading, demand(), policy(), start)
	want := []Action{AssignAddresses{ENI: w.reading.ENIs[0].ID, Subnet: "subnet-1", Count: 2}}
	if diff := cmp.Diff(want, actions(p)); diff != "" {
		t.Error(diff)
	}
	if n := p.Summary; n.Capacity != 15 || n.EmptySlots != 2 || n.Needed != 2 {
		t.Errorf("numbers %+v", n)
	}
	if p.Actions[0].Account().Grounds == "" {
		t.Error("no grounds")
	}
}

func TestNewENI(t *testing.T) {
	w := newWorld("t3.medium")
	w.reading.ENIs[0] = *newWorld("t3.medium").eni(0, 5)
	d := demand()
	d.Used = w.used(5)
	p := Pool(w.reading, d, policy(), start)
	token := Token("u", "i-1", []ENIID{w.reading.ENIs[0].ID}, 0)
	want := []Action{
		CreateENI{
			Subnet: "subnet-1", Groups: []GroupID{"sg-1"}, Count: 2, Token: token, Description: "eniplane n (i-1)",
			Tags: map[string]string{TagCluster: "c", TagNodeUID: "u", TagInstance: "i-1", TagIntent: token, TagCreated: "2030-01-02T03:04:05Z"},
		},
		AttachENI{Instance: "i-1", Index: 1},
		SetDeleteOnTermination{},
	}
	if diff := cmp.Diff(want, actions(p)); diff != "" {
		t.Error(diff)
	}
	if len(p.Actions[0].Account().Rejected) == 0 {
		t.Error("it is not said why the existing ENI does not do")
	}

	d.KeepOnTermination = true
	if got := actions(Pool(w.reading, d, policy(), start)); len(got) != 2 {
		t.Errorf("delete-on-termination is off, and the actions are %+v", got)
	}
}

// An ENI that takes as many secondary addresses as the limit says cannot be
// attached: the primary counts.
func TestB1NewENILeavesRoomForThePrimary(t *testing.T) {
	w := newWorld("t3.medium")
	d := demand()
	d.FirstInterfaceIndex = index(1)
	d.PreAllocate = 8
	if got := created1(t, Pool(w.reading, d, policy(), start)).Count; got != 5 {
		t.Errorf("asks for %d, want 5", got)
	}
}

func TestB2FullNodeIsLeftAlone(t *testing.T) {
	w := newWorld("t3.medium")
	w.reading.ENIs = nil
	for i := range 3 {
		w.eni(i, 5)
	}
	d := demand()
	d.PreAllocate = 8
	d.Used = w.used(15)
	p := Pool(w.reading, d, policy(), start)
	wantBlocked(t, p, reason.OutOfENIs)
	if n := p.Summary; n.Available != 15 || n.Used != 15 || n.EmptySlots != 0 {
		t.Errorf("numbers %+v", n)
	}
}

func TestB4ExcludedENITakesASlot(t *testing.T) {
	w := newWorld("m5.large")
	w.reading.ENIs = nil
	w.eni(0, 0)
	w.eni(1, 9)
	w.eni(2, 9)
	d := demand()
	d.FirstInterfaceIndex = index(1)
	d.Used = w.used(18)
	p := Pool(w.reading, d, policy(), start)
	wantBlocked(t, p, reason.OutOfENIs)
	if n := p.Summary; n.EmptySlots != 0 || n.Capacity != 18 {
		t.Errorf("numbers %+v", n)
	}
}

func TestB13IndexZeroIsNotUnset(t *testing.T) {
	w := newWorld("t3.medium")
	p := policy()
	p.FirstInterfaceIndex = 1
	d := demand()
	if got := actions(Pool(w.reading, d, p, start)); len(got) != 1 {
		t.Errorf("explicit 0: %+v, want an assignment on the primary interface", got)
	}
	d.FirstInterfaceIndex = nil
	if got := created1(t, Pool(w.reading, d, p, start)); got.Count != 2 {
		t.Errorf("unset: %+v", got)
	}
}

func TestB15Capacity(t *testing.T) {
	w := newWorld("m4.large")
	if got := Pool(w.reading, demand(), policy(), start).Summary.Capacity; got != 18 {
		t.Errorf("got %d, want 18", got)
	}
}

func TestB20SurgeInOneCall(t *testing.T) {
	w := newWorld("m5.4xlarge")
	w.reading.ENIs[0] = *newWorld("m5.4xlarge").eni(0, 1)
	d := demand()
	d.PendingPods = 30
	d.FirstInterfaceIndex = index(1)
	if got := created1(t, Pool(w.reading, d, policy(), start)).Count; got != 29 {
		t.Errorf("asks for %d, want 29, all that an ENI holds", got)
	}
}

func TestL17SurgeStaysInsideMaxAllocate(t *testing.T) {
	w := newWorld("m5.4xlarge")
	d := demand()
	d.PendingPods, d.Urgent = 30, 50
	d.MaxAllocate = 7
	d.MaxAboveWatermark = 9
	want := []Action{AssignAddresses{ENI: w.reading.ENIs[0].ID, Subnet: "subnet-1", Count: 7}}
	if diff := cmp.Diff(want, actions(Pool(w.reading, d, policy(), start))); diff != "" {
		t.Error(diff)
	}
}

func TestL16SelectionIsNeverWidened(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*Demand)
		want reason.Reason
	}{
		{"subnet id", func(d *Demand) { d.SubnetIDs = []SubnetID{"subnet-9"} }, reason.SubnetNoMatch},
		{"subnet id in another zone", func(d *Demand) { d.SubnetIDs = []SubnetID{"subnet-2"} }, reason.SubnetNoMatch},
		{"subnet tags", func(d *Demand) { d.SubnetTags = map[string]string{"k": "v"} }, reason.SubnetNoMatch},
		{"group id", func(d *Demand) { d.Groups = []GroupID{"sg-1", "sg-9"} }, reason.SecurityGroupNoMatch},
		{"group tags", func(d *Demand) { d.GroupTags = map[string]string{"k": "v"} }, reason.SecurityGroupNoMatch},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld("t3.medium")
			d := demand()
			d.FirstInterfaceIndex = index(1)
			tt.edit(&d)
			wantBlocked(t, Pool(w.reading, d, policy(), start), tt.want)
		})
	}
}

func TestUnreadyNodes(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*world, *Demand)
		want reason.Reason
	}{
		{"instance not shown", func(w *world, _ *Demand) { w.reading.Instance = Instance{} }, reason.InstanceUnknown},
		{"said not to run", func(_ *world, d *Demand) { d.SuspendedUntil = start.Add(time.Second) }, reason.InstanceNotRunning},
		{"stopping", func(w *world, _ *Demand) { w.reading.Instance.State = "stopping" }, reason.InstanceNotRunning},
		{"terminated", func(w *world, _ *Demand) { w.reading.Instance.State = InstanceTerminated }, reason.InstanceNotRunning},
		{"B21 limits unknown", func(w *world, _ *Demand) { w.reading.Limits = Limits{} }, reason.InstanceTypeUnknown},
		{"max-allocate", func(w *world, d *Demand) {
			d.MaxAllocate = 5
			w.reading.ENIs = nil
			w.eni(0, 5)
			d.Used = w.used(5)
		}, reason.MaxAllocate},
		{"max pods", func(w *world, d *Demand) {
			d.MaxPods = 5
			w.reading.ENIs = nil
			w.eni(0, 5)
			d.Used = w.used(5)
		}, reason.MaxPods},
		{"subnet full", func(w *world, _ *Demand) { w.subnet("subnet-1").Free = 0 }, reason.SubnetFull},
		{"one address is not enough for a new ENI", func(w *world, d *Demand) {
			w.subnet("subnet-1").Free = 1
			d.FirstInterfaceIndex = index(1)
		}, reason.SubnetFull},
		{"subnet unknown", func(w *world, d *Demand) {
			w.eni(1, 5)
			w.eni(2, 5)
			d.Used = w.used(10)
			w.reading.ENIs[0].Subnet = "subnet-9"
		}, reason.CIDRUnknown},
		{"primary interface unknown", func(w *world, d *Demand) {
			d.FirstInterfaceIndex = index(1)
			w.reading.ENIs = nil
		}, reason.ReadingStale},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, d := newWorld("t3.medium"), demand()
			tt.edit(w, &d)
			wantBlocked(t, Pool(w.reading, d, policy(), start), tt.want)
		})
	}
}

func TestUnreachableWatermarkIsNoted(t *testing.T) {
	w := newWorld("t3.medium")
	d := demand()
	d.PreAllocate = 100
	p := Pool(w.reading, d, policy(), start)
	if len(p.Actions) == 0 || len(p.Notes) != 1 || p.Notes[0].Reason != reason.WatermarkUnreachable {
		t.Errorf("actions %+v, notes %+v", p.Actions, p.Notes)
	}
}

func TestWhoIsUsable(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*ENI)
		want bool
	}{
		{"sound", func(*ENI) {}, true},
		{"another card", func(e *ENI) { e.Card = 1 }, false},
		{"flawed", func(e *ENI) { e.Malformed = "no MAC" }, false},
		{"trunk", func(e *ENI) { e.Type = "trunk" }, false},
		{"of an AWS service", func(e *ENI) { e.Managed = true }, false},
		{"all exclude tags", func(e *ENI) { e.Tags = map[string]string{"a": "1", "b": "2", "c": "3"} }, false},
		{"one exclude tag", func(e *ENI) { e.Tags = map[string]string{"a": "1"} }, true},
		{"B29 attached to nothing", func(e *ENI) { e.Instance = "" }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newWorld("t3.medium").eni(1, 1)
			tt.edit(e)
			d := demand()
			d.ExcludeTags = map[string]string{"a": "1", "b": "2"}
			if got := Gives(*e, d, policy()); got != tt.want {
				t.Errorf("got %t", got)
			}
		})
	}
}

func TestMalformedENITakesASlot(t *testing.T) {
	w := newWorld("t3.micro")
	e := w.eni(1, 0)
	e.Malformed = "no MAC"
	d := demand()
	d.PreAllocate = 0
	if n := Pool(w.reading, d, policy(), start).Summary; n.EmptySlots != 0 || n.Capacity != 1 {
		t.Errorf("numbers %+v", n)
	}
}

func TestPrimaryAddressCounts(t *testing.T) {
	w := newWorld("t3.medium")
	d := demand()
	d.UsePrimary = true
	p := Pool(w.reading, d, policy(), start)
	if n := p.Summary; n.Capacity != 18 || n.Available != 1 || n.Needed != 1 {
		t.Errorf("numbers %+v", n)
	}
}

func TestPrefixesCountSixteen(t *testing.T) {
	w := newWorld("t3.medium")
	w.reading.ENIs[0].Prefixes = []netip.Prefix{netip.MustParsePrefix("10.1.200.0/28")}
	n := Pool(w.reading, demand(), policy(), start).Summary
	if n.Available != 16 || n.Capacity != 15+15 {
		t.Errorf("numbers %+v", n)
	}
}

func TestUrgentDemand(t *testing.T) {
	w := newWorld("m5.large")
	w.reading.ENIs[0] = *newWorld("m5.large").eni(0, 3)
	d := demand()
	wantNothing(t, Pool(w.reading, d, policy(), start))
	d.Urgent = 6
	want := []Action{AssignAddresses{ENI: w.reading.ENIs[0].ID, Subnet: "subnet-1", Count: 3}}
	if diff := cmp.Diff(want, actions(Pool(w.reading, d, policy(), start))); diff != "" {
		t.Error(diff)
	}
}

func TestMaxAboveWatermarkComesAlongOnly(t *testing.T) {
	w := newWorld("m5.large")
	w.reading.ENIs[0] = *newWorld("m5.large").eni(0, 2)
	d := demand()
	d.MaxAboveWatermark = 4
	wantNothing(t, Pool(w.reading, d, policy(), start))
	d.Used = w.used(1)
	want := []Action{AssignAddresses{ENI: w.reading.ENIs[0].ID, Subnet: "subnet-1", Count: 5}}
	if diff := cmp.Diff(want, actions(Pool(w.reading, d, policy(), start))); diff != "" {
		t.Error(diff)
	}
}

func TestTakenIndexIsPassedOver(t *testing.T) {
	w := newWorld("t3.medium")
	d := demand()
	d.TakenIndexes = []int{1}
	d.FirstInterfaceIndex = index(1)
	got := Pool(w.reading, d, policy(), start)
	if a, ok := got.Actions[1].(AttachENI); !ok || a.Index != 2 {
		t.Errorf("got %+v", got.Actions[1])
	}
}

func spare(w *world, secondary int) *ENI {
	e := w.make("subnet-1", secondary)
	e.Tags = map[string]string{TagCluster: "c", TagInstance: "i-1", TagIntent: "t"}
	w.reading.ENIs = append(w.reading.ENIs, e)
	return &w.reading.ENIs[len(w.reading.ENIs)-1]
}

func TestB34SpareENIIsAdopted(t *testing.T) {
	w := newWorld("t3.medium")
	w.reading.ENIs[0] = *newWorld("t3.medium").eni(0, 5)
	e := spare(w, 2)
	d := demand()
	d.Used = w.used(5)
	want := []Action{AttachENI{ENI: e.ID, Instance: "i-1", Index: 1}, SetDeleteOnTermination{ENI: e.ID}}
	if diff := cmp.Diff(want, actions(Pool(w.reading, d, policy(), start))); diff != "" {
		t.Error(diff)
	}
}

func TestForeignSparesAreLeftAlone(t *testing.T) {
	for _, edit := range []func(*ENI){
		func(e *ENI) { e.Tags = nil },
		func(e *ENI) { e.Tags[TagCluster] = "other" },
		func(e *ENI) { e.Tags[TagInstance] = "i-2" },
	} {
		w := newWorld("t3.medium")
		w.reading.ENIs[0] = *newWorld("t3.medium").eni(0, 2)
		edit(spare(w, 2))
		wantNothing(t, Pool(w.reading, demand(), policy(), start.Add(time.Hour)))
	}
}

func TestSuperfluousSpareIsDeleted(t *testing.T) {
	w := newWorld("t3.medium")
	w.reading.ENIs[0] = *newWorld("t3.medium").eni(0, 2)
	e := spare(w, 2)
	want := []Action{DeleteENI{ENI: e.ID}}
	if diff := cmp.Diff(want, actions(Pool(w.reading, demand(), policy(), start))); diff != "" {
		t.Error(diff)
	}
}

func TestSpareThatDoesNotFitIsReplaced(t *testing.T) {
	w := newWorld("t3.medium")
	w.reading.ENIs[0] = *newWorld("t3.medium").eni(0, 5)
	e := spare(w, 9)
	d := demand()
	d.Used = w.used(5)
	p := Pool(w.reading, d, policy(), start.Add(time.Hour))
	created1(t, p)
	if diff := cmp.Diff(Action(DeleteENI{ENI: e.ID}), actions(p)[0]); diff != "" {
		t.Error(diff)
	}
}

func TestHalfDoneAttachmentIsFinished(t *testing.T) {
	w := newWorld("t3.medium")
	e := w.eni(1, 2)
	e.DeleteOnTermination = false
	wantNothing(t, Pool(w.reading, demand(), policy(), start)) // not ours
	e.Tags = map[string]string{TagCluster: "c", TagInstance: "i-1", TagIntent: "t"}
	want := []Action{SetDeleteOnTermination{ENI: e.ID, Attachment: e.Attachment}}
	if diff := cmp.Diff(want, actions(Pool(w.reading, demand(), policy(), start))); diff != "" {
		t.Error(diff)
	}
	d := demand()
	d.KeepOnTermination = true
	wantNothing(t, Pool(w.reading, d, policy(), start))
}

func TestSubnetChoice(t *testing.T) {
	subnets := func() []Subnet {
		return []Subnet{
			{ID: "own", VPC: "vpc-1", Zone: "a", Free: 50, Tags: map[string]string{"role": "nodes"}},
			{ID: "sibling", VPC: "vpc-1", Zone: "a", Free: 40, Tags: map[string]string{"role": "pods", "team": "x"}},
			{ID: "sibling2", VPC: "vpc-1", Zone: "a", Free: 40},
			{ID: "public", VPC: "vpc-1", Zone: "a", Free: 200, Tags: map[string]string{"role": "pods"}},
			{ID: "far", VPC: "vpc-1", Zone: "b", Free: 500},
			{ID: "foreign", VPC: "vpc-2", Zone: "a", Free: 500},
		}
	}
	tables := []RouteTable{
		{ID: "rtb-main", VPC: "vpc-1", Main: true},
		{ID: "rtb-public", VPC: "vpc-1", Subnets: []SubnetID{"public"}},
		{ID: "rtb-foreign", VPC: "vpc-2", Main: true},
	}
	free := func(id SubnetID, n int) func([]Subnet, *Demand) {
		return func(s []Subnet, _ *Demand) {
			s[slices.IndexFunc(s, func(x Subnet) bool { return x.ID == id })].Free = n
		}
	}
	all := func(edits ...func([]Subnet, *Demand)) func([]Subnet, *Demand) {
		return func(s []Subnet, d *Demand) {
			for _, e := range edits {
				e(s, d)
			}
		}
	}
	for _, tt := range []struct {
		name string
		edit func([]Subnet, *Demand)
		want SubnetID
	}{
		{"B93 own subnet before a larger public one", all(), "own"},
		{"own subnet too small for a whole ENI: same route table", free("own", 5), "sibling"},
		{"tie: by id", all(free("own", 5), free("sibling2", 41)), "sibling2"},
		{"own subnet has some, its siblings less", all(free("own", 5), free("sibling", 1), free("sibling2", 1)), "own"},
		{"nothing behind the same route table", all(free("own", 1), free("sibling", 1), free("sibling2", 0)), "public"},
		{"own subnet said full", func(s []Subnet, _ *Demand) { s[0].SkippedUntil = start.Add(time.Second) }, "sibling"},
		{"own subnet said full, long ago", func(s []Subnet, _ *Demand) { s[0].SkippedUntil = start }, "own"},
		{"by id, most free", func(_ []Subnet, d *Demand) { d.SubnetIDs = []SubnetID{"own", "public"} }, "public"},
		{"by id, the other is full", all(free("public", 0), func(_ []Subnet, d *Demand) { d.SubnetIDs = []SubnetID{"own", "public"} }), "own"},
		{"by tags", func(_ []Subnet, d *Demand) { d.SubnetTags = map[string]string{"role": "pods"} }, "public"},
		{"by all tags", func(_ []Subnet, d *Demand) { d.SubnetTags = map[string]string{"role": "pods", "team": "x"} }, "sibling"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld("t3.medium")
			d := demand()
			d.FirstInterfaceIndex = index(1)
			w.reading.Tables = tables
			w.reading.Instance.Subnet = "own"
			w.reading.Subnets = subnets()
			tt.edit(w.reading.Subnets, &d)
			p := Pool(w.reading, d, policy(), start)
			c := created1(t, p)
			if c.Subnet != tt.want {
				t.Errorf("chose %s, want %s: %+v", c.Subnet, tt.want, p.Actions[0])
			}
		})
	}
}

func TestGroupChoice(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*Demand)
		want []GroupID
	}{
		{"of the primary interface", func(*Demand) {}, []GroupID{"sg-1", "sg-2"}},
		{"by id", func(d *Demand) { d.Groups = []GroupID{"sg-3", "sg-1", "sg-3"} }, []GroupID{"sg-1", "sg-3"}},
		{"B94 by tags", func(d *Demand) { d.GroupTags = map[string]string{"role": "pods"} }, []GroupID{"sg-2", "sg-3"}},
		{"id before tags", func(d *Demand) {
			d.Groups, d.GroupTags = []GroupID{"sg-1"}, map[string]string{"role": "pods"}
		}, []GroupID{"sg-1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld("t3.medium")
			pods := map[string]string{"role": "pods"}
			w.reading.Groups = []SecurityGroup{
				{ID: "sg-3", VPC: "vpc-1", Tags: pods}, {ID: "sg-2", VPC: "vpc-1", Tags: pods}, {ID: "sg-1", VPC: "vpc-1"}, {ID: "sg-4", VPC: "vpc-2", Tags: pods},
			}
			w.reading.ENIs[0].Groups = []GroupID{"sg-2", "sg-1"}
			d := demand()
			d.FirstInterfaceIndex = index(1)
			tt.edit(&d)
			if diff := cmp.Diff(tt.want, created1(t, Pool(w.reading, d, policy(), start)).Groups); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestToken(t *testing.T) {
	base := Token("u", "i-1", []ENIID{"eni-1", "eni-2"}, 0)
	if base != Token("u", "i-1", []ENIID{"eni-2", "eni-1"}, 0) {
		t.Error("it depends on the order")
	}
	if len(base) > 64 || strings.ContainsFunc(base, func(r rune) bool { return r < ' ' || r > '~' }) {
		t.Errorf("EC2 takes no %q", base)
	}
	for _, other := range []string{
		Token("v", "i-1", []ENIID{"eni-1", "eni-2"}, 0), Token("u", "i-2", []ENIID{"eni-1", "eni-2"}, 0),
		Token("u", "i-1", []ENIID{"eni-1"}, 0), Token("u", "i-1", []ENIID{"eni-1", "eni-2"}, 1), Token("u", "i-1", []ENIID{"eni-1eni-2"}, 0),
	} {
		if other == base {
			t.Error("two intents have one token")
		}
	}
}

func TestRetryOfACreateIsTheSameCall(t *testing.T) {
	w := newWorld("t3.medium")
	d := demand()
	d.FirstInterfaceIndex = index(1)
	d.IntentSince = start
	first := created1(t, Pool(w.reading, d, policy(), start))
	again := created1(t, Pool(w.reading, d, policy(), start.Add(time.Minute)))
	if diff := cmp.Diff(first, again); diff != "" {
		t.Error(diff)
	}
}
