// Package api is the wire side of EC2: it decodes query requests, runs them
// through a chain of middlewares down to the account, and encodes the answers
// as the XML that EC2 clients expect.
package api

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/account"
)

// Call is one API call on its way to the account.
type Call struct {
	// Action is the EC2 action, such as "AttachNetworkInterface".
	Action string
	// N counts the calls of this action, from 1, since the counters were reset.
	N int
	// RequestID is what the answer carries.
	RequestID string
	// AccessKey is the access key id in the Authorization header; empty if there
	// is none. It is not verified.
	AccessKey string
	// Params are the form values of the request. Read only.
	Params map[string][]string
	// Start is when the call arrived, by the simulator's clock.
	Start time.Time
}

// Param returns the first value of a form parameter, or "".
func (c Call) Param(name string) string {
	if values := c.Params[name]; len(values) > 0 {
		return values[0]
	}
	return ""
}

// Response is what an action answers, ready to be encoded as XML.
type Response any

// Handler carries out a call. It returns a response or an error, never both.
type Handler func(ctx context.Context, call Call) (Response, *account.Error)

// Middleware wraps a handler: to refuse a call, delay it, or hide or replace
// the answer of one that did happen.
type Middleware func(next Handler) Handler

// Calls counts calls.
type Calls struct {
	// Started counts calls by action, whatever became of them.
	Started map[string]int `json:"started"`
	// Failed counts refusals by action and error code.
	Failed map[string]map[string]int `json:"failed"`
}

// Total is the number of calls of the given actions, or of all.
func (c Calls) Total(actions ...string) int {
	total := 0
	if len(actions) == 0 {
		for _, n := range c.Started {
			total += n
		}
	}
	for _, action := range actions {
		total += c.Started[action]
	}
	return total
}

// Counter counts calls. The zero value is ready.
type Counter struct {
	mu     sync.Mutex // guards what follows
	counts Calls
}

// start counts a call and returns which one of its action it is.
func (c *Counter) start(action string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.counts.Started == nil {
		c.counts.Started = make(map[string]int)
	}
	c.counts.Started[action]++
	return c.counts.Started[action]
}

func (c *Counter) fail(action, code string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.counts.Failed == nil {
		c.counts.Failed = make(map[string]map[string]int)
	}
	if c.counts.Failed[action] == nil {
		c.counts.Failed[action] = make(map[string]int)
	}
	c.counts.Failed[action][code]++
}

// Calls returns a copy of the counts. Its maps are never nil.
func (c *Counter) Calls() Calls {
	c.mu.Lock()
	defer c.mu.Unlock()
	counts := Calls{Started: make(map[string]int), Failed: make(map[string]map[string]int)}
	maps.Copy(counts.Started, c.counts.Started)
	for action, codes := range c.counts.Failed {
		counts.Failed[action] = maps.Clone(codes)
	}
	return counts
}

// Reset sets all counts to zero.
func (c *Counter) Reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts = Calls{}
}
