package plan

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The tags by which an ENI is its own record. Whatever lacks them is not ours,
// and never deleted.
const (
	// TagCluster holds the cluster's name.
	TagCluster = "eniplane.dev/cluster"
	// TagNodeUID holds the UID of the node for which it was made.
	TagNodeUID = "eniplane.dev/node-uid"
	// TagInstance holds the instance for which it was made.
	TagInstance = "eniplane.dev/instance-id"
	// TagIntent holds the ClientToken of its creation.
	TagIntent = "eniplane.dev/intent"
	// TagCreated holds when its creation was asked for, as RFC 3339.
	TagCreated = "eniplane.dev/created-at"
)

// Owned tells whether a cluster made the ENI for an instance.
func (e ENI) Owned(cluster string, instance InstanceID) bool {
	return instance != "" && e.Tags[TagInstance] == string(instance) && e.Tags[TagCluster] == cluster && e.Tags[TagIntent] != ""
}

// Token is the ClientToken of the creation of an ENI. It depends on nothing that
// an allocator remembers, so that a successor computes it again: attached are
// the ids of the ENIs attached to the instance, in any order; attempt counts
// those creations for them that are known to be gone.
func Token(nodeUID string, instance InstanceID, attached []ENIID, attempt int) string {
	h := sha256.New()
	write := func(s string) {
		// Lengths keep ("a","bc") and ("ab","c") apart. A hash never fails.
		_, _ = h.Write([]byte(strconv.Itoa(len(s)) + ":" + s))
	}
	write(nodeUID)
	write(string(instance))
	for _, id := range slices.Sorted(slices.Values(attached)) {
		write(string(id))
	}
	write(strconv.Itoa(attempt))
	// EC2 takes up to 64 characters.
	return "eniplane-" + hex.EncodeToString(h.Sum(nil)[:24])
}

// tagsOf are the tags of a new ENI. Ours win over those of the policy.
func tagsOf(d Demand, p Policy, instance InstanceID, token string, now time.Time) map[string]string {
	tags := maps.Clone(p.Tags)
	if tags == nil {
		tags = make(map[string]string)
	}
	tags[TagCluster] = p.Cluster
	tags[TagNodeUID] = d.NodeUID
	tags[TagInstance] = string(instance)
	tags[TagIntent] = token
	since := d.IntentSince
	if since.IsZero() {
		since = now
	}
	tags[TagCreated] = since.UTC().Format(time.RFC3339)
	return tags
}

// carries tells whether tags hold all of wanted. Nothing carries an empty set.
func carries(tags, wanted map[string]string) bool {
	if len(wanted) == 0 {
		return false
	}
	for k, v := range wanted {
		if got, ok := tags[k]; !ok || got != v {
			return false
		}
	}
	return true
}

func tagText(tags map[string]string) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(tags)) {
		parts = append(parts, fmt.Sprintf("%s=%s", k, tags[k]))
	}
	return strings.Join(parts, ",")
}

func byID(a, b ENI) int { return cmp.Compare(a.ID, b.ID) }
