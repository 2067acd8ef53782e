// Package bench prints measurements as ratios against a reference that was
// measured in the same run. What is measured does not belong here.
package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"time"
)

// Result is one figure.
type Result struct {
	// Service and Name make up the figure's name.
	Service, Name string
	// Ours and Reference are in Unit, such as "us" or "B".
	Ours, Reference float64
	Unit            string
	// Target is the largest ratio that is good.
	Target float64
}

// Print writes the figure as one line:
//
//	bench <service>/<name> ours=<value><unit> reference=<value><unit> ratio=<r> target=<t> ok|short
//
// A reference of zero makes the ratio infinite, and short; so is a figure that
// was not measured (NaN).
func (r Result) Print(w io.Writer) error {
	ratio := math.Inf(1)
	if r.Reference != 0 {
		ratio = r.Ours / r.Reference
	}
	verdict := "short" // Also of what is not a number.
	if ratio <= r.Target {
		verdict = "ok"
	}
	_, err := fmt.Fprintf(w, "bench %s/%s ours=%.1f%s reference=%.1f%s ratio=%.2f target=%g %s\n",
		r.Service, r.Name, r.Ours, r.Unit, r.Reference, r.Unit, ratio, r.Target, verdict)
	return err
}

// Percentile returns the p-th percentile (0 < p ≤ 100) of samples by nearest
// rank, in microseconds. It sorts samples. No samples give NaN.
func Percentile(samples []time.Duration, p float64) float64 {
	if len(samples) == 0 {
		return math.NaN()
	}
	slices.Sort(samples)
	rank := int(math.Ceil(p/100*float64(len(samples)))) - 1
	rank = min(max(rank, 0), len(samples)-1)
	return float64(samples[rank].Nanoseconds()) / 1e3
}

// Interleave times a and b n times each, in turn, so that both meet the same
// disturbances; the first tenth of n more rounds warms up and is not counted.
// It returns the times of a, then those of b, and stops at the first error.
func Interleave(n int, a, b func(i int) error) ([]time.Duration, []time.Duration, error) {
	var as, bs []time.Duration
	warm := n / 10
	for i := range n + warm {
		start := time.Now()
		if err := a(i); err != nil {
			return nil, nil, err
		}
		middle := time.Now()
		if err := b(i); err != nil {
			return nil, nil, err
		}
		end := time.Now()
		if i >= warm {
			as = append(as, middle.Sub(start))
			bs = append(bs, end.Sub(middle))
		}
	}
	return as, bs, nil
}
