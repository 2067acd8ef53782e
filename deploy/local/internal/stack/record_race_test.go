package stack

import (
	"fmt"
	"sync"
	"testing"
)

// Processes that start at once are all in the file: an older text never
// replaces a newer one.
func TestRecordKeepsEveryProcess(t *testing.T) {
	for range 20 {
		run := t.TempDir()
		k, err := newKeeper(run)
		if err != nil {
			t.Fatal(err)
		}
		const n = 16
		var all sync.WaitGroup
		for i := range n {
			all.Go(func() {
				if err := k.setProcess(Process{Name: fmt.Sprintf("p-%d", i), Ports: Ports{GRPC: "127.0.0.1:1"}}); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		r, err := ReadRecord(run)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Processes) != n {
			t.Fatalf("%d of %d processes are in the file", len(r.Processes), n)
		}
	}
}
