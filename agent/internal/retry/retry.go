// Package retry is how long the agent waits before it tries again.
package retry

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/eniplane/eniplane/internal/rpc"
)

const (
	// First is the shortest pause.
	First = 200 * time.Millisecond
	// Last is the longest pause, unless a server asks for a longer one.
	Last = 10 * time.Second
)

// Next returns the pause after one that did not help, the last of which ended in
// err: twice as long, with jitter, and no shorter than the server asked for. The
// first pause is 0.
func Next(pause time.Duration, err error) time.Duration {
	pause = min(max(2*pause, First), Last)
	if after, ok := rpc.RetryAfter(err); ok && after > pause {
		return after
	}
	return pause/2 + rand.N(pause/2+1)
}

// Sleep waits, and reports false if ctx ended first.
func Sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
