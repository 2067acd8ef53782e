package kube

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/view"
)

// Handler is told of changes, one call at a time for each kind. It must not
// block. Objects are shared and must not be changed.
type Handler interface {
	// CiliumNodeChanged has the newest version.
	CiliumNodeChanged(n *ciliumnode.CiliumNode)
	// CiliumNodeGone has the last version that was seen.
	CiliumNodeGone(n *ciliumnode.CiliumNode)
	// NodeChanged has the newest version, of which only metadata, spec.providerID
	// and of the status allocatable and capacity are kept.
	NodeChanged(n *corev1.Node)
	// NodeGone has the last version that was seen.
	NodeGone(n *corev1.Node)
	// PendingPods tells how many pods of a node wait in phase Pending for an
	// address; pods with host network do not count.
	PendingPods(node string, count int)
	// Synced is called once, when everything that existed at the start was told.
	Synced()
}

// Watch tells handler of every change until ctx ends, and returns nil then. It
// keeps what Nodes and CiliumNodes need and of pods only those in phase Pending.
func (c *Client) Watch(ctx context.Context, handler Handler) error {
	ciliumNodes := dynamicinformer.NewFilteredDynamicInformer(c.dyn, ciliumnode.GVR(), metav1.NamespaceAll, 0, cache.Indexers{}, nil).Informer()
	nodes := informers.NewSharedInformerFactory(c.core, 0).Core().V1().Nodes().Informer()
	pending := fields.AndSelectors(fields.OneTermEqualSelector("status.phase", string(corev1.PodPending)), fields.OneTermNotEqualSelector("spec.nodeName", "")).String()
	pods := informers.NewSharedInformerFactoryWithOptions(c.core, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = pending })).Core().V1().Pods().Informer()

	if err := errors.Join(
		ciliumNodes.SetTransform(trimCiliumNode),
		nodes.SetTransform(trimNode),
		pods.SetTransform(trimPod),
		pods.AddIndexers(cache.Indexers{byNode: indexByNode}),
	); err != nil {
		return fmt.Errorf("prepare informers: %w", err)
	}
	counted := &podCounter{pods: pods.GetIndexer(), handler: handler}
	var registrations []cache.ResourceEventHandlerRegistration
	for _, r := range []struct {
		informer cache.SharedIndexInformer
		handler  cache.ResourceEventHandlerFuncs
	}{
		{ciliumNodes, handlers(handler.CiliumNodeChanged, handler.CiliumNodeGone)},
		{nodes, handlers(handler.NodeChanged, handler.NodeGone)},
		{pods, handlers(counted.changed, counted.changed)},
	} {
		registration, err := r.informer.AddEventHandler(r.handler)
		if err != nil {
			return fmt.Errorf("prepare informers: %w", err)
		}
		registrations = append(registrations, registration)
	}

	running := make(chan struct{}, 3)
	for _, informer := range []cache.SharedIndexInformer{ciliumNodes, nodes, pods} {
		go func() {
			informer.RunWithContext(ctx)
			running <- struct{}{}
		}()
	}
	var synced []cache.InformerSynced
	for _, r := range registrations {
		synced = append(synced, r.HasSynced)
	}
	if cache.WaitForCacheSync(ctx.Done(), synced...) {
		handler.Synced()
	}
	for range cap(running) {
		<-running
	}
	return nil
}

// handlers adapts functions over one type to the informer's.
func handlers[T any](changed, gone func(T)) cache.ResourceEventHandlerFuncs {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) {
			if t, ok := o.(T); ok {
				changed(t)
			}
		},
		UpdateFunc: func(_, o any) {
			if t, ok := o.(T); ok {
				changed(t)
			}
		},
		DeleteFunc: func(o any) {
			if unknown, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = unknown.Obj
			}
			if t, ok := o.(T); ok {
				gone(t)
			}
		},
	}
}

const byNode = "node"

func indexByNode(o any) ([]string, error) {
	pod, ok := o.(*corev1.Pod)
	if !ok || pod.Spec.HostNetwork || pod.DeletionTimestamp != nil {
		return nil, nil
	}
	return []string{pod.Spec.NodeName}, nil
}

// podCounter counts the pods of the node of a pod that changed. By then the
// index holds the change.
type podCounter struct {
	pods    cache.Indexer
	handler Handler
}

func (c *podCounter) changed(pod *corev1.Pod) {
	keys, err := c.pods.IndexKeys(byNode, pod.Spec.NodeName)
	if err != nil {
		return // Only a missing index fails, and it is set above.
	}
	c.handler.PendingPods(pod.Spec.NodeName, len(keys))
}

// trimCiliumNode turns what the server sent into our type.
func trimCiliumNode(o any) (any, error) {
	u, ok := o.(*unstructured.Unstructured)
	if !ok {
		return o, nil
	}
	u.SetManagedFields(nil)
	n, err := decode(u)
	if err == nil {
		return n, nil
	}
	n = &ciliumnode.CiliumNode{ObjectMeta: metav1.ObjectMeta{
		Name: u.GetName(), UID: u.GetUID(), ResourceVersion: u.GetResourceVersion(),
		Annotations: map[string]string{view.MalformedAnnotation: err.Error()}, OwnerReferences: u.GetOwnerReferences(),
	}}
	return n, nil
}

func trimNode(o any) (any, error) {
	n, ok := o.(*corev1.Node)
	if !ok {
		return o, nil
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion},
		Spec:       corev1.NodeSpec{ProviderID: n.Spec.ProviderID},
		Status:     corev1.NodeStatus{Allocatable: n.Status.Allocatable, Capacity: n.Status.Capacity},
	}, nil
}

func trimPod(o any) (any, error) {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: p.Namespace, UID: p.UID, ResourceVersion: p.ResourceVersion, DeletionTimestamp: p.DeletionTimestamp},
		Spec:       corev1.PodSpec{NodeName: p.Spec.NodeName, HostNetwork: p.Spec.HostNetwork},
	}, nil
}
