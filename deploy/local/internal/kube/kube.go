// Package kube plays the parts of a cluster that a local stack lacks: it
// creates the Nodes and Pods that a kubelet and a scheduler would, and applies
// what a person would with kubectl.
package kube

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"
)

// Client talks to the stack's API server as its administrator.
type Client struct {
	Config  *rest.Config
	Typed   kubernetes.Interface
	Dynamic dynamic.Interface
}

// NewClient makes a Client from the path of a kubeconfig.
func NewClient(kubeconfig string) (*Client, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = 500, 500
	typed, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	dyn, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return &Client{Config: config, Typed: typed, Dynamic: dyn}, nil
}

var crds = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// EnsureCRD creates a CustomResourceDefinition, given as YAML, unless one of
// its name exists, and returns when the API server serves it.
func (c *Client) EnsureCRD(ctx context.Context, definition []byte) error {
	var crd unstructured.Unstructured
	if err := yaml.Unmarshal(definition, &crd.Object); err != nil {
		return fmt.Errorf("parse CRD: %w", err)
	}
	name := crd.GetName()
	if _, err := c.Dynamic.Resource(crds).Create(ctx, &crd, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create CRD %s: %w", name, err)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		got, err := c.Dynamic.Resource(crds).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("get CRD %s: %w", name, err)
		}
		if established(got) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("CRD %s is not established: %w", name, ctx.Err())
		case <-tick.C:
		}
	}
}

func established(crd *unstructured.Unstructured) bool {
	conditions, _, err := unstructured.NestedSlice(crd.Object, "status", "conditions")
	if err != nil {
		return false
	}
	for _, c := range conditions {
		condition, ok := c.(map[string]any)
		if ok && condition["type"] == "Established" && condition["status"] == "True" {
			return true
		}
	}
	return false
}

// Node is what a kubelet says of its node.
type Node struct {
	Name       string
	InstanceID string
	Zone       string
	IP         string // InternalIP; empty means that none is told
	MaxPods    int64
}

// CreateNode creates a Node as the kubelet of an EC2 instance would. An
// existing one of that name is left as it is.
func (c *Client) CreateNode(ctx context.Context, n Node) error {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:   n.Name,
			Labels: map[string]string{corev1.LabelHostname: n.Name, corev1.LabelTopologyZone: n.Zone},
		},
		Spec: corev1.NodeSpec{ProviderID: fmt.Sprintf("aws:///%s/%s", n.Zone, n.InstanceID)},
	}
	created, err := c.Typed.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("create node %s: %w", n.Name, err)
	}
	pods := corev1.ResourceList{corev1.ResourcePods: *resource.NewQuantity(n.MaxPods, resource.DecimalSI)}
	created.Status.Capacity, created.Status.Allocatable = pods, pods
	if n.IP != "" {
		created.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: n.IP}}
	}
	if _, err := c.Typed.CoreV1().Nodes().UpdateStatus(ctx, created, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("status of node %s: %w", n.Name, err)
	}
	return nil
}

// CreatePod creates a Pod that is bound to a node already, as after scheduling.
// It stays in phase Pending: nothing here runs it.
func (c *Client) CreatePod(ctx context.Context, namespace, name, node string) error {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{
			NodeName:   node,
			Containers: []corev1.Container{{Name: "main", Image: "registry.k8s.io/pause:3.10"}},
		},
	}
	if _, err := c.Typed.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create pod %s/%s: %w", namespace, name, err)
	}
	return nil
}

// RunPod tells that a Pod runs with an address, as its kubelet would once the
// CNI plugin has answered.
func (c *Client) RunPod(ctx context.Context, namespace, name, address string) error {
	patch := fmt.Appendf(nil, `{"status":{"phase":"Running","podIP":%q,"podIPs":[{"ip":%q}]}}`, address, address)
	_, err := c.Typed.CoreV1().Pods(namespace).Patch(ctx, name, "application/merge-patch+json", patch, metav1.PatchOptions{}, "status")
	if err != nil {
		return fmt.Errorf("status of pod %s/%s: %w", namespace, name, err)
	}
	return nil
}

// ApplyPolicy creates a NetworkPolicy, or replaces the spec of the one of its
// name, which keeps its uid.
func (c *Client) ApplyPolicy(ctx context.Context, policy *networkingv1.NetworkPolicy) error {
	policies := c.Typed.NetworkingV1().NetworkPolicies(policy.Namespace)
	_, err := policies.Create(ctx, policy, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		var present *networkingv1.NetworkPolicy
		if present, err = policies.Get(ctx, policy.Name, metav1.GetOptions{}); err == nil {
			present.Spec = policy.Spec
			_, err = policies.Update(ctx, present, metav1.UpdateOptions{})
		}
	}
	if err != nil {
		return fmt.Errorf("apply policy %s/%s: %w", policy.Namespace, policy.Name, err)
	}
	return nil
}

// DeletePolicy deletes a NetworkPolicy. One that is not there is no error.
func (c *Client) DeletePolicy(ctx context.Context, namespace, name string) error {
	err := c.Typed.NetworkingV1().NetworkPolicies(namespace).Delete(ctx, name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete policy %s/%s: %w", namespace, name, err)
	}
	return nil
}

// Block is an ipBlock of a NetworkPolicy.
type Block struct {
	CIDR   string
	Except []string
}

// EgressPolicy is a NetworkPolicy for all pods of a namespace that allows
// egress to some blocks.
func EgressPolicy(namespace, name string, blocks ...Block) *networkingv1.NetworkPolicy {
	policy := &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: networkingv1.NetworkPolicySpec{
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress},
			Egress:      []networkingv1.NetworkPolicyEgressRule{{}},
		},
	}
	for _, b := range blocks {
		policy.Spec.Egress[0].To = append(policy.Spec.Egress[0].To, networkingv1.NetworkPolicyPeer{
			IPBlock: &networkingv1.IPBlock{CIDR: b.CIDR, Except: b.Except},
		})
	}
	return policy
}
