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
			w := Watermarks{PreAllocate: tt.pre, MinAllocate: tt.minimum, MaxAllocate: tt.maximum}
			if got := Needed(tt.available, tt.used, w); got != tt.want {
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
			w := Watermarks{PreAllocate: tt.pre, MinAllocate: tt.minimum, MaxAboveWatermark: tt.above}
			if got := Excess(tt.available, tt.used, w); got != tt.want {
				t.Errorf("got %d, want %d", got, tt.want)
			}
		})
	}
}

func TestCeiling(t *testing.T) {
	for _, tt := range []struct {
		name     string
		demand   Demand
		capacity int
		want     int
		why      reason.Reason
	}{
		{"capacity", Demand{}, 15, 15, reason.OutOfENIs},
		{"max-allocate", Demand{Watermarks: Watermarks{MaxAllocate: 6}}, 15, 6, reason.MaxAllocate},
		{"max-allocate above capacity", Demand{Watermarks: Watermarks{MaxAllocate: 60}}, 15, 15, reason.OutOfENIs},
		{"max-allocate below min-allocate", Demand{Watermarks: Watermarks{MaxAllocate: 6, MinAllocate: 8}}, 15, 6, reason.MaxAllocate},
		{"pods (B19)", Demand{MaxPods: 20}, 58, 20, reason.MaxPods},
		{"pods, but min-allocate asks for more", Demand{MaxPods: 20, Watermarks: Watermarks{MinAllocate: 30}}, 58, 30, reason.MaxPods},
		{"pods, but pre-allocate asks for more", Demand{MaxPods: 4, Watermarks: Watermarks{PreAllocate: 8}}, 58, 8, reason.MaxPods},
		{"min-allocate above capacity", Demand{MaxPods: 20, Watermarks: Watermarks{MinAllocate: 100}}, 58, 58, reason.OutOfENIs},
		{"pods and max-allocate", Demand{MaxPods: 20, Watermarks: Watermarks{MaxAllocate: 10}}, 58, 10, reason.MaxAllocate},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, why := ceiling(tt.demand, tt.capacity)
			if got != tt.want || why != tt.why {
				t.Errorf("got %d because of %s, want %d because of %s", got, why, tt.want, tt.why)
			}
		})
	}
}
