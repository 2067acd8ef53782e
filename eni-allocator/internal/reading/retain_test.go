package reading_test

import (
	"testing"
	"time"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
	"github.com/eniplane/eniplane/eni-allocator/internal/reading"
)

func TestInstancesThatCameAndWentAreForgotten(t *testing.T) {
	c, now := reading.New(), time.Now()
	for _, id := range []plan.InstanceID{"i-gone", "i-node"} {
		c.FoldInstances(now, []plan.Instance{{ID: id, VPC: "v", State: plan.InstanceRunning}}, nil)
		c.FoldENIs(now, nil, reading.Scope{VPCs: []plan.VPCID{"v"}})
	}
	later := now.Add(time.Minute)
	c.FoldInstances(later, []plan.Instance{{ID: "i-here", VPC: "v", State: plan.InstanceRunning}}, nil)
	c.FoldENIs(later, nil, reading.Scope{VPCs: []plan.VPCID{"v"}})
	c.Retain(later, func(id plan.InstanceID) bool { return id == "i-node" })
	for id, want := range map[plan.InstanceID]bool{"i-gone": false, "i-node": true, "i-here": true} {
		if _, known := c.Reading(id); known != want {
			t.Errorf("%s is known: %t, want %t", id, known, want)
		}
	}
}
