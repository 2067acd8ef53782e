package demo

import (
	"context"
	"fmt"
	"strings"

	"github.com/eniplane/eniplane/deploy/local/internal/stack"
	"github.com/eniplane/eniplane/deploy/local/internal/traces"
)

// crossing is what a trace must hold to have crossed everything on the way of a
// pod's address.
var crossing = []struct {
	what  string
	found func(traces.Span) bool
}{
	{"the agent's AllocateIP", func(s traces.Span) bool {
		return s.Service == "agent" && strings.HasSuffix(s.Name, "AllocateIP")
	}},
	{"eni-allocator's EnsureAddresses", func(s traces.Span) bool {
		return s.Service == stack.EniAllocator && strings.HasSuffix(s.Name, "EnsureAddresses")
	}},
	{"EC2's CreateNetworkInterface", func(s traces.Span) bool {
		return s.Service == stack.EniAllocator && strings.Contains(s.Name, "CreateNetworkInterface")
	}},
	{"EC2's AttachNetworkInterface", func(s traces.Span) bool {
		return s.Service == stack.EniAllocator && strings.Contains(s.Name, "AttachNetworkInterface")
	}},
	{"node-syncer's PublishPool", func(s traces.Span) bool {
		return s.Service == stack.NodeSyncer && strings.HasSuffix(s.Name, "PublishPool")
	}},
	{"a write to the API server", func(s traces.Span) bool {
		method := s.Attributes["http.request.method"]
		return s.Service == stack.NodeSyncer && (method == "PATCH" || method == "PUT")
	}},
}

// missing returns what a trace lacks.
func missing(spans []traces.Span) []string {
	var lacks []string
	for _, c := range crossing {
		found := false
		for _, s := range spans {
			found = found || c.found(s)
		}
		if !found {
			lacks = append(lacks, c.what)
		}
	}
	return lacks
}

// showTrace prints the trace of a pod's request that needed a new ENI.
func (d *demo) showTrace(ctx context.Context) error {
	if f, ok := d.tracing.TracerProvider.(interface{ ForceFlush(context.Context) error }); ok {
		if err := f.ForceFlush(ctx); err != nil {
			return fmt.Errorf("send spans: %w", err)
		}
	}
	var chosen given
	var spans []traces.Span
	var lacks []string
	err := until(ctx, func(ctx context.Context) (bool, error) {
		lacks = []string{"everything"}
		for _, g := range d.given {
			got, err := d.stack.Traces().Trace(ctx, g.traceID)
			if err != nil {
				return false, err
			}
			if l := missing(got); len(l) < len(lacks) || spans == nil {
				chosen, spans, lacks = g, got, l
			}
			if len(lacks) == 0 {
				return true, nil
			}
		}
		return false, nil
	})
	d.check(err == nil, "no trace of a pod's request crossed everything; the best one lacks %s", strings.Join(lacks, ", "))
	var rows [][]string
	for _, n := range traces.Tree(spans) {
		note := ""
		if n.Failed {
			note = "failed"
		}
		rows = append(rows, []string{
			n.Service, strings.Repeat("  ", n.Depth) + n.Name, fmt.Sprintf("%.1f ms", float64(n.End.Sub(n.Start).Microseconds())/1000), note,
		})
	}
	d.table(fmt.Sprintf("Trace %s: %s on %s needed a new ENI", chosen.traceID, chosen.pod, chosen.node), []string{"PROCESS", "SPAN", "TOOK", ""}, rows)
	return nil
}

// showMore prints how to look further.
func (d *demo) showMore() {
	rec := d.stack.Record()
	first := rec.Nodes[0]
	d.print("\nTo look further (while the stack runs: KEEP=1):\n")
	for _, line := range []string{
		fmt.Sprintf("grpcurl -plaintext -d '{\"node_name\":%q}' %s eniplane.node.v1.NodeSyncerService/GetNode", first.Name, d.stack.Target(stack.NodeSyncer)),
		fmt.Sprintf("grpcurl -plaintext -d '{\"node_name\":%q}' %s eniplane.eni.v1.EniAllocatorService/PlanAllocation", first.Name, d.stack.Target(stack.EniAllocator)),
		fmt.Sprintf("grpcurl -plaintext %s eniplane.identity.v1.IdentityService/ListIdentities", d.stack.Target(stack.IdentityService)),
		fmt.Sprintf("grpcurl -plaintext -d '{\"address\":\"10.20.30.40\"}' %s eniplane.identity.v1.IdentityService/LookupIdentity", d.stack.Target(stack.IdentityService)),
		fmt.Sprintf("grpcurl -plaintext -unix %s eniplane.agent.v1.AgentService/GetStatus", strings.TrimPrefix(first.Socket, "unix://")),
		fmt.Sprintf("grpcurl -plaintext %s list", d.stack.Target(stack.NodeSyncer)),
		fmt.Sprintf("kubectl --kubeconfig %s get ciliumnode %s -o yaml", rec.Kubeconfig, first.Name),
		fmt.Sprintf("curl -s %s/_sim/state", rec.EC2),
	} {
		d.print("  %s\n", line)
	}
	if rec.Jaeger != "" {
		d.print("  curl -s '%s/api/traces?service=agent'\n", rec.Jaeger)
	}
}
