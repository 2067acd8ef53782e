// Package pooldigest compares what was published of a node's pool with what is
// stored: two sides that know the same ENIs and addresses compute the same text.
// It covers only what survives a round trip through a CiliumNode.
package pooldigest

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"maps"
	"slices"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
)

// Of returns a digest of ENIs and pool that does not depend on any order, nor
// on whether something empty is nil. It changes neither argument. Equal inputs
// have equal digests in every version that writes the same fields.
func Of(enis []*nodev1.Eni, pool []*nodev1.PoolAddress) string {
	w := writer{sha256.New()}

	enis = slices.SortedFunc(slices.Values(enis), func(a, b *nodev1.Eni) int {
		return cmp.Compare(a.GetId(), b.GetId())
	})
	w.count(len(enis))
	for _, e := range enis {
		w.text(e.GetId(), e.GetIp(), e.GetMac(), e.GetAvailabilityZone(), e.GetDescription())
		w.count(int(e.GetDeviceIndex()))
		w.text(e.GetSubnet().GetId(), e.GetSubnet().GetCidr(), e.GetVpc().GetId(), e.GetVpc().GetPrimaryCidr())
		w.set(e.GetVpc().GetCidrs())
		w.set(e.GetAddresses())
		w.set(e.GetPrefixes())
		w.set(e.GetSecurityGroups())
		keys := slices.Sorted(maps.Keys(e.GetTags()))
		w.count(len(keys))
		for _, k := range keys {
			w.text(k, e.GetTags()[k])
		}
	}

	pool = slices.SortedFunc(slices.Values(pool), func(a, b *nodev1.PoolAddress) int {
		return cmp.Or(cmp.Compare(a.GetAddress(), b.GetAddress()), cmp.Compare(a.GetEniId(), b.GetEniId()))
	})
	w.count(len(pool))
	for _, p := range pool {
		w.text(p.GetAddress(), p.GetEniId())
	}
	return hex.EncodeToString(w.Sum(nil))
}

// writer feeds a hash with values that cannot run into each other.
type writer struct{ hash.Hash }

func (w writer) count(n int) {
	_, _ = w.Write(binary.BigEndian.AppendUint64(nil, uint64(n))) // A hash never fails.
}

func (w writer) text(values ...string) {
	for _, v := range values {
		w.count(len(v))
		_, _ = w.Write([]byte(v))
	}
}

func (w writer) set(values []string) {
	sorted := slices.Sorted(slices.Values(values))
	w.count(len(sorted))
	w.text(sorted...)
}
