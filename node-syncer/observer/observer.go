// Package observer watches CiliumNode objects on a real API server and checks
// invariant I1 at every version that it stores. It judges whoever writes, so it
// shares no code with a writer.
package observer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
)

// Finding is one version that broke the invariant.
type Finding struct {
	// Node is the name of the object.
	Node string
	// Revision is its resourceVersion.
	Revision string
	// Violations are what is wrong, at least one.
	Violations []ciliumnode.Violation
}

// Observer counts versions and keeps findings. Its methods may be called at any
// time, from any goroutine.
type Observer struct {
	client dynamic.Interface

	mu       sync.Mutex // guards the fields below
	versions map[string]int
	findings []Finding
	missed   int
	synced   chan struct{}
	isSynced bool
}

// New returns an observer of the API server at config. Run makes it work.
func New(config *rest.Config) (*Observer, error) {
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("prepare client: %w", err)
	}
	return &Observer{client: client, versions: make(map[string]int), synced: make(chan struct{})}, nil
}

// Run observes until ctx ends, and returns nil then. It lists once and watches
// from there, so it sees every version in between; where the server no longer
// has them, Missed counts the gap.
func (o *Observer) Run(ctx context.Context) error {
	resource := o.client.Resource(ciliumnode.GVR())
	revision := ""
	for ctx.Err() == nil {
		if revision == "" {
			list, err := resource.List(ctx, metav1.ListOptions{})
			if err != nil {
				pause(ctx) // The server may be starting.
				continue
			}
			for i := range list.Items {
				o.judge(&list.Items[i])
			}
			revision = list.GetResourceVersion()
			o.markSynced()
		}
		stream, err := resource.Watch(ctx, metav1.ListOptions{ResourceVersion: revision})
		if err == nil {
			revision, err = o.follow(stream, revision)
		}
		if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
			o.mu.Lock()
			o.missed++
			o.mu.Unlock()
			revision = ""
		}
		if err != nil {
			pause(ctx)
		}
	}
	return nil
}

// pause waits before the server is asked again, or until ctx ends.
func pause(ctx context.Context) {
	t := time.NewTimer(100 * time.Millisecond)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

var errStreamEnded = errors.New("the watch ended")

func (o *Observer) follow(stream watch.Interface, revision string) (string, error) {
	defer stream.Stop()
	for event := range stream.ResultChan() {
		if event.Type == watch.Error {
			return revision, apierrors.FromObject(event.Object)
		}
		object, ok := event.Object.(*unstructured.Unstructured)
		if !ok {
			continue
		}
		revision = object.GetResourceVersion()
		if event.Type != watch.Bookmark {
			o.judge(object) // A deletion has the last version.
		}
	}
	return revision, errStreamEnded
}

func (o *Observer) judge(object *unstructured.Unstructured) {
	var node ciliumnode.CiliumNode
	var violations []ciliumnode.Violation
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &node); err != nil {
		violations = []ciliumnode.Violation{{Problem: err.Error()}}
	} else {
		violations = ciliumnode.Violations(&node)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.versions[object.GetName()]++
	if len(violations) > 0 {
		o.findings = append(o.findings, Finding{Node: object.GetName(), Revision: object.GetResourceVersion(), Violations: violations})
	}
}

func (o *Observer) markSynced() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.isSynced {
		o.isSynced = true
		close(o.synced)
	}
}

// Synced is closed once the first list is judged: versions stored from then on
// are seen.
func (o *Observer) Synced() <-chan struct{} { return o.synced }

// Versions returns how many versions of each node were judged. The caller owns
// the map.
func (o *Observer) Versions() map[string]int {
	o.mu.Lock()
	defer o.mu.Unlock()
	counts := make(map[string]int, len(o.versions))
	for name, n := range o.versions {
		counts[name] = n
	}
	return counts
}

// Findings returns the versions that broke the invariant, in the order in which
// they were seen. The caller owns the slice.
func (o *Observer) Findings() []Finding {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]Finding(nil), o.findings...)
}

// Missed returns how often the server had dropped versions before they could be
// seen. A proof needs 0.
func (o *Observer) Missed() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.missed
}
