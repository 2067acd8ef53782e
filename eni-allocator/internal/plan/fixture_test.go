package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

func types() map[string]Limits {
	return map[string]Limits{
		"t3.micro": {2, 2}, "t3.medium": {3, 6}, "m4.large": {2, 10}, "m5.large": {3, 10}, "m5.4xlarge": {8, 30},
	}
}

var start = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func policy() Policy { return Policy{Cluster: "c"} }

// world is a model of EC2 for one instance: small enough to be obviously right.
type world struct {
	reading Reading
	limits  Limits // EC2's, whatever the reading believes
	next    int
}

func newWorld(typ string) *world {
	w := &world{limits: types()[typ]}
	w.reading = Reading{
		Instance: Instance{ID: "i-1", Type: typ, State: InstanceRunning, Zone: "a", VPC: "vpc-1", Subnet: "subnet-1"},
		Limits:   w.limits,
		Subnets: []Subnet{
			{ID: "subnet-1", VPC: "vpc-1", Zone: "a", CIDR: netip.MustParsePrefix("10.1.0.0/16"), Free: 1000},
			{ID: "subnet-2", VPC: "vpc-1", Zone: "b", CIDR: netip.MustParsePrefix("10.2.0.0/16"), Free: 5000},
		},
		Groups: []SecurityGroup{{ID: "sg-1", VPC: "vpc-1"}},
		Tables: []RouteTable{{ID: "rtb-1", VPC: "vpc-1", Main: true}},
	}
	w.eni(0, 0)
	return w
}

func (w *world) address(subnet SubnetID) netip.Addr {
	w.next++
	s := w.subnet(subnet)
	base := s.CIDR.Addr().As4()
	return netip.AddrFrom4([4]byte{base[0], base[1], byte(w.next >> 8), byte(w.next)})
}

func (w *world) subnet(id SubnetID) *Subnet {
	for i := range w.reading.Subnets {
		if s := &w.reading.Subnets[i]; s.ID == id {
			return s
		}
	}
	panic("no subnet " + id)
}

// eni attaches an ENI with so many secondary addresses at an index.
func (w *world) eni(index, secondary int) *ENI {
	e := w.make("subnet-1", secondary)
	e.Instance, e.Attachment, e.Index, e.DeleteOnTermination = "i-1", AttachmentID("eni-attach-"+string(e.ID)), index, true
	w.reading.ENIs = append(w.reading.ENIs, e)
	return &w.reading.ENIs[len(w.reading.ENIs)-1]
}

func (w *world) make(subnet SubnetID, secondary int) ENI {
	w.next++
	e := ENI{
		ID: ENIID(fmt.Sprintf("eni-%04d", w.next)), Subnet: subnet, VPC: "vpc-1", Zone: w.subnet(subnet).Zone, Type: "interface",
		Groups: []GroupID{"sg-1"}, Primary: w.address(subnet),
	}
	for range secondary {
		e.Addresses = append(e.Addresses, w.address(subnet))
	}
	return e
}

// slots is how many IPv4 slots of an ENI are taken.
func slots(e ENI) int { return 1 + len(e.Addresses) + len(e.Prefixes) }

// apply carries out an action, and says what EC2 would say against it.
func (w *world) apply(action Action) error {
	switch a := action.(type) {
	case AssignAddresses:
		i := slices.IndexFunc(w.reading.ENIs, func(e ENI) bool { return e.ID == a.ENI })
		if i < 0 {
			return fmt.Errorf("no %s", a.ENI)
		}
		e := &w.reading.ENIs[i]
		if a.Count < 1 || slots(*e)+a.Count > w.limits.IPv4 {
			return fmt.Errorf("%d more addresses on %s, which has %d", a.Count, e.ID, slots(*e))
		}
		return w.take(e.Subnet, a.Count, func() { e.Addresses = append(slices.Clone(e.Addresses), w.address(e.Subnet)) })
	case CreateENI:
		if len(a.Groups) == 0 || len(a.Token) > 64 || a.Token == "" || a.Count < 0 {
			return fmt.Errorf("create %+v", a)
		}
		e := w.make(a.Subnet, 0)
		e.Groups, e.Tags, e.Description = a.Groups, a.Tags, a.Description
		if err := w.take(a.Subnet, 1, func() {}); err != nil {
			return err
		}
		if err := w.take(a.Subnet, a.Count, func() { e.Addresses = append(e.Addresses, w.address(e.Subnet)) }); err != nil {
			return err
		}
		w.reading.ENIs = append(w.reading.ENIs, e)
		return nil
	case AttachENI:
		return w.attach(a)
	case SetDeleteOnTermination:
		for i := range w.reading.ENIs {
			e := &w.reading.ENIs[i]
			if e.Instance != "" && (e.ID == a.ENI || (a.ENI == "" && i == len(w.reading.ENIs)-1)) {
				e.DeleteOnTermination = true
				return nil
			}
		}
		return fmt.Errorf("set delete-on-termination of %q", a.ENI)
	case DeleteENI:
		i := slices.IndexFunc(w.reading.ENIs, func(e ENI) bool { return e.ID == a.ENI && e.Instance == "" })
		if i < 0 {
			return fmt.Errorf("delete %s", a.ENI)
		}
		w.reading.ENIs = slices.Delete(w.reading.ENIs, i, i+1)
		return nil
	}
	return fmt.Errorf("unknown action %T", action)
}

func (w *world) attach(a AttachENI) error {
	attached := 0
	for _, e := range w.reading.ENIs {
		if e.Instance != "" && e.Card == 0 {
			attached++
			if e.Index == a.Index {
				return fmt.Errorf("index %d is taken", a.Index)
			}
		}
	}
	if attached+1 > w.limits.Interfaces {
		return fmt.Errorf("%d ENIs attached already", attached)
	}
	for i := range w.reading.ENIs {
		e := &w.reading.ENIs[i]
		if e.Instance != "" || (a.ENI != "" && e.ID != a.ENI) || (a.ENI == "" && i != len(w.reading.ENIs)-1) {
			continue
		}
		if slots(*e) > w.limits.IPv4 {
			return fmt.Errorf("%s has %d addresses", e.ID, slots(*e))
		}
		e.Instance, e.Attachment, e.Index = "i-1", AttachmentID("eni-attach-"+string(e.ID)), a.Index
		return nil
	}
	return fmt.Errorf("attach %q", a.ENI)
}

func (w *world) take(subnet SubnetID, n int, each func()) error {
	s := w.subnet(subnet)
	if s.Free < n {
		return fmt.Errorf("%s has %d addresses free, not %d", subnet, s.Free, n)
	}
	s.Free -= n
	for range n {
		each()
	}
	return nil
}

// used returns the first n addresses that pods of the node can have.
func (w *world) used(n int) []netip.Addr {
	var out []netip.Addr
	for _, e := range w.reading.ENIs {
		out = append(out, e.Usable(false)...)
	}
	return out[:n]
}

func index(i int) *int { return &i }

// actions are those of a plan without their grounds.
func actions(p Plan) []Action {
	var out []Action
	for _, action := range p.Actions {
		switch a := action.(type) {
		case AssignAddresses:
			a.Why = Why{}
			out = append(out, a)
		case CreateENI:
			a.Why = Why{}
			out = append(out, a)
		case AttachENI:
			a.Why = Why{}
			out = append(out, a)
		case SetDeleteOnTermination:
			a.Why = Why{}
			out = append(out, a)
		case DeleteENI:
			a.Why = Why{}
			out = append(out, a)
		}
	}
	return out
}
