package ciliumnode_test

import (
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
)

func good() *ciliumnode.CiliumNode {
	n := &ciliumnode.CiliumNode{}
	n.Spec.IPAM.Pool = map[string]ciliumnode.Allocation{"10.0.0.5": {Resource: "eni-1"}}
	n.Status.ENI.ENIs = map[string]ciliumnode.ENI{
		"eni-1": {
			ID: "eni-1", Addresses: []string{"10.0.0.5", "10.0.0.6"},
			Subnet: ciliumnode.Subnet{ID: "subnet-1", CIDR: "10.0.0.0/24"},
			VPC:    ciliumnode.VPC{ID: "vpc-1", PrimaryCIDR: "10.0.0.0/16"},
		},
	}
	return n
}

func TestViolations(t *testing.T) {
	editENI := func(edit func(*ciliumnode.ENI)) func(*ciliumnode.CiliumNode) {
		return func(n *ciliumnode.CiliumNode) {
			e := n.Status.ENI.ENIs["eni-1"]
			edit(&e)
			n.Status.ENI.ENIs["eni-1"] = e
		}
	}
	for _, tc := range []struct {
		name string
		edit func(*ciliumnode.CiliumNode)
		want int
	}{
		{"consistent", func(*ciliumnode.CiliumNode) {}, 0},
		{"empty", func(n *ciliumnode.CiliumNode) { *n = ciliumnode.CiliumNode{} }, 0},
		{"cilium#16494: the ENI is missing", func(n *ciliumnode.CiliumNode) { n.Status.ENI.ENIs = nil }, 1},
		{"the ENI does not list the address", editENI(func(e *ciliumnode.ENI) { e.Addresses = []string{"10.0.0.6"} }), 1},
		{"cilium#22477: no subnet CIDR", editENI(func(e *ciliumnode.ENI) { e.Subnet.CIDR = "" }), 1},
		{"cilium#32855: no VPC CIDR", editENI(func(e *ciliumnode.ENI) { e.VPC.PrimaryCIDR = "" }), 1},
		{"an ENI outside the pool counts too", func(n *ciliumnode.CiliumNode) { n.Status.ENI.ENIs["eni-2"] = ciliumnode.ENI{ID: "eni-2"} }, 2},
		{"an ENI under another id", editENI(func(e *ciliumnode.ENI) { e.ID = "eni-9" }), 1},
		{"an address without an ENI", func(n *ciliumnode.CiliumNode) { n.Spec.IPAM.Pool["10.0.0.6"] = ciliumnode.Allocation{} }, 1},
	} {
		n := good()
		tc.edit(n)
		if got := ciliumnode.Violations(n); len(got) != tc.want {
			t.Errorf("%s: %v, want %d", tc.name, got, tc.want)
		}
	}
}

func TestCRDPreservesWhatItDoesNotKnow(t *testing.T) {
	var crd apiextensionsv1.CustomResourceDefinition
	if err := yaml.UnmarshalStrict(ciliumnode.CRD(), &crd); err != nil {
		t.Fatal(err)
	}
	if got, want := crd.Name, "ciliumnodes.cilium.io"; got != want {
		t.Errorf("name %q, want %q", got, want)
	}
	v := crd.Spec.Versions[0]
	if v.Subresources == nil || v.Subresources.Status == nil {
		t.Error("no status subresource")
	}
	for _, part := range []string{"spec", "status"} {
		p := v.Schema.OpenAPIV3Schema.Properties[part]
		if p.XPreserveUnknownFields == nil || !*p.XPreserveUnknownFields {
			t.Errorf("%s drops unknown fields", part)
		}
	}
}
