package bench_test

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/eniplane/eniplane/internal/bench"
)

func TestPrint(t *testing.T) {
	for _, tc := range []struct {
		ours, ref float64
		want      string
	}{
		{15, 10, "bench a/b ours=15.0us reference=10.0us ratio=1.50 target=1.5 ok\n"},
		{16, 10, "bench a/b ours=16.0us reference=10.0us ratio=1.60 target=1.5 short\n"},
		{math.NaN(), 10, "bench a/b ours=NaNus reference=10.0us ratio=NaN target=1.5 short\n"},
		{1, 0, "bench a/b ours=1.0us reference=0.0us ratio=+Inf target=1.5 short\n"},
	} {
		var out strings.Builder
		if err := (bench.Result{Service: "a", Name: "b", Ours: tc.ours, Reference: tc.ref, Unit: "us", Target: 1.5}).Print(&out); err != nil {
			t.Fatal(err)
		}
		if out.String() != tc.want {
			t.Errorf("got %q, want %q", out.String(), tc.want)
		}
	}
}

func TestPercentile(t *testing.T) {
	var samples []time.Duration
	for i := 100; i > 0; i-- {
		samples = append(samples, time.Duration(i)*time.Microsecond)
	}
	for p, want := range map[float64]float64{50: 50, 99: 99, 100: 100, 0.1: 1} {
		if got := bench.Percentile(samples, p); got != want {
			t.Errorf("p%v = %v, want %v", p, got, want)
		}
	}
	if !math.IsNaN(bench.Percentile(nil, 99)) {
		t.Error("no samples gave a number")
	}
}

func TestInterleave(t *testing.T) {
	var order strings.Builder
	step := func(name string) func(int) error {
		return func(int) error { order.WriteString(name); return nil }
	}
	as, bs, err := bench.Interleave(10, step("a"), step("b"))
	if err != nil || len(as) != 10 || len(bs) != 10 {
		t.Fatalf("%d, %d, %v", len(as), len(bs), err)
	}
	if got := order.String(); got != strings.Repeat("ab", 11) {
		t.Errorf("order %q", got)
	}
	errStop := errors.New("stop")
	if _, _, err := bench.Interleave(1, func(int) error { return errStop }, step("b")); !errors.Is(err, errStop) {
		t.Errorf("error %v", err)
	}
}
