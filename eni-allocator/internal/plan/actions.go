package plan

import (
	"github.com/eniplane/eniplane/internal/reason"
)

// Action is one outside call. AssignAddresses, CreateENI, AttachENI,
// SetDeleteOnTermination and DeleteENI are the only ones.
type Action interface {
	// Name is the EC2 action that carries it out.
	Name() string
	isAction()
}

// AssignAddresses adds secondary addresses of EC2's choice to an ENI. It has no
// token: its outcome must be known before it is repeated.
type AssignAddresses struct {
	ENI   ENIID
	Count int
}

// CreateENI makes an unattached ENI with its addresses and tags in one call.
type CreateENI struct {
	Subnet SubnetID
	// Groups are sorted.
	Groups []GroupID
	// Count is the number of secondary addresses; the primary comes on top.
	Count int
	// Token makes the call idempotent.
	Token       string
	Tags        map[string]string
	Description string
}

// AttachENI attaches an ENI to the instance, on network card 0.
type AttachENI struct {
	// ENI is empty for the one that the CreateENI before it makes.
	ENI      ENIID
	Instance InstanceID
	Index    int
}

// SetDeleteOnTermination ties the life of an attached ENI to its instance.
type SetDeleteOnTermination struct {
	// ENI and Attachment are empty for those that the AttachENI before it makes.
	ENI        ENIID
	Attachment AttachmentID
}

// DeleteENI deletes an unattached ENI of ours.
type DeleteENI struct{ ENI ENIID }

// Name returns the EC2 action.
func (AssignAddresses) Name() string { return "AssignPrivateIpAddresses" }

// Name returns the EC2 action.
func (CreateENI) Name() string { return "CreateNetworkInterface" }

// Name returns the EC2 action.
func (AttachENI) Name() string { return "AttachNetworkInterface" }

// Name returns the EC2 action.
func (SetDeleteOnTermination) Name() string { return "ModifyNetworkInterfaceAttribute" }

// Name returns the EC2 action.
func (DeleteENI) Name() string { return "DeleteNetworkInterface" }

func (AssignAddresses) isAction()        {}
func (CreateENI) isAction()              {}
func (AttachENI) isAction()              {}
func (SetDeleteOnTermination) isAction() {}
func (DeleteENI) isAction()              {}

// Option is something that was considered and not done.
type Option struct {
	// What is the id of an ENI or subnet, or a few words.
	What    string
	Reason  reason.Reason
	Message string
}

// Step is an action with its grounds.
type Step struct {
	Action Action
	// Grounds is one sentence: why this.
	Grounds string
	// Rejected are the options that lost to it, in the order of consideration.
	Rejected []Option
}

// Blocked says why nothing can be done although something should be.
type Blocked struct {
	Reason  reason.Reason
	Message string
	// Rejected are the options that were considered.
	Rejected []Option
}

// Numbers are what a plan rests on.
type Numbers struct {
	// Available are the addresses that pods may use, Used those of them in use,
	// and Free the rest.
	Available, Used, Free int
	// Needed is what the watermarks lack, inside the ceiling.
	Needed int
	// Excess is what lies above the watermarks.
	Excess int
	// Capacity is the most that the instance can have. 0 means unknown, or none.
	Capacity int
	// Ceiling is the most that it may have: capacity, max pods and max-allocate.
	Ceiling int
	// EmptySlots are the ENIs that could still be attached.
	EmptySlots int
}

// Plan is what to do for one node.
type Plan struct {
	// Steps are in order. Empty means that nothing is to be done, or can be.
	Steps []Step
	// Blocked is nil unless something should be done and nothing can.
	Blocked *Blocked
	Numbers Numbers
}
