package view

import (
	"encoding/json"
	"fmt"
	"net/netip"

	"google.golang.org/protobuf/proto"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/plan"
)

// Flaw is what is wrong with a snapshot.
type Flaw struct {
	// Field is its path in the request.
	Field string
	// Reason and Text say what is wrong.
	Reason reason.Reason
	Text   string
}

// maxBytes bounds what a snapshot becomes in an object, which is enough for 11,000
// addresses. etcd takes 1.5 MiB; what is left is for the API server, which records
// who manages each address and needs half as much for that, for the fields of
// others, and for the time in which the object has old and new.
const maxBytes = 768 << 10

// tooLarge reports whether no object can hold a snapshot, and its size.
func tooLarge(s *nodev1.PoolSnapshot) (int, bool) {
	if proto.Size(s) < maxBytes/8 {
		return 0, false // JSON takes at most six times as much.
	}
	want := Wanted(s)
	n := Edit(Edit(&ciliumnode.CiliumNode{}, plan.MainWrite{Main: want.Main}), plan.StatusWrite{Status: want.Status})
	raw, err := json.Marshal(n)
	return len(raw), err != nil || len(raw) > maxBytes
}

// Check returns the first flaw of a snapshot whose fields already keep the
// rules of its proto, or nil. A snapshot without flaws is consistent in the
// sense of invariant I1.
func Check(s *nodev1.PoolSnapshot) *Flaw {
	owner := make(map[string]string)               // address → ENI
	listed := make(map[string]map[netip.Addr]bool) // ENI → addresses
	primaries := make(map[string]string)           // address → ENI
	index := make(map[uint32]string)               // device index → ENI
	for i, e := range s.GetEnis() {
		at := func(field string) string { return fmt.Sprintf("snapshot.enis[%d].%s", i, field) }
		if listed[e.GetId()] != nil {
			return &Flaw{at("id"), reason.Duplicate, e.GetId() + " appears twice"}
		}
		if other, taken := index[e.GetDeviceIndex()]; taken {
			return &Flaw{at("device_index"), reason.Duplicate, fmt.Sprintf("%d is the index of %s too", e.GetDeviceIndex(), other)}
		}
		index[e.GetDeviceIndex()] = e.GetId()
		subnet, err := netip.ParsePrefix(e.GetSubnet().GetCidr())
		if err != nil || !subnet.Addr().Is4() || subnet != subnet.Masked() {
			return &Flaw{at("subnet.cidr"), reason.CIDRUnknown, fmt.Sprintf("%q is not an IPv4 CIDR", e.GetSubnet().GetCidr())}
		}
		if vpc, err := netip.ParsePrefix(e.GetVpc().GetPrimaryCidr()); err != nil || !vpc.Addr().Is4() || vpc != vpc.Masked() {
			return &Flaw{at("vpc.primary_cidr"), reason.CIDRUnknown, fmt.Sprintf("%q is not an IPv4 CIDR", e.GetVpc().GetPrimaryCidr())}
		}
		for j, c := range e.GetVpc().GetCidrs() {
			if p, err := netip.ParsePrefix(c); err != nil || !p.Addr().Is4() || p != p.Masked() {
				return &Flaw{at(fmt.Sprintf("vpc.cidrs[%d]", j)), reason.FieldInvalid, fmt.Sprintf("%q is not an IPv4 CIDR", c)}
			}
		}
		addresses := make(map[netip.Addr]bool, len(e.GetAddresses()))
		primary, err := netip.ParseAddr(e.GetIp())
		if err != nil || !subnet.Contains(primary) {
			return &Flaw{at("ip"), reason.AddressOutsideSubnet, fmt.Sprintf("%q is not in %s", e.GetIp(), subnet)}
		}
		if other := primaries[e.GetIp()]; other != "" {
			return &Flaw{at("ip"), reason.Duplicate, fmt.Sprintf("%s is on %s too", e.GetIp(), other)}
		}
		primaries[e.GetIp()] = e.GetId()
		for j, a := range e.GetAddresses() {
			field := at(fmt.Sprintf("addresses[%d]", j))
			ip, err := netip.ParseAddr(a)
			switch {
			case err != nil || !subnet.Contains(ip):
				return &Flaw{field, reason.AddressOutsideSubnet, fmt.Sprintf("%q is not in %s", a, subnet)}
			case owner[a] != "":
				return &Flaw{field, reason.Duplicate, fmt.Sprintf("%s is on %s too", a, owner[a])}
			}
			owner[a] = e.GetId()
			addresses[ip] = true
		}
		for j, p := range e.GetPrefixes() {
			field := at(fmt.Sprintf("prefixes[%d]", j))
			block, err := netip.ParsePrefix(p)
			if err != nil || !block.Addr().Is4() || block.Bits() != 28 || block != block.Masked() || !subnet.Contains(block.Addr()) {
				return &Flaw{field, reason.FieldInvalid, fmt.Sprintf("%q is not a /28 in %s", p, subnet)}
			}
			for ip := block.Addr(); block.Contains(ip); ip = ip.Next() {
				if !addresses[ip] {
					return &Flaw{field, reason.FieldsContradict, fmt.Sprintf("%s of %s is not in addresses", ip, p)}
				}
			}
		}
		listed[e.GetId()] = addresses
	}
	for i, e := range s.GetEnis() {
		if id := owner[e.GetIp()]; id != "" && id != e.GetId() {
			return &Flaw{fmt.Sprintf("snapshot.enis[%d].ip", i), reason.Duplicate, fmt.Sprintf("%s is on %s too", e.GetIp(), id)}
		}
	}

	seen := make(map[string]bool, len(s.GetPool()))
	for i, p := range s.GetPool() {
		field := fmt.Sprintf("snapshot.pool[%d]", i)
		ip, err := netip.ParseAddr(p.GetAddress())
		switch {
		case err != nil:
			return &Flaw{field + ".address", reason.FieldInvalid, fmt.Sprintf("%q is not an address", p.GetAddress())}
		case seen[p.GetAddress()]:
			return &Flaw{field + ".address", reason.Duplicate, p.GetAddress() + " appears twice"}
		case listed[p.GetEniId()] == nil:
			return &Flaw{field + ".eni_id", reason.AddressNotOnENI, "the snapshot has no ENI " + p.GetEniId()}
		case !listed[p.GetEniId()][ip]:
			return &Flaw{field + ".address", reason.AddressNotOnENI, p.GetEniId() + " does not list " + p.GetAddress()}
		}
		seen[p.GetAddress()] = true
	}
	if size, large := tooLarge(s); large {
		return &Flaw{"snapshot", reason.FieldInvalid, fmt.Sprintf("its object would have %d bytes, more than the %d that can be stored", size, maxBytes)}
	}
	if len(s.GetReleases()) > 0 {
		return &Flaw{"snapshot.releases", reason.FieldInvalid, "this version does not release addresses"}
	}
	return nil
}
