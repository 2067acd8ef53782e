package plan

import (
	"fmt"
	"slices"
	"time"

	"github.com/eniplane/eniplane/internal/reason"
)

// Pool plans for one node. The result depends on nothing but the arguments, and
// not on the order of any slice in them:
//
//   - Existing ENIs are filled before an own spare one is attached, and that
//     before another is created. A plan creates at most one.
//   - No step breaks a limit of the reading, and no address is taken above the
//     ceiling. Addresses that are only nice to have come along in calls that are
//     made anyway.
//   - After the steps have been done, planning again leads to an end: no steps.
//   - Where something is lacking and there is no step, Blocked says why.
func Pool(r Reading, d Demand, p Policy, now time.Time) Plan {
	if b := unready(r, d); b != nil {
		return Plan{Blocked: b}
	}
	s := look(r, d, p)
	r.Network.Subnets = slices.Clone(r.Network.Subnets) // The plan takes from them.
	w := &work{reading: r, demand: d, policy: p, now: now, survey: s, at: where(r, d, s)}
	n := s.count(r.Limits, d)
	marks := d.Watermarks.effective(n.Capacity)
	most, limit := ceiling(d, n.Capacity)
	n.Ceiling = most
	n.Excess = Excess(n.Available, n.Used, marks)
	bounded := marks
	bounded.MaxAllocate = most
	if most > 0 {
		n.Needed = Needed(n.Available, n.Used, bounded)
	}
	w.numbers = n

	a := amount(n, d, marks)
	var blocked *Blocked
	switch {
	case a.want > 0:
		blocked = w.grow(a)
	case a.lacking > 0 || n.Capacity == 0:
		blocked = atCeiling(r, d, n, limit)
	}
	w.tidy(a.want > 0)
	if len(w.steps) > 0 {
		blocked = nil
	}
	return Plan{Steps: w.steps, Blocked: blocked, Numbers: n}
}

// unready says why a reading cannot be planned with.
func unready(r Reading, d Demand) *Blocked {
	i := r.Instance
	switch {
	case d.Instance == "":
		return &Blocked{Reason: reason.InstanceUnknown, Message: "the node's object names no instance"}
	case i.ID != d.Instance || i.State == "":
		return &Blocked{Reason: reason.InstanceUnknown, Message: fmt.Sprintf("EC2 shows no instance %s", d.Instance)}
	case i.State != StateRunning && i.State != StateStopped:
		return &Blocked{Reason: reason.InstanceNotRunning, Message: fmt.Sprintf("%s is %s", i.ID, i.State)}
	case !r.Limits.Known():
		return &Blocked{Reason: reason.InstanceTypeUnknown, Message: fmt.Sprintf("the limits of instance type %q are not known", i.Type)}
	}
	return nil
}

// atCeiling says which limit keeps a node from getting what it lacks.
func atCeiling(r Reading, d Demand, n Numbers, limit reason.Reason) *Blocked {
	w := d.Watermarks
	b := &Blocked{Reason: limit}
	switch {
	case n.Capacity == 0:
		b.Reason = reason.WatermarkUnreachable
		b.Message = fmt.Sprintf("%s has %d ENI slots, and none is left for addresses", r.Instance.Type, r.Limits.Interfaces)
	case limit == reason.MaxAllocate:
		b.Message = fmt.Sprintf("max-allocate is %d, and the node has %d addresses", w.MaxAllocate, n.Available)
	case limit == reason.MaxPods:
		b.Message = fmt.Sprintf("the node can run %d pods, and has %d addresses", d.MaxPods, n.Available)
	case max(w.PreAllocate, w.MinAllocate) > n.Capacity:
		b.Reason = reason.WatermarkUnreachable
		b.Message = fmt.Sprintf("pre-allocate %d and min-allocate %d, but %s can have %d addresses", w.PreAllocate, w.MinAllocate, r.Instance.Type, n.Capacity)
	case r.SlotsRefused:
		b.Message = fmt.Sprintf("EC2 refuses another ENI on %s, and the node has %d addresses of %d", r.Instance.ID, n.Available, n.Capacity)
	default:
		b.Message = fmt.Sprintf("all %d addresses that %s can have (%d ENIs of %d) are assigned",
			n.Capacity, r.Instance.Type, r.Limits.Interfaces, r.Limits.AddressesPerInterface)
	}
	return b
}

// work is a plan in the making.
type work struct {
	reading Reading
	demand  Demand
	policy  Policy
	now     time.Time
	survey  survey
	at      place
	numbers Numbers
	filled  int // addresses that the steps so far assign
	steps   []Step
}

func (w *work) add(a Action, rejected []Option, grounds string, args ...any) {
	w.steps = append(w.steps, Step{Action: a, Grounds: fmt.Sprintf(grounds, args...), Rejected: rejected})
}

// grow adds steps that bring what is wanted, as far as possible.
func (w *work) grow(a amounts) *Blocked {
	left, rejected := w.fill(a)
	if left.want <= 0 {
		return nil
	}
	if w.survey.empty == 0 {
		return cannotFill(w, rejected)
	}
	if w.adopt(rejected) {
		return nil
	}
	return w.create(left, rejected)
}

// fill assigns addresses on the ENIs that the node has and returns what is left.
func (w *work) fill(a amounts) (amounts, []Option) {
	subnets := make(map[SubnetID]*Subnet, len(w.reading.Network.Subnets))
	for i := range w.reading.Network.Subnets {
		s := &w.reading.Network.Subnets[i]
		subnets[s.ID] = s
	}
	var rejected []Option
	for _, e := range w.survey.others {
		rejected = append(rejected, Option{What: string(e.ID), Reason: reason.OutOfENIs, Message: "excluded: it takes a slot and gives no addresses"})
	}
	for _, e := range w.survey.usable {
		if a.want <= 0 {
			break
		}
		places := w.reading.Limits.AddressesPerInterface - e.Slots()
		subnet, known := subnets[e.Subnet]
		switch {
		case places <= 0:
			rejected = append(rejected, Option{What: string(e.ID), Reason: reason.OutOfENIs, Message: fmt.Sprintf("%d of %d addresses taken", e.Slots(), w.reading.Limits.AddressesPerInterface)})
			continue
		case e.Attachment.Leaving:
			rejected = append(rejected, Option{What: string(e.ID), Reason: reason.ReadingStale, Message: "it is being detached"})
			continue
		case !known:
			rejected = append(rejected, Option{What: string(e.ID), Reason: reason.CIDRUnknown, Message: fmt.Sprintf("its subnet %s is not known", e.Subnet)})
			continue
		case room(*subnet, w.now) == 0:
			o := noRoom(*subnet, 1, w.now)
			rejected = append(rejected, Option{What: string(e.ID), Reason: o.Reason, Message: fmt.Sprintf("its subnet %s: %s", e.Subnet, o.Message)})
			continue
		}
		count := min(places, room(*subnet, w.now), a.upTo)
		w.add(AssignAddresses{ENI: e.ID, Count: count}, rejected,
			"%d addresses wanted, up to %d with what comes along; %s has %d places and its subnet %d free", a.want, a.upTo, e.ID, places, subnet.Free)
		rejected = nil
		a.want -= count
		a.upTo -= count
		subnet.Free -= count
		w.filled += count
	}
	return a, rejected
}

// cannotFill says why a node with places left cannot fill them.
func cannotFill(w *work, rejected []Option) *Blocked {
	for _, o := range rejected {
		if o.Reason != reason.OutOfENIs {
			return &Blocked{Reason: o.Reason, Message: o.What + ": " + o.Message, Rejected: rejected}
		}
	}
	b := atCeiling(w.reading, w.demand, w.numbers, reason.OutOfENIs)
	b.Rejected = rejected
	return b
}

// adopt attaches an ENI that was made for this node before.
func (w *work) adopt(rejected []Option) bool {
	for _, e := range w.survey.spares {
		if why := w.unfit(e); why != "" {
			continue
		}
		w.add(AttachENI{ENI: e.ID, Instance: w.reading.Instance.ID, Index: w.survey.nextIndex(firstIndex(w.demand, w.policy))}, rejected,
			"%s was made for this node and is not attached", e.ID)
		if !w.demand.KeepOnTermination {
			w.add(SetDeleteOnTermination{ENI: e.ID}, nil, "it goes with its instance")
		}
		return true
	}
	return false
}

// unfit says why a spare ENI can not be attached; "" if it can.
func (w *work) unfit(e ENI) string {
	switch {
	case e.Zone != w.at.zone:
		return fmt.Sprintf("it is in zone %s, the instance in %s", e.Zone, w.at.zone)
	case e.VPC != w.at.vpc:
		return fmt.Sprintf("it is in %s, the instance in %s", e.VPC, w.at.vpc)
	case e.Slots() > w.reading.Limits.AddressesPerInterface:
		return fmt.Sprintf("it has %d addresses, %s allows %d", e.Slots(), w.reading.Instance.Type, w.reading.Limits.AddressesPerInterface)
	case len(e.Addresses(w.demand.UsePrimary)) > max(w.numbers.Ceiling-w.numbers.Available-w.filled, 0):
		return fmt.Sprintf("its %d addresses are more than the %d that the node may have", len(e.Addresses(w.demand.UsePrimary)), w.numbers.Ceiling)
	}
	return ""
}

// create adds a new ENI.
func (w *work) create(a amounts, rejected []Option) *Blocked {
	own := 0 // what the primary address gives
	least := 2
	if w.demand.UsePrimary {
		own, least = 1, 1
	}
	groups, blocked := chooseGroups(w.reading, w.demand, w.at, w.survey)
	if blocked != nil {
		return blocked
	}
	c, blocked := chooseSubnet(w.reading, w.demand, w.at, least, w.now)
	if blocked != nil {
		return blocked
	}
	count := min(a.upTo-own, w.reading.Limits.AddressesPerInterface-1, room(c.subnet, w.now)-1)
	attached := make([]ENIID, 0, len(w.reading.ENIs))
	for _, list := range [][]ENI{w.survey.usable, w.survey.others} {
		for _, e := range list {
			attached = append(attached, e.ID)
		}
	}
	token := Token(w.demand.UID, w.reading.Instance.ID, attached, w.demand.Attempt)
	w.add(CreateENI{
		Subnet: c.subnet.ID, Groups: groups, Count: max(count, 0), Token: token,
		Tags:        newTags(w.reading, w.demand, w.policy, token, w.now),
		Description: fmt.Sprintf("eniplane (%s)", w.reading.Instance.ID),
	}, slices.Concat(rejected, c.rejected),
		"%d addresses wanted that no ENI of the node can hold; %d slots are empty; %s is %s", a.want, w.survey.empty, c.subnet.ID, c.grounds)
	w.add(AttachENI{Instance: w.reading.Instance.ID, Index: w.survey.nextIndex(firstIndex(w.demand, w.policy))}, nil, "the first free device index")
	if !w.demand.KeepOnTermination {
		w.add(SetDeleteOnTermination{}, nil, "it goes with its instance")
	}
	return nil
}

// tidy finishes what an earlier process left half done. It comes last, so that
// it never keeps a node from its addresses.
func (w *work) tidy(growing bool) {
	var attached ENIID
	for _, s := range w.steps {
		if a, ok := s.Action.(AttachENI); ok {
			attached = a.ENI
		}
	}
	for _, list := range [][]ENI{w.survey.usable, w.survey.others} {
		for _, e := range list {
			a := e.Attachment
			if Own(e, w.policy.Cluster, w.reading.Instance.ID) && !a.DeleteOnTermination && !a.Leaving && !w.demand.KeepOnTermination && a.ID != "" {
				w.add(SetDeleteOnTermination{ENI: e.ID, Attachment: a.ID}, nil, "we made it, and it would outlive its instance")
			}
		}
	}
	for _, e := range w.survey.spares {
		why := w.unfit(e)
		made, dated := created(e)
		switch {
		case e.ID == attached:
		case !dated || w.now.Sub(made) < w.policy.SpareGrace:
		case why != "":
			w.add(DeleteENI{ENI: e.ID}, nil, "we made it and cannot attach it: %s", why)
		case !growing || w.survey.empty == 0:
			w.add(DeleteENI{ENI: e.ID}, nil, "we made it %s ago, and nothing wants or can take it", w.now.Sub(made).Truncate(time.Second))
		}
	}
}
