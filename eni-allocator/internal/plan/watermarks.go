package plan

// DefaultPreAllocate is how many addresses are kept free on a node that says
// nothing, if its instance can have so many. It is Cilium's.
const DefaultPreAllocate = 8

// Watermarks are how many addresses a node wants.
type Watermarks struct {
	// Pre is kept free.
	Pre int
	// Min is the least in total; 0 means no floor.
	Min int
	// Max is the most in total; 0 means no ceiling.
	Max int
	// Above is what may be had beyond, when asking anyway.
	Above int
}

// Deficit is how many addresses are missing, whatever the ceiling.
func (w Watermarks) Deficit(available, used int) int {
	missing := w.Pre - (available - used)
	if w.Min > 0 {
		missing = max(missing, w.Min-available)
	}
	return max(0, missing)
}

// Needed is how many addresses are missing and may be had.
func (w Watermarks) Needed(available, used int) int {
	return w.below(available, w.Deficit(available, used))
}

// below is n, or what the ceiling leaves of it.
func (w Watermarks) below(available, n int) int {
	if w.Max > 0 {
		n = min(n, w.Max-available)
	}
	return max(0, n)
}

// Excess is how many addresses are above the watermarks. While the node uses so
// few that the floor decides, what lies below floor and slack is no excess.
func (w Watermarks) Excess(available, used int) int {
	floor := w.Min + w.Above
	if used <= floor {
		if available <= floor {
			return 0
		}
		if used+w.Pre <= floor {
			return available - floor
		}
	}
	return max(0, available-used-w.Pre-w.Above)
}
