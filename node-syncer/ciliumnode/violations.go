package ciliumnode

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
)

// Violation is one way in which an object breaks invariant I1, the rule that a
// reader may take any address of the pool and find its ENI.
type Violation struct {
	// Address is the pool's address; empty if an ENI is at fault.
	Address string
	// ENI is the id of the ENI.
	ENI string
	// Problem is one sentence.
	Problem string
}

// String returns the violation as one line.
func (v Violation) String() string {
	if v.Address == "" {
		return v.ENI + ": " + v.Problem
	}
	return v.Address + " on " + v.ENI + ": " + v.Problem
}

// Violations returns every way in which n breaks invariant I1, sorted: each
// address in spec.ipam.pool names an ENI in status.eni.enis that lists it, and
// every ENI in the status has its subnet CIDR and its VPC's primary CIDR. A
// cilium-agent ends itself over the former ("unable to find ENI", cilium#16494)
// and ignores the whole object over the latter (cilium#32855). None means nil.
func Violations(n *CiliumNode) []Violation {
	var found []Violation
	enis := n.Status.ENI.ENIs
	for _, id := range slices.Sorted(maps.Keys(enis)) {
		eni := enis[id]
		if eni.ID != id {
			found = append(found, Violation{ENI: id, Problem: fmt.Sprintf("its id is %q", eni.ID)})
		}
		if _, err := netip.ParsePrefix(eni.Subnet.CIDR); err != nil {
			found = append(found, Violation{ENI: id, Problem: fmt.Sprintf("its subnet CIDR is %q", eni.Subnet.CIDR)})
		}
		if _, err := netip.ParsePrefix(eni.VPC.PrimaryCIDR); err != nil {
			found = append(found, Violation{ENI: id, Problem: fmt.Sprintf("its VPC's primary CIDR is %q", eni.VPC.PrimaryCIDR)})
		}
	}
	listed := make(map[string]map[string]bool, len(enis))
	for id, eni := range enis {
		listed[id] = make(map[string]bool, len(eni.Addresses))
		for _, a := range eni.Addresses {
			listed[id][a] = true
		}
	}
	for _, address := range slices.Sorted(maps.Keys(n.Spec.IPAM.Pool)) {
		id := n.Spec.IPAM.Pool[address].Resource
		switch addresses, exists := listed[id]; {
		case !exists:
			found = append(found, Violation{Address: address, ENI: id, Problem: "the status has no such ENI"})
		case !addresses[address]:
			found = append(found, Violation{Address: address, ENI: id, Problem: "the ENI does not list it"})
		}
	}
	return found
}
