package server_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	corev1 "k8s.io/api/core/v1"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

// field returns the first field that a refusal names.
func field(err error) string {
	for _, d := range status.Convert(err).Details() {
		if bad, ok := d.(*errdetails.BadRequest); ok && len(bad.GetFieldViolations()) > 0 {
			return bad.GetFieldViolations()[0].GetField()
		}
	}
	return ""
}

func TestBadSnapshots(t *testing.T) {
	r := start(t)
	node := newNode(t, "bad-snapshots")
	register(t, r, node.Name)
	publish(t, r, snapshot(node.Name, 2, 2, 2, 2))
	before := mustGet(t, node.Name).GetResourceVersion()
	for name, tc := range map[string]struct {
		edit  func(*nodev1.PoolSnapshot)
		code  codes.Code
		why   reason.Reason
		field string
	}{
		"no fence":               {func(s *nodev1.PoolSnapshot) { s.Fence = nil }, codes.InvalidArgument, reason.FieldInvalid, "snapshot.fence"},
		"epoch 0":                {func(s *nodev1.PoolSnapshot) { s.Fence.Epoch = 0 }, codes.InvalidArgument, reason.FieldInvalid, "snapshot.fence.epoch"},
		"empty instance":         {func(s *nodev1.PoolSnapshot) { s.InstanceId = "" }, codes.InvalidArgument, reason.FieldInvalid, "snapshot.instance_id"},
		"pool of an unknown ENI": {func(s *nodev1.PoolSnapshot) { s.Pool[0].EniId = "eni-9" }, codes.InvalidArgument, reason.AddressNotOnENI, "snapshot.pool[0].eni_id"},
		"pool of another ENI":    {func(s *nodev1.PoolSnapshot) { s.Pool[0].EniId = "eni-1" }, codes.InvalidArgument, reason.AddressNotOnENI, "snapshot.pool[0].address"},
		"address twice in pool":  {func(s *nodev1.PoolSnapshot) { s.Pool[1].Address = s.Pool[0].GetAddress() }, codes.InvalidArgument, reason.Duplicate, "snapshot.pool[1].address"},
		"ENI twice":              {func(s *nodev1.PoolSnapshot) { s.Enis[1].Id = "eni-0" }, codes.InvalidArgument, reason.Duplicate, "snapshot.enis[1].id"},
		"device index twice":     {func(s *nodev1.PoolSnapshot) { s.Enis[1].DeviceIndex = 0 }, codes.InvalidArgument, reason.Duplicate, "snapshot.enis[1].device_index"},
		"address on two ENIs": {func(s *nodev1.PoolSnapshot) {
			s.Enis[1].Subnet.Cidr = "10.0.0.0/16"
			s.Enis[1].Addresses[0] = "10.0.0.10"
		}, codes.InvalidArgument, reason.Duplicate, "snapshot.enis[1].addresses[0]"},
		"address outside subnet":  {func(s *nodev1.PoolSnapshot) { s.Enis[0].Addresses[0] = "10.0.7.1" }, codes.InvalidArgument, reason.AddressOutsideSubnet, "snapshot.enis[0].addresses[0]"},
		"primary outside subnet":  {func(s *nodev1.PoolSnapshot) { s.Enis[0].Ip = "10.0.7.1" }, codes.InvalidArgument, reason.AddressOutsideSubnet, "snapshot.enis[0].ip"},
		"IPv6 where IPv4 is due":  {func(s *nodev1.PoolSnapshot) { s.Enis[0].Addresses[0] = "fd00::1" }, codes.InvalidArgument, reason.FieldInvalid, "snapshot.enis[0].addresses[0]"},
		"IPv4-mapped in the pool": {func(s *nodev1.PoolSnapshot) { s.Pool[0].Address = "::ffff:10.0.0.10" }, codes.InvalidArgument, reason.FieldInvalid, "snapshot.pool[0].address"},
		"no subnet CIDR":          {func(s *nodev1.PoolSnapshot) { s.Enis[0].Subnet.Cidr = "" }, codes.InvalidArgument, reason.CIDRUnknown, "snapshot.enis[0].subnet.cidr"},
		"no VPC CIDR":             {func(s *nodev1.PoolSnapshot) { s.Enis[0].Vpc.PrimaryCidr = "" }, codes.InvalidArgument, reason.CIDRUnknown, "snapshot.enis[0].vpc.primary_cidr"},
		"subnet with host bits":   {func(s *nodev1.PoolSnapshot) { s.Enis[0].Subnet.Cidr = "10.0.0.1/24" }, codes.InvalidArgument, reason.CIDRUnknown, "snapshot.enis[0].subnet.cidr"},
		"prefix not expanded":     {func(s *nodev1.PoolSnapshot) { s.Enis[0].Prefixes = []string{"10.0.0.32/28"} }, codes.InvalidArgument, reason.FieldsContradict, "snapshot.enis[0].prefixes[0]"},
		"absurd device index":     {func(s *nodev1.PoolSnapshot) { s.Enis[0].DeviceIndex = 9999 }, codes.InvalidArgument, reason.FieldInvalid, "snapshot.enis[0].device_index"},
		"releases": {func(s *nodev1.PoolSnapshot) {
			s.Releases = []*nodev1.Release{{Address: "10.0.0.10", State: nodev1.ReleaseState_RELEASE_STATE_MARKED}}
		}, codes.InvalidArgument, reason.FieldInvalid, "snapshot.releases"},
		"unknown node":     {func(s *nodev1.PoolSnapshot) { s.NodeName = "nowhere" }, codes.FailedPrecondition, reason.NodeUnknown, ""},
		"another instance": {func(s *nodev1.PoolSnapshot) { s.InstanceId = "i-9" }, codes.FailedPrecondition, reason.InstanceMismatch, ""},
		"generation back":  {func(s *nodev1.PoolSnapshot) { s.Fence.Generation = 1 }, codes.FailedPrecondition, reason.StaleGeneration, ""},
	} {
		s := snapshot(node.Name, 2, 3, 2, 2)
		tc.edit(s)
		_, err := r.PublishPool(t.Context(), &nodev1.PublishPoolRequest{Snapshot: s})
		if status.Code(err) != tc.code || rpc.ReasonOf(err) != tc.why || field(err) != tc.field {
			t.Errorf("%s: %v with %v on %q; want %v with %v on %q", name, status.Code(err), rpc.ReasonOf(err), field(err), tc.code, tc.why, tc.field)
		}
	}
	if after := mustGet(t, node.Name).GetResourceVersion(); after != before {
		t.Error("a refused snapshot wrote something")
	}
}

// A user edits one object into nonsense: its agent is shown what makes sense,
// the others go on, and the next snapshot heals it.
func TestNonsenseStopsNobodyElse(t *testing.T) {
	r := start(t)
	broken, fine := newNode(t, "nonsense"), newNode(t, "fine")
	register(t, r, broken.Name)
	register(t, r, fine.Name)
	publish(t, r, snapshot(broken.Name, 1, 1, 2))
	patch(t, broken.Name, `{"spec":{"ipam":{"pool":{"10.0.0.10":{"resource":"eni-gone"},"not an address":{"resource":"eni-0"},"10.0.0.99":null}},"eni":{"first-interface-index":0}}}`)
	patch(t, broken.Name, `{"status":{"eni":{"enis":{"eni-x":{"id":"eni-y"}}}}}`, "status")
	if err := eventually(10*time.Second, func() error {
		got, err := r.GetNode(t.Context(), &nodev1.GetNodeRequest{NodeName: broken.Name})
		if err != nil {
			return err
		}
		v := got.GetNode().GetView()
		if len(v.GetPool()) != 1 || len(v.GetEnis()) != 1 {
			return fmt.Errorf("shown %v", v)
		}
		for _, c := range v.GetConditions() {
			if c.GetReason() == reasonv1.Reason_REASON_OBJECT_MALFORMED {
				return nil
			}
		}
		return fmt.Errorf("no condition in %v", v)
	}); err != nil {
		t.Error(err)
	}
	publish(t, r, snapshot(fine.Name, 1, 1, 3))
	if list, err := r.ListNodes(t.Context(), &nodev1.ListNodesRequest{Reason: reasonv1.Reason_REASON_OBJECT_MALFORMED}); err != nil || len(list.GetNodes()) != 1 {
		t.Errorf("by reason: %v, %v", list, err)
	}
	publish(t, r, snapshot(broken.Name, 1, 2, 2))
	if v := nested(t, mustGet(t, broken.Name), "spec", "ipam", "pool").(map[string]any); len(v) != 2 {
		t.Errorf("not healed: %v", v)
	}
}

func TestWatchNodeShowsENIsAndPoolTogether(t *testing.T) {
	r := start(t)
	node := newNode(t, "watched")
	register(t, r, node.Name)
	if stream, err := r.WatchNode(t.Context(), &nodev1.WatchNodeRequest{NodeName: "nowhere"}); err == nil {
		if _, err := stream.Recv(); rpc.ReasonOf(err) != reason.NodeUnknown {
			t.Errorf("unknown node: %v", err)
		}
	}
	stream, err := r.WatchNode(t.Context(), &nodev1.WatchNodeRequest{NodeName: node.Name})
	if err != nil {
		t.Fatal(err)
	}
	publish(t, r, snapshot(node.Name, 1, 1, 2))
	go func() {
		for g := uint64(2); g <= 20; g++ {
			s := snapshot(node.Name, 1, g, int(g)%5, int(g*3)%4) //nolint:gosec // Small.
			_, _ = r.PublishPool(context.Background(), &nodev1.PublishPoolRequest{Snapshot: s})
		}
	}()
	for {
		resp, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		on := map[string]string{}
		for _, e := range resp.GetView().GetEnis() {
			for _, a := range e.GetAddresses() {
				on[a] = e.GetId()
			}
		}
		for _, p := range resp.GetView().GetPool() {
			if on[p.GetAddress()] != p.GetEniId() {
				t.Fatalf("%s at %s is on %q", p, resp.GetView().GetRevision(), on[p.GetAddress()])
			}
		}
		if resp.GetView().GetFence().GetGeneration() == 20 {
			return
		}
	}
}

func TestWatchDemand(t *testing.T) {
	r := start(t)
	node := newNode(t, "demand")
	register(t, r, node.Name)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := r.WatchDemand(ctx, &nodev1.WatchDemandRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var revision string
	next := func(accept func(*nodev1.WatchDemandResponse) bool) *nodev1.WatchDemandResponse {
		t.Helper()
		for {
			resp, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if resp.GetRevision() != "" {
				revision = resp.GetRevision()
			}
			if accept(resp) {
				return resp
			}
		}
	}
	ours := func(accept func(*nodev1.NodeDemand) bool) *nodev1.NodeDemand {
		t.Helper()
		return next(func(r *nodev1.WatchDemandResponse) bool {
			return r.GetNode().GetNodeName() == node.Name && accept(r.GetNode())
		}).GetNode()
	}
	d := ours(func(*nodev1.NodeDemand) bool { return true })
	if d.GetInstanceId() != instance || d.GetWatermarks().GetPreAllocate() != 2 || d.GetEni().FirstInterfaceIndex == nil || !d.GetRegistered() || d.GetStored().GetFence() != nil {
		t.Errorf("demand %v", d)
	}
	next(func(r *nodev1.WatchDemandResponse) bool { return r.GetSnapshotEnd() != nil })

	pods := core(t).CoreV1().Pods("default")
	for i, host := range []bool{false, true} {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("demand-%d", i)},
			Spec:       corev1.PodSpec{NodeName: node.Name, HostNetwork: host, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}
		if _, err := pods.Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = pods.Delete(context.Background(), pod.Name, metav1.DeleteOptions{}) })
	}
	ours(func(d *nodev1.NodeDemand) bool { return d.GetPendingPods() == 1 })

	publish(t, r, snapshot(node.Name, 3, 1, 4))
	// The claim of the epoch comes first; then the digest shows the pool.
	ours(func(now *nodev1.NodeDemand) bool {
		return now.GetStored().GetFence().GetEpoch() == 3 && now.GetStored().GetDigest() != d.GetStored().GetDigest()
	})
	if _, err := r.ReportUsage(t.Context(), &nodev1.ReportUsageRequest{NodeName: node.Name, Sequence: 1, Used: []*nodev1.UsedAddress{{Address: "10.0.0.10", Owner: "router"}}}); err != nil {
		t.Fatal(err)
	}
	ours(func(d *nodev1.NodeDemand) bool { return len(d.GetUsed()) == 1 })

	// What happens between two streams is not lost.
	cancel()
	if err := objects(t).Delete(t.Context(), node.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := eventually(10*time.Second, func() error {
		if _, err := r.GetNode(t.Context(), &nodev1.GetNodeRequest{NodeName: node.Name}); status.Code(err) != codes.NotFound {
			return fmt.Errorf("still there: %w", err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if stream, err = r.WatchDemand(t.Context(), &nodev1.WatchDemandRequest{Revision: revision}); err != nil {
		t.Fatal(err)
	}
	removed := next(func(r *nodev1.WatchDemandResponse) bool { return r.GetRemoved().GetNodeName() == node.Name }).GetRemoved()
	if removed.GetUid() != d.GetUid() || removed.GetInstanceId() != instance {
		t.Errorf("removal %v, want uid %s", removed, d.GetUid())
	}

	foreign, err := r.WatchDemand(t.Context(), &nodev1.WatchDemandRequest{Revision: "somebody.7"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := foreign.Recv(); status.Code(err) != codes.OutOfRange || rpc.ReasonOf(err) != reason.RevisionUnknown {
		t.Errorf("a foreign revision: %v", err)
	}
}

func TestReportUsage(t *testing.T) {
	r := start(t)
	node := newNode(t, "usage")
	used := func(n int) []*nodev1.UsedAddress {
		var out []*nodev1.UsedAddress
		for i := range n {
			out = append(out, &nodev1.UsedAddress{Address: fmt.Sprintf("10.0.0.%d", 10+i), Owner: fmt.Sprintf("ns/pod-%d", i), EniId: "eni-0"})
		}
		return out
	}
	report := func(sequence uint64, u []*nodev1.UsedAddress) error {
		_, err := r.ReportUsage(t.Context(), &nodev1.ReportUsageRequest{NodeName: node.Name, Sequence: sequence, Used: u})
		return err
	}
	if err := report(1, used(1)); rpc.ReasonOf(err) != reason.NodeUnknown {
		t.Errorf("unregistered: %v", err)
	}
	register(t, r, node.Name)
	publish(t, r, snapshot(node.Name, 1, 1, 5))
	if err := eventually(5*time.Second, func() error {
		got, err := r.GetNode(t.Context(), &nodev1.GetNodeRequest{NodeName: node.Name})
		if err == nil && len(got.GetNode().GetView().GetPool()) != 5 {
			err = fmt.Errorf("pool %v", got.GetNode().GetView().GetPool())
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	// Crossing the watermark is written at once.
	if err := report(2, used(4)); err != nil {
		t.Fatal(err)
	}
	if got := nested(t, mustGet(t, node.Name), "status", "ipam", "used").(map[string]any); len(got) != 4 {
		t.Errorf("used = %v", got)
	}
	if err := report(1, used(0)); rpc.ReasonOf(err) != reason.StaleGeneration {
		t.Errorf("an older report: %v", err)
	}
	if err := report(3, append(used(1), used(1)...)); rpc.ReasonOf(err) != reason.Duplicate || field(err) != "used[1].address" {
		t.Errorf("twice the same address: %v", err)
	}
	// The rest is written within the interval.
	if err := report(4, used(5)); err != nil {
		t.Fatal(err)
	}
	if err := eventually(15*time.Second, func() error {
		if got := nested(t, mustGet(t, node.Name), "status", "ipam", "used").(map[string]any); len(got) != 5 {
			return fmt.Errorf("used = %v", got)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	// A node that a cilium-agent made is not ours to write.
	patch(t, node.Name, `{"metadata":{"annotations":{"eniplane.dev/registered":null}}}`)
	if err := eventually(5*time.Second, func() error {
		if err := report(5, used(0)); rpc.ReasonOf(err) != reason.NodeUnknown {
			return fmt.Errorf("a cilium-agent's node: %w", err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

func TestListNodesPages(t *testing.T) {
	r := start(t)
	want := map[string]bool{}
	for i := range 5 {
		node := newNode(t, fmt.Sprintf("page-%d", i))
		register(t, r, node.Name)
		want[node.Name] = true
	}
	token, pages := "", 0
	for {
		resp, err := r.ListNodes(t.Context(), &nodev1.ListNodesRequest{PageSize: 2, PageToken: token})
		if err != nil {
			t.Fatal(err)
		}
		pages++
		for _, n := range resp.GetNodes() {
			delete(want, n.GetView().GetNodeName())
		}
		if token = resp.GetNextPageToken(); token == "" {
			break
		}
	}
	if len(want) > 0 || pages < 3 {
		t.Errorf("%d pages left out %v", pages, want)
	}
	for _, q := range []*nodev1.ListNodesRequest{{PageToken: "!"}, {PageToken: "bm9wZQ"}, {PageSize: 1001}} {
		if _, err := r.ListNodes(t.Context(), q); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%v: %v", q, err)
		}
	}
}
