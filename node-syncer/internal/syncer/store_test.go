package syncer_test

import (
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/syncer"
	"github.com/eniplane/eniplane/node-syncer/internal/view"
)

func object(name, uid, version string) *ciliumnode.CiliumNode {
	return &ciliumnode.CiliumNode{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uid), ResourceVersion: version}}
}

func names(u syncer.Update) string {
	var out []string
	for _, n := range u.Nodes {
		out = append(out, n.GetNodeName())
	}
	return fmt.Sprint(out)
}

func TestMaxPods(t *testing.T) {
	pods := func(n string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourcePods: resource.MustParse(n)}
	}
	for name, tc := range map[string]struct {
		status corev1.NodeStatus
		want   uint32
	}{
		"unknown":     {corev1.NodeStatus{}, 0},
		"allocatable": {corev1.NodeStatus{Allocatable: pods("17"), Capacity: pods("110")}, 17},
		"capacity":    {corev1.NodeStatus{Capacity: pods("110")}, 110},
	} {
		s := syncer.NewStore("test")
		s.Synced()
		s.CiliumNodeChanged(object("n", "u", "1"))
		s.NodeChanged(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "node"}, Status: tc.status})
		if _, d, err := s.Views("n"); err != nil || d.GetMaxPods() != tc.want || d.GetNodeUid() != "node" {
			t.Errorf("%s: %v, %v", name, d, err)
		}
	}
}

// A watcher that was asleep gets the newest of each node once, and what is gone.
func TestDemandIsCoalesced(t *testing.T) {
	s := syncer.NewStore("test")
	if _, err := s.WatchDemand(""); !errors.Is(err, syncer.ErrNotReady) {
		t.Errorf("before the list: %v", err)
	}
	s.CiliumNodeChanged(object("a", "a", "1"))
	s.CiliumNodeChanged(object("b", "b", "2"))
	s.Synced()
	w, err := s.WatchDemand("")
	if err != nil {
		t.Fatal(err)
	}
	first, err := w.Next()
	if err != nil || names(first) != "[a b]" {
		t.Fatalf("first %v, %v", first, err)
	}
	for v := range 100 {
		s.CiliumNodeChanged(object("b", "b", fmt.Sprint(3+v)))
	}
	s.CiliumNodeGone(object("a", "a", "200"))
	s.CiliumNodeChanged(object("a", "a2", "201"))
	<-w.Changed()
	u, err := w.Next()
	if err != nil || names(u) != "[a b]" || u.Nodes[1].GetRevision() != "102" || len(u.Removed) != 1 || u.Removed[0].GetUid() != "a" {
		t.Errorf("then %v, %v", u, err)
	}
	select {
	case <-w.Changed():
		if u, err := w.Next(); err != nil || len(u.Nodes)+len(u.Removed) > 0 {
			t.Errorf("told twice: %v, %v", u, err)
		}
	default:
	}
	w.Stop()

	// Another one resumes from what the first one had.
	again, err := s.WatchDemand(first.Revision)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Stop()
	if u, err := again.Next(); err != nil || names(u) != "[a b]" || len(u.Removed) != 1 {
		t.Errorf("resumed %v, %v", u, err)
	}
	for _, unknown := range []string{"other.1", "test", "test.x", "test.99999"} {
		if _, err := s.WatchDemand(unknown); !errors.Is(err, syncer.ErrRevisionUnknown) {
			t.Errorf("%q: %v", unknown, err)
		}
	}
}

// Too many removals to remember: the watcher must start over, not miss one.
func TestForgottenRemovals(t *testing.T) {
	s := syncer.NewStore("test")
	s.Synced()
	w, err := s.WatchDemand("")
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	for i := range 10_001 {
		n := object(fmt.Sprint(i), fmt.Sprint(i), "1")
		s.CiliumNodeChanged(n)
		s.CiliumNodeGone(n)
	}
	if _, err := w.Next(); !errors.Is(err, syncer.ErrRevisionUnknown) {
		t.Errorf("error %v", err)
	}
}

func TestChangeWakesOnlyItsOwnNode(t *testing.T) {
	s := syncer.NewStore("test")
	s.Synced()
	watches := map[string]*syncer.NodeWatch{}
	for _, name := range []string{"a", "b"} {
		s.CiliumNodeChanged(object(name, name, "1"))
		w, err := s.WatchNode(name)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		<-w.Changed()
		watches[name] = w
	}
	s.CiliumNodeChanged(object("a", "a", "2"))
	<-watches["a"].Changed()
	select {
	case <-watches["b"].Changed():
		t.Error("the watcher of b was woken by a")
	default:
	}
	s.NodeGone(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
	if _, gone := watches["a"].Next(); !gone {
		t.Error("the Node is gone, its agent was not told")
	}
}

// Of an object that cannot be decoded nothing but the name is served, with a reason.
func TestObjectThatCannotBeDecoded(t *testing.T) {
	s := syncer.NewStore("test")
	s.Synced()
	n := object("n", "u", "1")
	n.Annotations = map[string]string{view.MalformedAnnotation: "spec.ipam is a string"}
	s.CiliumNodeChanged(n)
	agent, demand, err := s.Views("n")
	if err != nil {
		t.Fatal(err)
	}
	for _, conditions := range [][]*nodev1.Condition{agent.GetConditions(), demand.GetConditions()} {
		if len(conditions) != 1 || conditions[0].GetReason() != reasonv1.Reason_REASON_OBJECT_MALFORMED {
			t.Errorf("conditions %v", conditions)
		}
	}
}
