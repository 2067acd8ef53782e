package server_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/internal/testsize"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/server"
	"github.com/eniplane/eniplane/node-syncer/internal/syncer"
)

// A name that cannot be a Node's is the caller's fault, and never part of a path.
func TestNamesThatAreNone(t *testing.T) {
	r := start(t)
	for _, name := range []string{"a/b", "..", ".", "a%2fb", "Upper", "a?b", "-", "a b", strings.Repeat("a", 252) + "."} {
		for rpcName, call := range map[string]func() error{
			"node_name": func() error {
				_, err := r.RegisterNode(t.Context(), registration(name))
				return err
			},
			"snapshot.node_name": func() error {
				_, err := r.PublishPool(t.Context(), &nodev1.PublishPoolRequest{Snapshot: snapshot(name, 1, 1, 1)})
				return err
			},
		} {
			if err := call(); status.Code(err) != codes.InvalidArgument || rpc.ReasonOf(err) != reason.FieldInvalid || field(err) != rpcName {
				t.Errorf("%q: %v on %q", name, err, field(err))
			}
		}
	}
}

// A snapshot that no CiliumNode can hold is refused and changes nothing. The
// largest that is taken can be stored; that alone takes seconds.
func TestSnapshotThatIsTooLarge(t *testing.T) {
	r := start(t)
	node := newNode(t, "too-large")
	register(t, r, node.Name)
	large := func(generation uint64, total int) *nodev1.PoolSnapshot {
		s := &nodev1.PoolSnapshot{NodeName: node.Name, InstanceId: instance, Fence: &nodev1.Fence{Epoch: 1, Generation: generation}}
		for i := range 15 {
			e := eniNumber(i)
			e.Id, e.Ip, e.Subnet.Cidr = fmt.Sprintf("eni-0123456789abcde%02d", i), fmt.Sprintf("10.%d.255.4", i), fmt.Sprintf("10.%d.0.0/16", i)
			for k := range total / 15 {
				a := fmt.Sprintf("10.%d.%d.%d", i, k/256, k%256)
				e.Addresses = append(e.Addresses, a)
				s.Pool = append(s.Pool, &nodev1.PoolAddress{Address: a, EniId: e.GetId()})
			}
			s.Enis = append(s.Enis, e)
		}
		return s
	}
	patient, done := context.WithTimeout(t.Context(), time.Minute)
	defer done()
	if _, err := r.PublishPool(patient, &nodev1.PublishPoolRequest{Snapshot: large(1, testsize.Pick(3_000, 11_000))}); err != nil {
		t.Fatal(err)
	}
	before := mustGet(t, node.Name).GetResourceVersion()
	for _, total := range []int{12_500, 60_000} {
		_, err := r.PublishPool(t.Context(), &nodev1.PublishPoolRequest{Snapshot: large(2, total)})
		if status.Code(err) != codes.InvalidArgument || field(err) != "snapshot" {
			t.Errorf("%d addresses: %v", total, err)
		}
	}
	if mustGet(t, node.Name).GetResourceVersion() != before {
		t.Error("something was written")
	}
}

// A replica whose news of the API server are late does not take an agent back to
// a view that it has left; it shows the next one. If nothing newer comes, as after
// a restore of the cluster, it shows what there is.
func TestViewsDoNotGoBack(t *testing.T) {
	store := syncer.NewStore("late")
	at := func(version string) {
		store.CiliumNodeChanged(&ciliumnode.CiliumNode{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "u", ResourceVersion: version}})
	}
	synctest.Test(t, func(t *testing.T) {
		store.Synced()
		at("5")
		ctx, cancel := context.WithCancel(t.Context())
		views := make(chan string, 10)
		done := make(chan error)
		go func() {
			done <- server.New(nil, store, nil, nil).WatchNode(&nodev1.WatchNodeRequest{NodeName: "n", Revision: "7"}, &reading{ctx: ctx, views: views})
		}()
		synctest.Wait()
		at("6")
		synctest.Wait()
		if len(views) > 0 {
			t.Errorf("the agent has 7 and was shown %s", <-views)
		}
		at("8")
		synctest.Wait()
		if len(views) != 1 || <-views != "8" {
			t.Error("8 was not shown")
		}
		cancel()
		<-done

		ctx, cancel = context.WithCancel(t.Context())
		go func() {
			done <- server.New(nil, store, nil, nil).WatchNode(&nodev1.WatchNodeRequest{NodeName: "n", Revision: "900"}, &reading{ctx: ctx, views: views})
		}()
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(views) != 1 || <-views != "8" {
			t.Error("the agent of a restored cluster is shown nothing")
		}
		cancel()
		<-done
	})
}

// reading is a stream whose reader keeps the revisions of views.
type reading struct {
	grpc.ServerStream
	ctx   context.Context
	views chan string
}

func (r *reading) Context() context.Context { return r.ctx }

func (r *reading) Send(m *nodev1.WatchNodeResponse) error {
	r.views <- m.GetView().GetRevision()
	return nil
}

// stuck is a stream whose transport takes nothing, whatever its context says.
type stuck struct {
	grpc.ServerStream
	ctx     context.Context
	release chan struct{}
}

func (s *stuck) Context() context.Context { return s.ctx }

func (s *stuck) Send(*nodev1.WatchNodeResponse) error {
	<-s.release
	return context.Canceled
}

// The stop of the server does not wait for a reader that takes nothing.
func TestStopDoesNotWaitForASlowReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := syncer.NewStore("test")
		store.CiliumNodeChanged(&ciliumnode.CiliumNode{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "u", ResourceVersion: "1"}})
		store.Synced()
		ctx, cancel := context.WithCancel(t.Context())
		stream := &stuck{ctx: ctx, release: make(chan struct{})}
		done := make(chan error)
		go func() {
			done <- server.New(nil, store, nil, nil).WatchNode(&nodev1.WatchNodeRequest{NodeName: "n"}, stream)
		}()
		synctest.Wait()
		began := time.Now()
		cancel()
		if err := <-done; status.Code(err) != codes.Canceled {
			t.Errorf("ended with %v", err)
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("it took %v", took)
		}
		close(stream.release)
	})
}

// A page of large nodes is shorter than was asked for: every page can be sent.
func TestPagesOfLargeNodes(t *testing.T) {
	store := syncer.NewStore("test")
	const nodes = 60
	for i := range nodes {
		n := &ciliumnode.CiliumNode{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n-%02d", i), UID: "u", ResourceVersion: "1"}}
		eni := ciliumnode.ENI{ID: "eni-1", Subnet: ciliumnode.Subnet{CIDR: "10.0.0.0/16"}, VPC: ciliumnode.VPC{PrimaryCIDR: "10.0.0.0/16"}}
		n.Spec.IPAM.Pool = map[string]ciliumnode.Allocation{}
		for k := range 12_000 {
			a := fmt.Sprintf("10.0.%d.%d", k/250, k%250)
			eni.Addresses = append(eni.Addresses, a)
			n.Spec.IPAM.Pool[a] = ciliumnode.Allocation{Resource: "eni-1"}
		}
		n.Status.ENI.ENIs = map[string]ciliumnode.ENI{"eni-1": eni}
		store.CiliumNodeChanged(n)
	}
	store.Synced()
	s := server.New(nil, store, syncer.NewSyncer(nil, store, syncer.Lease{}, nil), nil)
	token, seen := "", 0
	for {
		page, err := s.ListNodes(t.Context(), &nodev1.ListNodesRequest{PageSize: 1000, PageToken: token})
		if err != nil || len(page.GetNodes()) == 0 {
			t.Fatalf("%d nodes, %v", len(page.GetNodes()), err)
		}
		seen += len(page.GetNodes())
		if size := proto.Size(page); size > 16<<20 {
			t.Errorf("a page of %d bytes", size)
		}
		if token = page.GetNextPageToken(); token == "" {
			break
		}
	}
	if seen != nodes {
		t.Errorf("%d nodes listed, want %d", seen, nodes)
	}
}

// Somebody replaces all annotations of a node: its agent is told, registers
// again, and its reports are taken as before.
func TestLostRegistration(t *testing.T) {
	r := start(t)
	node := newNode(t, "lost-registration")
	register(t, r, node.Name)
	stream, err := r.WatchNode(t.Context(), &nodev1.WatchNodeRequest{NodeName: node.Name})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	patch(t, node.Name, `{"metadata":{"annotations":null}}`)
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.FailedPrecondition || rpc.ReasonOf(err) != reason.NodeUnknown {
		t.Errorf("the stream ended with %v", err)
	}
	register(t, r, node.Name)
	if err := eventually(10*time.Second, func() error {
		_, err := r.ReportUsage(t.Context(), &nodev1.ReportUsageRequest{NodeName: node.Name, Sequence: 1})
		return err
	}); err != nil {
		t.Error(err)
	}
}

// An agent says which addresses its node has now; what others added stays.
func TestAddressesOfANodeAreReplaced(t *testing.T) {
	r := start(t)
	node := newNode(t, "addresses")
	q := registration(node.Name)
	for i := range 3 {
		q.Addresses = []*nodev1.NodeAddress{{Type: "InternalIP", Ip: fmt.Sprintf("10.0.0.%d", 4+i)}}
		if _, err := r.RegisterNode(t.Context(), q); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			patch(t, node.Name, `{"spec":{"addresses":[{"type":"InternalIP","ip":"10.0.0.4"},{"type":"CiliumInternalIP","ip":"10.9.0.1"}]}}`)
		}
	}
	if got := fmt.Sprint(nested(t, mustGet(t, node.Name), "spec", "addresses")); got != "[map[ip:10.9.0.1 type:CiliumInternalIP] map[ip:10.0.0.6 type:InternalIP]]" {
		t.Errorf("addresses %v", got)
	}
}

var errBroken = errors.New("the connection broke")

// A write that the API server took, but whose answer was lost, is not made twice
// and stops nobody.
func TestLostAnswers(t *testing.T) {
	r, o := start(t), watchEverything(t)
	node := newNode(t, "lost-answers")
	register(t, r, node.Name)
	for g := uint64(1); g <= 8; g++ {
		lost := false
		r.faults.set(func(q *http.Request) (*http.Response, error) {
			if lost || q.Method != http.MethodPatch {
				return nil, errPass
			}
			lost = true
			resp, err := r.faults.next.RoundTrip(q)
			if err == nil {
				_ = resp.Body.Close()
			}
			return nil, errBroken
		})
		s := snapshot(node.Name, 1+g/3, g, int(g*3)%5, int(g)%4)                   //nolint:gosec // Small.
		_, _ = r.PublishPool(t.Context(), &nodev1.PublishPoolRequest{Snapshot: s}) // The client may try again by itself.
		r.faults.set(nil)
		publish(t, r, s)
		if again := publish(t, r, s); again.GetWrites() != 0 {
			t.Errorf("generation %d took %d more writes", g, again.GetWrites())
		}
	}
	noViolations(t, o, node.Name, 10)
}
