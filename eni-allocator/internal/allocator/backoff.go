package allocator

import (
	"math/rand/v2"
	"time"
)

// Backoff is how long to wait after failures in a row: it doubles from Initial
// to Max, and between half and all of it is waited.
type Backoff struct {
	// Initial zero means 500 ms, Max zero 5 minutes.
	Initial, Max time.Duration
}

func (b Backoff) withDefaults() Backoff {
	if b.Initial == 0 {
		b.Initial = 500 * time.Millisecond
	}
	if b.Max == 0 {
		b.Max = 5 * time.Minute
	}
	return b
}

// after returns how long to wait after the nth failure in a row, counted from 1.
func (b Backoff) after(failures int) time.Duration {
	wait := b.Max
	if shift := failures - 1; shift < 30 && b.Initial<<shift < b.Max {
		wait = b.Initial << max(shift, 0)
	}
	return wait/2 + rand.N(wait/2+1) //nolint:gosec // Jitter is no secret.
}
