package kube

import (
	"maps"
	"slices"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"

	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/reason"
)

func block(cidr string, except ...string) networkingv1.NetworkPolicyPeer {
	return networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: cidr, Except: except}}
}

func policy(name string, from []networkingv1.NetworkPolicyPeer, to []networkingv1.NetworkPolicyPeer) *networkingv1.NetworkPolicy {
	np := &networkingv1.NetworkPolicy{}
	np.Namespace, np.Name = "default", name
	if from != nil {
		np.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: from}}
	}
	if to != nil {
		np.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{To: to}}
	}
	return np
}

func TestPrefixes(t *testing.T) {
	type peers = []networkingv1.NetworkPolicyPeer
	for _, tt := range []struct {
		name     string
		from, to peers
		want     []string
		problems []Problem
	}{
		{name: "nothing"},
		{name: "no ipBlock", from: peers{{}}},
		{name: "both directions", from: peers{block("10.0.0.0/8")}, to: peers{block("fd00::/8"), block("192.0.2.1/32")}, want: []string{"10.0.0.0/8", "192.0.2.1/32", "fd00::/8"}},
		{name: "two spellings are one", from: peers{block("10.1.2.3/8"), block("::ffff:10.0.0.0/104")}, want: []string{"10.0.0.0/8"}},
		{name: "except", to: peers{block("10.0.0.0/8", "10.1.0.0/16", "10.1.1.0/24")}, want: []string{"10.0.0.0/8", "10.1.0.0/16", "10.1.1.0/24"}},
		{name: "world", from: peers{block("0.0.0.0/0", "10.0.0.0/8"), block("::/0")}, want: []string{"0.0.0.0/0", "10.0.0.0/8", "::/0"}},
		{
			name: "what is wrong is left out", from: peers{block("10.0.0.0/8", "11.0.0.0/16", "10.0.0.0/8", "x"), block("10.0.0.1", "10.0.0.0/8"), block("::ffff:0:0/90")},
			want: []string{"10.0.0.0/8"},
			problems: []Problem{
				{Reason: reason.FieldsContradict, Field: "spec.ingress[0].from[0].ipBlock.except[0]"},
				{Reason: reason.FieldsContradict, Field: "spec.ingress[0].from[0].ipBlock.except[1]"},
				{Reason: reason.PrefixInvalid, Field: "spec.ingress[0].from[0].ipBlock.except[2]"},
				{Reason: reason.PrefixInvalid, Field: "spec.ingress[0].from[1].ipBlock.cidr"},
				{Reason: reason.PrefixInvalid, Field: "spec.ingress[0].from[2].ipBlock.cidr"},
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			set, problems := Prefixes(policy("p", tt.from, tt.to))
			var got []string
			for _, p := range slices.SortedFunc(maps.Keys(set), prefix.Compare) {
				got = append(got, p.String())
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("prefixes %v, want %v", got, tt.want)
			}
			for i := range problems {
				if problems[i].Message == "" {
					t.Errorf("%v says nothing", problems[i])
				}
				problems[i].Message = ""
			}
			if !slices.Equal(problems, tt.problems) {
				t.Errorf("problems %v, want %v", problems, tt.problems)
			}
		})
	}
}
