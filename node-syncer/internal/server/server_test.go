package server_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/internal/testsize"
	"github.com/eniplane/eniplane/node-syncer/observer"
)

func nested(t *testing.T, u *unstructured.Unstructured, path ...string) any {
	t.Helper()
	v, found, err := unstructured.NestedFieldNoCopy(u.Object, path...)
	if err != nil || !found {
		t.Fatalf("%s: found %v, %v", strings.Join(path, "."), found, err)
	}
	return v
}

func patch(t *testing.T, name, body string, subresources ...string) {
	t.Helper()
	if _, err := objects(t).Patch(context.Background(), name, types.MergePatchType, []byte(body), metav1.PatchOptions{}, subresources...); err != nil {
		t.Fatal(err)
	}
}

func noViolations(t *testing.T, o *observer.Observer, name string, atLeast int) {
	t.Helper()
	if err := eventually(20*time.Second, func() error {
		if got := o.Versions()[name]; got < atLeast {
			return fmt.Errorf("%d versions of %s seen, want %d", got, name, atLeast)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	for _, f := range o.Findings() {
		if f.Node == name {
			t.Errorf("%s at %s: %v", f.Node, f.Revision, f.Violations)
		}
	}
	if o.Missed() > 0 {
		t.Error("the observer missed versions")
	}
}

func TestRegisterNode(t *testing.T) {
	r := start(t)
	node := newNode(t, "register")
	register(t, r, node.Name)
	u := mustGet(t, node.Name)
	if got := u.GetOwnerReferences(); len(got) != 1 || got[0].UID != node.UID || got[0].Kind != "Node" {
		t.Errorf("owner references %v", got)
	}
	for path, want := range map[string]any{
		"spec.instance-id": instance, "spec.eni.instance-type": "t3.medium", "spec.eni.first-interface-index": int64(0),
		"spec.eni.vpc-id": "vpc-1", "spec.eni.node-subnet-id": "subnet-1", "spec.ipam.pre-allocate": int64(2),
	} {
		if got := nested(t, u, strings.Split(path, ".")...); got != want {
			t.Errorf("%s = %v, want %v", path, got, want)
		}
	}

	// A user edits watermarks, a newer Cilium adds fields, somebody adds labels:
	// none of it is lost when the agent registers again.
	patch(t, node.Name, `{"metadata":{"labels":{"team":"a"}},"spec":{"ipam":{"pre-allocate":5},"future":{"x":1}}}`)
	before := mustGet(t, node.Name)
	register(t, r, node.Name)
	after := mustGet(t, node.Name)
	if got := nested(t, after, "spec", "ipam", "pre-allocate"); got != int64(5) {
		t.Errorf("pre-allocate was reverted to %v", got)
	}
	if got := nested(t, after, "spec", "future", "x"); got != int64(1) || after.GetLabels()["team"] != "a" {
		t.Error("what we do not know was lost")
	}
	if before.GetResourceVersion() != after.GetResourceVersion() {
		t.Error("registering again wrote without need")
	}
}

// Absent messages mean defaults; first-interface-index absent stays absent (cilium#9738).
func TestRegisterNodeWithDefaults(t *testing.T) {
	r := start(t)
	node := newNode(t, "register-defaults")
	q := registration(node.Name)
	q.Watermarks, q.Eni = nil, nil
	if _, err := r.RegisterNode(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	if _, found, _ := unstructured.NestedFieldNoCopy(mustGet(t, node.Name).Object, "spec", "eni", "first-interface-index"); found {
		t.Error("an absent first-interface-index became 0")
	}
}

func TestRegisterNodeRefusals(t *testing.T) {
	r := start(t)
	node := newNode(t, "register-refusals")
	for name, tc := range map[string]struct {
		edit func(*nodev1.RegisterNodeRequest)
		code codes.Code
		why  reason.Reason
	}{
		"no Node":          {func(q *nodev1.RegisterNodeRequest) { q.NodeName = "nowhere" }, codes.FailedPrecondition, reason.NodeUnknown},
		"another UID":      {func(q *nodev1.RegisterNodeRequest) { q.NodeUid = "x" }, codes.FailedPrecondition, reason.NodeUnknown},
		"another instance": {func(q *nodev1.RegisterNodeRequest) { q.InstanceId = "i-2" }, codes.FailedPrecondition, reason.InstanceMismatch},
		"empty instance":   {func(q *nodev1.RegisterNodeRequest) { q.InstanceId = "" }, codes.InvalidArgument, reason.FieldInvalid},
		"empty name":       {func(q *nodev1.RegisterNodeRequest) { q.NodeName = "" }, codes.InvalidArgument, reason.FieldInvalid},
		"empty type":       {func(q *nodev1.RegisterNodeRequest) { q.InstanceType = "" }, codes.InvalidArgument, reason.FieldInvalid},
		"absurd watermark": {func(q *nodev1.RegisterNodeRequest) { v := uint32(1 << 30); q.Watermarks.PreAllocate = &v }, codes.InvalidArgument, reason.FieldInvalid},
		"not an address": {func(q *nodev1.RegisterNodeRequest) {
			q.Addresses = []*nodev1.NodeAddress{{Type: "InternalIP", Ip: "x"}}
		}, codes.InvalidArgument, reason.FieldInvalid},
		"name of 300 octets": {func(q *nodev1.RegisterNodeRequest) { q.NodeName = strings.Repeat("n", 300) }, codes.InvalidArgument, reason.FieldInvalid},
	} {
		q := registration(node.Name)
		tc.edit(q)
		_, err := r.RegisterNode(t.Context(), q)
		if status.Code(err) != tc.code || rpc.ReasonOf(err) != tc.why {
			t.Errorf("%s: %v, want %v %v", name, err, tc.code, tc.why)
		}
	}
	if _, err := objects(t).Get(t.Context(), node.Name, metav1.GetOptions{}); err == nil {
		t.Error("a refused registration created something")
	}
}

// The name of a node comes back with another Node behind it.
func TestNameReuse(t *testing.T) {
	r := start(t)
	node := newNode(t, "reused")
	register(t, r, node.Name)
	publish(t, r, snapshot(node.Name, 1, 1, 2))
	old := mustGet(t, node.Name)
	stream, err := r.WatchNode(t.Context(), &nodev1.WatchNodeRequest{NodeName: node.Name})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := core(t).CoreV1().Nodes().Delete(t.Context(), node.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := core(t).CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node.Name}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	q := registration(node.Name)
	q.InstanceId = "i-00000000000000002"
	if _, err := r.RegisterNode(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	u := mustGet(t, node.Name)
	if u.GetUID() == old.GetUID() {
		t.Error("the object of the old node was kept")
	}
	for {
		resp, err := stream.Recv()
		if err != nil {
			t.Fatalf("the stream ended with %v before it said removed", err)
		}
		if resp.GetRemoved() {
			break
		}
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after removed: %v", err)
	}
}

func TestPublishGrowShrinkMove(t *testing.T) {
	r, o := start(t), watchEverything(t)
	node := newNode(t, "publish")
	register(t, r, node.Name)
	for i, tc := range []struct {
		counts []int
		writes uint32
	}{
		{[]int{5}, 3}, // The epoch is claimed first.
		{[]int{5, 5}, 2},
		{[]int{5, 5}, 1}, // Only the generation.
		{[]int{3, 5}, 2},
		{[]int{3}, 2},
		{[]int{0}, 2},
	} {
		resp := publish(t, r, snapshot(node.Name, 1, uint64(i+1), tc.counts...)) //nolint:gosec // Small.
		if resp.GetWrites() != tc.writes {
			t.Errorf("%v: %d writes, want %d", tc.counts, resp.GetWrites(), tc.writes)
		}
		if again := publish(t, r, snapshot(node.Name, 1, uint64(i+1), tc.counts...)); again.GetWrites() != 0 || again.GetRevision() != resp.GetRevision() { //nolint:gosec // Small.
			t.Errorf("%v: the same again took %d writes", tc.counts, again.GetWrites())
		}
	}
	noViolations(t, o, node.Name, 12)
}

func TestForeignFieldsSurvivePublishing(t *testing.T) {
	r := start(t)
	node := newNode(t, "foreign-fields")
	register(t, r, node.Name)
	publish(t, r, snapshot(node.Name, 1, 1, 2))
	patch(t, node.Name, `{"metadata":{"labels":{"l":"1"},"annotations":{"a":"1"}},"spec":{"future":1,"encryption":{"key":3},"ipam":{"pool":{"10.0.0.10":{"owner":"somebody"}}}}}`)
	patch(t, node.Name, `{"status":{"future":2,"eni":{"enis":{"eni-0":{"public-ip":"1.2.3.4","ipv6-prefixes":["fd00::/80"]}}},"ipam":{"used":{"10.0.0.11":{"owner":"ns/pod"}},"assigned-static-ip":"5.6.7.8"}}}`, "status")
	publish(t, r, snapshot(node.Name, 1, 2, 4, 1))
	u := mustGet(t, node.Name)
	for path, want := range map[string]any{
		"spec.future": int64(1), "spec.encryption.key": int64(3), "status.future": int64(2),
		"status.eni.enis.eni-0.public-ip": "1.2.3.4", "status.ipam.assigned-static-ip": "5.6.7.8",
	} {
		if got := nested(t, u, strings.Split(path, ".")...); got != want {
			t.Errorf("%s = %v, want %v", path, got, want)
		}
	}
	if got := nested(t, u, "spec", "ipam", "pool", "10.0.0.10", "owner"); got != "somebody" {
		t.Errorf("owner in the pool = %v", got)
	}
	if got := nested(t, u, "status", "ipam", "used", "10.0.0.11", "owner"); got != "ns/pod" {
		t.Errorf("used = %v", got)
	}
	if got := nested(t, u, "status", "eni", "enis", "eni-0", "ipv6-prefixes"); len(got.([]any)) != 1 {
		t.Errorf("ipv6-prefixes = %v", got)
	}
	if u.GetLabels()["l"] != "1" || u.GetAnnotations()["a"] != "1" {
		t.Error("labels or annotations were lost")
	}
}

func TestFencing(t *testing.T) {
	a, b := start(t), start(t)
	node := newNode(t, "fencing")
	register(t, a, node.Name)
	register(t, b, node.Name)
	publish(t, a, snapshot(node.Name, 5, 3, 3))
	for _, tc := range []struct {
		name              string
		epoch, generation uint64
		counts            []int
		why               reason.Reason
	}{
		{"older epoch", 4, 9, []int{1}, reason.StaleEpoch},
		{"generation that goes back", 5, 2, []int{1}, reason.StaleGeneration},
		{"newer generation", 5, 4, []int{2}, 0},
		{"newer epoch", 6, 1, []int{4}, 0},
		{"the epoch before", 5, 5, []int{1}, reason.StaleEpoch},
	} {
		before := mustGet(t, node.Name).GetResourceVersion()
		_, err := b.PublishPool(t.Context(), &nodev1.PublishPoolRequest{Snapshot: snapshot(node.Name, tc.epoch, tc.generation, tc.counts...)})
		if got := rpc.ReasonOf(err); got != tc.why {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.why)
		}
		if tc.why != 0 {
			if status.Code(err) != codes.FailedPrecondition {
				t.Errorf("%s: code %v", tc.name, status.Code(err))
			}
			if mustGet(t, node.Name).GetResourceVersion() != before {
				t.Errorf("%s: something was written", tc.name)
			}
		}
	}
}

// A cilium-agent may replace all annotations: what is missing then is not epoch 0.
func TestLostFenceAsksTheLease(t *testing.T) {
	r := start(t)
	node := newNode(t, "lost-fence")
	register(t, r, node.Name)
	publish(t, r, snapshot(node.Name, 7, 1, 2))
	leases := core(t).CoordinationV1().Leases("kube-system")
	if _, err := leases.Create(t.Context(), newLease("7"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = leases.Delete(context.Background(), "eniplane-eni-allocator", metav1.DeleteOptions{}) })
	patch(t, node.Name, `{"metadata":{"annotations":{"eniplane.dev/fence":null}}}`)
	_, err := r.PublishPool(t.Context(), &nodev1.PublishPoolRequest{Snapshot: snapshot(node.Name, 6, 9, 1)})
	if rpc.ReasonOf(err) != reason.StaleEpoch {
		t.Errorf("an older epoch over a lost fence: %v", err)
	}
	publish(t, r, snapshot(node.Name, 7, 2, 3))
	if got := mustGet(t, node.Name).GetAnnotations()["eniplane.dev/fence"]; got != "7.2" {
		t.Errorf("fence %q, want 7.2", got)
	}
}

// cilium#13193: a status that could not be written stops the pool.
func TestFailedStatusWriteStopsThePool(t *testing.T) {
	r := start(t)
	node := newNode(t, "status-fails")
	register(t, r, node.Name)
	publish(t, r, snapshot(node.Name, 1, 1, 2))
	r.faults.set(func(q *http.Request) (*http.Response, error) {
		if q.Method == http.MethodPatch && strings.HasSuffix(q.URL.Path, "/status") {
			return &http.Response{StatusCode: 500, Header: http.Header{"Content-Type": {"text/plain"}}, Body: io.NopCloser(strings.NewReader("broken")), Request: q}, nil
		}
		return nil, errPass
	})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err := r.PublishPool(ctx, &nodev1.PublishPoolRequest{Snapshot: snapshot(node.Name, 1, 2, 2, 2)})
	if status.Code(err) != codes.Unavailable || rpc.ReasonOf(err) != reason.APIServerUnavailable {
		t.Errorf("error %v", err)
	}
	if pool := nested(t, mustGet(t, node.Name), "spec", "ipam", "pool").(map[string]any); len(pool) != 2 {
		t.Errorf("the pool moved to %d addresses", len(pool))
	}
	got, err := r.GetNode(t.Context(), &nodev1.GetNodeRequest{NodeName: node.Name})
	if err != nil || got.GetNode().GetLastError() == nil || got.GetNode().GetPendingWrites() == 0 {
		t.Errorf("GetNode does not show the failure: %v, %v", got, err)
	}
	r.faults.set(nil)
	publish(t, r, snapshot(node.Name, 1, 2, 2, 2))
}

// A replica dies after each of its writes; another one finishes.
func TestKilledBetweenWrites(t *testing.T) {
	o := watchEverything(t)
	node := newNode(t, "killed")
	healthy := start(t)
	register(t, healthy, node.Name)
	generation := uint64(0)
	for round := range testsize.Pick(4, 40) {
		for k := range 4 {
			dying := start(t)
			left := k
			var mu sync.Mutex
			dying.faults.set(func(q *http.Request) (*http.Response, error) {
				mu.Lock()
				defer mu.Unlock()
				if q.Method != http.MethodPatch {
					return nil, errPass
				}
				if left--; left < 0 {
					return nil, errors.New("killed")
				}
				return nil, errPass
			})
			generation++
			s := snapshot(node.Name, uint64(round*4+k+1), generation, 1+(round+k)%4, (k*3)%5) //nolint:gosec // Small.
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			_, _ = dying.PublishPool(ctx, &nodev1.PublishPoolRequest{Snapshot: s}) // It may or may not get through.
			cancel()
			publish(t, healthy, s)
		}
	}
	noViolations(t, o, node.Name, 16)
}

// cilium#35404 and cilium#27963: foreign writers change status and labels and
// drop annotations all the time, and nothing wedges.
func TestConflictStorm(t *testing.T) {
	r, other, o := start(t), start(t), watchEverything(t)
	node := newNode(t, "storm")
	register(t, r, node.Name)
	register(t, other, node.Name)
	ctx, cancel := context.WithCancel(t.Context())
	var storm sync.WaitGroup
	for i := range 2 {
		storm.Go(func() {
			client := objects(t)
			pace := time.NewTicker(20 * time.Millisecond) // A cilium-agent writes every 15 s.
			defer pace.Stop()
			for n := 0; ctx.Err() == nil; n++ {
				<-pace.C
				body, sub := fmt.Sprintf(`{"metadata":{"labels":{"l%d":"%d"}}}`, i, n), []string(nil)
				switch {
				case n%7 == 0:
					body = `{"metadata":{"annotations":null}}` // A cilium-agent replaces them.
				case n%2 == 0:
					body, sub = fmt.Sprintf(`{"status":{"ipam":{"used":{"10.9.0.%d":{"owner":"a"}}}}}`, n%200), []string{"status"}
				}
				_, _ = client.Patch(ctx, node.Name, types.MergePatchType, []byte(body), metav1.PatchOptions{}, sub...) // The storm may lose.
			}
		})
	}
	versions := testsize.Pick(300, 5_000)
	for g := uint64(1); o.Versions()[node.Name] < versions; g++ {
		s := snapshot(node.Name, 1, g, int(g*7)%6, int(g*5)%4) //nolint:gosec // Small.
		from := r
		if g%2 == 0 {
			from = other
		}
		// However long it takes, it is not given up.
		patient, done := context.WithTimeout(t.Context(), time.Minute)
		_, err := from.PublishPool(patient, &nodev1.PublishPoolRequest{Snapshot: s})
		done()
		if err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	storm.Wait()
	noViolations(t, o, node.Name, versions)
}

// Two allocators, an old and a new one, publish through two replicas at once.
func TestRacingEpochs(t *testing.T) {
	a, b, o := start(t), start(t), watchEverything(t)
	node := newNode(t, "racing")
	register(t, a, node.Name)
	register(t, b, node.Name)
	var race sync.WaitGroup
	n := testsize.Pick(25, 500)
	for i, r := range []*replica{a, b} {
		race.Go(func() {
			for g := range n {
				s := snapshot(node.Name, uint64(i+1), uint64(g+1), (g*3+i)%6, (g+i)%5) //nolint:gosec // Small.
				_, err := r.PublishPool(context.Background(), &nodev1.PublishPoolRequest{Snapshot: s})
				if why := rpc.ReasonOf(err); err != nil && why != reason.StaleEpoch && why != reason.Conflict {
					t.Errorf("epoch %d: %v", i+1, err)
				}
				if err != nil && i == 1 && rpc.ReasonOf(err) == reason.StaleEpoch {
					t.Errorf("the newer epoch was refused: %v", err)
				}
			}
		})
	}
	race.Wait()
	if got := mustGet(t, node.Name).GetAnnotations()["eniplane.dev/fence"]; got != fmt.Sprintf("2.%d", n) {
		t.Errorf("fence %q", got)
	}
	noViolations(t, o, node.Name, n)
}
