package kube

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/internal/localkube"
)

// cluster is one API server for the tests of this package.
var cluster *localkube.Cluster

func TestMain(m *testing.M) {
	os.Exit(localkube.Shared(m, func(c *localkube.Cluster) { cluster = c }))
}

// sink remembers what it was told.
type sink struct {
	mu       sync.Mutex
	sets     map[ipcache.Owner]map[netip.Prefix]ipcache.Metadata
	problems map[ipcache.Owner]int
	listed   bool
	atList   int // owners when the source was listed
}

func newSink() *sink {
	return &sink{sets: make(map[ipcache.Owner]map[netip.Prefix]ipcache.Metadata), problems: make(map[ipcache.Owner]int)}
}

func (s *sink) Replace(o ipcache.Owner, set map[netip.Prefix]ipcache.Metadata, problems []Problem) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sets[o], s.problems[o] = set, len(problems)
}

func (s *sink) Remove(o ipcache.Owner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sets, o)
}

func (s *sink) Listed(string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listed, s.atList = true, len(s.sets)
}

// eventually waits until the condition holds on the sink.
func (s *sink) eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		s.mu.Lock()
		ok := holds()
		s.mu.Unlock()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s; have %v", what, s.sets)
		}
	}
}

func client(t *testing.T, reached func(error)) *Client {
	t.Helper()
	config, err := RESTConfig(cluster.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewClient(config, reached)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestPoliciesOfARealServer(t *testing.T) {
	var mu sync.Mutex
	answered := 0
	c := client(t, func(err error) {
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			answered++
		}
	})
	ctx := t.Context()
	create := func(np *networkingv1.NetworkPolicy) *networkingv1.NetworkPolicy {
		t.Helper()
		np = np.DeepCopy()
		np.ResourceVersion, np.UID = "", ""
		var out networkingv1.NetworkPolicy
		if err := c.networking.Post().Namespace("default").Resource(Policies).Body(np).Do(ctx).Into(&out); err != nil {
			t.Fatal(err)
		}
		return &out
	}
	first := create(policy("first", []networkingv1.NetworkPolicyPeer{block("10.0.0.0/8", "10.1.0.0/16")}, nil))

	s := newSink()
	watchCtx, cancel := context.WithCancel(ctx)
	done := make(chan error)
	go func() { done <- c.WatchPolicies(watchCtx, s, slog.New(slog.DiscardHandler)) }()
	s.eventually(t, "listed", func() bool { return s.listed })
	if s.atList != 1 || len(s.sets[OwnerOf(first)]) != 2 {
		t.Fatalf("listed with %v", s.sets)
	}

	second := create(policy("second", nil, []networkingv1.NetworkPolicyPeer{block("192.0.2.0/24")}))
	s.eventually(t, "created", func() bool { return len(s.sets[OwnerOf(second)]) == 1 })

	second.Spec.Egress[0].To = append(second.Spec.Egress[0].To, block("198.51.100.0/24"))
	if err := c.networking.Put().Namespace("default").Resource(Policies).Name("second").Body(second).Do(ctx).Error(); err != nil {
		t.Fatal(err)
	}
	s.eventually(t, "edited", func() bool { return len(s.sets[OwnerOf(second)]) == 2 })

	if err := c.networking.Delete().Namespace("default").Resource(Policies).Name("first").Do(ctx).Error(); err != nil {
		t.Fatal(err)
	}
	again := create(first)
	s.eventually(t, "created again with another UID", func() bool {
		_, old := s.sets[OwnerOf(first)]
		return len(s.sets[OwnerOf(again)]) == 2 && !old
	})

	cancel()
	if err := <-done; err != nil {
		t.Errorf("ended with %v", err)
	}
	mu.Lock()
	defer mu.Unlock()
	if answered == 0 {
		t.Error("no answer was reported")
	}
}

func TestNodeUID(t *testing.T) {
	c := client(t, nil)
	var node corev1.Node
	node.Name = "node-1"
	if err := c.core.Post().Resource("nodes").Body(&node).Do(t.Context()).Into(&node); err != nil {
		t.Fatal(err)
	}
	if uid, err := c.NodeUID(t.Context(), "node-1"); err != nil || uid == "" || uid != string(node.UID) {
		t.Errorf("uid %q, %v", uid, err)
	}
	if uid, err := c.NodeUID(t.Context(), "node-2"); err == nil {
		t.Errorf("the UID of no node: %q", uid)
	}
}

func TestRESTConfigOutsideOfAPod(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := RESTConfig(""); !errors.Is(err, ErrNotConfigured) {
		t.Errorf("got %v", err)
	}
	if _, err := RESTConfig("/nonexistent"); err == nil || errors.Is(err, ErrNotConfigured) {
		t.Errorf("a missing file: %v", err)
	}
}
