package app_test

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

// violation returns the first field that a refusal names; empty if it names none.
func violation(err error) string {
	for _, d := range status.Convert(err).Details() {
		if bad, ok := d.(*errdetails.BadRequest); ok {
			return bad.GetFieldViolations()[0].GetField()
		}
	}
	return ""
}

// Bad input is refused with its field and a reason, and changes nothing.
func TestBadSetHolding(t *testing.T) {
	in := start(t, defaults(t))
	n := open(t, in, "n")
	stale := proto.CloneOf(n.session)
	n.reopen("n")
	n.gen["p"] = 4
	n.acquire("p", "10.0.0.0/8") // Generation 5.
	used := "request-of-p"
	if _, err := in.SetHolding(t.Context(), &identityv1.SetHoldingRequest{
		RequestId: used, Session: n.session, Owner: policy("p"), Generation: 6, Prefixes: []*identityv1.WantedPrefix{{Prefix: "10.0.0.0/8"}},
	}); err != nil {
		t.Fatal(err)
	}
	want, err := in.GetIdentity(t.Context(), &identityv1.GetIdentityRequest{Key: &identityv1.GetIdentityRequest_Prefix{Prefix: "10.0.0.0/8"}})
	if err != nil {
		t.Fatal(err)
	}

	prefixes := func(texts ...string) func(*identityv1.SetHoldingRequest) {
		return func(r *identityv1.SetHoldingRequest) {
			r.Prefixes = nil
			for _, p := range texts {
				r.Prefixes = append(r.Prefixes, &identityv1.WantedPrefix{Prefix: p})
			}
		}
	}
	type change = func(*identityv1.SetHoldingRequest)
	for _, tc := range []struct {
		name   string
		change change
		code   codes.Code
		reason reason.Reason
		field  string
	}{
		{"no CIDR", prefixes("12.0.0.0/8", "nonsense"), codes.InvalidArgument, reason.PrefixInvalid, "prefixes[1].prefix"},
		{"an address", prefixes("12.0.0.1"), codes.InvalidArgument, reason.PrefixInvalid, "prefixes[0].prefix"},
		{"too long", prefixes("12.0.0.0/33"), codes.InvalidArgument, reason.PrefixInvalid, "prefixes[0].prefix"},
		{"a zone", prefixes("fe80::1%eth0/64"), codes.InvalidArgument, reason.PrefixInvalid, "prefixes[0].prefix"},
		{"not foldable", prefixes("::ffff:10.0.0.0/64"), codes.InvalidArgument, reason.PrefixInvalid, "prefixes[0].prefix"},
		{"the world", prefixes("12.0.0.0/8", "0.0.0.0/0"), codes.InvalidArgument, reason.PrefixReserved, "prefixes[1].prefix"},
		{"the other world", prefixes("::/0"), codes.InvalidArgument, reason.PrefixReserved, "prefixes[0].prefix"},
		{"an empty prefix", prefixes(""), codes.InvalidArgument, reason.FieldInvalid, "prefixes[0].prefix"},
		{"a huge prefix", prefixes(strings.Repeat("1", 100)), codes.InvalidArgument, reason.FieldInvalid, "prefixes[0].prefix"},
		{"number too low", func(r *identityv1.SetHoldingRequest) { r.Prefixes[0].PreferredNumber = 1 }, codes.InvalidArgument, reason.NumberOutOfRange, "prefixes[0].preferred_number"},
		{"number too high", func(r *identityv1.SetHoldingRequest) { r.Prefixes[0].PreferredNumber = 1 << 25 }, codes.InvalidArgument, reason.NumberOutOfRange, "prefixes[0].preferred_number"},
		{"two numbers for one prefix", func(r *identityv1.SetHoldingRequest) {
			r.Prefixes = []*identityv1.WantedPrefix{{Prefix: "12.0.0.0/8", PreferredNumber: 1<<24 + 7}, {Prefix: "12.1.1.1/8", PreferredNumber: 1<<24 + 8}}
		}, codes.InvalidArgument, reason.FieldInvalid, "prefixes[1].preferred_number"},
		{"no owner", func(r *identityv1.SetHoldingRequest) { r.Owner = nil }, codes.InvalidArgument, reason.FieldInvalid, "owner"},
		{"no kind", func(r *identityv1.SetHoldingRequest) { r.Owner.Kind = 0 }, codes.InvalidArgument, reason.FieldInvalid, "owner.kind"},
		{"unknown kind", func(r *identityv1.SetHoldingRequest) { r.Owner.Kind = 99 }, codes.InvalidArgument, reason.FieldInvalid, "owner.kind"},
		{"no uid", func(r *identityv1.SetHoldingRequest) { r.Owner.Uid = "" }, codes.InvalidArgument, reason.FieldInvalid, "owner.uid"},
		{"no name", func(r *identityv1.SetHoldingRequest) { r.Owner.Name = "" }, codes.InvalidArgument, reason.FieldInvalid, "owner.name"},
		{"no session", func(r *identityv1.SetHoldingRequest) { r.Session = nil }, codes.InvalidArgument, reason.FieldInvalid, "session"},
		{"no request id", func(r *identityv1.SetHoldingRequest) { r.RequestId = "" }, codes.InvalidArgument, reason.FieldInvalid, "request_id"},
		{"no generation", func(r *identityv1.SetHoldingRequest) { r.Generation = 0 }, codes.InvalidArgument, reason.FieldInvalid, "generation"},
		{"generation goes back", func(r *identityv1.SetHoldingRequest) { r.Generation = 3 }, codes.FailedPrecondition, reason.StaleSession, ""},
		{"generation used before", func(r *identityv1.SetHoldingRequest) { r.Generation = 6 }, codes.InvalidArgument, reason.FieldInvalid, "generation"},
		{"request id used before", func(r *identityv1.SetHoldingRequest) { r.RequestId = used }, codes.InvalidArgument, reason.RequestIDReused, "request_id"},
		{"old epoch", func(r *identityv1.SetHoldingRequest) { r.Session = stale }, codes.FailedPrecondition, reason.StaleSession, ""},
		{"epoch of the future", func(r *identityv1.SetHoldingRequest) { r.Session.Epoch += 5 }, codes.NotFound, reason.SessionUnknown, ""},
		{"unknown session", func(r *identityv1.SetHoldingRequest) { r.Session.Id = "who" }, codes.NotFound, reason.SessionUnknown, ""},
		{"session with a path", func(r *identityv1.SetHoldingRequest) { r.Session.Id = "../n/" }, codes.NotFound, reason.SessionUnknown, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			req := &identityv1.SetHoldingRequest{
				RequestId: "bad " + tc.name, Session: proto.CloneOf(n.session), Owner: policy("p"), Generation: 7,
				Prefixes: []*identityv1.WantedPrefix{{Prefix: "12.0.0.0/8"}},
			}
			tc.change(req)
			_, err := in.SetHolding(t.Context(), req)
			if status.Code(err) != tc.code || rpc.ReasonOf(err) != tc.reason || violation(err) != tc.field {
				t.Errorf("%v %v in %q (%v), want %v %v in %q", status.Code(err), rpc.ReasonOf(err), violation(err), err, tc.code, tc.reason, tc.field)
			}
		})
	}
	// A refusal keeps its place for the good ones to come: nothing has changed.
	got, err := in.GetIdentity(t.Context(), &identityv1.GetIdentityRequest{Key: &identityv1.GetIdentityRequest_Prefix{Prefix: "10.0.0.0/8"}})
	if err != nil || !proto.Equal(got, want) {
		t.Errorf("%v (%v), was %v", got, err, want)
	}
	all, err := in.ListIdentities(t.Context(), &identityv1.ListIdentitiesRequest{})
	if err != nil || len(all.GetIdentities()) != 1 {
		t.Errorf("%d identities (%v), want 1", len(all.GetIdentities()), err)
	}
}

func TestManyBadPrefixesAreNamed(t *testing.T) {
	n := open(t, start(t, defaults(t)), "n")
	bad := make([]string, 50)
	for i := range bad {
		bad[i] = fmt.Sprintf("bad-%d", i)
	}
	_, err := n.on.SetHolding(t.Context(), n.setRequest(policy("p"), bad...))
	for _, d := range status.Convert(err).Details() {
		if b, ok := d.(*errdetails.BadRequest); ok {
			if got := len(b.GetFieldViolations()); got < 2 || got > 20 {
				t.Errorf("%d fields are named, want several, but not all 50", got)
			}
			return
		}
	}
	t.Errorf("no fields are named: %v", err)
}

func TestTooManyPrefixes(t *testing.T) {
	n := open(t, start(t, defaults(t)), "n")
	req := n.setRequest(policy("p"))
	req.Prefixes = make([]*identityv1.WantedPrefix, 200001)
	for i := range req.Prefixes {
		req.Prefixes[i] = &identityv1.WantedPrefix{Prefix: fmt.Sprintf("10.%d.%d.%d/32", i>>16, i>>8&255, i&255)}
	}
	_, err := n.on.SetHolding(t.Context(), req)
	if status.Code(err) != codes.InvalidArgument || violation(err) != "prefixes" {
		t.Errorf("%v in %q, want INVALID_ARGUMENT in prefixes", err, violation(err))
	}
	// An empty set says that the owner is there and wants nothing.
	n.acquire("p")
}

func TestBadCallsOfTheOthers(t *testing.T) {
	in := start(t, defaults(t))
	n := open(t, in, "n")
	n.acquire("p", "10.0.0.0/8")
	ctx := t.Context()
	session := func(change func(*identityv1.Session)) *identityv1.Session {
		s := proto.CloneOf(n.session)
		change(s)
		return s
	}
	same := func(*identityv1.Session) {}
	future := func(s *identityv1.Session) { s.Epoch = 99 }
	for _, tc := range []struct {
		name   string
		call   func() error
		code   codes.Code
		reason reason.Reason
		field  string
	}{
		{"open: a name that no Node has", func() error {
			_, err := in.OpenSession(ctx, &identityv1.OpenSessionRequest{RequestId: "1", NodeName: "a/b", NodeUid: "u", BootId: "b"})
			return err
		}, codes.InvalidArgument, reason.FieldInvalid, "node_name"},
		{"open: no boot id", func() error {
			_, err := in.OpenSession(ctx, &identityv1.OpenSessionRequest{RequestId: "1", NodeName: "a", NodeUid: "u"})
			return err
		}, codes.InvalidArgument, reason.FieldInvalid, "boot_id"},
		{"open: request id of another boot", func() error {
			if _, err := in.OpenSession(ctx, &identityv1.OpenSessionRequest{RequestId: "x", NodeName: "m", NodeUid: "u", BootId: "1"}); err != nil {
				return err
			}
			_, err := in.OpenSession(ctx, &identityv1.OpenSessionRequest{RequestId: "x", NodeName: "m", NodeUid: "u", BootId: "2"})
			return err
		}, codes.InvalidArgument, reason.RequestIDReused, "request_id"},
		{"keepalive: unknown session", func() error {
			_, err := in.KeepAlive(ctx, &identityv1.KeepAliveRequest{Session: &identityv1.Session{Id: "who", Epoch: 1}})
			return err
		}, codes.NotFound, reason.SessionUnknown, ""},
		{"keepalive: epoch of the future", func() error {
			_, err := in.KeepAlive(ctx, &identityv1.KeepAliveRequest{Session: session(future)})
			return err
		}, codes.NotFound, reason.SessionUnknown, ""},
		{"drop: generation goes back", func() error {
			n.gen["p"] = 8
			n.acquire("p", "10.0.0.0/8")
			_, err := in.DropHolding(ctx, &identityv1.DropHoldingRequest{RequestId: "d", Session: session(same), Owner: policy("p"), Generation: 2})
			return err
		}, codes.FailedPrecondition, reason.StaleSession, ""},
		{"drop: generation that set it", func() error {
			_, err := in.DropHolding(ctx, &identityv1.DropHoldingRequest{RequestId: "d", Session: session(same), Owner: policy("p"), Generation: 9})
			return err
		}, codes.InvalidArgument, reason.FieldInvalid, "generation"},
		{"drop: no uid", func() error {
			o := policy("p")
			o.Uid = ""
			_, err := in.DropHolding(ctx, &identityv1.DropHoldingRequest{RequestId: "d", Session: session(same), Owner: o, Generation: 10})
			return err
		}, codes.InvalidArgument, reason.FieldInvalid, "owner.uid"},
		{"lookup: no address", func() error {
			_, err := in.LookupIdentity(ctx, &identityv1.LookupIdentityRequest{Address: "10.0.0.0/8"})
			return err
		}, codes.InvalidArgument, reason.FieldInvalid, "address"},
		{"lookup: a zone", func() error {
			_, err := in.LookupIdentity(ctx, &identityv1.LookupIdentityRequest{Address: "fe80::1%eth0"})
			return err
		}, codes.InvalidArgument, reason.FieldInvalid, "address"},
		{"lookup: nobody holds it", func() error {
			_, err := in.LookupIdentity(ctx, &identityv1.LookupIdentityRequest{Address: "11.0.0.1"})
			return err
		}, codes.NotFound, reason.PrefixUnknown, ""},
		{"get: no key", func() error {
			_, err := in.GetIdentity(ctx, &identityv1.GetIdentityRequest{})
			return err
		}, codes.InvalidArgument, reason.FieldInvalid, "key"},
		{"get: no CIDR", func() error {
			_, err := in.GetIdentity(ctx, &identityv1.GetIdentityRequest{Key: &identityv1.GetIdentityRequest_Prefix{Prefix: "x"}})
			return err
		}, codes.InvalidArgument, reason.PrefixInvalid, "prefix"},
		{"get: unknown number", func() error {
			_, err := in.GetIdentity(ctx, &identityv1.GetIdentityRequest{Key: &identityv1.GetIdentityRequest_Number{Number: 5}})
			return err
		}, codes.NotFound, reason.IdentityUnknown, ""},
		{"get: the world has no number", func() error {
			_, err := in.GetIdentity(ctx, &identityv1.GetIdentityRequest{Key: &identityv1.GetIdentityRequest_Prefix{Prefix: "0.0.0.0/0"}})
			return err
		}, codes.NotFound, reason.PrefixUnknown, ""},
		{"list: a page too big", func() error {
			_, err := in.ListIdentities(ctx, &identityv1.ListIdentitiesRequest{PageSize: 10001})
			return err
		}, codes.InvalidArgument, reason.FieldInvalid, "page_size"},
		{"list: no CIDR", func() error {
			_, err := in.ListIdentities(ctx, &identityv1.ListIdentitiesRequest{OverlappingPrefix: "x"})
			return err
		}, codes.InvalidArgument, reason.PrefixInvalid, "overlapping_prefix"},
		{"not built yet", func() error {
			_, err := in.Audit(ctx, &identityv1.AuditRequest{SessionId: "n"})
			return err
		}, codes.Unimplemented, reason.Unspecified, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.call()
			if status.Code(err) != tc.code || rpc.ReasonOf(err) != tc.reason || violation(err) != tc.field {
				t.Errorf("%v %v in %q (%v), want %v %v in %q", status.Code(err), rpc.ReasonOf(err), violation(err), err, tc.code, tc.reason, tc.field)
			}
		})
	}
}
