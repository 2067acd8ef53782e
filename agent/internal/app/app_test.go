package app

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cilium/ebpf"

	"github.com/eniplane/eniplane/agent/internal/fake"
	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

func localOwner(name string) fake.Owner {
	return fake.Owner{Kind: identityv1.OwnerKind_OWNER_KIND_LOCAL, Name: name, UID: "local"}
}

func TestFromNothingToAddressesAndEntries(t *testing.T) {
	before := goleak.IgnoreCurrent()
	defer goleak.VerifyNone(t, before)
	t.Run("agent", testFromNothing) // so that what it cleans up is gone before
}

func testFromNothing(t *testing.T) {
	w := newWorld(t)
	w.flags["first-interface-index"], w.flags["pre-allocate"] = "0", "2"
	w.flags["subnet-tags"] = "role=pods"
	r := w.start()
	ctx := t.Context()

	eventually(t, "registered", func() error {
		if w.syncer.Registration() == nil {
			return fmt.Errorf("not yet")
		}
		return nil
	})
	reg := w.syncer.Registration()
	if reg.GetNodeName() != nodeName || reg.GetInstanceId() != instanceID || reg.GetInstanceType() != "t3.medium" ||
		reg.GetAvailabilityZone() != "us-east-1a" || reg.GetVpcId() != "vpc-00000001" || reg.GetNodeSubnetId() != "subnet-00000001" || len(reg.GetAddresses()) != 1 {
		t.Errorf("registered with %s", compact(reg))
	}
	// Absent is not 0.
	if m, e := reg.GetWatermarks(), reg.GetEni(); m.PreAllocate == nil || m.GetPreAllocate() != 2 || m.MinAllocate != nil ||
		e.FirstInterfaceIndex == nil || e.GetFirstInterfaceIndex() != 0 || e.DeleteOnTermination != nil || e.GetSubnetTags()["role"] != "pods" {
		t.Errorf("registered with %s", compact(reg))
	}

	got, err := r.AllocateIP(ctx, &agentv1.AllocateIPRequest{Owner: "default/pod-1"})
	if err != nil {
		t.Fatal(err)
	}
	if got.GetAddress() != "10.0.1.2" || got.GetEniId() != "eni-1" || got.GetEniMac() != mac || got.GetDeviceIndex() != 1 ||
		got.GetSubnetCidr() != "10.0.1.0/24" || got.GetGateway() != "10.0.1.1" || !slices.Equal(got.GetVpcCidrs(), []string{"10.0.0.0/16", "100.64.0.0/16"}) {
		t.Errorf("got %s", compact(got))
	}
	eventually(t, "use is reported", func() error {
		owners := make(map[string]string)
		for _, u := range w.syncer.LastReport().GetUsed() {
			owners[u.GetOwner()] = u.GetAddress() + " " + u.GetEniId()
		}
		if len(owners) != 2 || owners["router"] != "10.0.1.1 eni-1" || owners["default/pod-1"] != "10.0.1.2 eni-1" {
			return fmt.Errorf("%v", owners)
		}
		return nil
	})

	numbers, err := r.replace("vpn", "10.1.0.0/16", "10.1.2.3/16", "fd00::/8", "::ffff:192.0.2.0/120")
	if err != nil {
		t.Fatal(err)
	}
	a := numbers.GetAssignments()
	if len(a) != 4 || a[0].GetNumber() != a[1].GetNumber() || a[3].GetPrefix() != "192.0.2.0/24" || a[0].GetNumber() != w.identity.Number("10.1.0.0/16") {
		t.Errorf("got %s", compact(numbers))
	}
	// It is in the kernel's map when the call returns.
	kernel, err := ebpf.LoadPinnedMap(w.flags["map-pin-path"], nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = kernel.Close() }()
	key, _ := hex.DecodeString("40000000000000010a010203000000000000000000000000")
	raw, err := kernel.LookupBytes(key)
	if err != nil || len(raw) != 24 || uint32(raw[0])|uint32(raw[1])<<8|uint32(raw[2])<<16|uint32(raw[3])<<24 != a[0].GetNumber() {
		t.Errorf("the kernel has % x, %v, want %d", raw, err, a[0].GetNumber())
	}
	found, err := r.LookupIP(ctx, &agentv1.LookupIPRequest{Address: "10.1.2.3"})
	if err != nil || found.GetEntry().GetPrefix() != "10.1.0.0/16" || !bytes.Equal(found.GetEntry().GetRawValue(), raw) ||
		!slices.Equal(found.GetEntry().GetOwners(), []string{"local//vpn"}) {
		t.Errorf("found %s, %v", compact(found), err)
	}
	if _, err := r.LookupIP(ctx, &agentv1.LookupIPRequest{Address: "11.0.0.1"}); status.Code(err) != codes.NotFound || rpc.ReasonOf(err) != reason.PrefixUnknown {
		t.Errorf("found nothing: %v", err)
	}
	w.wantEntries(r, "10.1.0.0/16", "fd00::/8", "192.0.2.0/24")

	// cilium#5877: what a replaced set lacks goes, what stays is not touched.
	r.mustReplace("vpn", "10.1.0.0/16", "10.2.0.0/16")
	w.wantEntries(r, "10.1.0.0/16", "10.2.0.0/16")
	if _, err := r.RemovePrefixes(ctx, &agentv1.RemovePrefixesRequest{OwnerName: "vpn"}); err != nil {
		t.Fatal(err)
	}
	w.wantEntries(r)
	eventually(t, "the ledger forgets the owner", func() error {
		if o := w.identity.Owners(); len(o) != 0 {
			return fmt.Errorf("%v", o)
		}
		return nil
	})
	eventually(t, "the removal is acknowledged", func() error {
		if ack, newest := w.identity.LastAck(); !newest || len(ack.GetFailures()) != 0 {
			return fmt.Errorf("%s", compact(ack))
		}
		return nil
	})
	s, err := r.GetStatus(ctx, &agentv1.GetStatusRequest{})
	if err != nil || s.GetInstanceId() != instanceID || s.GetRouterAddress() != "10.0.1.1" || s.GetMap().GetLayout() != "v2" ||
		s.GetMap().GetMaxEntries() != 1000 || s.GetMap().GetProgrammedRevision() == 0 || len(s.GetConditions()) != 0 || s.GetRestoreDeadline() != nil {
		t.Errorf("status %s, %v", compact(s), err)
	}
}

func TestAddresses(t *testing.T) {
	w := newWorld(t)
	r := w.start()
	ctx := t.Context()
	allocate := func(owner string, timeout time.Duration) (*agentv1.AllocateIPResponse, error) {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		return r.AllocateIP(ctx, &agentv1.AllocateIPRequest{Owner: owner})
	}
	for _, owner := range []string{"default/a", "default/b", "default/a"} {
		if _, err := allocate(owner, 10*time.Second); err != nil {
			t.Fatal(err)
		}
	}

	t.Run("an empty pool says why", func(t *testing.T) {
		_, err := allocate("default/c", time.Second)
		if status.Code(err) != codes.ResourceExhausted || rpc.ReasonOf(err) != reason.PoolEmpty {
			t.Fatalf("got %v", err)
		}
		if m := rpc.MetadataOf(err); m["blocked_reason"] != "OUT_OF_ENIS" || m["in_use"] != "3" || m["pool"] != "3" {
			t.Errorf("metadata %v", m)
		}
		if _, again := rpc.RetryAfter(err); !again {
			t.Error("does not say when to come again")
		}
	})

	t.Run("six at once wait for a view that has room", func(t *testing.T) {
		var mu sync.Mutex
		most := uint32(0)
		w.allocator.OnEnsure(func(e *eniv1.EnsureAddressesRequest) error {
			mu.Lock()
			defer mu.Unlock()
			if len(e.GetUsed()) < 3 {
				t.Errorf("used %v", e.GetUsed())
			}
			if most = max(most, e.GetFree()); most == 6 {
				w.syncer.SetView(view(2, 1, 2, 3, 4, 5, 6, 7, 8, 9))
			}
			return nil
		})
		var wg sync.WaitGroup
		got := make(chan string, 6)
		for i := range 6 {
			wg.Go(func() {
				a, err := allocate(fmt.Sprint("default/many-", i), 20*time.Second)
				if err != nil {
					t.Error(err)
					return
				}
				got <- a.GetAddress()
			})
		}
		wg.Wait()
		close(got)
		distinct := make(map[string]bool)
		for a := range got {
			distinct[a] = true
		}
		if len(distinct) != 6 {
			t.Errorf("got %v", distinct)
		}
		eventually(t, "nobody waits any more", func() error {
			if last := w.syncer.LastReport(); last.GetWaiting() != 0 || len(last.GetUsed()) != 9 {
				return fmt.Errorf("%s", compact(last))
			}
			return nil
		})
	})

	t.Run("a released address serves who waits", func(t *testing.T) {
		w.allocator.OnEnsure(func(*eniv1.EnsureAddressesRequest) error {
			return rpc.Refuse(codes.Unavailable, reason.EC2Throttled, "later")
		})
		got := make(chan error, 1)
		go func() {
			a, err := allocate("default/late", 20*time.Second)
			if err == nil && a.GetAddress() != "10.0.1.2" {
				err = fmt.Errorf("got %s", a.GetAddress())
			}
			got <- err
		}()
		eventually(t, "it waits", func() error {
			if w.syncer.LastReport().GetWaiting() != 1 {
				return fmt.Errorf("not yet")
			}
			return nil
		})
		released, err := r.ReleaseIP(ctx, &agentv1.ReleaseIPRequest{Owner: "default/a"})
		if err != nil || released.GetAddress() != "10.0.1.2" {
			t.Fatalf("released %s, %v", compact(released), err)
		}
		if err := <-got; err != nil {
			t.Error(err)
		}
	})

	t.Run("a pool that shrinks keeps what is used", func(t *testing.T) {
		w.syncer.SetView(view(3, 1, 3, 4, 5, 6, 7, 8, 9))
		r.wantCondition("ADDRESS_RETAINED", true)
		if a, err := allocate("default/late", time.Second); err != nil || a.GetAddress() != "10.0.1.2" || a.GetEniId() != "eni-1" {
			t.Errorf("got %s, %v", compact(a), err)
		}
		// A replica that lags must not bring back what went.
		w.syncer.SetView(view(2, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
		w.syncer.SetView(view(4, 1, 2, 3, 4, 5, 6, 7, 8, 9))
		r.wantCondition("ADDRESS_RETAINED", false)
		list, err := r.ListIPs(ctx, &agentv1.ListIPsRequest{})
		if err != nil || len(list.GetIps()) != 9 {
			t.Errorf("listed %s, %v", compact(list), err)
		}
	})

	t.Run("a mark is answered for its round", func(t *testing.T) {
		v := view(5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11)
		for _, a := range []string{"10.0.1.4", "10.0.1.11"} {
			v.Releases = append(v.Releases, &nodev1.Release{Address: a, State: nodev1.ReleaseState_RELEASE_STATE_MARKED, RoundId: "round-7"})
		}
		w.syncer.SetView(v)
		eventually(t, "answered", func() error {
			answers := make(map[string]string)
			for _, a := range w.syncer.LastReport().GetReleaseAnswers() {
				answers[a.GetAddress()] = a.GetAnswer().String() + " " + a.GetRoundId()
			}
			if answers["10.0.1.4"] != "RELEASE_STATE_DO_NOT_RELEASE round-7" || answers["10.0.1.11"] != "RELEASE_STATE_READY round-7" {
				return fmt.Errorf("%v", answers)
			}
			return nil
		})
		if _, err := allocate("default/after-yes", 300*time.Millisecond); rpc.ReasonOf(err) != reason.PoolEmpty {
			t.Errorf("after the yes: %v", err)
		}
	})

	t.Run("the node is registered again when it is gone", func(t *testing.T) {
		w.syncer.Remove()
		eventually(t, "registered again", func() error {
			if w.syncer.Registration() == nil {
				return fmt.Errorf("not yet")
			}
			return nil
		})
	})
}

func TestBadInput(t *testing.T) {
	w := newWorld(t)
	r := w.start()
	ctx := t.Context()
	eventually(t, "an address", func() error {
		_, err := r.AllocateIP(ctx, &agentv1.AllocateIPRequest{Owner: "default/a"})
		return err
	})
	r.mustReplace("good", "10.1.0.0/16")
	allocate := func(owner, address string) func() error {
		return func() error {
			_, err := r.AllocateIP(ctx, &agentv1.AllocateIPRequest{Owner: owner, Address: address})
			return err
		}
	}
	release := func(owner, address string) func() error {
		return func() error {
			_, err := r.ReleaseIP(ctx, &agentv1.ReleaseIPRequest{Owner: owner, Address: address})
			return err
		}
	}
	replace := func(owner string, prefixes ...string) func() error {
		return func() error { _, err := r.replace(owner, prefixes...); return err }
	}
	for _, tt := range []struct {
		name string
		call func() error
		code codes.Code
		why  reason.Reason
	}{
		{"no owner", allocate("", ""), codes.InvalidArgument, reason.FieldInvalid},
		{"not namespace/pod", allocate("pod", ""), codes.InvalidArgument, reason.FieldInvalid},
		{"too many slashes", allocate("a/b/c", ""), codes.InvalidArgument, reason.FieldInvalid},
		{"no address", allocate("default/b", "10.0.1"), codes.InvalidArgument, reason.FieldInvalid},
		{"IPv6 address", allocate("default/b", "fd00::1"), codes.InvalidArgument, reason.FieldInvalid},
		{"foreign address", allocate("default/b", "10.9.9.9"), codes.FailedPrecondition, reason.AddressUnknown},
		{"somebody's address", allocate("default/b", "10.0.1.2"), codes.FailedPrecondition, reason.AddressInUse},
		{"another address than it has", allocate("default/a", "10.0.1.3"), codes.FailedPrecondition, reason.AddressInUse},
		{"release somebody's address", release("default/b", "10.0.1.2"), codes.FailedPrecondition, reason.AddressInUse},
		{"release the router", release("router", ""), codes.FailedPrecondition, reason.AddressInUse},
		{"no CIDR", replace("x", "10.0.0.0/8", "10.0.0.1"), codes.InvalidArgument, reason.PrefixInvalid},
		{"not foldable", replace("x", "::ffff:0:0/90"), codes.InvalidArgument, reason.PrefixInvalid},
		{"the world", replace("x", "0.0.0.0/0"), codes.InvalidArgument, reason.PrefixReserved},
		{"no owner of prefixes", replace("", "10.0.0.0/8"), codes.InvalidArgument, reason.FieldInvalid},
		{"page token", func() error {
			_, err := r.ListEntries(ctx, &agentv1.ListEntriesRequest{PageToken: "!"})
			return err
		}, codes.InvalidArgument, reason.PageTokenInvalid},
		{"page size", func() error {
			_, err := r.ListEntries(ctx, &agentv1.ListEntriesRequest{PageSize: 10001})
			return err
		}, codes.InvalidArgument, reason.FieldInvalid},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.call()
			if status.Code(err) != tt.code || rpc.ReasonOf(err) != tt.why {
				t.Errorf("got %v, want %s %s", err, tt.code, tt.why)
			}
		})
	}
	w.wantEntries(r, "10.1.0.0/16")
	if o := w.identity.Owners(); !slices.Equal(o, []fake.Owner{localOwner("good")}) {
		t.Errorf("owners %v", o)
	}
}

// I10: with every service away, from the start.
func TestServicesAway(t *testing.T) {
	w := newWorld(t)
	r := w.start()
	eventually(t, "an address", func() error {
		_, err := r.AllocateIP(t.Context(), &agentv1.AllocateIPRequest{Owner: "default/a"})
		return err
	})
	r.mustReplace("vpn", "10.1.0.0/16")
	number := w.identity.Number("10.1.0.0/16")
	r.close()

	for _, e := range w.services {
		e.Stop()
	}
	w.imds.Close()
	r = w.start()
	// The pod keeps its address, and another one gets one from the last view.
	for owner, want := range map[string]string{"default/a": "10.0.1.2", "default/b": "10.0.1.3"} {
		a, err := r.AllocateIP(t.Context(), &agentv1.AllocateIPRequest{Owner: owner})
		if err != nil || a.GetAddress() != want || a.GetEniMac() != mac {
			t.Errorf("%s got %s, %v", owner, compact(a), err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := r.AllocateIP(ctx, &agentv1.AllocateIPRequest{Owner: "default/c"})
	if rpc.ReasonOf(err) != reason.PoolEmpty || rpc.MetadataOf(err)["blocked_reason"] != "SERVICE_AWAY" {
		t.Errorf("got %v, %v", err, rpc.MetadataOf(err))
	}
	r.wantCondition("SERVICE_AWAY", true)
	if _, err := r.replace("other", "10.2.0.0/16"); status.Code(err) != codes.Unavailable || rpc.ReasonOf(err) != reason.ServiceAway {
		t.Errorf("a new prefix: %v", err)
	}
	if got, err := r.entries(); err != nil || len(got) != 1 || got["10.1.0.0/16"] != number {
		t.Errorf("the map has %v, %v", got, err)
	}

	for _, e := range w.services {
		if err := e.Start(); err != nil {
			t.Fatal(err)
		}
	}
	w.wantEntries(r, "10.1.0.0/16", "10.2.0.0/16")
	if w.identity.Number("10.1.0.0/16") != number {
		t.Error("the number changed")
	}
	r.wantCondition("SERVICE_AWAY", false)
	eventually(t, "use is reported", func() error {
		if last := w.syncer.LastReport(); len(last.GetUsed()) != 3 {
			return fmt.Errorf("%s", compact(last))
		}
		return nil
	})
}

func TestSessionLostIsReplayed(t *testing.T) {
	w := newWorld(t)
	r := w.start()
	r.mustReplace("a", "10.1.0.0/16", "10.2.0.0/16")
	r.mustReplace("b", "10.2.0.0/16", "10.3.0.0/16")
	before, err := r.entries()
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string) {
		t.Helper()
		eventually(t, what, func() error {
			if held := w.identity.Held(); len(held) != 3 || len(held["10.2.0.0/16"]) != 2 {
				return fmt.Errorf("held %v", held)
			}
			return nil
		})
		w.wantEntries(r, "10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16")
		for p, n := range before {
			if got := w.identity.Number(p); got != n {
				t.Errorf("%s had %d and has %d", p, n, got)
			}
		}
	}
	w.identity.LoseSessions()
	check("replayed after the session was lost")
	// cilium#5397: the ledger is gone, too; the node re-asserts its numbers.
	w.identity.NewLedger("ledger-2", fake.FirstNumber)
	check("re-asserted in another ledger")
	eventually(t, "acknowledged", func() error {
		if ack, newest := w.identity.LastAck(); !newest || len(ack.GetFailures()) != 0 {
			return fmt.Errorf("%s", compact(ack))
		}
		return nil
	})
}

// A number that the ledger gave to another prefix meanwhile is not kept.
func TestTakenNumberChangesInPlace(t *testing.T) {
	w := newWorld(t)
	r := w.start()
	r.mustReplace("a", "10.1.0.0/16")
	w.identity.NewLedger("ledger-2", fake.FirstNumber+100)
	w.identity.Reserve("192.0.2.0/24", fake.FirstNumber)
	eventually(t, "renumbered", func() error {
		got, err := r.entries()
		if err == nil && got["10.1.0.0/16"] != fake.FirstNumber+100 {
			err = fmt.Errorf("%v", got)
		}
		return err
	})
}

// One owner that the ledger refuses stops nobody else.
func TestRefusedOwnerStopsNobody(t *testing.T) {
	w := newWorld(t)
	w.identity.Fail(func(method string, o fake.Owner) error {
		if method == "SetHolding" && o.Name == "bad" {
			return rpc.Refuse(codes.ResourceExhausted, reason.NumbersExhausted, "no number is free")
		}
		return nil
	})
	r := w.start()
	if _, err := r.replace("bad", "10.1.0.0/16"); status.Code(err) != codes.ResourceExhausted || rpc.ReasonOf(err) != reason.NumbersExhausted {
		t.Fatalf("got %v", err)
	}
	r.mustReplace("good", "10.2.0.0/16")
	w.wantEntries(r, "10.2.0.0/16")
	r.wantCondition("NUMBERS_EXHAUSTED", true)
	w.identity.Fail(nil)
	r.mustReplace("bad", "10.1.0.0/16", "10.3.0.0/16")
	r.wantCondition("NUMBERS_EXHAUSTED", false)
}

// cilium#47894: eleven prefixes in a map of ten.
func TestB37FullMapIsToldAndHealsItself(t *testing.T) {
	w := newWorld(t)
	w.flags["map-max-entries"] = "10"
	r := w.start()
	var ten []string
	for i := range 10 {
		ten = append(ten, fmt.Sprintf("10.%d.0.0/16", i))
	}
	r.mustReplace("ten", ten...)
	r.mustReplace("one", "192.0.2.0/24")
	r.wantCondition("MAP_FULL", true)
	eventually(t, "the ledger is told", func() error {
		ack, newest := w.identity.LastAck()
		if f := ack.GetFailures(); !newest || len(f) != 1 || f[0].GetPrefix() != "192.0.2.0/24" || f[0].GetReason().String() != "REASON_MAP_FULL" {
			return fmt.Errorf("%s", compact(ack))
		}
		return nil
	})
	s, err := r.GetStatus(t.Context(), &agentv1.GetStatusRequest{})
	if err != nil || s.GetMap().GetRefused() != 1 || s.GetMap().GetWanted() != 11 {
		t.Errorf("status %s, %v", compact(s), err)
	}
	r.mustReplace("ten", ten[1:]...)
	w.wantEntries(r, append(ten[1:], "192.0.2.0/24")...)
	r.wantCondition("MAP_FULL", false)
}

func TestVerifyMap(t *testing.T) {
	w := newWorld(t)
	r := w.start()
	r.mustReplace("a", "10.1.0.0/16", "10.2.0.0/16")
	kernel, err := ebpf.LoadPinnedMap(w.flags["map-pin-path"], nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = kernel.Close() }()
	key := func(s string) []byte { b, _ := hex.DecodeString(s); return b }
	missing, foreign, wrong := key("30000000000000010a010000000000000000000000000000"), key("2800000000000001cb000000000000000000000000000000"), key("30000000000000010a020000000000000000000000000000")
	value := key("050000000000000000000000000000000000000000000000")
	if err := kernel.Delete(missing); err != nil {
		t.Fatal(err)
	}
	for _, k := range [][]byte{foreign, wrong} {
		if err := kernel.Put(k, value); err != nil {
			t.Fatal(err)
		}
	}
	for i, repair := range []bool{false, true, true} {
		v, err := r.VerifyMap(t.Context(), &agentv1.VerifyMapRequest{Repair: repair})
		if err != nil {
			t.Fatal(err)
		}
		if i < 2 && (len(v.GetMissing()) != 1 || v.GetMissing()[0].GetPrefix() != "10.1.0.0/16" ||
			len(v.GetForeign()) != 1 || v.GetForeign()[0].GetPrefix() != "203.0.0.0/8" || v.GetForeign()[0].GetHave() != 5 ||
			len(v.GetWrong()) != 1 || v.GetWrong()[0].GetHave() != 5 || v.GetCompared() != 3 || int(v.GetRepaired()) != i*3) {
			t.Errorf("check %d found %s", i, compact(v))
		}
		if i == 2 && (len(v.GetMissing())+len(v.GetForeign())+len(v.GetWrong()) != 0 || v.GetCompared() != 2) {
			t.Errorf("after the repair: %s", compact(v))
		}
		r.wantCondition("MAP_DRIFT", i == 0)
	}
	w.wantEntries(r, "10.1.0.0/16", "10.2.0.0/16")
}

func TestMapOfAnotherShapeAndNoMap(t *testing.T) {
	for name, prepare := range map[string]func(t *testing.T, w *world){
		"MAP_LAYOUT": func(t *testing.T, w *world) {
			m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 24, ValueSize: 12, MaxEntries: 10})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = m.Close() }()
			pin := w.flags["map-pin-path"]
			if err := os.MkdirAll(filepath.Dir(pin), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := m.Pin(pin); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if _, err := os.Stat(pin); err != nil {
					t.Errorf("the pin is gone: %v", err)
				}
			})
		},
		"MAP_IN_MEMORY": func(_ *testing.T, w *world) { w.flags["map-pin-path"] = filepath.Join(w.dir, "no-bpffs", "map") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			prepare(t, w)
			r := w.start()
			r.wantCondition(name, true)
			r.mustReplace("a", "10.1.0.0/16")
			w.wantEntries(r, "10.1.0.0/16")
			if _, err := r.AllocateIP(t.Context(), &agentv1.AllocateIPRequest{Owner: "default/a"}); err != nil {
				t.Error(err)
			}
			if !strings.Contains(r.logs.String(), "NO KERNEL MAP") {
				t.Error("not said loudly")
			}
			r.stop()
		})
	}
}

func TestForeignCheckpointIsKeptAside(t *testing.T) {
	w := newWorld(t)
	r := w.start()
	if _, err := r.AllocateIP(t.Context(), &agentv1.AllocateIPRequest{Owner: "default/a", Address: "10.0.1.3"}); err != nil {
		// The view may not be there yet: a wanted address does not wait.
		eventually(t, "an address", func() error {
			_, err := r.AllocateIP(t.Context(), &agentv1.AllocateIPRequest{Owner: "default/a", Address: "10.0.1.3"})
			return err
		})
	}
	r.close()
	w.flags["node-name"] = "node-2"
	w.syncer.SetView(view(9, 1, 2, 3))
	r = w.start()
	r.wantCondition("OBJECT_MALFORMED", true)
	a, err := r.AllocateIP(t.Context(), &agentv1.AllocateIPRequest{Owner: "default/b"})
	if err != nil || a.GetAddress() != "10.0.1.2" {
		t.Errorf("got %s, %v", compact(a), err)
	}
	if _, err := os.Stat(filepath.Join(w.flags["state-dir"], addressesFile+".refused-1")); err != nil {
		t.Errorf("not kept: %v", err)
	}
}

func TestNotReadyWithoutAnInstance(t *testing.T) {
	w := newWorld(t)
	dead := httptest.NewServer(nil)
	dead.Close()
	w.flags["imds-endpoint"] = dead.URL
	r := w.start()
	if _, err := r.AllocateIP(t.Context(), &agentv1.AllocateIPRequest{Owner: "default/a"}); status.Code(err) != codes.Unavailable || rpc.ReasonOf(err) != reason.NotReady {
		t.Errorf("got %v", err)
	}
	r.wantCondition("NOT_READY", true)
}
