package allocator_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"

	"github.com/eniplane/eniplane/eni-allocator/internal/allocator"
	"github.com/eniplane/eniplane/eni-allocator/internal/lease"
	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

func TestNodeIsFilled(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	w.start()
	w.poolOf("n", 2)
	w.quiet()
	if got := w.changes(); !slices.Equal(got, []string{"AssignPrivateIpAddresses"}) {
		t.Errorf("changes %v", got)
	}
	snap := w.syncer.published("n")
	if len(snap.GetEnis()) != 1 || snap.GetFence().GetEpoch() != w.epoch || snap.GetInstanceId() != medium || len(snap.GetConditions()) != 0 {
		t.Errorf("published %+v", snap)
	}
	if vpc := snap.GetEnis()[0].GetVpc(); vpc.GetPrimaryCidr() != "10.0.0.0/16" || !slices.Equal(vpc.GetCidrs(), []string{"100.64.0.0/16"}) {
		t.Errorf("VPC %+v", vpc)
	}

	// One address is used: one more is assigned, and nothing else is done.
	w.syncer.use("n", 1)
	w.poolOf("n", 3)
	w.quiet()
	if got := w.changes(); len(got) != 2 {
		t.Errorf("changes %v", got)
	}
}

func TestIdleAllocatorIsQuiet(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	w.start(func(c *allocator.Config) { c.Recheck = 10 * time.Millisecond })
	w.poolOf("n", 2)
	w.quiet()
	calls, stored := w.sim.Calls().Total(), len(w.syncer.History("n"))
	w.syncer.Edit("n", func(*nodev1.NodeDemand) {})
	time.Sleep(300 * time.Millisecond) // Nothing is waited for: that is the point.
	if got := w.sim.Calls().Total(); got != calls {
		t.Errorf("%d calls to EC2 while nothing was wanted", got-calls)
	}
	if got := len(w.syncer.History("n")); got != stored {
		t.Errorf("%d snapshots while nothing changed", got-stored)
	}
}

func TestSixAtOnceNeedASecondENI(t *testing.T) {
	w := newWorld(t)
	spans := recorded(w)
	w.node("n", medium, 2)
	a := w.start()
	w.poolOf("n", 2)
	ctx, span := w.tracer.Tracer("caller").Start(t.Context(), "EnsureAddresses")
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	got, err := a.Ensure(ctx, "n", 6, nil)
	if err != nil {
		t.Fatal(err)
	}
	span.End()
	snap := w.syncer.published("n")
	if got.Free < 6 || len(snap.GetPool()) != got.Free || got.Fence.GetGeneration() > snap.GetFence().GetGeneration() {
		t.Errorf("ensured %+v, published %+v", got, snap)
	}
	w.quiet()
	made := w.enis()
	if len(made) != 1 || made[0].Attachment.DeviceIndex != 1 || made[0].Subnet != own || made[0].Groups[0].ID != "sg-00000001" {
		t.Errorf("made %+v", made)
	}
	tags := make(map[string]string)
	for _, tag := range made[0].Tags {
		tags[tag.Key] = tag.Value
	}
	if tags[plan.TagCluster] != "test" || tags[plan.TagInstance] != medium || tags[plan.TagNodeUID] != "uid-n" || tags[plan.TagIntent] == "" || tags[plan.TagCreated] == "" {
		t.Errorf("tags %v", tags)
	}
	if n := count(w.changes(), "CreateTags"); n != 0 {
		t.Error("tags in a call of their own")
	}
	eventually(t, "the whole work is one trace", func() bool {
		names := spans.of(span.SpanContext().TraceID())
		for _, want := range []string{"allocator.Reconcile", "EC2.CreateNetworkInterface", "EC2.AttachNetworkInterface", "eniplane.node.v1.NodeSyncerService/PublishPool"} {
			if !slices.Contains(names, want) {
				return false
			}
		}
		return true
	})
}

func TestEnsureWithUsageNewerThanReported(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	a := w.start()
	w.poolOf("n", 2)
	var used []string
	used = append(used, w.syncer.pool("n")...)
	got, err := a.Ensure(t.Context(), "n", 1, addresses(used...))
	if err != nil || got.Free < 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	if n := len(w.syncer.pool("n")); n < 3 {
		t.Errorf("pool of %d", n)
	}
}

func TestEnsureThatIsMetAlready(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	a := w.start()
	w.poolOf("n", 2)
	w.quiet()
	before := w.sim.Calls().Total()
	got, err := a.Ensure(t.Context(), "n", 2, nil)
	if err != nil || got.Free != 2 || got.Fence == nil || w.sim.Calls().Total() != before {
		t.Errorf("%+v, %v, %d calls", got, err, w.sim.Calls().Total()-before)
	}
}

func TestEnsureThatCannotBeMet(t *testing.T) {
	w := newWorld(t)
	w.node("n", tiny, 1)
	a := w.start()
	w.poolOf("n", 1)
	_, err := a.Ensure(t.Context(), "n", 3, nil) // A t3.micro has two.
	var blocked *allocator.BlockedError
	if !errors.As(err, &blocked) || blocked.Reason != reason.OutOfENIs || blocked.Free != 2 {
		t.Fatalf("%+v", err)
	}
	if _, err := a.Ensure(t.Context(), "m", 1, nil); !errors.Is(err, allocator.ErrNodeUnknown) {
		t.Errorf("unknown node: %v", err)
	}
}

func TestStandbyDoesNothing(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	a := w.start()
	w.poolOf("n", 2)
	a.kill()
	if _, err := a.Ensure(t.Context(), "n", 1, nil); !errors.Is(err, allocator.ErrNotLeader) {
		t.Errorf("Ensure: %v", err)
	}
	if _, err := a.Node("n"); !errors.Is(err, allocator.ErrNotLeader) {
		t.Errorf("Node: %v", err)
	}
}

func TestLostLeaseStopsEveryChange(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	w.startTerm(lease.NewTerm(7, func() error { return lease.ErrLost }))
	w.quiet()
	if got := w.changes(); len(got) != 0 {
		t.Errorf("changes %v", got)
	}
}

// mustNotAmplify refuses an action of a node that wants seven addresses, checks
// that nothing else was tried instead of it, and that all is well afterwards.
func mustNotAmplify(t *testing.T, action string, err *ec2sim.APIError, want reason.Reason) {
	w := newWorld(t)
	w.node("n", medium, 7)
	w.fault(refuseAll(action, err))
	w.start()
	eventually(t, "four tries", func() bool { return count(w.changes(), action) >= 4 })
	c := w.conditionOf("n", want)
	if c.GetMessage() == "" || c.GetSince() == nil {
		t.Errorf("condition %v", c)
	}
	changes := w.changes()
	if tried := changes[slices.Index(changes, action):]; count(tried, action) != len(tried) {
		t.Errorf("instead of %s: %v", action, tried)
	}
	w.heal()
	w.poolOf("n", 7)
	eventually(t, "the condition is gone", func() bool { return len(w.syncer.published("n").GetConditions()) == 0 })
	w.quiet()
	if made := w.enis(); len(made) != 1 {
		t.Errorf("made %+v", made)
	}
}

func TestNoAmplification(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  *ec2sim.APIError
		want reason.Reason
	}{
		{"throttled", apiError("RequestLimitExceeded", "Request limit exceeded.", 503), reason.EC2Throttled},
		{"denied", apiError("UnauthorizedOperation", "You are not authorized to perform this operation.", 403), reason.EC2Denied},
		{"failing", apiError("InternalError", "An internal error has occurred", 500), reason.EC2Unavailable},
		{"refused", apiError("UnsupportedOperation", "The operation is not supported.", 400), reason.EC2Refused},
	} {
		for _, action := range []string{"AssignPrivateIpAddresses", "CreateNetworkInterface", "AttachNetworkInterface", "ModifyNetworkInterfaceAttribute"} {
			t.Run(tt.name+"/"+action, func(t *testing.T) {
				t.Parallel()
				mustNotAmplify(t, action, tt.err, tt.want)
			})
		}
	}
}

func TestB41DeniedCreateSaysWhy(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 7)
	w.fault(refuseAll("CreateNetworkInterface", apiError("UnauthorizedOperation", "You are not authorized to perform: ec2:CreateTags", 403)))
	a := w.start()
	w.poolOf("n", 5)
	_, err := a.Ensure(t.Context(), "n", 6, nil)
	var blocked *allocator.BlockedError
	if !errors.As(err, &blocked) || blocked.Reason != reason.EC2Denied || !strings.Contains(blocked.Message, "ec2:CreateTags") || blocked.RetryAfter <= 0 {
		t.Errorf("%v", err)
	}
	if c := w.conditionOf("n", reason.EC2Denied); !strings.Contains(c.GetMessage(), "ec2:CreateTags") {
		t.Errorf("condition %v", c)
	}
}

func TestEnsureAnswersBeforeItsDeadline(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	w.fault(refuseAll("AssignPrivateIpAddresses", apiError("RequestLimitExceeded", "Request limit exceeded.", 503)))
	a := w.start()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := a.Ensure(ctx, "n", 1, nil)
	var blocked *allocator.BlockedError
	if !errors.As(err, &blocked) || blocked.Reason != reason.EC2Throttled || blocked.RetryAfter <= 0 {
		t.Errorf("%v", err)
	}
	if ctx.Err() != nil {
		t.Error("too late")
	}
}

func TestDeviceIndexConflictKeepsTheENI(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	w.fault(fault{before: func(c ec2sim.Call) *ec2sim.APIError {
		if c.Action == "AttachNetworkInterface" && c.Param("DeviceIndex") == "1" {
			return apiError("InvalidParameterValue", "Instance '"+medium+"' already has an interface attached at device index '1'.", 400)
		}
		return nil
	}})
	a := w.start()
	if _, err := a.Ensure(t.Context(), "n", 7, nil); err != nil {
		t.Fatal(err)
	}
	w.quiet()
	made := w.enis()
	if len(made) != 1 || made[0].Attachment.DeviceIndex != 2 || count(w.changes(), "CreateNetworkInterface") != 1 || count(w.changes(), "DeleteNetworkInterface") != 0 {
		t.Errorf("made %+v with %v", made, w.changes())
	}
}

func TestAttachmentLimitDeletesWhatWasMade(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 7)
	w.fault(refuseAll("AttachNetworkInterface", apiError("AttachmentLimitExceeded", "Interface count 2 exceeds the limit for t3.medium", 400)))
	a := w.start()
	_, err := a.Ensure(t.Context(), "n", 7, nil)
	var blocked *allocator.BlockedError
	if !errors.As(err, &blocked) || blocked.Reason != reason.OutOfENIs {
		t.Errorf("%v", err)
	}
	w.conditionOf("n", reason.OutOfENIs)
	w.quiet()
	if made := w.enis(); len(made) != 0 || count(w.changes(), "CreateNetworkInterface") != 1 {
		t.Errorf("left %+v after %v", made, w.changes())
	}
}

func TestFullSubnetIsPassedOver(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	full := apiError("InsufficientFreeAddressesInSubnet", "The specified subnet does not have enough free addresses to satisfy the request.", 400)
	w.fault(fault{before: func(c ec2sim.Call) *ec2sim.APIError {
		if c.Action == "AssignPrivateIpAddresses" || c.Param("SubnetId") == own {
			return full
		}
		return nil
	}})
	w.start()
	w.poolOf("n", 2)
	w.quiet()
	if made := w.enis(); len(made) != 1 || made[0].Subnet != other || count(w.changes(), "AssignPrivateIpAddresses") != 1 {
		t.Errorf("made %+v with %v", made, w.changes())
	}
}

func TestB33NotRunningIsForgotten(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 6)
	w.fault(refuseN("AttachNetworkInterface", 1, apiError("IncorrectState", "Instance '"+medium+"' is not 'running'.", 400)))
	w.start(func(c *allocator.Config) { c.Suspension = time.Second })
	w.conditionOf("n", reason.InstanceNotRunning)
	w.poolOf("n", 6)
	w.quiet()
	if made := w.enis(); len(made) != 1 || count(w.changes(), "CreateNetworkInterface") != 1 {
		t.Errorf("made %+v with %v", made, w.changes())
	}
}

func TestStaleKnowledgeOfAnENI(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	w.fault(refuseN("AssignPrivateIpAddresses", 1, apiError("PrivateIpAddressLimitExceeded", "Number of private addresses will exceed limit.", 400)))
	w.start()
	before := w.sim.Calls().Started["DescribeNetworkInterfaces"]
	w.poolOf("n", 2)
	if count(w.changes(), "CreateNetworkInterface") != 0 || w.sim.Calls().Started["DescribeNetworkInterfaces"] == before {
		t.Errorf("changes %v", w.changes())
	}
}

func TestB2FullNodeIsLeftAlone(t *testing.T) {
	w := newWorld(t)
	w.node("n", tiny, 2)
	a := w.start()
	w.poolOf("n", 2)
	w.quiet()
	before := len(w.changes())
	w.syncer.use("n", 2)
	w.conditionOf("n", reason.OutOfENIs)
	w.quiet()
	if got := w.changes()[before:]; len(got) != 0 {
		t.Errorf("changes %v", got)
	}
	s, err := a.Node("n")
	if err != nil || s.Plan.Blocked == nil || s.Plan.Blocked.Reason != reason.OutOfENIs || len(s.ENIs) != 2 || s.Published == nil || s.ReadAt.IsZero() {
		t.Errorf("status %+v, %v", s, err)
	}
}

func TestB21UnknownTypeHurtsNobodyElse(t *testing.T) {
	w := newWorld(t)
	w.node("known", medium, 2)
	w.node("unknown", tiny, 2)
	w.fault(fault{before: func(c ec2sim.Call) *ec2sim.APIError {
		if c.Action == "DescribeInstanceTypes" && c.Param("InstanceType.1") == "t3.micro" {
			return apiError("InvalidInstanceType", "The following supplied instance types do not exist: [t3.micro]", 400)
		}
		return nil
	}})
	w.start(func(c *allocator.Config) { c.Recheck = time.Second })
	w.poolOf("known", 2)
	w.conditionOf("unknown", reason.InstanceTypeUnknown)
	if n := w.sim.Calls().Started["DescribeInstanceTypes"]; n > 4 {
		t.Errorf("DescribeInstanceTypes asked %d times", n)
	}
	w.heal() // B22: it is known from now on.
	w.poolOf("unknown", 2)
}

func TestStoredStateThatWasEditedIsHealed(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	w.start()
	w.poolOf("n", 2)
	w.quiet()
	for range 2 {
		fence := w.syncer.published("n").GetFence()
		w.syncer.Edit("n", func(d *nodev1.NodeDemand) { d.Stored.Digest = "edited" })
		eventually(t, "it is published again", func() bool { return w.syncer.published("n").GetFence().GetGeneration() > fence.GetGeneration() })
	}
	w.syncer.Edit("n", func(d *nodev1.NodeDemand) { d.Stored.Fence = nil })
	fence := w.syncer.published("n").GetFence()
	eventually(t, "a lost fence is written again", func() bool { return w.syncer.published("n").GetFence().GetGeneration() > fence.GetGeneration() })
	if got := w.changes(); len(got) != 1 {
		t.Errorf("changes %v", got)
	}
}

func TestPublishIsRetried(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	refusals := 0
	w.syncer.OnPublish(func(*nodev1.PoolSnapshot) error {
		if refusals++; refusals > 3 {
			return nil
		}
		return rpc.Refuse(codes.Aborted, reason.Conflict, "somebody was faster")
	})
	a := w.start()
	if _, err := a.Ensure(t.Context(), "n", 4, nil); err != nil {
		t.Error(err)
	}
}

func TestPoisonedEpochHurtsNobodyElse(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	w.node("m", tiny, 1)
	w.syncer.Edit("n", func(d *nodev1.NodeDemand) {
		d.Stored = &nodev1.StoredState{Fence: &nodev1.Fence{Epoch: 1 << 60, Generation: 1}}
	})
	a := w.start()
	w.poolOf("m", 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := a.Ensure(ctx, "n", 1, nil)
	var blocked *allocator.BlockedError
	if !errors.As(err, &blocked) || blocked.Reason != reason.StaleEpoch {
		t.Errorf("%v", err)
	}
}

func TestRemovedNodeIsLeftAlone(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 6)
	a := w.start()
	w.poolOf("n", 6)
	w.quiet()
	before := len(w.changes())
	w.syncer.Remove("n")
	eventually(t, "it is forgotten", func() bool { _, err := a.Node("n"); return errors.Is(err, allocator.ErrNodeUnknown) })
	w.quiet()
	if got := w.changes()[before:]; len(got) != 0 {
		t.Errorf("changes %v", got)
	}
	// It comes back, and what it has is known.
	w.node("n", medium, 6)
	eventually(t, "it is known again", func() bool { s, err := a.Node("n"); return err == nil && s.Plan.Available == 6 })
}

func TestNodeThatComesLater(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	a := w.start()
	w.poolOf("n", 2)
	w.node("m", tiny, 1)
	w.poolOf("m", 1)
	all, err := a.Nodes()
	if err != nil || len(all) != 2 || all[0].Wire.GetNodeName() != "m" {
		t.Errorf("%+v, %v", all, err)
	}
}

func TestUnknownInstanceIsNotPublished(t *testing.T) {
	w := newWorld(t)
	w.node("n", "i-0000dead", 2)
	a := w.start()
	_, err := a.Ensure(t.Context(), "n", 1, nil)
	var blocked *allocator.BlockedError
	if !errors.As(err, &blocked) || blocked.Reason != reason.InstanceUnknown {
		t.Errorf("%v", err)
	}
	if w.syncer.published("n").GetFence() != nil {
		t.Error("something was published of an instance that EC2 never showed")
	}
}

func TestWithoutEC2NothingIsDone(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 2)
	w.fault(refuseAll("DescribeSubnets", apiError("UnauthorizedOperation", "You are not authorized to perform: ec2:DescribeSubnets", 403)))
	a := w.start()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := a.Ensure(ctx, "n", 1, nil)
	var blocked *allocator.BlockedError
	if !errors.As(err, &blocked) || blocked.Reason != reason.EC2Denied || !strings.Contains(blocked.Message, "ec2:DescribeSubnets") {
		t.Errorf("%v", err)
	}
	if s, err := a.Node("n"); err != nil || len(s.Conditions) != 1 || reason.Reason(s.Conditions[0].GetReason()) != reason.EC2Denied {
		t.Errorf("%+v, %v", s.Conditions, err)
	}
	if got := w.changes(); len(got) != 0 || w.syncer.published("n").GetFence() != nil {
		t.Errorf("changes %v", got)
	}
	w.heal()
	w.poolOf("n", 2)
}

// TestB6StaleDescribe has every reading show the addresses of before an Assign,
// as EC2 does for a moment, while the allocator reads again and again.
func TestB6StaleDescribe(t *testing.T) {
	w := newWorld(t)
	w.node("n", medium, 3)
	var mu sync.Mutex
	old := make(map[string]ec2sim.Response) // by everything that was asked
	stale, replays := false, 0
	w.fault(fault{instead: func(c ec2sim.Call, now ec2sim.Response) ec2sim.Response {
		if c.Action != "DescribeNetworkInterfaces" && c.Action != "DescribeSubnets" {
			return now
		}
		mu.Lock()
		defer mu.Unlock()
		asked := fmt.Sprint(c.Params)
		if before, ok := old[asked]; stale && ok {
			replays++
			return before
		}
		old[asked] = now
		return now
	}})
	w.start(func(c *allocator.Config) { c.ResyncInterval = 20 * time.Millisecond })
	w.poolOf("n", 3)
	had := w.syncer.pool("n")
	mu.Lock()
	stale = true
	mu.Unlock()
	w.syncer.use("n", 1)
	w.poolOf("n", 4)
	had = append(had, w.syncer.pool("n")...)
	for {
		mu.Lock()
		enough := replays > 20
		mu.Unlock()
		if enough {
			break
		}
		for _, a := range had {
			if !slices.Contains(w.syncer.pool("n"), a) {
				t.Fatalf("%s was lost", a)
			}
		}
	}
	if n := count(w.changes(), "AssignPrivateIpAddresses"); n != 2 {
		t.Errorf("%d assignments", n)
	}
}

func TestWaitersOfOneRoundAreLinked(t *testing.T) {
	w := newWorld(t)
	spans := recorded(w)
	w.node("n", medium, 2)
	block := make(chan struct{})
	w.fault(fault{before: func(c ec2sim.Call) *ec2sim.APIError {
		if c.Action == "AssignPrivateIpAddresses" {
			<-block
		}
		return nil
	}})
	a := w.start()
	eventually(t, "the first assignment is on its way", func() bool { return len(w.changes()) == 1 })
	ensured := make(chan error, 2)
	var ids []trace.TraceID
	for range 2 {
		ctx, span := w.tracer.Tracer("caller").Start(t.Context(), "EnsureAddresses")
		ids = append(ids, span.SpanContext().TraceID())
		go func() {
			_, err := a.Ensure(ctx, "n", 5, nil)
			span.End()
			ensured <- err
		}()
	}
	eventually(t, "both wait", func() bool { return a.Waiting("n") == 2 })
	close(block)
	for range 2 {
		if err := <-ensured; err != nil {
			t.Error(err)
		}
	}
	eventually(t, "one round serves both", func() bool {
		spans.mu.Lock()
		defer spans.mu.Unlock()
		for _, s := range spans.ended {
			if s.Name() == "allocator.Reconcile" && len(s.Links()) == 1 && slices.Contains(ids, s.SpanContext().TraceID()) && slices.Contains(ids, s.Links()[0].SpanContext.TraceID()) {
				return true
			}
		}
		return false
	})
}
