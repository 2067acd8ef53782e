package ledger

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"
)

// The default range is Cilium's scope of local CIDR identities, so that
// datapaths treat our numbers as CIDR identities (pkg/identity/numericidentity.go:
// scope byte 0x01; its first number is never given out).
const (
	DefaultFirst Number = 1<<24 + 1
	DefaultLast  Number = 1<<25 - 1
)

// Range is the closed range of numbers that are given out.
type Range struct{ First, Last Number }

// Validate returns an error that says why no number could come from the range.
func (r Range) Validate() error {
	if r.First == 0 {
		return fmt.Errorf("%w: the first number is 0, which means none", ErrNumberOutOfRange)
	}
	if r.First > r.Last {
		return fmt.Errorf("%w: the first number %d is above the last, %d", ErrNumberOutOfRange, r.First, r.Last)
	}
	return nil
}

// Contains reports whether n can be given out.
func (r Range) Contains(n Number) bool { return r.First <= n && n <= r.Last }

// Size is how many numbers there are.
func (r Range) Size() uint64 { return uint64(r.Last) - uint64(r.First) + 1 }

// Candidate returns the number that a prefix gets if it is free. It depends on
// the prefix alone, so that a store that was lost altogether gives most prefixes
// the numbers that they had. A salt other than zero gives another candidate.
func (r Range) Candidate(p netip.Prefix, salt uint32) Number {
	b := AppendPrefix(make([]byte, 0, 24), p)
	if salt != 0 {
		b = binary.BigEndian.AppendUint32(b, salt)
	}
	h := sha256.Sum256(b)
	return r.First + Number(binary.BigEndian.Uint64(h[:8])%r.Size())
}

// Numbers is the view of the numbers that are in use. Count is how many of them
// are in the range.
type Numbers struct {
	Taken func(Number) bool
	Count uint64
}

// Choose picks a number for each wanted prefix, none of which has one: the
// preferred one if it is free, else the first free one from the prefix's
// candidate on. Numbers differ from each other and from the taken ones. salt is
// zero at the first try and other than that after a lost race. It returns
// ErrNumbersExhausted if there are too few.
func Choose(r Range, wanted []Wanted, salt uint32, numbers Numbers) ([]Grant, error) {
	if numbers.Count+uint64(len(wanted)) > r.Size() {
		return nil, fmt.Errorf("%w: %d wanted, %d of %d in use", ErrNumbersExhausted, len(wanted), numbers.Count, r.Size())
	}
	grants := make([]Grant, 0, len(wanted))
	chosen := make(map[Number]struct{}, len(wanted))
	free := func(n Number) bool {
		_, mine := chosen[n]
		return !mine && !numbers.Taken(n)
	}
	for _, w := range wanted {
		n := w.Preferred
		if n == 0 || !r.Contains(n) || !free(n) {
			n = r.Candidate(w.Prefix, salt)
			for steps := uint64(0); !free(n); steps++ {
				if steps == r.Size() {
					return nil, fmt.Errorf("%w: %d of %d in use", ErrNumbersExhausted, r.Size(), r.Size())
				}
				if n++; !r.Contains(n) {
					n = r.First
				}
			}
		}
		chosen[n] = struct{}{}
		grants = append(grants, Grant{Prefix: w.Prefix, Number: n})
	}
	return grants, nil
}
