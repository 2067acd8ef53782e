package plan

import (
	"fmt"
	"testing"

	"github.com/eniplane/eniplane/internal/reason"
)

// The vectors are those of Cilium's operator tests for calculateNeededIPs.
func TestNeeded(t *testing.T) {
	for _, tt := range []struct{ available, used, pre, minimum, maximum, want int }{
		{0, 0, 0, 16, 0, 16},
		{0, 0, 8, 16, 0, 16},
		{0, 0, 16, 8, 0, 16},
		{0, 0, 16, 0, 0, 16},
		{8, 0, 0, 16, 0, 8},
		{8, 4, 8, 0, 0, 4},
		{8, 4, 8, 8, 0, 4},
		{8, 4, 8, 8, 6, 0},
		{8, 4, 8, 0, 8, 0},
		{4, 4, 8, 0, 8, 4},
	} {
		t.Run(fmt.Sprint(tt), func(t *testing.T) {
			w := Watermarks{Pre: or(tt.pre), Min: tt.minimum, Max: tt.maximum}
			if got := w.Needed(tt.available, tt.used); got != tt.want {
				t.Errorf("got %d, want %d", got, tt.want)
			}
		})
	}
}

// The vectors are those of Cilium's operator tests for calculateExcessIPs.
func TestExcess(t *testing.T) {
	for _, tt := range []struct{ available, used, pre, minimum, above, want int }{
		{0, 0, 0, 16, 0, 0},
		{15, 0, 8, 16, 8, 0},
		{17, 0, 8, 16, 0, 1},
		{20, 0, 8, 16, 4, 0},
		{21, 0, 8, 0, 4, 9},
		{20, 0, 8, 20, 8, 0},
		{16, 1, 8, 16, 8, 0},
		{20, 4, 8, 17, 8, 0},
		{20, 4, 8, 0, 0, 8},
		{20, 4, 8, 0, 8, 0},    // B8
		{61, 29, 20, 60, 0, 1}, // B7: 12 before cilium#28467
	} {
		t.Run(fmt.Sprint(tt), func(t *testing.T) {
			w := Watermarks{Pre: or(tt.pre), Min: tt.minimum, Above: tt.above}
			if got := w.Excess(tt.available, tt.used); got != tt.want {
				t.Errorf("got %d, want %d", got, tt.want)
			}
		})
	}
}

// or is how a node that does not say pre-allocate is counted.
func or(pre int) int {
	if pre == 0 {
		return DefaultPreAllocate
	}
	return pre
}

// A node that lacks addresses and may not have them knows which ceiling it hit.
func TestCeiling(t *testing.T) {
	for _, tt := range []struct {
		name   string
		demand Demand
		typ    string
		most   int
		why    reason.Reason
	}{
		{"capacity", Demand{MinAllocate: 100}, "t3.medium", 15, reason.OutOfENIs},
		{"max-allocate", Demand{MaxAllocate: 6}, "t3.medium", 6, reason.MaxAllocate},
		{"max-allocate above capacity", Demand{MaxAllocate: 60, MinAllocate: 100}, "t3.medium", 15, reason.OutOfENIs},
		{"max-allocate below min-allocate", Demand{MaxAllocate: 6, MinAllocate: 8}, "t3.medium", 6, reason.MaxAllocate},
		{"pods (B19)", Demand{MaxPods: 20, Urgent: 50}, "m5.4xlarge", 20, reason.MaxPods},
		{"pods and the router", Demand{MaxPods: 20, System: 1, Urgent: 50}, "m5.4xlarge", 21, reason.MaxPods},
		{"pods, but min-allocate asks for more", Demand{MaxPods: 20, MinAllocate: 30, Urgent: 50}, "m5.4xlarge", 30, reason.MaxPods},
		{"pods, but pre-allocate asks for more", Demand{MaxPods: 4, PreAllocate: 8, Urgent: 50}, "m5.4xlarge", 8, reason.MaxPods},
		{"min-allocate above capacity", Demand{MaxPods: 20, MinAllocate: 100}, "t3.medium", 15, reason.OutOfENIs},
		{"pods and max-allocate", Demand{MaxPods: 20, MaxAllocate: 10, Urgent: 50}, "m5.4xlarge", 10, reason.MaxAllocate},
		{"nothing may give addresses", Demand{FirstInterfaceIndex: index(3), Urgent: 1}, "t3.medium", 0, reason.OutOfENIs},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(tt.typ)
			for {
				p := Pool(w.reading, tt.demand, policy(), start)
				if len(p.Actions) == 0 {
					if p.Available != tt.most || p.Blocked == nil || p.Blocked.Reason != tt.why || p.Blocked.Message == "" {
						t.Errorf("%d addresses, blocked %+v; want %d because of %s", p.Available, p.Blocked, tt.most, tt.why)
					}
					return
				}
				for _, a := range p.Actions {
					if err := w.apply(a); err != nil {
						t.Fatal(err)
					}
				}
			}
		})
	}
}
