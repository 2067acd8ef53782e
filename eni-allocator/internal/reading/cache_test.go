package reading

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	node  = plan.InstanceID("i-1")
	vpc   = plan.VPCID("vpc-1")
	sub   = plan.SubnetID("subnet-1")
	own   = plan.ENIID("eni-own")
	first = plan.ENIID("eni-first")
)

var start = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func at(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }

func address(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}) }

// attached is an ENI of the node with these addresses.
func attached(id plan.ENIID, index int, addresses ...int) plan.ENI {
	e := plan.ENI{ID: id, VPC: vpc, Subnet: sub, Instance: node, Index: index, Attachment: "a-" + plan.AttachmentID(id)}
	for _, a := range addresses {
		e.Addresses = append(e.Addresses, address(a))
	}
	return e
}

func spare(id plan.ENIID, addresses ...int) plan.ENI {
	e := attached(id, 0, addresses...)
	e.Instance, e.Attachment = "", ""
	e.Tags = map[string]string{plan.TagInstance: string(node)}
	return e
}

func running() []plan.Instance {
	return []plan.Instance{{ID: node, Type: "t3.medium", State: plan.InstanceRunning, VPC: vpc}}
}

var scope = Scope{Instance: node}

// known makes a cache that has read the node's first ENI at second 0.
func known() *Cache {
	c := New()
	c.FoldInstances(at(0), running(), []plan.InstanceID{node})
	c.FoldENIs(at(0), []plan.ENI{attached(first, 0, 1, 2)}, scope)
	c.FoldNetwork(at(0), []plan.VPCID{vpc}, plan.Network{
		VPCs:    []plan.VPC{{ID: vpc, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}},
		Subnets: []plan.Subnet{{ID: sub, VPC: vpc, Free: 100}},
		Groups:  []plan.SecurityGroup{{ID: "sg-1", VPC: vpc}},
		Tables:  []plan.RouteTable{{ID: "rtb-1", VPC: vpc, Main: true}},
	})
	return c
}

// failer is what *testing.T and *rapid.T have in common.
type failer interface {
	Helper()
	Fatal(args ...any)
}

func enis(t failer, c *Cache) []plan.ENI {
	t.Helper()
	r, ok := c.Reading(node)
	if !ok {
		t.Fatal("the node was never read")
	}
	return r.ENIs
}

// want checks ids and last bytes of addresses of the node's ENIs.
func want(t testing.TB, c *Cache, texts ...string) {
	t.Helper()
	var got []string
	for _, e := range enis(t, c) {
		where := "spare"
		if e.Instance != "" {
			where = fmt.Sprint(e.Index)
		}
		var last []int
		for _, a := range e.Addresses {
			last = append(last, int(a.As4()[3]))
		}
		slices.Sort(last)
		got = append(got, fmt.Sprint(e.ID, " ", where, " ", last))
	}
	if diff := cmp.Diff(texts, got); diff != "" {
		t.Error(diff)
	}
}

func TestNothingIsKnownBeforeBothWereRead(t *testing.T) {
	c := New()
	if _, ok := c.Reading(node); ok || !c.ReadAt(node).IsZero() {
		t.Error("something is known of an instance that was never read")
	}
	c.FoldInstances(at(1), running(), nil)
	if _, ok := c.Reading(node); ok {
		t.Error("its ENIs were never read")
	}
	c.FoldENIs(at(0), nil, scope)
	if _, ok := c.Reading(node); !ok || !c.ReadAt(node).Equal(at(0)) {
		t.Errorf("read at %s", c.ReadAt(node))
	}
	c.SetLimits("t3.medium", plan.Limits{})
	if _, ok := c.Limits("t3.medium"); ok {
		t.Error("unknown limits are known")
	}
	c.SetLimits("t3.medium", plan.Limits{Interfaces: 3, IPv4: 6})
	if r, _ := c.Reading(node); r.Limits.IPv4 != 6 {
		t.Errorf("limits %+v", r.Limits)
	}
}

// cilium#36428: a Describe after an Assign shows the addresses from before it.
func TestB6StaleReadingDoesNotTakeAssignedAddresses(t *testing.T) {
	c := known()
	c.Assigned(at(10), first, []netip.Addr{address(3)})
	c.FoldENIs(at(9), []plan.ENI{attached(first, 0, 1, 2)}, scope) // began before the answer
	want(t, c, "eni-first 0 [1 2 3]")
	if c.Doubtful(node) {
		t.Error("a reading from before a write is no reason for doubt")
	}
	c.FoldENIs(at(11), []plan.ENI{attached(first, 0, 1, 2)}, scope) // EC2 lags
	want(t, c, "eni-first 0 [1 2 3]")
	if !c.Doubtful(node) {
		t.Error("nobody will look again")
	}
	c.FoldENIs(at(11.5), []plan.ENI{attached(first, 0, 1, 2)}, scope) // too soon to be another reading
	want(t, c, "eni-first 0 [1 2 3]")
	c.FoldENIs(at(14), []plan.ENI{attached(first, 0, 1, 2, 3)}, scope)
	want(t, c, "eni-first 0 [1 2 3]")
	if c.Doubtful(node) {
		t.Error("it is confirmed")
	}
}

// An address that somebody took away is gone after two readings, no later.
func TestAddressGoesAfterTwoReadings(t *testing.T) {
	c := known()
	c.FoldENIs(at(10), []plan.ENI{attached(first, 0, 1)}, scope)
	want(t, c, "eni-first 0 [1 2]")
	c.FoldENIs(at(13), []plan.ENI{attached(first, 0, 1)}, scope)
	want(t, c, "eni-first 0 [1]")
}

func TestB54DetachedENIGoesAfterTwoReadings(t *testing.T) {
	c := known()
	c.FoldENIs(at(1), []plan.ENI{attached(first, 0, 1, 2), attached("eni-x", 1, 9)}, scope)
	c.FoldENIs(at(10), []plan.ENI{attached(first, 0, 1, 2)}, scope)
	want(t, c, "eni-first 0 [1 2]", "eni-x 1 [9]")
	c.FoldENIs(at(20), []plan.ENI{attached(first, 0, 1, 2)}, scope)
	want(t, c, "eni-first 0 [1 2]")
}

func TestEmptyAnswerChangesNothing(t *testing.T) {
	c := known()
	c.FoldENIs(at(10), nil, scope)
	c.FoldInstances(at(10), nil, []plan.InstanceID{node})
	c.FoldNetwork(at(10), []plan.VPCID{vpc}, plan.Network{})
	want(t, c, "eni-first 0 [1 2]")
	r, _ := c.Reading(node)
	if len(r.Subnets) != 1 || len(r.Groups) != 1 || len(r.Tables) != 1 || r.Instance.State != plan.InstanceRunning {
		t.Errorf("%+v", r)
	}
	if _, ok := c.VPC(vpc); !ok {
		t.Error("the VPC is gone")
	}
}

func TestInstanceGoesAfterTwoReadings(t *testing.T) {
	c := known()
	c.FoldInstances(at(10), nil, []plan.InstanceID{node})
	if _, ok := c.Reading(node); !ok || !c.Doubtful(node) {
		t.Error("one answer that there is no such instance proves nothing")
	}
	c.FoldInstances(at(20), nil, []plan.InstanceID{node})
	if _, ok := c.Reading(node); ok {
		t.Error("it is still there")
	}
}

func TestTerminatedEndsAtOnce(t *testing.T) {
	c := known()
	c.FoldInstances(at(10), []plan.Instance{{ID: node, Type: "t3.medium", State: plan.InstanceTerminated}}, []plan.InstanceID{node})
	c.FoldENIs(at(10), nil, scope)
	want(t, c)
	if r, _ := c.Reading(node); r.Instance.VPC != vpc {
		t.Errorf("instance %+v", r.Instance)
	}
}

// The steps by which a node gets an ENI, with every reading in between stale.
func TestOwnENISurvivesStaleReadings(t *testing.T) {
	c := known()
	old := []plan.ENI{attached(first, 0, 1, 2)}
	c.Created(at(10), spare(own, 5, 6))
	c.FoldENIs(at(9.9), old, scope)
	want(t, c, "eni-first 0 [1 2]", "eni-own spare [5 6]")
	c.Attached(at(12), own, "a-1", node, 1)
	c.FoldENIs(at(11), append(old, spare(own, 5, 6)), scope) // from before the attachment
	want(t, c, "eni-first 0 [1 2]", "eni-own 1 [5 6]")
	c.FoldENIs(at(12.5), append(old, spare(own, 5, 6)), scope) // EC2 lags
	want(t, c, "eni-first 0 [1 2]", "eni-own 1 [5 6]")
	c.SetDeleteOnTermination(at(13), own)
	c.FoldENIs(at(12.9), append(old, attached(own, 1, 5, 6)), scope)
	if e := enis(t, c)[1]; !e.DeleteOnTermination || e.Attachment != "a-1" {
		t.Errorf("%+v", e)
	}
	gone := attached(own, 1, 5, 6)
	gone.DeleteOnTermination = true
	c.FoldENIs(at(14), append(old, gone), scope)
	if c.Doubtful(node) {
		t.Error("all is confirmed")
	}
}

// What two readings say is true, whatever this process believes to have done.
func TestTwoReadingsWinOverAWrite(t *testing.T) {
	c := known()
	c.Created(at(10), spare(own, 5))
	c.Attached(at(11), own, "a-1", node, 1)
	both := []plan.ENI{attached(first, 0, 1, 2), spare(own, 5)}
	c.FoldENIs(at(12), both, scope)
	want(t, c, "eni-first 0 [1 2]", "eni-own 1 [5]")
	if !c.Doubtful(node) {
		t.Error("nobody will look again")
	}
	c.FoldENIs(at(15), both, scope)
	want(t, c, "eni-first 0 [1 2]", "eni-own spare [5]")
}

func TestDeletedENIDoesNotComeBackAtOnce(t *testing.T) {
	c := known()
	both := []plan.ENI{attached(first, 0, 1, 2), spare(own, 5)}
	c.FoldENIs(at(5), both, scope)
	c.Deleted(at(10), own)
	c.FoldENIs(at(9), both, scope)
	c.FoldENIs(at(20), both, scope)
	want(t, c, "eni-first 0 [1 2]")
	c.FoldENIs(at(100), both, scope) // It was not deleted after all.
	want(t, c, "eni-first 0 [1 2]", "eni-own spare [5]")
}

func TestGoneENIMayBeShownLater(t *testing.T) {
	c := known()
	both := []plan.ENI{attached(first, 0, 1, 2), spare(own, 5)}
	c.FoldENIs(at(5), both, scope)
	c.Gone(at(10), own)
	c.FoldENIs(at(9), both, scope)
	want(t, c, "eni-first 0 [1 2]")
	c.FoldENIs(at(11), both, scope)
	want(t, c, "eni-first 0 [1 2]", "eni-own spare [5]")
}

func TestReadingsOutOfOrder(t *testing.T) {
	c := known()
	c.FoldENIs(at(20), []plan.ENI{attached(first, 0, 1, 2, 3)}, scope)
	c.FoldENIs(at(10), []plan.ENI{attached(first, 0, 1, 2)}, scope)
	want(t, c, "eni-first 0 [1 2 3]")
	if c.Doubtful(node) {
		t.Error("an old reading is no reason for doubt")
	}
	c.FoldInstances(at(20), running(), nil)
	stopped := running()
	stopped[0].State = "stopping"
	c.FoldInstances(at(10), stopped, nil)
	if r, _ := c.Reading(node); r.Instance.State != plan.InstanceRunning {
		t.Error("an old reading won")
	}
}

func TestMalformedAnswerIsDoubtedOnce(t *testing.T) {
	c := known()
	bad := attached(first, 0)
	bad.Malformed = "no MAC"
	c.FoldENIs(at(10), []plan.ENI{bad}, scope)
	want(t, c, "eni-first 0 [1 2]")
	c.FoldENIs(at(20), []plan.ENI{bad}, scope)
	if e := enis(t, c)[0]; e.Malformed == "" {
		t.Errorf("%+v", e)
	}
}

func TestVPCWideReading(t *testing.T) {
	c := known()
	c.FoldENIs(at(10), []plan.ENI{attached(first, 0, 1, 2), {ID: "eni-other", VPC: vpc, Instance: "i-2"}, {ID: "eni-nobody", VPC: vpc}}, Scope{VPCs: []plan.VPCID{vpc}})
	want(t, c, "eni-first 0 [1 2]")
	c.FoldInstances(at(10), running(), nil)
	if !c.ReadAt(node).Equal(at(10)) {
		t.Errorf("read at %s", c.ReadAt(node))
	}
	c.FoldENIs(at(20), nil, Scope{VPCs: []plan.VPCID{"vpc-2"}})
	c.FoldENIs(at(30), nil, Scope{VPCs: []plan.VPCID{"vpc-2"}})
	want(t, c, "eni-first 0 [1 2]")
}

func TestSubnetsInFlight(t *testing.T) {
	c := known()
	release := c.Reserve(sub, 6)
	if s, _ := c.Subnet(sub); s.Free != 100 || s.Reserved != 6 {
		t.Errorf("%+v", s)
	}
	c.Created(at(10), spare(own, 5, 6, 7, 8, 9))
	release()
	if s, _ := c.Subnet(sub); s.Free != 94 || s.Reserved != 0 {
		t.Errorf("%+v", s)
	}
	c.Created(at(11), spare(own, 5, 6, 7, 8, 9)) // the answer to a repetition
	c.Assigned(at(12), first, []netip.Addr{address(3)})
	c.FoldNetwork(at(10.5), []plan.VPCID{vpc}, plan.Network{Subnets: []plan.Subnet{{ID: sub, VPC: vpc, Free: 94}}})
	if s, _ := c.Subnet(sub); s.Free != 93 {
		t.Errorf("%+v", s)
	}
	c.Skip(sub, at(100))
	if r, _ := c.Reading(node); !r.Subnets[0].SkippedUntil.Equal(at(100)) {
		t.Errorf("%+v", r.Subnets[0])
	}
	if n := c.Network(); len(n.Subnets) != 1 || len(n.VPCs) != 1 {
		t.Errorf("%+v", n)
	}
}

func TestForget(t *testing.T) {
	c := known()
	c.Forget(node)
	if _, ok := c.Reading(node); ok {
		t.Error("it is still known")
	}
	c.FoldInstances(at(1), running(), nil)
	c.FoldENIs(at(1), []plan.ENI{attached(first, 0, 1)}, scope)
	want(t, c, "eni-first 0 [1]")
}

func TestUnknownENIsAreNotWritten(t *testing.T) {
	c := known()
	c.Assigned(at(1), "eni-x", []netip.Addr{address(9)})
	c.Attached(at(1), "eni-x", "a", node, 1)
	c.SetDeleteOnTermination(at(1), "eni-x")
	want(t, c, "eni-first 0 [1 2]")
}

// TestLaws reads and writes at random. For three seconds after a write EC2 may
// answer with what was before it. Whatever was written stays, and in the end the
// cache shows what EC2 has.
func TestLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := known()
		truth := []plan.ENI{attached(first, 0, 1, 2)}
		history := [][]plan.ENI{truth}
		now, written, next := 10.0, 0.0, 10
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			now++
			truth = slices.Clone(truth)
			switch rapid.IntRange(0, 2).Draw(t, "step") {
			case 0: // a reading, possibly from before a write of just now
				stale := rapid.Bool().Draw(t, "stale")
				seen := truth
				if stale && len(history) > 1 && now < written+3 {
					seen = history[len(history)-2]
				}
				c.FoldENIs(at(now), seen, scope)
			case 1:
				i := rapid.IntRange(0, len(truth)-1).Draw(t, "eni")
				next++
				truth[i] = truth[i].Clone()
				truth[i].Addresses = append(truth[i].Addresses, address(next))
				c.Assigned(at(now), truth[i].ID, []netip.Addr{address(next)})
				history = append(history, truth)
				written = now
			case 2:
				if len(truth) == 4 {
					continue
				}
				id := plan.ENIID(fmt.Sprintf("eni-%d", len(truth)))
				made := spare(id, 100+len(truth))
				c.Created(at(now), made)
				c.Attached(at(now+0.1), id, "a-"+plan.AttachmentID(id), node, len(truth))
				e := attached(id, len(truth), 100+len(truth))
				e.Tags = made.Tags
				truth = append(truth, e)
				history = append(history, truth)
				written = now
			}
			got := enis(t, c)
			for _, e := range truth {
				i := slices.IndexFunc(got, func(x plan.ENI) bool { return x.ID == e.ID })
				if i < 0 || got[i].Instance != node || got[i].Index != e.Index {
					t.Fatalf("%s is lost: %+v", e.ID, got)
				}
			}
		}
		for i := range 3 {
			c.FoldENIs(at(now+10+10*float64(i)), truth, scope)
		}
		got := enis(t, c)
		for i := range got {
			slices.SortFunc(got[i].Addresses, netip.Addr.Compare)
		}
		slices.SortFunc(truth, func(a, b plan.ENI) int { return strings.Compare(string(a.ID), string(b.ID)) })
		if len(got) != len(truth) || c.Doubtful(node) {
			t.Fatalf("got %+v, want %+v", got, truth)
		}
		for i := range got {
			mine := slices.SortedFunc(slices.Values(truth[i].Addresses), netip.Addr.Compare)
			if !slices.Equal(got[i].Addresses, mine) {
				t.Fatalf("%s has %v, want %v", got[i].ID, got[i].Addresses, mine)
			}
		}
	})
}

func TestConcurrentUse(t *testing.T) {
	c := known()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := range 200 {
				now := at(float64(10 + j))
				switch i {
				case 0:
					c.FoldENIs(now, []plan.ENI{attached(first, 0, 1, 2)}, scope)
				case 1:
					c.Assigned(now, first, []netip.Addr{address(j % 250)})
				case 2:
					c.Reserve(sub, 1)()
					c.FoldNetwork(now, []plan.VPCID{vpc}, plan.Network{Subnets: []plan.Subnet{{ID: sub, VPC: vpc, Free: 100}}})
				default:
					r, _ := c.Reading(node)
					plan.Pool(r, plan.Demand{}, plan.Policy{}, now)
					c.Doubtful(node)
				}
			}
		})
	}
	wg.Wait()
}
