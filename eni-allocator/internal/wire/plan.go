package wire

import (
	"google.golang.org/protobuf/types/known/timestamppb"

	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/internal/reason"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

// Reason converts a reason.
func Reason(r reason.Reason) reasonv1.Reason { return reasonv1.Reason(r) }

// Blocked converts the cause of a block; nil gives nil.
func Blocked(b *plan.Blocked) *nodev1.Condition {
	if b == nil {
		return nil
	}
	return &nodev1.Condition{Reason: Reason(b.Reason), Message: b.Message}
}

// Actions converts the actions of a plan, in order.
func Actions(actions []plan.Action) []*eniv1.PlannedAction {
	var out []*eniv1.PlannedAction
	for _, a := range actions {
		out = append(out, action(a))
	}
	return out
}

func action(a plan.Action) *eniv1.PlannedAction {
	why := a.Account()
	out := &eniv1.PlannedAction{Grounds: why.Grounds}
	for _, r := range why.Rejected {
		out.Rejected = append(out.Rejected, &eniv1.RejectedOption{Option: r.Option, Reason: Reason(r.Reason), Message: r.Message})
	}
	switch a := a.(type) {
	case plan.AssignAddresses:
		out.Kind, out.EniId, out.SubnetId, out.Count = eniv1.ActionKind_ACTION_KIND_ASSIGN_ADDRESSES, string(a.ENI), string(a.Subnet), Count(a.Count)
	case plan.CreateENI:
		out.Kind, out.SubnetId, out.Count = eniv1.ActionKind_ACTION_KIND_CREATE, string(a.Subnet), Count(a.Count)
	case plan.AttachENI:
		out.Kind, out.EniId, out.DeviceIndex = eniv1.ActionKind_ACTION_KIND_ATTACH, string(a.ENI), Count(a.Index)
	case plan.SetDeleteOnTermination:
		out.Kind, out.EniId = eniv1.ActionKind_ACTION_KIND_SET_DELETE_ON_TERMINATION, string(a.ENI)
	case plan.DeleteENI:
		out.Kind, out.EniId = eniv1.ActionKind_ACTION_KIND_DELETE, string(a.ENI)
	}
	return out
}

// Count converts a number that is not negative; a negative one becomes 0.
func Count(n int) uint32 { return uint32(min(max(n, 0), 1<<31-1)) } //nolint:gosec // Bounded in this line.

// Subnet converts a subnet.
func Subnet(s plan.Subnet) *eniv1.SubnetCapacity {
	out := &eniv1.SubnetCapacity{
		Id: string(s.ID), VpcId: string(s.VPC), AvailabilityZone: s.Zone, Free: Count(s.Free), Reserved: Count(s.Reserved), Tags: s.Tags,
	}
	if s.CIDR.IsValid() {
		out.Cidr = s.CIDR.String()
	}
	if !s.SkippedUntil.IsZero() {
		out.SkippedUntil = timestamppb.New(s.SkippedUntil)
	}
	return out
}
