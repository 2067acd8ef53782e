package server_test

import (
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/localkube"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/plan"
	"github.com/eniplane/eniplane/node-syncer/internal/view"
)

// naive writes a snapshot as somebody would who did not think of readers.
func naive(t *testing.T, name string, s *nodev1.PoolSnapshot, specFirst bool) {
	t.Helper()
	want := view.Wanted(s)
	write := func(w plan.Write, subresources ...string) {
		n := view.Edit(&ciliumnode.CiliumNode{}, w)
		var body any
		switch w.(type) {
		case plan.MainWrite:
			body = map[string]any{"spec": map[string]any{"ipam": map[string]any{"pool": replacing(t, mustGet(t, name), n.Spec.IPAM.Pool, "spec", "ipam", "pool")}}}
		case plan.StatusWrite:
			body = map[string]any{"status": map[string]any{"eni": map[string]any{"enis": replacing(t, mustGet(t, name), n.Status.ENI.ENIs, "status", "eni", "enis")}}}
		}
		raw, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		patch(t, name, string(raw), subresources...)
	}
	if specFirst {
		write(plan.MainWrite{Main: want.Main})
		write(plan.StatusWrite{Status: want.Status}, "status")
		return
	}
	write(plan.StatusWrite{Status: want.Status}, "status")
	write(plan.MainWrite{Main: want.Main})
}

// replacing makes a merge patch that leaves exactly want under a path.
func replacing[V any](t *testing.T, have *unstructured.Unstructured, want map[string]V, path ...string) map[string]any {
	t.Helper()
	out := map[string]any{}
	old, _, err := unstructured.NestedMap(have.Object, path...)
	if err != nil {
		t.Fatal(err)
	}
	for k := range old {
		out[k] = nil
	}
	for k, v := range want {
		out[k] = v
	}
	return out
}

// The observer catches the writers that it is there for.
func TestNegativeControls(t *testing.T) {
	r := start(t)
	for _, tc := range []struct {
		name      string
		specFirst bool
		from, to  []int
	}{
		{"control-spec-before-status", true, []int{2}, []int{2, 2}},  // cilium#16494
		{"control-status-before-spec", false, []int{2, 2}, []int{2}}, // what upstream does, when shrinking
	} {
		o := watchEverything(t)
		node := newNode(t, tc.name)
		register(t, r, node.Name)
		publish(t, r, snapshot(node.Name, 1, 1, tc.from...))
		naive(t, node.Name, snapshot(node.Name, 1, 2, tc.to...), tc.specFirst)
		if err := eventually(10*time.Second, func() error {
			for _, f := range o.Findings() {
				if f.Node == node.Name {
					return nil
				}
			}
			return fmt.Errorf("%d versions seen, none found broken", o.Versions()[node.Name])
		}); err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

// Everything that we write is a CiliumNode of Cilium v1.18.6, to the letter.
func TestObjectsKeepCiliumsSchema(t *testing.T) {
	crd, err := os.ReadFile("testdata/ciliumnodes-v1.18.6.crd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	config := restConfigOf(localkube.ForTest(t))
	if err := installCRD(config, crd); err != nil {
		t.Fatal(err)
	}
	api, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := api.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	r := startAt(t, config)
	q := registration("n")
	yes, no := true, false
	q.Addresses = []*nodev1.NodeAddress{{Type: "InternalIP", Ip: "10.0.0.4"}}
	q.Eni.SecurityGroups, q.Eni.SubnetIds = []string{"sg-1"}, []string{"subnet-1"}
	q.Eni.SecurityGroupTags, q.Eni.SubnetTags = map[string]string{"a": "b"}, map[string]string{"a": "b"}
	q.Eni.ExcludeInterfaceTags, q.Eni.StaticIpTags = map[string]string{"a": "b"}, map[string]string{"a": "b"}
	q.Eni.DeleteOnTermination, q.Eni.UsePrimaryAddress, q.Eni.DisablePrefixDelegation = &yes, &no, &yes
	for _, w := range []**uint32{&q.Watermarks.MinAllocate, &q.Watermarks.MaxAllocate, &q.Watermarks.MaxAboveWatermark} {
		v := uint32(3)
		*w = &v
	}
	if _, err := r.RegisterNode(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	s := snapshot("n", 1, 1, 3, 0)
	s.Enis[0].Tags, s.Enis[0].Vpc.Cidrs, s.Enis[0].Description = map[string]string{"k": "v"}, []string{"10.1.0.0/16"}, "d"
	for i := range 16 {
		a := fmt.Sprintf("10.0.0.%d", 32+i)
		s.Enis[0].Addresses = append(s.Enis[0].Addresses, a)
		s.Pool = append(s.Pool, &nodev1.PoolAddress{Address: a, EniId: s.Enis[0].GetId()})
	}
	s.Enis[0].Prefixes = []string{"10.0.0.32/28"}
	s.Conditions = []*nodev1.Condition{{Reason: 36, Message: "3 of 3 ENIs"}}
	publish(t, r, s)
	if err := eventually(10*time.Second, func() error {
		_, err := r.ReportUsage(t.Context(), &nodev1.ReportUsageRequest{NodeName: "n", Sequence: 1, Used: []*nodev1.UsedAddress{{Address: "10.0.0.10", Owner: "router", EniId: "eni-0"}}})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	stored, err := client.Resource(ciliumnode.GVR()).Get(t.Context(), "n", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := nested(t, stored, "status", "ipam", "operator-status", "error"); got != "OUT_OF_ENIS: 3 of 3 ENIs" {
		t.Errorf("operator-status.error = %q", got)
	}
	for _, path := range [][]string{{"spec", "ipam", "static-ip-tags"}, {"spec", "eni", "disable-prefix-delegation"}, {"status", "eni", "enis", "eni-0", "prefixes"}, {"status", "eni", "enis", "eni-0", "vpc", "cidrs"}, {"status", "ipam", "used"}} {
		nested(t, stored, path...) // Pruned if the schema did not know it.
	}
	copied := stored.DeepCopy()
	copied.SetName("copy")
	copied.SetResourceVersion("")
	copied.SetUID("")
	copied.SetManagedFields(nil)
	if _, err := client.Resource(ciliumnode.GVR()).Create(t.Context(), copied, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}); err != nil {
		t.Errorf("strict validation: %v", err)
	}
}
