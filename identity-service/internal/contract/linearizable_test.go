package contract_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/internal/testsize"
)

// act is what a client does to one prefix: it holds it, holds it no more, or
// asks for it.
type act struct {
	prefix string
	client int
	kind   actKind
}

type actKind int

const (
	hold actKind = iota
	release
	ask
)

// seen is the answer. number is 0 if the prefix has none.
type seen struct {
	number  uint32
	holders uint32
}

// truth is what is true of one prefix at one moment.
type truth struct {
	number  uint32 // 0 until somebody held it first
	holders uint64 // a bit for each client
}

func (s truth) count() uint32 {
	n := uint32(0)
	for b := s.holders; b != 0; b &= b - 1 {
		n++
	}
	return n
}

var register = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		of := make(map[string][]porcupine.Operation)
		for _, o := range history {
			p := o.Input.(act).prefix
			of[p] = append(of[p], o)
		}
		var out [][]porcupine.Operation
		for _, one := range of {
			out = append(out, one)
		}
		return out
	},
	Init: func() any { return truth{} },
	Step: func(state, input, output any) (bool, any) {
		s, in, out := state.(truth), input.(act), output.(seen)
		switch in.kind {
		case hold:
			if out.number == 0 || s.number != 0 && s.number != out.number {
				return false, s
			}
			return true, truth{out.number, s.holders | 1<<in.client}
		case release:
			return true, truth{s.number, s.holders &^ (1 << in.client)}
		default:
			return out == seen{s.number, s.count()}, s
		}
	},
}

// Clients that hold, release and ask at the same time, through three replicas
// one of which is always being replaced, see one order of events. A call whose
// outcome is unknown is repeated elsewhere until it is known.
func TestLinearizable(t *testing.T) {
	const clients, width = 8, 3
	s := newSpace()
	replicas := make([]atomic.Pointer[replica], width)
	for i := range replicas {
		replicas[i].Store(s.start(t, settings{}))
	}
	pick := func() *replica { return replicas[rand.N(width)].Load() }
	ctx, cancel := context.WithTimeout(t.Context(), testsize.Pick(3*time.Second, time.Minute))
	defer cancel()

	var (
		mu      sync.Mutex // guards history
		history []porcupine.Operation
		begin   = time.Now()
		group   sync.WaitGroup
	)
	for c := range clients {
		n := pick().node(t, fmt.Sprintf("n%d", c))
		group.Go(func() {
			for round := 0; ctx.Err() == nil; round++ {
				do := act{fmt.Sprintf("10.%d.%d.0/24", round/60%200, rand.N(4)), c, actKind(rand.N(3))}
				called := time.Since(begin)
				result, err := n.perform(pick, do)
				if err != nil {
					t.Errorf("%+v: %v", do, err)
					return
				}
				returned := time.Since(begin)
				mu.Lock()
				history = append(history, porcupine.Operation{
					ClientId: c, Input: do, Output: result, Call: called.Nanoseconds(), Return: returned.Nanoseconds(),
				})
				mu.Unlock()
			}
		})
	}
	replaced := 0
	for ctx.Err() == nil {
		i := replaced % width
		fresh := s.start(t, settings{})
		replicas[i].Swap(fresh).stop()
		replaced++
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	group.Wait()
	if t.Failed() {
		return
	}
	t.Logf("%d operations, %d replicas replaced", len(history), replaced)
	if len(history) < 200 {
		t.Errorf("only %d operations", len(history))
	}
	if result := porcupine.CheckOperationsTimeout(register, history, time.Minute); result != porcupine.Ok {
		t.Errorf("the history is %v", result)
	}

	// The check can fail: an answer that never was.
	last := history[len(history)-1]
	end := time.Since(begin).Nanoseconds()
	lie := porcupine.Operation{ClientId: clients, Input: act{last.Input.(act).prefix, 0, ask}, Output: seen{7, 1}, Call: end, Return: end + 1}
	if result := porcupine.CheckOperationsTimeout(register, append(history, lie), time.Minute); result != porcupine.Illegal {
		t.Errorf("a history with a lie is %v", result)
	}
}

// perform makes one call, again and elsewhere if its outcome is unknown.
func (n *node) perform(pick func() *replica, do act) (seen, error) {
	n.generation++
	owner := policy(do.prefix)
	set := &identityv1.SetHoldingRequest{
		RequestId: requestID(), Session: n.session, Owner: owner, Generation: n.generation, Prefixes: wanted(do.prefix),
	}
	drop := &identityv1.DropHoldingRequest{RequestId: requestID(), Session: n.session, Owner: owner, Generation: n.generation}
	var err error
	for range 200 {
		var result seen
		ctx, cancel := context.WithTimeout(n.t.Context(), 5*time.Second)
		result, err = call(ctx, pick(), do, set, drop)
		cancel()
		if err == nil {
			return result, nil
		}
		time.Sleep(time.Millisecond) // It may be stopping.
	}
	return seen{}, err
}

func call(ctx context.Context, r *replica, do act, set *identityv1.SetHoldingRequest, drop *identityv1.DropHoldingRequest) (seen, error) {
	switch do.kind {
	case hold:
		resp, err := r.SetHolding(ctx, set)
		if err != nil {
			return seen{}, err
		}
		return seen{number: resp.GetAssignments()[0].GetNumber()}, nil
	case release:
		_, err := r.DropHolding(ctx, drop)
		return seen{}, err
	default:
		resp, err := r.ListIdentities(ctx, &identityv1.ListIdentitiesRequest{OverlappingPrefix: do.prefix})
		if err != nil {
			return seen{}, err
		}
		if len(resp.GetIdentities()) == 0 {
			return seen{}, nil
		}
		id := resp.GetIdentities()[0]
		return seen{number: id.GetNumber(), holders: id.GetHolderCount()}, nil
	}
}
