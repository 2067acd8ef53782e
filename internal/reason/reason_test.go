package reason_test

import (
	"testing"

	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/internal/reason"
)

// The set in Go and the enum on the wire are one set.
func TestSetEqualsProtoEnum(t *testing.T) {
	values := reasonv1.Reason(0).Descriptor().Values()
	if got, want := len(reason.All())+1, values.Len(); got != want {
		t.Errorf("reason.All has %d reasons with Unspecified, the enum has %d", got, want)
	}
	for i := range values.Len() {
		v := values.Get(i)
		r := reason.Reason(v.Number())
		if got, want := "REASON_"+r.String(), string(v.Name()); got != want {
			t.Errorf("number %d: got %s, want %s", v.Number(), got, want)
		}
		if r == reason.Unspecified {
			continue
		}
		if back, ok := reason.Parse(r.String()); !ok || back != r {
			t.Errorf("Parse(%q) = %v, %v", r.String(), back, ok)
		}
	}
}

func TestUnknownReason(t *testing.T) {
	const foreign = reason.Reason(9999)
	if foreign.Known() {
		t.Error("9999 is known")
	}
	if got := foreign.String(); got != "REASON(9999)" {
		t.Errorf("String() = %q", got)
	}
	if _, ok := reason.Parse("REASON_POOL_EMPTY"); ok {
		t.Error("Parse took a name with its prefix")
	}
}
