// Package kube is the edge to the Kubernetes API server: NetworkPolicies as a
// source of prefixes, and the node's own Node. What becomes of the prefixes does
// not belong here.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/internal/telemetry"
)

// Policies is the name of the source of prefixes that NetworkPolicies are.
const Policies = "networkpolicies"

// Service is the name of the API server as a dependency.
const Service = "kube-apiserver"

// ErrNotConfigured says that no API server is named, and this process runs in no pod.
var ErrNotConfigured = errors.New("no API server configured")

// RESTConfig returns how to reach the API server: the kubeconfig file, or in a
// pod, if path is empty, what Kubernetes put there. The error is
// ErrNotConfigured, wrapped, if there is neither.
func RESTConfig(path string) (*rest.Config, error) {
	if path != "" {
		config, err := clientcmd.BuildConfigFromFlags("", path)
		if err != nil {
			return nil, fmt.Errorf("read the kubeconfig %s: %w", path, err)
		}
		return config, nil
	}
	config, err := rest.InClusterConfig()
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, fmt.Errorf("%w: %w", ErrNotConfigured, err)
	}
	if err != nil {
		return nil, fmt.Errorf("read the configuration of the pod: %w", err)
	}
	return config, nil
}

// Client reads from the API server.
type Client struct {
	core, networking *rest.RESTClient
}

// NewClient returns a client. It does not connect yet. After each request
// reached, which may be nil, is told whether the server answered.
func NewClient(config *rest.Config, reached func(error)) (*Client, error) {
	if reached != nil {
		config = rest.CopyConfig(config)
		config.Wrap(func(next http.RoundTripper) http.RoundTripper { return reporter{next: next, reached: reached} })
	}
	core, err := restClient(config, corev1.SchemeGroupVersion, "/api", corev1.AddToScheme)
	if err != nil {
		return nil, err
	}
	networking, err := restClient(config, networkingv1.SchemeGroupVersion, "/apis", networkingv1.AddToScheme)
	if err != nil {
		return nil, err
	}
	return &Client{core: core, networking: networking}, nil
}

func restClient(config *rest.Config, version schema.GroupVersion, path string, add func(*runtime.Scheme) error) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	if err := add(scheme); err != nil {
		return nil, fmt.Errorf("register %s: %w", version, err)
	}
	metav1.AddToGroupVersion(scheme, version)
	c := rest.CopyConfig(config)
	c.GroupVersion = &version
	c.APIPath = path
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	c.UserAgent = "eniplane-agent"
	client, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("make a client for %s: %w", version, err)
	}
	return client, nil
}

// NodeUID returns the UID of a Node.
func (c *Client) NodeUID(ctx context.Context, name string) (string, error) {
	var node corev1.Node
	if err := c.core.Get().Resource("nodes").Name(name).Do(ctx).Into(&node); err != nil {
		return "", fmt.Errorf("read node %s: %w", name, err)
	}
	return string(node.UID), nil
}

// reporter tells after each request whether the server answered.
type reporter struct {
	next    http.RoundTripper
	reached func(error)
}

// RoundTrip implements http.RoundTripper.
func (r reporter) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := r.next.RoundTrip(request)
	switch {
	case err == nil && response.StatusCode >= http.StatusBadRequest:
		r.reached(fmt.Errorf("%s %s: %s", request.Method, request.URL.Path, response.Status))
	case err == nil:
		r.reached(nil)
	case request.Context().Err() == nil: // we did not give up ourselves
		r.reached(err)
	}
	return response, err
}

// Sink takes what a source of prefixes has.
type Sink interface {
	// Replace makes set the whole set of an owner; problems are what of the owner
	// is left out.
	Replace(owner ipcache.Owner, set map[netip.Prefix]ipcache.Metadata, problems []Problem)
	// Remove ends an owner.
	Remove(owner ipcache.Owner)
	// Listed says that everything the source had at some moment since the start
	// of this process was handed over.
	Listed(source string)
}

// WatchPolicies hands every NetworkPolicy to the sink, and each change, until ctx
// ends. It retries for as long as the API server is away.
func (c *Client) WatchPolicies(ctx context.Context, sink Sink, logger *slog.Logger) error {
	lw := cache.NewListWatchFromClient(c.networking, Policies, metav1.NamespaceAll, fields.Everything())
	informer := cache.NewSharedIndexInformer(lw, &networkingv1.NetworkPolicy{}, 0, nil)
	if err := informer.SetTransform(strip); err != nil {
		return fmt.Errorf("prepare to watch %s: %w", Policies, err)
	}
	reg, err := informer.AddEventHandler(handler{ctx: ctx, sink: sink, logger: logger})
	if err != nil {
		return fmt.Errorf("prepare to watch %s: %w", Policies, err)
	}
	listed := make(chan struct{})
	go func() {
		defer close(listed)
		if cache.WaitForCacheSync(ctx.Done(), reg.HasSynced) {
			sink.Listed(Policies)
		}
	}()
	informer.RunWithContext(ctx)
	<-listed
	return nil
}

// strip drops what nobody here reads and objects carry a lot of.
func strip(obj any) (any, error) {
	if np, ok := obj.(*networkingv1.NetworkPolicy); ok {
		np.ManagedFields, np.Annotations, np.Labels = nil, nil, nil
	}
	return obj, nil
}

// handler hands the informer's events on. An object that was deleted and created
// again between two looks comes as an update with another UID: another owner.
type handler struct {
	ctx    context.Context // the informer's callbacks have none
	sink   Sink
	logger *slog.Logger
}

func (h handler) OnAdd(obj any, _ bool) { h.replace(obj) }

func (h handler) OnUpdate(before, after any) {
	h.replace(after)
	if b, ok := before.(*networkingv1.NetworkPolicy); ok {
		if a, ok := after.(*networkingv1.NetworkPolicy); ok && a.UID != b.UID {
			h.sink.Remove(OwnerOf(b))
		}
	}
}

func (h handler) OnDelete(obj any) {
	if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = gone.Obj
	}
	if np, ok := obj.(*networkingv1.NetworkPolicy); ok {
		h.sink.Remove(OwnerOf(np))
	}
}

func (h handler) replace(obj any) {
	np, ok := obj.(*networkingv1.NetworkPolicy)
	if !ok {
		utilruntime.HandleErrorWithContext(h.ctx, nil, "an informer gave another object", "type", fmt.Sprintf("%T", obj))
		return
	}
	set, problems := Prefixes(np)
	for _, p := range problems {
		h.logger.WarnContext(h.ctx, "part of a policy is left out",
			telemetry.KeyOwner, OwnerOf(np).String(), telemetry.KeyReason, p.Reason.String(), "field", p.Field, "problem", p.Message)
	}
	h.sink.Replace(OwnerOf(np), set, problems)
}
