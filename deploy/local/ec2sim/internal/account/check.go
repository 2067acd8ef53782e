package account

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// Check tests what must hold for every state of the account, and returns all
// that does not: no address is on two interfaces or outside its subnet, free
// counts are right, primaries exist, slots and device indices fit the instance
// type, and both sides of an attachment agree.
func (a *Account) Check() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return errors.Join(a.checkAddresses(), a.checkAttachments(), a.checkInstances(), a.checkKeys())
}

func (s *state) checkAddresses() error {
	var problems []error
	report := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	holders := make(map[SubnetID]map[netip.Addr]ENIID)
	for _, subnet := range s.subnets.all() {
		holders[subnet.ID] = make(map[netip.Addr]ENIID)
	}
	for _, eni := range s.enis.all() {
		subnet, ok := s.subnets.get(eni.Subnet)
		if !ok {
			report("%s: no subnet %s", eni.ID, eni.Subnet)
			continue
		}
		addrs := eni.Addresses()
		for _, prefix := range eni.Prefixes {
			addrs = append(addrs, expand(prefix)...)
		}
		for _, addr := range addrs {
			if !subnet.CIDR.Contains(addr) || reserved(subnet.CIDR, offsetOf(subnet.CIDR, addr)) {
				report("%s: address %s can not be used in %s", eni.ID, addr, subnet.CIDR)
			}
			if other, taken := holders[subnet.ID][addr]; taken {
				report("address %s is on %s and %s", addr, other, eni.ID)
			}
			holders[subnet.ID][addr] = eni.ID
			if got := s.used[subnet.ID][addr]; got != eni.ID {
				report("address %s of %s is entered for %q", addr, eni.ID, got)
			}
		}
	}
	for _, subnet := range s.subnets.all() {
		if got, want := len(s.used[subnet.ID]), len(holders[subnet.ID]); got != want {
			report("%s: %d addresses entered, %d held", subnet.ID, got, want)
		}
		if want := int(subnetSize(subnet.CIDR)) - reservedFirst - reservedLast - len(holders[subnet.ID]); subnet.Free != want {
			report("%s: %d free, want %d", subnet.ID, subnet.Free, want)
		}
	}
	return errors.Join(problems...)
}

func (s *state) checkAttachments() error {
	var problems []error
	report := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	attached := 0
	for _, eni := range s.enis.all() {
		if (eni.Status == StatusInUse) != (eni.Attachment != nil) {
			report("%s: status %s does not fit its attachment", eni.ID, eni.Status)
		}
		if eni.Attachment == nil {
			continue
		}
		attached++
		if id, _ := s.attachments.get(eni.Attachment.ID); id != eni.ID {
			report("attachment %s of %s is entered for %q", eni.Attachment.ID, eni.ID, id)
		}
		instance, ok := s.instances.get(eni.Attachment.Instance)
		if !ok || !slices.Contains(instance.Interfaces, eni.ID) {
			report("%s: instance %s does not know it", eni.ID, eni.Attachment.Instance)
			continue
		}
		limit, _ := s.limits.Lookup(instance.Type)
		if err := checkSlots(eni, limit); err != nil {
			report("%s: %w", eni.ID, err)
		}
		if eni.Zone != instance.Zone {
			report("%s: in zone %s, instance in %s", eni.ID, eni.Zone, instance.Zone)
		}
	}
	if got := len(s.attachments.keys); got != attached {
		report("%d attachments entered, %d exist", got, attached)
	}
	return errors.Join(problems...)
}

func (s *state) checkInstances() error {
	var problems []error
	report := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	for _, instance := range s.instances.all() {
		type place struct{ card, index int }
		places := make(map[place]bool)
		perCard := make(map[int]int)
		for _, id := range instance.Interfaces {
			eni, ok := s.enis.get(id)
			if !ok || eni.Attachment == nil || eni.Attachment.Instance != instance.ID {
				report("%s: %s is not attached to it", instance.ID, id)
				continue
			}
			at := place{eni.Attachment.NetworkCard, eni.Attachment.DeviceIndex}
			if places[at] {
				report("%s: device index %d of card %d is used twice", instance.ID, at.index, at.card)
			}
			places[at] = true
			perCard[at.card]++
			if at == (place{}) && eni.Primary != instance.Address {
				report("%s: address %s, primary interface has %s", instance.ID, instance.Address, eni.Primary)
			}
		}
		limit, _ := s.limits.Lookup(instance.Type)
		for card, n := range perCard {
			if card >= len(limit.Cards) || n > limit.Cards[card] {
				report("%s: %d interfaces on card %d", instance.ID, n, card)
			}
		}
		if terminated := instance.State == StateTerminated; terminated == places[place{}] {
			report("%s: state %s, primary interface %t", instance.ID, instance.State, places[place{}])
		}
		if instance.State == StateTerminated && len(instance.Interfaces) > 0 {
			report("%s: terminated with interfaces", instance.ID)
		}
	}
	return errors.Join(problems...)
}

func (s *state) checkKeys() error {
	return errors.Join(
		checkTable(s.vpcs, func(r VPC) VPCID { return r.ID }), checkTable(s.subnets, func(r Subnet) SubnetID { return r.ID }),
		checkTable(s.groups, func(r SecurityGroup) GroupID { return r.ID }), checkTable(s.instances, func(r Instance) InstanceID { return r.ID }),
		checkTable(s.enis, func(r NetworkInterface) ENIID { return r.ID }), checkTable(s.routeTables, func(r RouteTable) RouteTableID { return r.ID }),
	)
}

func checkTable[K ~string, V any](t *table[K, V], id func(V) K) error {
	if !slices.IsSorted(t.keys) || len(t.keys) != len(t.rows) {
		return fmt.Errorf("keys of %T are not those of its rows", t)
	}
	for key, row := range t.rows {
		if id(row) != key {
			return fmt.Errorf("row %s is entered as %s", id(row), key)
		}
	}
	return nil
}
