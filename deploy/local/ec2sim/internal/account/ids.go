package account

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"strings"
)

// kind is one sort of identifier: how it begins, and how EC2 answers to one
// that is malformed or that nobody has.
type kind struct {
	prefix    string
	malformed string
	notFound  string
	noun      string
}

func kindENI() kind {
	return kind{"eni-", "InvalidNetworkInterfaceId.Malformed", "InvalidNetworkInterfaceID.NotFound", "networkInterface"}
}

func kindInstance() kind {
	return kind{"i-", "InvalidInstanceID.Malformed", "InvalidInstanceID.NotFound", "instance"}
}

func kindSubnet() kind {
	return kind{"subnet-", "InvalidSubnetID.Malformed", "InvalidSubnetID.NotFound", "subnet"}
}

func kindVPC() kind {
	return kind{"vpc-", "InvalidVpcID.Malformed", "InvalidVpcID.NotFound", "vpc"}
}

func kindGroup() kind {
	return kind{"sg-", "InvalidGroupId.Malformed", "InvalidGroup.NotFound", "security group"}
}

func kindRouteTable() kind {
	return kind{"rtb-", "InvalidRouteTableId.Malformed", "InvalidRouteTableID.NotFound", "routeTable"}
}

func kindAttachment() kind {
	return kind{"eni-attach-", "InvalidAttachmentId.Malformed", "InvalidAttachmentID.NotFound", "attachment"}
}

// check refuses an id that does not have the shape of the kind.
func (k kind) check(id string) *Error {
	digits, ok := strings.CutPrefix(id, k.prefix)
	if !ok || (len(digits) != 8 && len(digits) != 17) || strings.Trim(digits, "0123456789abcdef") != "" {
		return Errorf(k.malformed, "Invalid id: %q (expecting \"%s...\")", id, k.prefix)
	}
	return nil
}

func (k kind) missing(id string) *Error {
	if k.noun == "security group" {
		return Errorf(k.notFound, "The security group '%s' does not exist", id)
	}
	return Errorf(k.notFound, "The %s ID '%s' does not exist", k.noun, id)
}

// find looks an id up in its table, and refuses it as EC2 does if it is
// malformed or unknown.
func find[K ~string, V any](t *table[K, V], k kind, id K) (V, *Error) {
	row, ok := t.get(id)
	if ok {
		return row, nil
	}
	if err := k.check(string(id)); err != nil {
		return row, err
	}
	return row, k.missing(string(id))
}

// newID makes the next identifier of a kind. The n-th of a kind depends on the
// seed and n only, whatever else was created before it.
func (s *state) newID(prefix string) string {
	digest := s.next(prefix)
	return prefix + "0" + hex.EncodeToString(digest[:8])
}

// newMAC makes a locally administered unicast address.
func (s *state) newMAC() string {
	digest := s.next("mac")
	mac := net.HardwareAddr(append([]byte{0x0a}, digest[:5]...))
	return mac.String()
}

func (s *state) next(name string) [sha256.Size]byte {
	s.counters[name]++
	var buf [16]byte
	binary.BigEndian.PutUint64(buf[:8], s.seed)
	binary.BigEndian.PutUint64(buf[8:], s.counters[name])
	return sha256.Sum256(fmt.Appendf(buf[:], "/%s", name))
}
