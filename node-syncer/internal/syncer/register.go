package syncer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/telemetry"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/kube"
	"github.com/eniplane/eniplane/node-syncer/internal/view"
)

// awaitLimit is how long a registration waits for the informer, so that the
// calls which the agent makes next find its node here. It is stored already.
const awaitLimit = 2 * time.Second

// registry is what registration needs of the API server.
type registry interface {
	objects
	Node(ctx context.Context, name string) (*corev1.Node, error)
	Create(ctx context.Context, n *ciliumnode.CiliumNode) (*ciliumnode.CiliumNode, error)
	Delete(ctx context.Context, name string, uid types.UID) error
}

// Register creates the CiliumNode of a node, or brings what its agent knows for
// a fact up to date, and returns the object. What a user may edit (watermarks,
// selections) is written at creation only. An object of another instance, or of
// a Node that had the same name, is replaced. Errors are ErrNodeUnknown (no Node
// object, or one with another UID), ErrInstanceMismatch, and those of kube and ctx.
func (s *Syncer) Register(ctx context.Context, api registry, req *nodev1.RegisterNodeRequest) (*ciliumnode.CiliumNode, error) {
	name := req.GetNodeName()
	node, err := api.Node(ctx, name)
	if errors.Is(err, kube.ErrNotFound) {
		return nil, fmt.Errorf("%w: there is no Node %s", ErrNodeUnknown, name)
	}
	if err != nil {
		return nil, err
	}
	if uid := req.GetNodeUid(); uid != "" && uid != string(node.UID) {
		return nil, fmt.Errorf("%w: Node %s has UID %s, not %s", ErrNodeUnknown, name, node.UID, uid)
	}
	if id := instanceOf(node.Spec.ProviderID); id != "" && id != req.GetInstanceId() {
		return nil, fmt.Errorf("%w: Node %s is %s, its agent says %s", ErrInstanceMismatch, name, id, req.GetInstanceId())
	}
	want := registration(req, node)

	backoff := newBackoff()
	for {
		stored, err := s.register(ctx, api, want, node)
		if err == nil {
			s.store.wrote(stored)
			told, cancel := context.WithTimeout(ctx, awaitLimit)
			s.store.await(told, stored)
			cancel()
			return stored, nil
		}
		if !errors.Is(err, kube.ErrConflict) {
			return nil, err
		}
		if err := backoff.wait(ctx); err != nil {
			return nil, fmt.Errorf("%w: %w", err, kube.ErrConflict)
		}
	}
}

func (s *Syncer) register(ctx context.Context, api registry, want *ciliumnode.CiliumNode, node *corev1.Node) (*ciliumnode.CiliumNode, error) {
	have, err := api.CiliumNode(ctx, want.Name)
	switch {
	case errors.Is(err, kube.ErrNotFound):
		stored, err := api.Create(ctx, want)
		if err == nil {
			s.log.InfoContext(ctx, "node registered", telemetry.KeyNode, want.Name, telemetry.KeyInstance, want.Spec.InstanceID)
		}
		return stored, err
	case err != nil:
		return nil, err
	}
	if reused(have, want.Spec.InstanceID, node.UID) {
		s.log.InfoContext(ctx, "node name reused", telemetry.KeyNode, want.Name, telemetry.KeyInstance, want.Spec.InstanceID, "before", view.InstanceID(have))
		if err := api.Delete(ctx, have.Name, have.UID); err != nil {
			return nil, err
		}
		return api.Create(ctx, want)
	}
	return api.Patch(ctx, have, updated(have, want), kube.MainPart)
}

// reused reports whether an object belongs to another node of the same name.
func reused(have *ciliumnode.CiliumNode, instance string, node types.UID) bool {
	if id := view.InstanceID(have); id != "" && id != instance {
		return true
	}
	for _, o := range have.OwnerReferences {
		if o.Kind == "Node" && o.UID != node {
			return true
		}
	}
	return false
}

// updated returns have with the facts of want.
func updated(have, want *ciliumnode.CiliumNode) *ciliumnode.CiliumNode {
	out := have.DeepCopy()
	if out.Annotations == nil {
		out.Annotations = make(map[string]string, 1)
	}
	maps.Copy(out.Annotations, want.Annotations)
	if !slices.ContainsFunc(out.OwnerReferences, func(o metav1.OwnerReference) bool { return o.UID == want.OwnerReferences[0].UID }) {
		out.OwnerReferences = append(out.OwnerReferences, want.OwnerReferences...)
	}
	out.Spec.InstanceID = want.Spec.InstanceID
	out.Spec.ENI.InstanceType = want.Spec.ENI.InstanceType
	out.Spec.ENI.AvailabilityZone = want.Spec.ENI.AvailabilityZone
	out.Spec.ENI.VPCID = want.Spec.ENI.VPCID
	out.Spec.ENI.NodeSubnetID = want.Spec.ENI.NodeSubnetID
	// An address of a kind that the agent names is its to say.
	out.Spec.Addresses = slices.DeleteFunc(out.Spec.Addresses, func(a ciliumnode.Address) bool {
		sameKind := func(w ciliumnode.Address) bool { return w.Type == a.Type }
		return slices.ContainsFunc(want.Spec.Addresses, sameKind) && !slices.Contains(want.Spec.Addresses, a)
	})
	for _, a := range want.Spec.Addresses {
		if !slices.Contains(out.Spec.Addresses, a) {
			out.Spec.Addresses = append(out.Spec.Addresses, a)
		}
	}
	return out
}

func registration(req *nodev1.RegisterNodeRequest, node *corev1.Node) *ciliumnode.CiliumNode {
	marks, eni := req.GetWatermarks(), req.GetEni()
	if eni == nil {
		eni = &nodev1.EniSpec{} // Says nothing, as absence does.
	}
	n := &ciliumnode.CiliumNode{
		ObjectMeta: metav1.ObjectMeta{
			Name:        req.GetNodeName(),
			Annotations: map[string]string{view.RegisteredAnnotation: "true"},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID,
			}},
		},
		Spec: ciliumnode.Spec{
			InstanceID: req.GetInstanceId(),
			ENI: ciliumnode.ENISpec{
				InstanceType: req.GetInstanceType(), AvailabilityZone: req.GetAvailabilityZone(),
				VPCID: req.GetVpcId(), NodeSubnetID: req.GetNodeSubnetId(),
				SecurityGroups: eni.GetSecurityGroups(), SecurityGroupTags: eni.GetSecurityGroupTags(),
				SubnetIDs: eni.GetSubnetIds(), SubnetTags: eni.GetSubnetTags(), ExcludeInterfaceTags: eni.GetExcludeInterfaceTags(),
				DeleteOnTermination: eni.DeleteOnTermination, UsePrimaryAddress: eni.UsePrimaryAddress, DisablePrefixDelegation: eni.DisablePrefixDelegation,
			},
			IPAM: ciliumnode.IPAMSpec{
				PreAllocate: int(marks.GetPreAllocate()), MinAllocate: int(marks.GetMinAllocate()),
				MaxAllocate: int(marks.GetMaxAllocate()), MaxAboveWatermark: int(marks.GetMaxAboveWatermark()),
				StaticIPTags: eni.GetStaticIpTags(),
			},
		},
	}
	if eni.FirstInterfaceIndex != nil {
		index := int(eni.GetFirstInterfaceIndex())
		n.Spec.ENI.FirstInterfaceIndex = &index
	}
	for _, a := range req.GetAddresses() {
		n.Spec.Addresses = append(n.Spec.Addresses, ciliumnode.Address{Type: a.GetType(), IP: a.GetIp()})
	}
	return n
}

// instanceOf returns the instance id of a provider id such as
// aws:///us-east-1a/i-0123; empty for another provider's.
func instanceOf(providerID string) string {
	rest, ok := strings.CutPrefix(providerID, "aws://")
	if !ok {
		return ""
	}
	return rest[strings.LastIndex(rest, "/")+1:]
}
