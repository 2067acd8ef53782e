package localkube

import (
	"context"
	"fmt"
	"os"
	"testing"
)

// ForTest starts a cluster of the test's own and kills it when the test ends.
// The test fails at once if it can not be started.
func ForTest(t testing.TB) *Cluster {
	t.Helper()
	c, err := Start(t.Context(), Config{})
	if err != nil {
		t.Fatalf("start a cluster: %v", err)
	}
	t.Cleanup(c.Kill)
	return c
}

// Shared runs a test binary's tests with one cluster for all of them and
// returns the code to exit with:
//
//	var cluster *localkube.Cluster
//
//	func TestMain(m *testing.M) {
//		os.Exit(localkube.Shared(m, func(c *localkube.Cluster) { cluster = c }))
//	}
//
// Tests keep apart by the names of their objects.
func Shared(m *testing.M, use func(*Cluster)) int {
	c, err := Start(context.Background(), Config{})
	if err != nil {
		fmt.Fprintf(os.Stderr, "start a cluster: %v\n", err)
		return 1
	}
	defer c.Kill()
	use(c)
	return m.Run()
}
