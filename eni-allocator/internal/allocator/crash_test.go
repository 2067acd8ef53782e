package allocator_test

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
)

func addresses(texts ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range texts {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// TestCrash kills the allocator around each change that it makes on the way to a
// second ENI, starts another, and requires the same end with nothing leaked
// (invariant I3).
func TestCrash(t *testing.T) {
	actions := []string{"AssignPrivateIpAddresses", "CreateNetworkInterface", "AttachNetworkInterface", "ModifyNetworkInterfaceAttribute"}
	for _, action := range actions {
		for _, after := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/done=%t", action, after), func(t *testing.T) {
				t.Parallel()
				crash(t, action, after)
			})
		}
	}
}

func crash(t *testing.T, action string, after bool) {
	w := newWorld(t)
	w.node("n", medium, 7)
	struck := make(chan struct{})
	var once sync.Once
	strike := func(c ec2sim.Call) *ec2sim.APIError {
		if c.Action != action {
			return nil
		}
		// The process dies now: it sees no answer, and asks for nothing more.
		once.Do(func() { close(struck) })
		return apiError("ServiceUnavailable", "The answer is lost.", 503)
	}
	if after {
		w.fault(fault{after: strike})
	} else {
		w.fault(fault{before: strike})
	}
	first := w.start()
	<-struck
	first.kill()
	w.heal()

	w.start()
	w.poolOf("n", 7)
	w.quiet()
	if made := w.enis(); len(made) != 1 {
		t.Errorf("made %+v", made)
	}
}

// TestLostAnswers is TestCrash without the crash: the process goes on and has to
// find out what became of the call.
func TestLostAnswers(t *testing.T) {
	for _, action := range []string{"AssignPrivateIpAddresses", "CreateNetworkInterface", "AttachNetworkInterface", "ModifyNetworkInterfaceAttribute"} {
		t.Run(action, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.node("n", medium, 7)
			var once sync.Once
			w.fault(fault{after: func(c ec2sim.Call) *ec2sim.APIError {
				var err *ec2sim.APIError
				if c.Action == action {
					once.Do(func() { err = apiError("ServiceUnavailable", "The answer is lost.", 503) })
				}
				return err
			}})
			w.start()
			w.poolOf("n", 7)
			w.quiet()
			if made := w.enis(); len(made) != 1 || count(w.changes(), "CreateNetworkInterface") > 2 {
				t.Errorf("made %+v with %v", made, w.changes())
			}
		})
	}
}

// TestTokenOfADeletedENI is a successor that computes the token of an ENI which
// was deleted: EC2 answers with that one, and the successor must not wait for it
// for ever.
func TestTokenOfADeletedENI(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 7)
	struck := make(chan struct{})
	var once sync.Once
	w.fault(fault{before: func(c ec2sim.Call) *ec2sim.APIError {
		if c.Action == "AttachNetworkInterface" {
			once.Do(func() { close(struck) })
			return apiError("ServiceUnavailable", "Try again.", 503)
		}
		return nil
	}})
	first := w.start()
	<-struck
	first.kill()
	for _, e := range w.sim.State().NetworkInterfaces {
		if e.Attachment == nil {
			w.deleteENI(string(e.ID))
		}
	}
	w.heal()
	w.start()
	w.poolOf("n", 7)
	w.quiet()
	if made := w.enis(); len(made) != 1 {
		t.Errorf("made %+v", made)
	}
}
