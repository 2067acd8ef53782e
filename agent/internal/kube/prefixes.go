package kube

import (
	"fmt"
	"net/netip"

	networkingv1 "k8s.io/api/networking/v1"

	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/reason"
)

// Problem is something in an object that can not be taken as it stands. The rest
// of the object is.
type Problem struct {
	// Reason is PrefixInvalid or FieldsContradict.
	Reason reason.Reason
	// Field is where in the object.
	Field string
	// Message says what is wrong.
	Message string
}

// OwnerOf returns the owner that a NetworkPolicy is.
func OwnerOf(np *networkingv1.NetworkPolicy) ipcache.Owner {
	return ipcache.Owner{Kind: ipcache.KindNetworkPolicy, Namespace: np.Namespace, Name: np.Name, UID: string(np.UID)}
}

// Prefixes returns the prefixes that the datapath must tell apart to enforce a
// NetworkPolicy: of each ipBlock the CIDR, and each block of its `except` as a
// prefix of its own. An excepted block needs its own number because the longest
// match decides: with it, its addresses no longer carry the number of the block
// around it, which the policy allows.
func Prefixes(np *networkingv1.NetworkPolicy) (map[netip.Prefix]ipcache.Metadata, []Problem) {
	c := collector{set: make(map[netip.Prefix]ipcache.Metadata)}
	for i, rule := range np.Spec.Ingress {
		for j, peer := range rule.From {
			c.block(fmt.Sprintf("spec.ingress[%d].from[%d].ipBlock", i, j), peer.IPBlock)
		}
	}
	for i, rule := range np.Spec.Egress {
		for j, peer := range rule.To {
			c.block(fmt.Sprintf("spec.egress[%d].to[%d].ipBlock", i, j), peer.IPBlock)
		}
	}
	return c.set, c.problems
}

type collector struct {
	set      map[netip.Prefix]ipcache.Metadata
	problems []Problem
}

func (c *collector) block(field string, b *networkingv1.IPBlock) {
	if b == nil {
		return
	}
	block, ok := c.parse(field+".cidr", b.CIDR)
	if !ok {
		return
	}
	c.add(block)
	for i, text := range b.Except {
		field := fmt.Sprintf("%s.except[%d]", field, i)
		except, ok := c.parse(field, text)
		if !ok {
			continue
		}
		// Kubernetes wants it strictly inside.
		if !block.Contains(except.Addr()) || except.Bits() <= block.Bits() {
			c.problems = append(c.problems, Problem{
				Reason: reason.FieldsContradict, Field: field,
				Message: fmt.Sprintf("%s is not strictly inside %s", except, block),
			})
			continue
		}
		c.add(except)
	}
}

func (c *collector) parse(field, text string) (netip.Prefix, bool) {
	p, err := prefix.Parse(text)
	if err != nil {
		c.problems = append(c.problems, Problem{Reason: reason.PrefixInvalid, Field: field, Message: err.Error()})
	}
	return p, err == nil
}

func (c *collector) add(p netip.Prefix) {
	c.set[p] = ipcache.Metadata{Source: ipcache.SourceKubernetes}
}
