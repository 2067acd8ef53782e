package server

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/identity-service/internal/keeper"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

const (
	// maxRequest is the size of the largest SetHolding.
	maxRequest = 16 << 20
	// maxViolations is how many wrong fields are named in one refusal.
	maxViolations = 20
)

// nodeName is a DNS-1123 subdomain, as Kubernetes demands of the name of a Node.
var nodeName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

func badNodeName(name string) string {
	if !nodeName.MatchString(name) {
		return fmt.Sprintf("%.80q is not a DNS-1123 subdomain", name)
	}
	return ""
}

func owner(o *identityv1.Owner) ledger.Owner {
	return ledger.Owner{Kind: ledger.OwnerKind(o.GetKind()), Namespace: o.GetNamespace(), Name: o.GetName(), UID: o.GetUid()}
}

func wireOwner(o ledger.Owner) *identityv1.Owner {
	return &identityv1.Owner{Kind: identityv1.OwnerKind(o.Kind), Namespace: o.Namespace, Name: o.Name, Uid: o.UID}
}

// wantedSet is a set as it was asked for.
type wantedSet struct {
	asked  []ledger.Wanted // in the order of the request, canonical
	set    ledger.Set
	wanted []ledger.Wanted // in the order of the set
}

// parseWanted makes the prefixes canonical and refuses what is not right, all of
// it at once up to a limit.
func parseWanted(req *identityv1.SetHoldingRequest, r ledger.Range) (*wantedSet, error) {
	if size := proto.Size(req); size > maxRequest {
		return nil, rpc.InvalidField("prefixes", reason.FieldInvalid, "the request has %d bytes, more than %d", size, maxRequest)
	}
	w := &wantedSet{asked: make([]ledger.Wanted, 0, len(req.GetPrefixes()))}
	prefixes := make([]netip.Prefix, 0, len(req.GetPrefixes()))
	preferred := make(map[netip.Prefix]ledger.Number)
	var wrong []rpc.FieldViolation
	for i, asked := range req.GetPrefixes() {
		p, err := prefix.Parse(asked.GetPrefix())
		n := ledger.Number(asked.GetPreferredNumber())
		before, twice := preferred[p]
		violation := rpc.FieldViolation{Field: fmt.Sprintf("prefixes[%d].prefix", i)}
		switch {
		case err != nil:
			violation.Description, violation.Reason = err.Error(), reason.PrefixInvalid
		case prefix.IsWorld(p):
			violation.Description, violation.Reason = fmt.Sprintf("%s is a reserved world identity", p), reason.PrefixReserved
		case n != 0 && !r.Contains(n):
			violation.Field = fmt.Sprintf("prefixes[%d].preferred_number", i)
			violation.Description, violation.Reason = fmt.Sprintf("%d is outside of %d..%d", n, r.First, r.Last), reason.NumberOutOfRange
		case n != 0 && twice && before != n:
			violation.Field = fmt.Sprintf("prefixes[%d].preferred_number", i)
			violation.Description, violation.Reason = fmt.Sprintf("%d contradicts %d for the same prefix", n, before), reason.FieldInvalid
		default:
			if n != 0 {
				preferred[p] = n
			}
			prefixes = append(prefixes, p)
			w.asked = append(w.asked, ledger.Wanted{Prefix: p, Preferred: n})
			continue
		}
		if wrong = append(wrong, violation); len(wrong) == maxViolations {
			break
		}
	}
	if len(wrong) > 0 {
		return nil, &rpc.Error{
			Code: codes.InvalidArgument, Reason: wrong[0].Reason, Fields: wrong,
			Message: wrong[0].Field + ": " + wrong[0].Description,
		}
	}
	set, err := ledger.NewSet(prefixes)
	if err != nil {
		return nil, rpc.InvalidField("prefixes", reason.PrefixReserved, "%v", err)
	}
	w.set = set
	w.wanted = make([]ledger.Wanted, len(set.Prefixes))
	for i, p := range set.Prefixes {
		w.wanted[i] = ledger.Wanted{Prefix: p, Preferred: preferred[p]}
	}
	return w, nil
}

// response answers in the order of the request. Two spellings of one prefix get
// the same answer.
func (w *wantedSet) response(held keeper.Held) *identityv1.SetHoldingResponse {
	resp := &identityv1.SetHoldingResponse{
		Revision:    held.Revision,
		Duplicates:  uint32(len(w.asked) - len(w.set.Prefixes)),
		Assignments: make([]*identityv1.Assignment, len(w.asked)),
	}
	all := make([]identityv1.Assignment, len(w.asked))
	for i, asked := range w.asked {
		at, _ := slices.BinarySearchFunc(w.set.Prefixes, asked.Prefix, prefix.Compare)
		a := &all[i]
		a.Prefix, a.Number = asked.Prefix.String(), uint32(held.Numbers[at])
		if n := w.wanted[at].Preferred; n != 0 && n != held.Numbers[at] {
			a.PreferredRefused = reasonv1.Reason(reason.NumberTaken)
		}
		resp.Assignments[i] = a
	}
	return resp
}

// parsePrefix parses one CIDR in a field.
func parsePrefix(field, text string) (netip.Prefix, error) {
	p, err := prefix.Parse(text)
	if err != nil {
		return netip.Prefix{}, rpc.InvalidField(field, reason.PrefixInvalid, "%v", err)
	}
	return p, nil
}
