package plan

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/eniplane/eniplane/internal/reason"
)

// Pool says what to do so that a node has the addresses it wants, and why it
// cannot have them where it cannot. Applied again and again, with what EC2
// answered folded into the reading, it comes to rest. A plan makes at most one
// ENI, and only for what the attached ones cannot give.
func Pool(r Reading, d Demand, p Policy, now time.Time) Plan {
	s := stand(r, d, p)
	plan := Plan{Summary: s.Summary, Notes: s.notes}
	switch {
	case r.Instance.ID == "":
		return plan.blocked(reason.InstanceUnknown, "EC2 does not show the instance")
	case r.Instance.State != InstanceRunning:
		return plan.blocked(reason.InstanceNotRunning, "instance %s is %s", r.Instance.ID, r.Instance.State)
	case now.Before(d.SuspendedUntil):
		plan.RetryAt = d.SuspendedUntil
		return plan.blocked(reason.InstanceNotRunning, "EC2 said that instance %s is not running; tried again after %s", r.Instance.ID, d.SuspendedUntil.UTC().Format(time.RFC3339))
	case !r.Limits.Known():
		return plan.blocked(reason.InstanceTypeUnknown, "the limits of instance type %q are not known", r.Instance.Type)
	}

	plan.Actions = s.settle()
	assigned, left, rejected := s.assign(now)
	plan.Actions = append(plan.Actions, assigned...)
	if left > 0 {
		more, blocked := s.widen(left, rejected, now)
		plan.Actions = append(plan.Actions, more...)
		if blocked != nil {
			plan.Blocked = blocked
			plan.RetryAt = s.earliestSkip(now)
		}
	} else {
		plan.Actions = append(plan.Actions, s.tidy(everySpare, "no address is missing")...)
	}
	if plan.Blocked == nil {
		plan.Blocked = s.ceiling()
	}
	return plan
}

func (p Plan) blocked(r reason.Reason, format string, args ...any) Plan {
	p.Blocked = &Blocked{r, fmt.Sprintf(format, args...)}
	return p
}

// standing is how a node stands: everything that the steps of Pool share.
type standing struct {
	Summary
	reading  Reading
	demand   Demand
	policy   Policy
	marks    Watermarks
	deficit  int   // missing, whatever the ceilings
	assigned int   // by this plan, on attached ENIs
	amount   int   // asked for when asking anyway: needed, slack and surge
	attached []ENI // to the instance, by device index
	managed  []ENI // those of them that give addresses
	orphans  []ENI // ours and attached nowhere, by id
	notes    []Blocked
	capBy    Blocked // the ceiling that binds first
}

func stand(r Reading, d Demand, p Policy) standing {
	s := standing{reading: r, demand: d, policy: p}
	first := d.first(p)
	apart := 0 // attached at an index that could give addresses, and excluded
	card := 0
	for _, e := range slices.SortedFunc(slices.Values(r.ENIs), byID) {
		switch {
		case r.Instance.ID == "":
		case e.Instance == "" && e.Owned(p.Cluster, r.Instance.ID) && e.Malformed == "":
			s.orphans = append(s.orphans, e)
		case e.Instance == r.Instance.ID:
			s.attached = append(s.attached, e)
			if e.Card != 0 {
				continue // Limits are those of card 0.
			}
			card++
			if excluded(e, first, d.ExcludeTags) {
				if e.Index >= first {
					apart++
				}
				continue
			}
			s.managed = append(s.managed, e)
		}
	}
	slices.SortStableFunc(s.attached, func(a, b ENI) int { return cmp.Or(cmp.Compare(a.Card, b.Card), cmp.Compare(a.Index, b.Index)) })
	slices.SortStableFunc(s.managed, func(a, b ENI) int { return cmp.Compare(a.Index, b.Index) })

	have := make(map[netip.Addr]bool)
	for _, e := range s.managed {
		for _, a := range e.Usable(d.UsePrimary) {
			have[a] = true
		}
	}
	s.Available = len(have)
	for _, a := range d.Used {
		if have[a] {
			s.Used++
			delete(have, a) // Each counts once.
		}
	}

	slots := max(0, r.Limits.Interfaces-first-apart)
	s.Capacity = capacity(r.Limits, slots, s.managed, d.UsePrimary)
	s.EmptySlots = max(0, min(r.Limits.Interfaces-card, slots-len(s.managed)))
	s.reckon()
	return s
}

// capacity is the most addresses that pods can have: the one formula for it.
// Each slot carries an ENI, whose primary address is not for pods unless the
// node says so; a prefix that is there already gives 16 for one.
func capacity(l Limits, slots int, managed []ENI, primary bool) int {
	if !l.Known() {
		return 0
	}
	each := l.IPv4 - 1
	if primary {
		each++
	}
	total := slots * each
	for _, e := range managed {
		total += 15 * len(e.Prefixes)
	}
	return total
}

// excluded tells whether an attached ENI gives no addresses.
func excluded(e ENI, first int, tags map[string]string) bool {
	return e.Malformed != "" || e.Managed || e.Index < first || e.Card != 0 || (e.Type != "" && e.Type != "interface") || carries(e.Tags, tags)
}

// reckon computes what is needed, and what binds it.
func (s *standing) reckon() {
	d := s.demand
	s.marks = Watermarks{Pre: d.PreAllocate, Min: d.MinAllocate, Max: s.Capacity, Above: d.MaxAboveWatermark}
	if s.marks.Pre == 0 {
		s.marks.Pre = min(DefaultPreAllocate, s.Capacity)
	}
	if s.Capacity == 0 {
		s.capBy = Blocked{reason.OutOfENIs, fmt.Sprintf("no ENI of an instance of %d interfaces may give addresses from device index %d on", s.reading.Limits.Interfaces, d.first(s.policy))}
	} else {
		s.capBy = Blocked{reason.OutOfENIs, fmt.Sprintf("the instance has %d of at most %d addresses on %d interfaces", s.Available, s.Capacity, s.reading.Limits.Interfaces)}
	}
	if s.reading.Limits.Known() {
		for _, w := range []struct {
			name  string
			value int
		}{{"pre-allocate", d.PreAllocate}, {"min-allocate", d.MinAllocate}} {
			if w.value > s.Capacity {
				s.notes = append(s.notes, Blocked{reason.WatermarkUnreachable, fmt.Sprintf("%s %d is more than the %d addresses that the instance can have", w.name, w.value, s.Capacity)})
			}
		}
	}
	if d.MaxPods > 0 {
		// More pods cannot run; what was asked for explicitly is had all the same.
		most := max(d.MaxPods+d.System, d.PreAllocate, d.MinAllocate)
		if most < s.marks.Max {
			s.marks.Max = most
			s.capBy = Blocked{reason.MaxPods, fmt.Sprintf("%d addresses are enough for %d pods", s.Available, d.MaxPods)}
		}
	}
	if d.MaxAllocate > 0 && d.MaxAllocate < s.marks.Max {
		s.marks.Max = d.MaxAllocate
		s.capBy = Blocked{reason.MaxAllocate, fmt.Sprintf("the node has %d addresses and max-allocate is %d", s.Available, d.MaxAllocate)}
	}

	s.deficit = max(s.marks.Deficit(s.Available, s.Used), d.Urgent-s.Free())
	s.Excess = s.marks.Excess(s.Available, s.Used)
	if s.marks.Max <= 0 {
		s.Needed = 0 // A ceiling of nothing, not none.
		return
	}
	s.Needed = s.marks.below(s.Available, s.deficit)
	surge := max(0, d.PendingPods-s.Needed)
	s.amount = s.marks.below(s.Available, s.Needed+s.marks.Above+surge)
}

// ceiling says which ceiling keeps the node from what it lacks; nil if none does.
func (s *standing) ceiling() *Blocked {
	if s.deficit <= s.Needed {
		return nil
	}
	b := s.capBy
	b.Message += fmt.Sprintf("; %d are used and %d are missing", s.Used, s.deficit)
	return &b
}

// settle makes our attached ENIs go with the instance.
func (s *standing) settle() []Action {
	if s.demand.KeepOnTermination {
		return nil
	}
	var actions []Action
	for _, e := range s.attached {
		if e.Owned(s.policy.Cluster, s.reading.Instance.ID) && e.Malformed == "" && !e.DeleteOnTermination {
			actions = append(actions, SetDeleteOnTermination{Why{Grounds: fmt.Sprintf("%s was made for %s and would outlive it", e.ID, e.Instance)}, e.ID, e.Attachment})
		}
	}
	return actions
}

// assign fills up attached ENIs until nothing is missing. It returns what still
// is, and why each ENI could not give it.
func (s *standing) assign(now time.Time) ([]Action, int, []Rejected) {
	needed, amount := s.Needed, s.amount
	// What is assigned here is no longer there for a new ENI.
	subnets := slices.Clone(s.reading.Subnets)
	s.reading.Subnets = subnets
	var actions []Action
	var rejected []Rejected
	for _, e := range s.managed {
		if needed <= 0 {
			break
		}
		taken := len(e.Addresses) + len(e.Prefixes)
		room := s.reading.Limits.IPv4 - 1 - taken
		at := slices.IndexFunc(subnets, func(n Subnet) bool { return n.ID == e.Subnet })
		switch {
		case e.Leaving:
			rejected = append(rejected, Rejected{string(e.ID), reason.ReadingStale, "EC2 is detaching it"})
			continue
		case room <= 0:
			rejected = append(rejected, Rejected{string(e.ID), reason.OutOfENIs, fmt.Sprintf("%d of %d slots are taken", taken+1, s.reading.Limits.IPv4)})
			continue
		case at < 0:
			rejected = append(rejected, Rejected{string(e.ID), reason.CIDRUnknown, fmt.Sprintf("its subnet %s is not known", e.Subnet)})
			continue
		case subnets[at].room(now) <= 0:
			rejected = append(rejected, Rejected{string(e.ID), reason.SubnetFull, fmt.Sprintf("its subnet %s has no free address", e.Subnet)})
			continue
		}
		left := subnets[at].room(now)
		n := min(room, left, amount)
		actions = append(actions, AssignAddresses{
			Why: Why{
				Grounds:  fmt.Sprintf("%d addresses are missing; %s has %d free slots and its subnet %d free addresses", s.Needed, e.ID, room, left),
				Rejected: slices.Clone(rejected),
			},
			ENI: e.ID, Subnet: e.Subnet, Count: n,
		})
		subnets[at].Free -= n
		s.assigned += n
		needed -= n
		amount -= n
	}
	return actions, max(0, needed), rejected
}

// widen gives the instance one more ENI: one of ours that is attached nowhere,
// else a new one.
func (s *standing) widen(missing int, rejected []Rejected, now time.Time) ([]Action, *Blocked) {
	index, ok := s.freeIndex()
	if s.EmptySlots == 0 || !ok {
		return s.tidy(everySpare, "no slot is empty"), s.noSlot(missing, rejected)
	}

	if e, ok := s.adoptable(); ok {
		why := Why{Grounds: fmt.Sprintf("%d addresses are missing; %s was made for this instance and is attached nowhere", missing, e.ID), Rejected: rejected}
		return s.attachment(why, e.ID, index), nil
	}

	extra := s.amount - (s.Needed - missing) // What is asked for beyond what assign got.
	count := min(s.reading.Limits.IPv4-1, extra)
	if s.demand.UsePrimary {
		count = min(s.reading.Limits.IPv4-1, extra-1)
	}
	// What was made before and does not fit goes before another is made.
	unfit := s.tidy(func(e ENI) bool { return !s.fits(e) }, "does not fit")
	groups, blocked := chooseGroups(s.reading, s.demand)
	if blocked != nil {
		return unfit, blocked
	}
	subnet, others, blocked := chooseSubnet(s.reading, s.demand, now)
	if blocked != nil {
		return unfit, blocked
	}
	count = min(count, subnet.room(now)-1)
	var ids []ENIID
	for _, e := range s.attached {
		ids = append(ids, e.ID)
	}
	instance := s.reading.Instance.ID
	token := Token(s.demand.NodeUID, instance, ids, s.demand.Attempt)
	create := CreateENI{
		Why: Why{
			Grounds: fmt.Sprintf("%d addresses are missing that no attached ENI can give; %d slots are empty and %s has %d free addresses",
				missing, s.EmptySlots, subnet.ID, subnet.room(now)),
			Rejected: append(slices.Clone(rejected), others...),
		},
		Subnet: subnet.ID, Groups: groups, Count: count, Token: token,
		Description: fmt.Sprintf("eniplane %s (%s)", s.demand.Node, instance),
		Tags:        tagsOf(s.demand, s.policy, instance, token, now),
	}
	return append(append(unfit, create), s.attachment(Why{Grounds: "it was made for this instance"}, "", index)...), nil
}

// noSlot says why a node without an empty slot lacks addresses: an attached ENI
// that has room and cannot grow tells more than that the others are full.
func (s *standing) noSlot(missing int, rejected []Rejected) *Blocked {
	for _, why := range rejected {
		if why.Reason != reason.OutOfENIs {
			return &Blocked{why.Reason, fmt.Sprintf("%d addresses are missing, and of %s: %s; no slot for another ENI is empty", missing, why.Option, why.Message)}
		}
	}
	return &Blocked{reason.OutOfENIs, fmt.Sprintf("%d addresses are missing; every ENI is full and no slot of %d is empty", missing, s.reading.Limits.Interfaces)}
}

func (s *standing) attachment(why Why, id ENIID, index int) []Action {
	actions := []Action{AttachENI{why, id, s.reading.Instance.ID, index}}
	if !s.demand.KeepOnTermination {
		actions = append(actions, SetDeleteOnTermination{Why: Why{Grounds: "it shall go with its instance"}, ENI: id})
	}
	return actions
}

// adoptable is the first of our unattached ENIs that fits the instance.
func (s *standing) adoptable() (ENI, bool) {
	for _, e := range s.orphans {
		if s.fits(e) {
			return e, true
		}
	}
	return ENI{}, false
}

func (s *standing) fits(e ENI) bool {
	return s.Available+s.assigned+len(e.Usable(s.demand.UsePrimary)) <= s.marks.Max &&
		e.VPC == s.reading.Instance.VPC && e.Zone == s.reading.Instance.Zone &&
		len(e.Addresses)+len(e.Prefixes) < s.reading.Limits.IPv4 && !carries(e.Tags, s.demand.ExcludeTags)
}

// everySpare is for tidy.
func everySpare(ENI) bool { return true }

// tidy deletes those of our ENIs that are attached nowhere and not wanted.
func (s *standing) tidy(which func(ENI) bool, why string) []Action {
	var actions []Action
	for _, e := range s.orphans {
		if !which(e) {
			continue
		}
		actions = append(actions, DeleteENI{Why{Grounds: fmt.Sprintf("%s was made for this instance, is attached nowhere, and %s", e.ID, why)}, e.ID})
	}
	return actions
}

// freeIndex is the lowest device index for a new ENI. Index 0 is the primary
// interface's for ever.
func (s *standing) freeIndex() (int, bool) {
	const last = 255
	for i := max(1, s.demand.first(s.policy)); i <= last; i++ {
		taken := slices.ContainsFunc(s.attached, func(e ENI) bool { return e.Card == 0 && e.Index == i })
		if !taken && !slices.Contains(s.demand.TakenIndexes, i) {
			return i, true
		}
	}
	return 0, false
}

// earliestSkip is when the first subnet that is skipped may be asked again.
func (s *standing) earliestSkip(now time.Time) time.Time {
	var first time.Time
	for _, n := range s.reading.Subnets {
		if now.Before(n.SkippedUntil) && (first.IsZero() || n.SkippedUntil.Before(first)) {
			first = n.SkippedUntil
		}
	}
	return first
}

// Gives tells whether pods may have the addresses of an ENI of the node.
func Gives(e ENI, d Demand, p Policy) bool {
	return e.Instance != "" && !excluded(e, d.first(p), d.ExcludeTags)
}
