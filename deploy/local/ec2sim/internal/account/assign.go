package account

import (
	"net/netip"
	"slices"
	"strings"
	"time"
)

// AssignPrivateIPAddressesRequest is the input of AssignPrivateIpAddresses.
// Exactly one of the four ways to say what to assign must be used. The action
// has no client token: repeating it assigns again.
type AssignPrivateIPAddressesRequest struct {
	NetworkInterfaceID ENIID    `query:"NetworkInterfaceId"`
	Addresses          []string `query:"PrivateIpAddress"`
	SecondaryCount     *int     `query:"SecondaryPrivateIpAddressCount"`
	Prefixes           []string `query:"Ipv4Prefix"`
	PrefixCount        *int     `query:"Ipv4PrefixCount"`
	AllowReassignment  bool     `query:"AllowReassignment"`
}

// AssignPrivateIPAddressesResponse is the output of AssignPrivateIpAddresses:
// what was assigned by this request.
type AssignPrivateIPAddressesResponse struct {
	NetworkInterfaceID ENIID
	Addresses          []netip.Addr
	Prefixes           []netip.Prefix
}

// AssignPrivateIPAddresses adds secondary addresses or prefixes to an
// interface, attached or not.
func (a *Account) AssignPrivateIPAddresses(req AssignPrivateIPAddressesRequest) (AssignPrivateIPAddressesResponse, *Error) {
	var resp AssignPrivateIPAddressesResponse
	err := a.mutate(false, func(s *state, _ time.Time) *Error {
		eni, err := s.eni(req.NetworkInterfaceID)
		if err != nil {
			return err
		}
		want, err := planAssign(req)
		if err != nil {
			return err
		}
		if req.AllowReassignment {
			s.takeAway(eni, want.secondary)
		}
		held := func(addr netip.Addr) bool { return addr == eni.Primary || slices.Contains(eni.Secondary, addr) }
		if req.AllowReassignment {
			want.secondary = slices.DeleteFunc(want.secondary, held)
		}
		added := len(want.secondary) + want.secondaryCount + len(want.prefixes) + want.prefixCount
		if eni.Slots()+added > s.slotLimit(eni) {
			return Errorf("PrivateIpAddressLimitExceeded", "Number of private addresses will exceed limit.")
		}
		if err := s.takeExact(eni.Subnet, want.secondary, eni.ID); err != nil {
			return err
		}
		more, err := s.takeAny(eni.Subnet, want.secondaryCount, eni.ID)
		if err != nil {
			return err
		}
		if err := s.takeExactPrefixes(eni.Subnet, want.prefixes, eni.ID); err != nil {
			return err
		}
		blocks, err := s.takePrefixes(eni.Subnet, want.prefixCount, eni.ID)
		if err != nil {
			return err
		}
		resp = AssignPrivateIPAddressesResponse{
			NetworkInterfaceID: eni.ID,
			Addresses:          slices.Concat(want.secondary, more),
			Prefixes:           slices.Concat(want.prefixes, blocks),
		}
		eni.Secondary = slices.Concat(eni.Secondary, resp.Addresses)
		eni.Prefixes = slices.Concat(eni.Prefixes, resp.Prefixes)
		s.enis.put(eni.ID, eni)
		return nil
	})
	if err != nil {
		return AssignPrivateIPAddressesResponse{}, err
	}
	return resp, nil
}

func planAssign(req AssignPrivateIPAddressesRequest) (addressPlan, *Error) {
	ways := 0
	for _, given := range []bool{len(req.Addresses) > 0, req.SecondaryCount != nil, len(req.Prefixes) > 0, req.PrefixCount != nil} {
		if given {
			ways++
		}
	}
	switch {
	case ways == 0:
		return addressPlan{}, missing("secondaryPrivateIpAddressCount")
	case ways > 1:
		return addressPlan{}, combination("Only one of privateIpAddress, secondaryPrivateIpAddressCount, ipv4Prefix and ipv4PrefixCount can be used")
	case req.SecondaryCount != nil && *req.SecondaryCount < 1:
		return addressPlan{}, invalid("Value (%d) for parameter secondaryPrivateIpAddressCount is invalid. It must be positive.", *req.SecondaryCount)
	case req.PrefixCount != nil && *req.PrefixCount < 1:
		return addressPlan{}, invalid("Value (%d) for parameter ipv4PrefixCount is invalid. It must be positive.", *req.PrefixCount)
	}
	var plan addressPlan
	var err *Error
	if plan.secondary, err = parseAddrs(req.Addresses); err != nil {
		return addressPlan{}, err
	}
	if plan.prefixes, err = parsePrefixes(req.Prefixes); err != nil {
		return addressPlan{}, err
	}
	if req.SecondaryCount != nil {
		plan.secondaryCount = *req.SecondaryCount
	}
	if req.PrefixCount != nil {
		plan.prefixCount = *req.PrefixCount
	}
	return plan, nil
}

// takeAway removes the addresses from the other interfaces that have them as
// secondary ones.
func (s *state) takeAway(eni NetworkInterface, addrs []netip.Addr) {
	for _, addr := range addrs {
		other, ok := s.enis.get(s.used[eni.Subnet][addr])
		if !ok || other.ID == eni.ID || !slices.Contains(other.Secondary, addr) {
			continue
		}
		other.Secondary = slices.DeleteFunc(slices.Clone(other.Secondary), func(x netip.Addr) bool { return x == addr })
		s.enis.put(other.ID, other)
		s.release(eni.Subnet, addr)
	}
}

// slotLimit is how many slots the interface has where it is now.
func (s *state) slotLimit(eni NetworkInterface) int {
	if eni.Attachment == nil {
		return s.limits.MaxAddresses()
	}
	instance, _ := s.instances.get(eni.Attachment.Instance)
	limit, _ := s.limits.Lookup(instance.Type)
	return limit.AddressesPerInterface
}

// UnassignPrivateIPAddressesRequest is the input of UnassignPrivateIpAddresses.
type UnassignPrivateIPAddressesRequest struct {
	NetworkInterfaceID ENIID    `query:"NetworkInterfaceId"`
	Addresses          []string `query:"PrivateIpAddress"`
	Prefixes           []string `query:"Ipv4Prefix"`
}

// UnassignPrivateIPAddresses takes secondary addresses or prefixes from an
// interface, all of them or none. An address inside a prefix is not a
// secondary address.
func (a *Account) UnassignPrivateIPAddresses(req UnassignPrivateIPAddressesRequest) *Error {
	return a.mutate(false, func(s *state, _ time.Time) *Error {
		eni, err := s.eni(req.NetworkInterfaceID)
		if err != nil {
			return err
		}
		addrs, err := parseAddrs(req.Addresses)
		if err != nil {
			return err
		}
		prefixes, err := parsePrefixes(req.Prefixes)
		if err != nil {
			return err
		}
		switch {
		case len(addrs) == 0 && len(prefixes) == 0:
			return missing("privateIpAddress")
		case len(addrs) > 0 && len(prefixes) > 0:
			return combination("The parameter privateIpAddress cannot be used with the parameter ipv4Prefix")
		case slices.Contains(addrs, eni.Primary):
			return invalid("The primary private IP address %s of interface %s cannot be unassigned.", eni.Primary, eni.ID)
		}
		secondary, lacking := subtract(eni.Secondary, addrs)
		if len(lacking) > 0 {
			return invalid("Some of [%s] are not assigned to interface %s", listed(lacking), eni.ID)
		}
		blocks, lackingPrefixes := subtract(eni.Prefixes, prefixes)
		if len(lackingPrefixes) > 0 {
			return invalid("Some of [%s] are not assigned to interface %s", listed(lackingPrefixes), eni.ID)
		}
		s.release(eni.Subnet, addrs...)
		for _, prefix := range prefixes {
			s.release(eni.Subnet, expand(prefix)...)
		}
		eni.Secondary, eni.Prefixes = secondary, blocks
		s.enis.put(eni.ID, eni)
		return nil
	})
}

// subtract returns have without those in take, and those in take that have
// does not hold.
func subtract[T comparable](have, take []T) ([]T, []T) {
	var rest, lacking []T
	for _, x := range have {
		if !slices.Contains(take, x) {
			rest = append(rest, x)
		}
	}
	for _, x := range take {
		if !slices.Contains(have, x) {
			lacking = append(lacking, x)
		}
	}
	return rest, lacking
}

func listed[T interface{ String() string }](items []T) string {
	var texts []string
	for _, item := range items {
		texts = append(texts, item.String())
	}
	return strings.Join(texts, ", ")
}
