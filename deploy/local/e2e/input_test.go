package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
)

// above is how far the generation of snapshot is above the stored one.
const above = 1000

// snapshot is a valid snapshot of a node as it is stored, with a fence above
// every real one, for a test to break.
func snapshot(t *testing.T, node string) *nodev1.PoolSnapshot {
	t.Helper()
	resp, err := syncer(t).GetNode(t.Context(), &nodev1.GetNodeRequest{NodeName: node})
	if err != nil {
		t.Fatal(err)
	}
	view := resp.GetNode().GetView()
	return &nodev1.PoolSnapshot{
		NodeName: node, InstanceId: view.GetInstanceId(), Enis: view.GetEnis(), Pool: view.GetPool(),
		Fence: &nodev1.Fence{Epoch: view.GetFence().GetEpoch(), Generation: view.GetFence().GetGeneration() + above},
	}
}

// secondGeneration sees to it that the allocator has published a node more than
// once in its term: somebody takes a free address out of the object's pool, and
// the allocator publishes again.
func secondGeneration(t *testing.T, node string) {
	t.Helper()
	for snapshot(t, node).GetFence().GetGeneration() < 2+above {
		n := object(t, node)
		for address := range n.Spec.IPAM.Pool {
			if _, used := n.Status.IPAM.Used[address]; used {
				continue
			}
			patch := fmt.Sprintf(`{"spec":{"ipam":{"pool":{%q:null}}}}`, address)
			_, err := st.Kube().Dynamic.Resource(ciliumnode.GVR()).Patch(t.Context(), node, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
			if err != nil {
				t.Fatal(err)
			}
			break
		}
		want := len(n.Spec.IPAM.Pool)
		eventually(t, "the pool is whole again", func() string {
			if got := len(object(t, node).Spec.IPAM.Pool); got != want {
				return fmt.Sprintf("%d addresses, want %d", got, want)
			}
			return ""
		})
	}
}

func TestBadInput(t *testing.T) {
	const node = "node-1"
	settled(t, node)
	secondGeneration(t, node)
	s, e, i, a := syncer(t), allocator(t), identity(t), agent(t, node)
	register := func(change func(*nodev1.RegisterNodeRequest)) func(context.Context) error {
		return func(ctx context.Context) error {
			d := object(t, node)
			req := &nodev1.RegisterNodeRequest{
				NodeName: node, InstanceId: d.Spec.InstanceID, InstanceType: d.Spec.ENI.InstanceType,
				AvailabilityZone: d.Spec.ENI.AvailabilityZone, VpcId: d.Spec.ENI.VPCID, NodeSubnetId: d.Spec.ENI.NodeSubnetID,
			}
			change(req)
			_, err := s.RegisterNode(ctx, req)
			return err
		}
	}
	publish := func(change func(*nodev1.PoolSnapshot)) func(context.Context) error {
		return func(ctx context.Context) error {
			snap := snapshot(t, node)
			change(snap)
			_, err := s.PublishPool(ctx, &nodev1.PublishPoolRequest{Snapshot: snap})
			return err
		}
	}
	replace := func(prefix string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := a.ReplacePrefixes(ctx, &agentv1.ReplacePrefixesRequest{OwnerName: "bad-input", Prefixes: []string{prefix}})
			return err
		}
	}
	for _, tc := range []struct {
		name   string
		call   func(context.Context) error
		code   codes.Code
		reason reason.Reason
		field  string // of the BadRequest; empty for none
	}{
		{"unknown node", register(func(r *nodev1.RegisterNodeRequest) { r.NodeName = "nowhere" }), codes.FailedPrecondition, reason.NodeUnknown, ""},
		{"empty instance id", register(func(r *nodev1.RegisterNodeRequest) { r.InstanceId = "" }), codes.InvalidArgument, reason.FieldInvalid, "instance_id"},
		{"another instance", register(func(r *nodev1.RegisterNodeRequest) { r.InstanceId = "i-0ffffffffffffffff" }), codes.FailedPrecondition, reason.InstanceMismatch, ""},
		{"pool names an unknown ENI", publish(func(p *nodev1.PoolSnapshot) { p.Pool[0].EniId = "eni-0ffffffffffffffff" }), codes.InvalidArgument, reason.AddressNotOnENI, "snapshot.pool[0].eni_id"},
		{"address outside its subnet", publish(func(p *nodev1.PoolSnapshot) { p.Enis[0].Addresses[0], p.Pool = "192.0.2.1", nil }), codes.InvalidArgument, reason.AddressOutsideSubnet, "snapshot.enis[0].addresses[0]"},
		{"address that is no address", publish(func(p *nodev1.PoolSnapshot) { p.Pool[0].Address = "10.0.0.256" }), codes.InvalidArgument, reason.FieldInvalid, "snapshot.pool[0].address"},
		{"an address twice", publish(func(p *nodev1.PoolSnapshot) { p.Pool = append(p.Pool, p.Pool[0]) }), codes.InvalidArgument, reason.Duplicate, ""},
		{"a generation that goes back", publish(func(p *nodev1.PoolSnapshot) { p.Fence.Generation, p.Pool = 1, p.Pool[1:] }), codes.FailedPrecondition, reason.StaleGeneration, ""},
		{"an epoch that goes back", publish(func(p *nodev1.PoolSnapshot) { p.Fence.Epoch-- }), codes.FailedPrecondition, reason.StaleEpoch, ""},
		{"addresses for an unknown node", func(ctx context.Context) error {
			_, err := e.EnsureAddresses(ctx, &eniv1.EnsureAddressesRequest{NodeName: "nowhere", Free: 1})
			return err
		}, codes.FailedPrecondition, reason.NodeUnknown, ""},
		{"no addresses", func(ctx context.Context) error {
			_, err := e.EnsureAddresses(ctx, &eniv1.EnsureAddressesRequest{NodeName: node})
			return err
		}, codes.InvalidArgument, reason.FieldInvalid, "free"},
		{"look up what is no address", func(ctx context.Context) error {
			_, err := i.LookupIdentity(ctx, &identityv1.LookupIdentityRequest{Address: "10.0.0"})
			return err
		}, codes.InvalidArgument, reason.FieldInvalid, "address"},
		{"session without a boot id", func(ctx context.Context) error {
			_, err := i.OpenSession(ctx, &identityv1.OpenSessionRequest{RequestId: "x", NodeName: node, NodeUid: "u"})
			return err
		}, codes.InvalidArgument, reason.FieldInvalid, "boot_id"},
		{"prefix that is none", replace("10.0.0.0/33"), codes.InvalidArgument, reason.PrefixInvalid, "prefixes[0]"},
		{"IPv4-mapped that can not be folded", replace("::ffff:10.0.0.0/90"), codes.InvalidArgument, reason.PrefixInvalid, "prefixes[0]"},
		{"the world", replace("0.0.0.0/0"), codes.InvalidArgument, reason.PrefixReserved, "prefixes[0]"},
		{"nobody asks for an address", func(ctx context.Context) error {
			_, err := a.AllocateIP(ctx, &agentv1.AllocateIPRequest{})
			return err
		}, codes.InvalidArgument, reason.FieldInvalid, "owner"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before, held := object(t, node).ResourceVersion, identities(t)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			err := tc.call(ctx)
			if got := status.Code(err); got != tc.code {
				t.Errorf("code %s, want %s: %v", got, tc.code, err)
			}
			if got := rpc.ReasonOf(err); got != tc.reason {
				t.Errorf("reason %s, want %s: %v", got, tc.reason, err)
			}
			if fields := violated(err); tc.field != "" && !fields[tc.field] {
				t.Errorf("fields %v, want %s: %v", fields, tc.field, err)
			}
			if after := object(t, node).ResourceVersion; after != before {
				t.Errorf("the object changed from version %s to %s", before, after)
			}
			if now := identities(t); !maps.Equal(now, held) {
				t.Errorf("the ledger changed from %v to %v", held, now)
			}
		})
	}
}

// violated are the fields that an error's BadRequest names.
func violated(err error) map[string]bool {
	fields := make(map[string]bool)
	for _, d := range status.Convert(err).Details() {
		if bad, ok := d.(*errdetails.BadRequest); ok {
			for _, v := range bad.GetFieldViolations() {
				fields[v.GetField()] = true
			}
		}
	}
	return fields
}

// TestObjectEditedIntoNonsense edits one node's object by hand, as no program
// would, and expects the other nodes to be served, and the object to be healed.
func TestObjectEditedIntoNonsense(t *testing.T) {
	settled(t, edited)
	before := poolOf(t, edited)
	for name, patch := range map[string]string{
		"pool with an unknown ENI": `{"spec":{"ipam":{"pool":{"10.99.99.99":{"resource":"eni-nonsense"},"not an address":{}}}}}`,
		"fields of later versions": `{"metadata":{"annotations":{"someone/else":"x"}},"spec":{"future":{"a":[1,2]},"ipam":{"future":"x"}}}`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := st.Kube().Dynamic.Resource(ciliumnode.GVR()).Patch(t.Context(), edited, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for i, node := range []string{"node-1", "node-2"} {
				for j := range 3 {
					allocate(t, node, fmt.Sprintf("default/beside-nonsense-%d-%d", i, j))
				}
			}
			eventually(t, "the object is healed", func() string {
				if got := poolOf(t, edited); !maps.Equal(got, before) {
					return fmt.Sprintf("the pool is %v, want %v", got, before)
				}
				if v := ciliumnode.Violations(object(t, edited)); len(v) > 0 {
					return fmt.Sprint(v)
				}
				return ""
			})
			got, err := st.Kube().Dynamic.Resource(ciliumnode.GVR()).Get(t.Context(), edited, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if name == "fields of later versions" {
				spec, ok := got.Object["spec"].(map[string]any)
				if !ok || spec["future"] == nil || got.GetAnnotations()["someone/else"] != "x" {
					t.Errorf("what we do not know was not left alone: %v", got.Object)
				}
			}
		})
	}
	// The node itself goes on, too.
	allocate(t, edited, "default/after-nonsense")
}
