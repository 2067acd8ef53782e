package allocator_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/eniplane/eniplane/eni-allocator/internal/allocator"
	"github.com/eniplane/eniplane/eni-allocator/internal/lease"
	"github.com/eniplane/eniplane/internal/reason"
)

func TestLeaseThatWasLateOnceIsWorkedOnWith(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 4)
	var late atomic.Int32
	late.Store(1)
	w.startTerm(lease.NewTerm(2000, func() error {
		if late.Add(-1) >= 0 {
			return lease.ErrLost
		}
		return nil
	}))
	w.poolOf("n", 4)
}

func TestThrottledLimitsAreNotUnknownLimits(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 4)
	w.fault(refuseAll("DescribeInstanceTypes", apiError("RequestLimitExceeded", "Request limit exceeded.", 503)))
	r := w.start(func(c *allocator.Config) { c.Recheck = 10 * time.Second })
	deadline := time.Now().Add(8 * time.Second)
	throttled := false
	for time.Now().Before(deadline) {
		s, err := r.Node("n")
		if err == nil {
			for _, c := range s.Conditions {
				if reason.Reason(c.GetReason()) == reason.InstanceTypeUnknown {
					t.Fatalf("condition %v while EC2 throttles", c)
				}
				throttled = throttled || reason.Reason(c.GetReason()) == reason.EC2Throttled
			}
		}
		if throttled {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Error("nothing says that EC2 throttles")
}
