package testsize_test

import (
	"testing"

	"github.com/eniplane/eniplane/internal/testsize"
)

func TestPick(t *testing.T) {
	for value, want := range map[string]int{"": 1, "test": 1, "anything": 1, "soak": 2} {
		t.Setenv(testsize.Variable, value)
		if got := testsize.Pick(1, 2); got != want {
			t.Errorf("%s=%q: %d, want %d", testsize.Variable, value, got, want)
		}
	}
}
