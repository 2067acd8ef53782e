// Package kube is node-syncer's edge to the Kubernetes API server. It reads and
// patches objects and translates errors; what should be written, and in which
// order, does not belong here.
package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/trace"

	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
)

var (
	// ErrNotFound means: there is no such object.
	ErrNotFound = errors.New("no such object")
	// ErrConflict means: somebody else wrote the object since it was read, or made one
	// of the same name.
	ErrConflict = errors.New("the object was changed by somebody else")
	// ErrRefused means: the server understood the write and will not take it.
	ErrRefused = errors.New("the API server refused")
	// ErrUnavailable means: the server could not be reached, was overloaded, or broke.
	ErrUnavailable = errors.New("the API server is unavailable")
	// ErrMalformed means: a stored object does not have the shape of its kind.
	ErrMalformed = errors.New("the stored object is malformed")
)

// Client reads and writes Kubernetes objects. It keeps no state.
type Client struct {
	nodes dynamic.NamespaceableResourceInterface
	core  kubernetes.Interface
	dyn   dynamic.Interface
}

// New returns a client for the API server at config, which it does not change.
// Every request becomes a span.
func New(config *rest.Config, tracers trace.TracerProvider) (*Client, error) {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return otelhttp.NewTransport(next, otelhttp.WithTracerProvider(tracers),
			otelhttp.WithFilter(func(r *http.Request) bool { return r.URL.Query().Get("watch") == "" }),
			otelhttp.WithSpanNameFormatter(func(_ string, r *http.Request) string {
				return "kube " + r.Method + " " + resourceOf(r.URL.Path)
			}))
	})
	dyn, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("prepare client: %w", err)
	}
	core, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("prepare client: %w", err)
	}
	return &Client{nodes: dyn.Resource(ciliumnode.GVR()), core: core, dyn: dyn}, nil
}

// resourceOf leaves the names of objects out of a path, to keep the number of
// span names small.
func resourceOf(path string) string {
	switch {
	case strings.Contains(path, "/ciliumnodes") && strings.HasSuffix(path, "/status"):
		return "ciliumnodes/status"
	case strings.Contains(path, "/ciliumnodes"):
		return "ciliumnodes"
	case strings.Contains(path, "/leases"):
		return "leases"
	case strings.Contains(path, "/nodes"):
		return "nodes"
	case strings.Contains(path, "/pods"):
		return "pods"
	default:
		return "other"
	}
}

// translate maps errors of the API machinery to ours; context errors pass.
func translate(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%w: %w", ErrNotFound, err)
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return fmt.Errorf("%w: %w", ErrConflict, err)
	case apierrors.IsTooManyRequests(err), apierrors.IsServerTimeout(err), apierrors.IsTimeout(err), apierrors.IsInternalError(err), apierrors.IsServiceUnavailable(err):
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	var status apierrors.APIStatus
	if errors.As(err, &status) && status.Status().Code >= 400 && status.Status().Code < 500 {
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

func decode(u *unstructured.Unstructured) (*ciliumnode.CiliumNode, error) {
	n := &ciliumnode.CiliumNode{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, n); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrMalformed, u.GetName(), err)
	}
	return n, nil
}

// CiliumNode returns the object as stored now. Errors are ErrNotFound,
// ErrMalformed and ErrUnavailable.
func (c *Client) CiliumNode(ctx context.Context, name string) (*ciliumnode.CiliumNode, error) {
	u, err := c.nodes.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("get CiliumNode %s: %w", name, translate(err))
	}
	return decode(u)
}

// Create stores a new object and returns it as stored; ErrConflict if there is
// one already.
func (c *Client) Create(ctx context.Context, n *ciliumnode.CiliumNode) (*ciliumnode.CiliumNode, error) {
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(n)
	if err != nil {
		return nil, fmt.Errorf("encode CiliumNode %s: %w", n.Name, err)
	}
	u := &unstructured.Unstructured{Object: content}
	u.SetGroupVersionKind(ciliumnode.GVR().GroupVersion().WithKind(ciliumnode.Kind))
	unstructured.RemoveNestedField(u.Object, "metadata", "creationTimestamp")
	stored, err := c.nodes.Create(ctx, u, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create CiliumNode %s: %w", n.Name, translate(err))
	}
	return decode(stored)
}

// Delete removes the object if it still is the one with this UID; one that is
// gone is no error.
func (c *Client) Delete(ctx context.Context, name string, uid types.UID) error {
	err := c.nodes.Delete(ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete CiliumNode %s: %w", name, translate(err))
	}
	return nil
}

// Part is the endpoint that a patch goes to.
type Part string

// The endpoints of an object.
const (
	MainPart   Part = ""
	StatusPart Part = "status"
)

// Patch writes the difference between have and want, and nothing else, to one
// endpoint, on condition that the stored object still is the version of have.
// Fields that the types do not know stay as they are. It returns the object as
// stored, or have itself if there is no difference. want's resourceVersion is
// ignored. Errors are ErrConflict, ErrNotFound, ErrRefused and ErrUnavailable.
func (c *Client) Patch(ctx context.Context, have, want *ciliumnode.CiliumNode, part Part) (*ciliumnode.CiliumNode, error) {
	patch, err := difference(have, want, part)
	if err != nil {
		return nil, fmt.Errorf("compare CiliumNode %s: %w", have.Name, err)
	}
	if patch == nil {
		return have, nil
	}
	var subresources []string
	if part != MainPart {
		subresources = append(subresources, string(part))
	}
	u, err := c.nodes.Patch(ctx, have.Name, types.MergePatchType, patch, metav1.PatchOptions{}, subresources...)
	if err != nil {
		return nil, fmt.Errorf("patch CiliumNode %s: %w", have.Name, translate(err))
	}
	return decode(u)
}

// difference returns a JSON merge patch (RFC 7386) with the version of have as
// its precondition; nil if nothing differs.
func difference(have, want *ciliumnode.CiliumNode, part Part) ([]byte, error) {
	view := func(n *ciliumnode.CiliumNode) ([]byte, error) {
		if part == StatusPart {
			return json.Marshal(map[string]any{"status": n.Status})
		}
		return json.Marshal(map[string]any{
			"spec":     n.Spec,
			"metadata": map[string]any{"annotations": n.Annotations, "ownerReferences": n.OwnerReferences},
		})
	}
	old, err := view(have)
	if err != nil {
		return nil, err
	}
	wanted, err := view(want)
	if err != nil {
		return nil, err
	}
	raw, err := jsonpatch.CreateMergePatch(old, wanted)
	if err != nil {
		return nil, err
	}
	var patch map[string]any
	if err := json.Unmarshal(raw, &patch); err != nil {
		return nil, err
	}
	if len(patch) == 0 {
		return nil, nil
	}
	metadata, _ := patch["metadata"].(map[string]any)
	if metadata == nil {
		metadata = make(map[string]any, 2)
		patch["metadata"] = metadata
	}
	metadata["resourceVersion"] = have.ResourceVersion
	metadata["uid"] = string(have.UID)
	return json.Marshal(patch)
}

// Node returns the Kubernetes Node. Errors are ErrNotFound and ErrUnavailable.
func (c *Client) Node(ctx context.Context, name string) (*corev1.Node, error) {
	n, err := c.core.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("get Node %s: %w", name, translate(err))
	}
	return n, nil
}

// LeaseAnnotation returns one annotation of a Lease. ok is false if there is no
// such Lease or annotation.
func (c *Client) LeaseAnnotation(ctx context.Context, namespace, name, key string) (string, bool, error) {
	lease, err := c.core.CoordinationV1().Leases(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("get Lease %s/%s: %w", namespace, name, translate(err))
	}
	value, ok := lease.Annotations[key]
	return value, ok, nil
}
