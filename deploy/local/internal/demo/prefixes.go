package demo

import (
	"context"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/eniplane/eniplane/deploy/local/internal/ipcachemap"
	"github.com/eniplane/eniplane/deploy/local/internal/kube"
	"github.com/eniplane/eniplane/deploy/local/internal/stack"
	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
)

// The policies overlap in themselves and with each other.
var (
	backends = []kube.Block{
		{CIDR: "10.20.0.0/16", Except: []string{"10.20.30.0/24"}},
		{CIDR: "10.20.0.0/18"},
		{CIDR: "192.0.2.0/24"},
		{CIDR: "2001:db8::/32"},
	}
	partners = []kube.Block{
		{CIDR: "192.0.2.0/24", Except: []string{"192.0.2.128/25"}},
		{CIDR: "198.51.100.7/32"},
	}
)

// wanted are the prefixes of both policies. An excepted block needs a number of
// its own: without it, its addresses would have that of the block around.
func wanted() []netip.Prefix {
	var texts []string
	for _, b := range append(slices.Clone(backends), partners...) {
		texts = append(append(texts, b.CIDR), b.Except...)
	}
	var prefixes []netip.Prefix
	for _, text := range sorted(texts) {
		prefixes = append(prefixes, netip.MustParsePrefix(text))
	}
	slices.SortFunc(prefixes, netip.Prefix.Compare)
	return prefixes
}

// applyPolicies applies both and waits until every node has programmed what
// they speak of.
func (d *demo) applyPolicies(ctx context.Context) error {
	for _, p := range []struct {
		name   string
		blocks []kube.Block
	}{{"to-backends", backends}, {"to-partners", partners}} {
		if err := d.stack.Kube().ApplyPolicy(ctx, kube.EgressPolicy(namespace, p.name, p.blocks...)); err != nil {
			return err
		}
	}
	for _, node := range d.nodes {
		err := until(ctx, func(ctx context.Context) (bool, error) {
			entries, err := d.entries(ctx, node)
			return err == nil && len(entries) >= len(wanted()), err
		})
		d.check(err == nil, "%s has not programmed the policies: %v", node, err)
	}
	return nil
}

// entries asks an agent for its map.
func (d *demo) entries(ctx context.Context, node string) ([]*agentv1.Entry, error) {
	var entries []*agentv1.Entry
	for token := ""; ; {
		resp, err := d.agents[node].ListEntries(ctx, &agentv1.ListEntriesRequest{PageToken: token})
		if err != nil {
			return nil, err
		}
		entries = append(entries, resp.GetEntries()...)
		if token = resp.GetNextPageToken(); token == "" {
			return entries, nil
		}
	}
}

// showPrefixes prints each CIDR with its number and holders as the service
// knows them, and with its bytes in the map of each node.
func (d *demo) showPrefixes(ctx context.Context) error {
	numbers := make(map[string]uint32)
	var rows [][]string
	for _, p := range wanted() {
		resp, err := d.identity.GetIdentity(ctx, &identityv1.GetIdentityRequest{Key: &identityv1.GetIdentityRequest_Prefix{Prefix: p.String()}})
		if err != nil {
			return fmt.Errorf("identity of %s: %w", p, err)
		}
		id := resp.GetIdentity()
		for other, n := range numbers {
			d.check(n != id.GetNumber(), "%s and %s have the number %d", other, p, n)
		}
		numbers[p.String()] = id.GetNumber()
		var owners, nodes []string
		for _, h := range id.GetHolders() {
			owners = append(owners, h.GetOwner().GetNamespace()+"/"+h.GetOwner().GetName())
			nodes = append(nodes, h.GetNodeName())
		}
		owners, nodes = sorted(owners), sorted(nodes)
		d.check(slices.Equal(nodes, d.nodes), "%s is held by the nodes %v", p, nodes)
		rows = append(rows, []string{p.String(), number(id.GetNumber()), strings.Join(owners, ", "), strings.Join(nodes, " ")})
	}
	d.table("CIDRs of the policies, as identity-service knows them", []string{"CIDR", "NUMBER", "HELD BY", "ON"}, rows)

	rows = nil
	for _, n := range d.stack.Record().Nodes {
		entries, err := d.nodeEntries(ctx, n)
		if err != nil {
			return err
		}
		have := make([]string, 0, len(entries))
		for _, e := range entries {
			have = append(have, e.Prefix.String())
			want := numbers[e.Prefix.String()]
			d.check(want == 0 || e.Number == want, "%s has the number %d on %s; the service says %d", e.Prefix, e.Number, n.Name, want)
			rows = append(rows, []string{e.Prefix.String(), n.Name, number(e.Number), hex.EncodeToString(e.Key[:]), hex.EncodeToString(e.Value[:])})
		}
		for _, p := range wanted() {
			d.check(slices.Contains(have, p.String()), "%s is not in the map of %s", p, n.Name)
		}
		d.check(len(have) == len(wanted()), "the map of %s holds %d entries, want %d: %v", n.Name, len(have), len(wanted()), have)
	}
	slices.SortStableFunc(rows, func(a, b []string) int {
		return netip.MustParsePrefix(a[0]).Compare(netip.MustParsePrefix(b[0]))
	})
	title := "The same CIDRs, read from the pinned kernel map of each node by this process"
	if !d.stack.HasPins() {
		title = "The same CIDRs, as each agent has them IN MEMORY (no kernel map: not root, or no BPF file system)"
	}
	d.table(title, []string{"CIDR", "NODE", "NUMBER", "KEY", "VALUE"}, rows)
	return nil
}

// nodeEntries reads a node's map from the kernel and compares it with what the
// agent says; without a kernel map there is only the latter.
func (d *demo) nodeEntries(ctx context.Context, n stack.NodeRecord) ([]ipcachemap.Entry, error) {
	told, err := d.entries(ctx, n.Name)
	if err != nil {
		return nil, fmt.Errorf("entries of %s: %w", n.Name, err)
	}
	said := make([]ipcachemap.Entry, 0, len(told))
	for _, e := range told {
		p, err := netip.ParsePrefix(e.GetPrefix())
		if err != nil || len(e.GetRawKey()) != 24 || len(e.GetRawValue()) != 24 {
			return nil, fmt.Errorf("entry %v of %s makes no sense: %w", e, n.Name, err)
		}
		said = append(said, ipcachemap.Entry{Prefix: p, Number: e.GetNumber(), Key: [24]byte(e.GetRawKey()), Value: [24]byte(e.GetRawValue())})
	}
	slices.SortFunc(said, func(a, b ipcachemap.Entry) int { return a.Prefix.Compare(b.Prefix) })
	if n.Pin == "" {
		return said, nil
	}
	read, err := ipcachemap.Read(n.Pin)
	if err != nil {
		return nil, err
	}
	d.check(slices.Equal(read, said), "the agent of %s says that its map holds %v; the kernel says %v", n.Name, said, read)
	return read, nil
}
