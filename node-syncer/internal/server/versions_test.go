package server_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"golang.org/x/sync/errgroup"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/testsize"
)

// random returns a snapshot of up to four ENIs in one subnet, each address on one
// of them or none, in the pool or not: from one to the next, addresses come, go
// and move between ENIs.
func random(rng *rand.Rand, name string, epoch, generation uint64) *nodev1.PoolSnapshot {
	s := snapshot(name, epoch, generation, make([]int, 1+rng.IntN(4))...)
	for _, e := range s.GetEnis() {
		e.Subnet.Cidr = "10.0.0.0/16"
	}
	for i := range 12 {
		on := rng.IntN(len(s.GetEnis()) + 1)
		if on == len(s.GetEnis()) {
			continue
		}
		e, a := s.GetEnis()[on], fmt.Sprintf("10.0.100.%d", i)
		e.Addresses = append(e.Addresses, a)
		if rng.IntN(3) > 0 {
			s.Pool = append(s.Pool, &nodev1.PoolAddress{Address: a, EniId: e.GetId()})
		}
	}
	return s
}

// Several nodes change at once, through two replicas by turns, with a new epoch
// now and then: no version that the API server stores is ever inconsistent.
func TestEveryVersionIsConsistent(t *testing.T) {
	const nodes = 4
	replicas, o := []*replica{start(t), start(t)}, watchEverything(t)
	versions := testsize.Pick(1_000, 20_000)
	var group errgroup.Group
	for i := range nodes {
		node := newNode(t, fmt.Sprintf("versions-%d", i))
		register(t, replicas[0], node.Name)
		group.Go(func() error {
			rng := rand.New(rand.NewPCG(1, uint64(i))) //nolint:gosec // Small, and a test.
			epoch, writes := uint64(1), uint32(0)
			for g := uint64(1); writes < uint32(versions/nodes); g++ { //nolint:gosec // Small.
				if rng.IntN(20) == 0 {
					epoch++
				}
				r := replicas[rng.IntN(2)]
				resp, err := r.PublishPool(t.Context(), &nodev1.PublishPoolRequest{Snapshot: random(rng, node.Name, epoch, g)})
				if err != nil {
					return fmt.Errorf("%s, snapshot %d: %w", node.Name, g, err)
				}
				writes += resp.GetWrites()
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	for i := range nodes {
		noViolations(t, o, fmt.Sprintf("versions-%d", i), versions/nodes)
	}
}
