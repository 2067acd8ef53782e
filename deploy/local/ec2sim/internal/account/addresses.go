package account

import (
	"encoding/binary"
	"net/netip"
)

// AWS keeps the first four addresses of a subnet and the last one.
const (
	reservedFirst = 4
	reservedLast  = 1
	prefixBits    = 28
	prefixSize    = 1 << (32 - prefixBits)
)

func subnetSize(cidr netip.Prefix) uint32 { return 1 << (32 - cidr.Bits()) }

func addrAt(cidr netip.Prefix, offset uint32) netip.Addr {
	base := cidr.Addr().As4()
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(base[:])+offset)
	return netip.AddrFrom4(b)
}

func offsetOf(cidr netip.Prefix, addr netip.Addr) uint32 {
	base, b := cidr.Addr().As4(), addr.As4()
	return binary.BigEndian.Uint32(b[:]) - binary.BigEndian.Uint32(base[:])
}

func reserved(cidr netip.Prefix, offset uint32) bool {
	return offset < reservedFirst || offset >= subnetSize(cidr)-reservedLast
}

// mark records that an interface holds an address.
func (s *state) mark(subnet SubnetID, addr netip.Addr, eni ENIID) {
	used := s.used[subnet]
	used[addr] = eni
	s.journal.record(func() { delete(used, addr) })
}

// release gives addresses back to their subnet.
func (s *state) release(subnet SubnetID, addrs ...netip.Addr) {
	used := s.used[subnet]
	for _, addr := range addrs {
		eni := used[addr]
		delete(used, addr)
		s.journal.record(func() { used[addr] = eni })
	}
	s.addFree(subnet, len(addrs))
}

func (s *state) addFree(id SubnetID, n int) {
	subnet, _ := s.subnets.get(id)
	subnet.Free += n
	s.subnets.put(id, subnet)
}

// takeAny takes n free addresses of a subnet. It goes on from where it stopped
// last, so that an address that was given back is not handed out at once.
func (s *state) takeAny(id SubnetID, n int, eni ENIID) ([]netip.Addr, *Error) {
	if n == 0 {
		return nil, nil
	}
	subnet, _ := s.subnets.get(id)
	if n > subnet.Free {
		return nil, Errorf(codeSubnetFull, "The specified subnet does not have enough free addresses to satisfy the request.")
	}
	used, size := s.used[id], subnetSize(subnet.CIDR)
	addrs := make([]netip.Addr, 0, n)
	offset := subnet.cursor
	for len(addrs) < n { // ends: subnet.Free counts exactly the addresses that are neither reserved nor used
		offset %= size
		addr := addrAt(subnet.CIDR, offset)
		if _, taken := used[addr]; !taken && !reserved(subnet.CIDR, offset) {
			s.mark(id, addr, eni)
			addrs = append(addrs, addr)
		}
		offset++
	}
	subnet.Free -= n
	subnet.cursor = offset
	s.subnets.put(id, subnet)
	return addrs, nil
}

// takeExact takes the named addresses of a subnet.
func (s *state) takeExact(id SubnetID, addrs []netip.Addr, eni ENIID) *Error {
	subnet, _ := s.subnets.get(id)
	for _, addr := range addrs {
		if !subnet.CIDR.Contains(addr) {
			return invalid("Address %s does not fall within the subnet's address range", addr)
		}
		if reserved(subnet.CIDR, offsetOf(subnet.CIDR, addr)) {
			return invalid("Address %s is in subnet's reserved address range", addr)
		}
		if _, taken := s.used[id][addr]; taken {
			return Errorf("InvalidIPAddress.InUse", "Address %s is in use.", addr)
		}
		s.mark(id, addr, eni)
	}
	s.addFree(id, -len(addrs))
	return nil
}

// takePrefixes takes n free /28 blocks, the lowest ones.
func (s *state) takePrefixes(id SubnetID, n int, eni ENIID) ([]netip.Prefix, *Error) {
	subnet, _ := s.subnets.get(id)
	var prefixes []netip.Prefix
	for offset := uint32(0); len(prefixes) < n && offset+prefixSize <= subnetSize(subnet.CIDR); offset += prefixSize {
		prefix := netip.PrefixFrom(addrAt(subnet.CIDR, offset), prefixBits)
		if s.prefixFree(subnet, prefix) {
			s.takePrefix(id, prefix, eni)
			prefixes = append(prefixes, prefix)
		}
	}
	if len(prefixes) < n {
		return nil, Errorf("InsufficientCidrBlocks", "The specified subnet does not have enough free cidr blocks to satisfy the request.")
	}
	return prefixes, nil
}

// takeExactPrefixes takes the named /28 blocks.
func (s *state) takeExactPrefixes(id SubnetID, prefixes []netip.Prefix, eni ENIID) *Error {
	for _, prefix := range prefixes {
		subnet, _ := s.subnets.get(id)
		if !subnet.CIDR.Contains(prefix.Addr()) || subnet.CIDR.Bits() > prefixBits {
			return invalid("Prefix %s does not fall within the subnet's address range", prefix)
		}
		if !s.prefixFree(subnet, prefix) {
			return Errorf("InvalidIPAddress.InUse", "Prefix %s is in use.", prefix)
		}
		s.takePrefix(id, prefix, eni)
	}
	return nil
}

func (s *state) prefixFree(subnet Subnet, prefix netip.Prefix) bool {
	for _, addr := range expand(prefix) {
		if _, taken := s.used[subnet.ID][addr]; taken || reserved(subnet.CIDR, offsetOf(subnet.CIDR, addr)) {
			return false
		}
	}
	return true
}

func (s *state) takePrefix(id SubnetID, prefix netip.Prefix, eni ENIID) {
	for _, addr := range expand(prefix) {
		s.mark(id, addr, eni)
	}
	s.addFree(id, -prefixSize)
}

// expand lists the addresses of a prefix.
func expand(prefix netip.Prefix) []netip.Addr {
	addrs := make([]netip.Addr, 0, prefixSize)
	for addr := prefix.Addr(); prefix.Contains(addr); addr = addr.Next() {
		addrs = append(addrs, addr)
	}
	return addrs
}

// parseAddrs reads IPv4 addresses and refuses what is none, and duplicates.
func parseAddrs(texts []string) ([]netip.Addr, *Error) {
	var addrs []netip.Addr
	seen := make(map[netip.Addr]bool)
	for _, text := range texts {
		addr, err := netip.ParseAddr(text)
		if err != nil || !addr.Is4() {
			return nil, invalid("invalid value for parameter address: %s", text)
		}
		if seen[addr] {
			return nil, invalid("Address %s is given more than once", addr)
		}
		seen[addr] = true
		addrs = append(addrs, addr)
	}
	return addrs, nil
}

// parsePrefixes reads /28 prefixes and refuses what is none, and duplicates.
func parsePrefixes(texts []string) ([]netip.Prefix, *Error) {
	var prefixes []netip.Prefix
	seen := make(map[netip.Prefix]bool)
	for _, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		if err != nil || !prefix.Addr().Is4() || prefix.Bits() != prefixBits || prefix != prefix.Masked() {
			return nil, badPrefix(text)
		}
		if seen[prefix] {
			return nil, invalid("Prefix %s is given more than once", prefix)
		}
		seen[prefix] = true
		prefixes = append(prefixes, prefix)
	}
	return prefixes, nil
}
