package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	opsv1 "github.com/eniplane/eniplane/gen/eniplane/ops/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

func badRequest(err error) *errdetails.BadRequest {
	for _, d := range status.Convert(err).Details() {
		if bad, ok := d.(*errdetails.BadRequest); ok {
			return bad
		}
	}
	return nil
}

// Whatever the code, wrapped or not, a caller gets all that the handler said.
func TestDetailsSurviveTheWire(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	client := opsv1.NewOpsServiceClient(bare(t, r.server.Addr().String())) // No retries.
	for code := codes.OK; code <= codes.Unauthenticated; code++ {
		for _, wrapped := range []bool{false, true} {
			sent := &rpc.Error{
				Code: code, Reason: reason.PoolEmpty, Message: "no address", RetryAfter: 3 * time.Second,
				Fields:   []rpc.FieldViolation{{Field: "a.b[0]", Description: "bad", Reason: reason.PrefixInvalid}, {Field: "c", Description: "worse"}},
				Metadata: map[string]string{"used": "5"},
			}
			r.ops.get = func(context.Context) (*opsv1.GetConfigResponse, error) {
				if wrapped {
					return nil, fmt.Errorf("allocate: %w", sent)
				}
				return nil, sent
			}
			_, err := client.GetConfig(t.Context(), &opsv1.GetConfigRequest{})
			want := code
			if code == codes.OK {
				want = codes.Internal // An error is never a success.
			}
			if got := status.Code(err); got != want {
				t.Errorf("%v: code %v, want %v", code, got, want)
			}
			if got := status.Convert(err).Message(); got != "no address" {
				t.Errorf("%v: message %q", code, got)
			}
			if got := rpc.ReasonOf(err); got != reason.PoolEmpty {
				t.Errorf("%v: reason %v", code, got)
			}
			if got := rpc.MetadataOf(err); !maps.Equal(got, sent.Metadata) {
				t.Errorf("%v: metadata %v", code, got)
			}
			if after, ok := rpc.RetryAfter(err); !ok || after != 3*time.Second {
				t.Errorf("%v: retry after %v, %v", code, after, ok)
			}
			fields := badRequest(err).GetFieldViolations()
			if len(fields) != 2 || fields[0].GetField() != "a.b[0]" || fields[0].GetReason() != "PREFIX_INVALID" || fields[1].GetReason() != "POOL_EMPTY" {
				t.Errorf("%v: fields %v", code, fields)
			}
		}
	}
}

// An error may repeat what a request said. It still fits into headers, is valid
// UTF-8 and keeps its reason.
func TestHostileTextIsBounded(t *testing.T) {
	for name, text := range map[string]string{
		"long":             strings.Repeat("x", 1<<20),
		"long and wide":    "x" + strings.Repeat("\u20ac", 1<<18),
		"not UTF-8":        "a\xff\xfeb",
		"long, not UTF-8":  strings.Repeat("\xff", 1<<20),
		"cut in character": strings.Repeat("x", 252) + "\u20ac\u20ac",
		"zero bytes":       "a\x00b\nc",
	} {
		r := start(t, rpc.ServerConfig{}, nil)
		r.ops.get = func(context.Context) (*opsv1.GetConfigResponse, error) {
			e := rpc.InvalidField(text, reason.PrefixInvalid, "%s", text).With("text", text).With(text, "key")
			for i := range 1000 {
				e.Fields = append(e.Fields, e.Fields[0])
				e.Metadata[fmt.Sprintf("z%d", i)] = text
			}
			return nil, e
		}
		_, err := opsv1.NewOpsServiceClient(r.conn).GetConfig(t.Context(), &opsv1.GetConfigRequest{})
		if got := status.Code(err); got != codes.InvalidArgument {
			t.Errorf("%s: code %v, want InvalidArgument", name, got)
		}
		if got := rpc.ReasonOf(err); got != reason.PrefixInvalid {
			t.Errorf("%s: reason %v, want PREFIX_INVALID", name, got)
		}
		st := status.Convert(err)
		if n := len(st.Message()); n > 1024 || !utf8.ValidString(st.Message()) {
			t.Errorf("%s: message of %d bytes, valid %v", name, n, utf8.ValidString(st.Message()))
		}
		if got := len(badRequest(err).GetFieldViolations()); got == 0 || got > 16 {
			t.Errorf("%s: %d fields", name, got)
		}
		if got := len(rpc.MetadataOf(err)); got == 0 || got > 32 {
			t.Errorf("%s: %d entries of metadata", name, got)
		}
	}
}

// One bad request does not make an answer of a hundred thousand violations.
func TestManyViolations(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	for _, n := range []int{3, 100_000} {
		req := holding(n)
		for _, p := range req.GetPrefixes() {
			p.Prefix = strings.Repeat("1", 65)
		}
		if n > 1000 {
			for i, p := range req.GetPrefixes() {
				if i > 0 {
					p.Prefix = ""
				}
			}
		}
		_, err := identityv1.NewIdentityServiceClient(r.conn).SetHolding(t.Context(), req)
		if got := status.Code(err); got != codes.InvalidArgument || rpc.ReasonOf(err) != reason.FieldInvalid {
			t.Fatalf("%d: got %v (%v), want INVALID_ARGUMENT, FIELD_INVALID", n, err, got)
		}
		fields := badRequest(err).GetFieldViolations()
		if len(fields) == 0 || fields[0].GetField() != "prefixes[0].prefix" {
			t.Errorf("%d: fields %v", n, fields)
		}
		if n == 3 && len(fields) != 3 {
			t.Errorf("a small request: %d violations, want all 3", len(fields))
		}
	}
}

func TestWithLeavesTheOriginal(t *testing.T) {
	original := rpc.Refuse(codes.NotFound, reason.NodeUnknown, "no %s", "n").With("a", "1")
	changed := original.With("b", "2")
	if len(original.Metadata) != 1 || len(changed.Metadata) != 2 {
		t.Errorf("original %v, changed %v", original.Metadata, changed.Metadata)
	}
	if got := original.Error(); got != "NODE_UNKNOWN: no n" {
		t.Errorf("Error() = %q", got)
	}
}

// A foreign error has no reason of ours, even one with the same name.
func TestForeignDetails(t *testing.T) {
	st, err := status.New(codes.Aborted, "x").WithDetails(&errdetails.ErrorInfo{Reason: "CONFLICT", Domain: "example.com", Metadata: map[string]string{"a": "1"}})
	if err != nil {
		t.Fatal(err)
	}
	if got := rpc.ReasonOf(st.Err()); got != reason.Unspecified {
		t.Errorf("reason %v", got)
	}
	if got := rpc.MetadataOf(st.Err()); got != nil {
		t.Errorf("metadata %v", got)
	}
	for _, err := range []error{nil, errors.New("x"), status.Error(codes.Unavailable, "x")} {
		if _, ok := rpc.RetryAfter(err); ok || rpc.ReasonOf(err) != reason.Unspecified || rpc.MetadataOf(err) != nil {
			t.Errorf("%v has details", err)
		}
	}
}

// pretender is an error that says of itself that it is none.
type pretender struct{}

func (pretender) Error() string              { return "pretended" }
func (pretender) GRPCStatus() *status.Status { return nil }

func TestTable(t *testing.T) {
	errGone := errors.New("gone")
	table := rpc.Table{{Err: errGone, Code: codes.NotFound, Reason: reason.NodeUnknown}}
	for _, tc := range []struct {
		name string
		err  error
		code codes.Code
		why  reason.Reason
	}{
		{"nil", nil, codes.OK, 0},
		{"sentinel", errGone, codes.NotFound, reason.NodeUnknown},
		{"wrapped sentinel", fmt.Errorf("read n: %w", errGone), codes.NotFound, reason.NodeUnknown},
		{"refusal", fmt.Errorf("x: %w", rpc.InvalidField("a", reason.PrefixInvalid, "bad")), codes.InvalidArgument, reason.PrefixInvalid},
		{"canceled", fmt.Errorf("x: %w", context.Canceled), codes.Canceled, 0},
		{"deadline", fmt.Errorf("x: %w", context.DeadlineExceeded), codes.DeadlineExceeded, 0},
		{"remote", fmt.Errorf("call: %w", rpc.Refuse(codes.Aborted, reason.Conflict, "again").GRPCStatus().Err()), codes.Aborted, reason.Conflict},
		{"remote without a reason", fmt.Errorf("call: %w", status.Error(codes.Unavailable, "away")), codes.Unavailable, 0},
		{"no code and no reason", &rpc.Error{Message: "x"}, codes.Internal, reason.Internal},
		{"an error with the status of a success", pretender{}, codes.Internal, reason.Internal},
		{"unforeseen", errors.New("boom"), codes.Internal, reason.Internal},
	} {
		got := table.Status(tc.err)
		if code := status.Code(got); code != tc.code {
			t.Errorf("%s: code %v, want %v", tc.name, code, tc.code)
		}
		if why := rpc.ReasonOf(got); why != tc.why {
			t.Errorf("%s: reason %v, want %v", tc.name, why, tc.why)
		}
		if tc.err != nil && tc.why == reason.Internal && !errors.Is(got, tc.err) {
			t.Errorf("%s: the cause is lost for the log", tc.name)
		}
	}
}
