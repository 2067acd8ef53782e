package plan

import (
	"time"

	"github.com/eniplane/eniplane/internal/reason"
)

// Action is one call to EC2, as a value.
type Action interface {
	// Account says on what grounds it is done and what was considered instead.
	Account() Why
	action()
}

// Why is the account of a decision.
type Why struct {
	// Grounds is one sentence with the numbers.
	Grounds string
	// Rejected is what was considered instead.
	Rejected []Rejected
}

// Account returns w.
func (w Why) Account() Why { return w }

func (Why) action() {}

// Rejected is an option that was not taken.
type Rejected struct {
	// Option is an id, such as that of a subnet.
	Option  string
	Reason  reason.Reason
	Message string
}

// AssignAddresses asks for more addresses on an ENI that is attached.
type AssignAddresses struct {
	Why
	ENI    ENIID
	Subnet SubnetID
	Count  int
}

// CreateENI makes an ENI with all the addresses that it shall have. The actions
// after it that name no ENI mean this one.
type CreateENI struct {
	Why
	Subnet SubnetID
	Groups []GroupID
	// Count is how many secondary addresses it gets.
	Count int
	// Token makes a repetition harmless; a successor computes the same.
	Token       string
	Description string
	Tags        map[string]string
}

// AttachENI attaches an ENI to the instance.
type AttachENI struct {
	Why
	// ENI is empty for the one created just before.
	ENI      ENIID
	Instance InstanceID
	Index    int
}

// SetDeleteOnTermination lets an attached ENI go with its instance.
type SetDeleteOnTermination struct {
	Why
	// ENI and Attachment are empty for the one attached just before.
	ENI        ENIID
	Attachment AttachmentID
}

// DeleteENI deletes an ENI of ours that is attached nowhere.
type DeleteENI struct {
	Why
	ENI ENIID
}

// Blocked says why a node does not get what it wants.
type Blocked struct {
	Reason  reason.Reason
	Message string
}

// Plan is what to do for a node.
type Plan struct {
	// Actions are done in order. None means: nothing to do, or blocked.
	Actions []Action
	// Blocked says why the node lacks what no action gets. Nil means that it
	// lacks nothing.
	Blocked *Blocked
	// Notes are what else a person may want to know.
	Notes []Blocked
	// RetryAt is when the cause of Blocked passes by itself. Zero means unknown.
	RetryAt time.Time
	Summary
}

// Summary is how a node stands before the plan.
type Summary struct {
	// Available is how many addresses pods may have, Used how many they have.
	Available, Used int
	// Needed is how many are missing and may be had, Excess how many are above
	// the watermarks.
	Needed, Excess int
	// Capacity is the most that the instance can have. 0 with unknown limits.
	Capacity int
	// EmptySlots is how many more ENIs it can have.
	EmptySlots int
}

// Free is how many addresses pods could have and do not.
func (s Summary) Free() int { return s.Available - s.Used }
