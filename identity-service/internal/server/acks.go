package server

import (
	"sync"

	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

// ack is the last acknowledgement of a session that this replica has heard.
type ack struct {
	epoch    ledger.Epoch
	revision int64
	failures int
}

// acks has one entry per session, so it is as big as the cluster has nodes. It
// is not persisted: nothing is decided by it yet.
type acks struct {
	mu sync.Mutex // guards of
	of map[ledger.SessionID]ack
}

// record notes an acknowledgement and reports whether the node begins to fail.
func (a *acks) record(id ledger.SessionID, now ack) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	before := a.of[id]
	a.of[id] = now
	return now.failures > 0 && before.failures == 0
}

// failing counts the sessions whose last acknowledgement named failures.
func (a *acks) failing() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, one := range a.of {
		if one.failures > 0 {
			n++
		}
	}
	return n
}
