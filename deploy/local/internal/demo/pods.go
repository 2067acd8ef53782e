package demo

import (
	"context"
	"fmt"
	"sync"
	"time"

	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
)

const (
	namespace  = "default"
	podsOfEach = 2
	burstSize  = 6
)

// givePods gives some pods of every node but the first an address, one after
// the other, as kubelet and CNI plugin would: the Pod is bound to the node, the
// plugin asks the agent, the Pod runs.
func (d *demo) givePods(ctx context.Context) error {
	for _, node := range d.nodes[1:] {
		for i := range podsOfEach {
			pod := fmt.Sprintf("web-%s-%d", node, i+1)
			if err := d.stack.Kube().CreatePod(ctx, namespace, pod, node); err != nil {
				return err
			}
			g, err := d.allocate(ctx, node, pod)
			if err != nil {
				return err
			}
			if err := d.accept(ctx, g); err != nil {
				return err
			}
		}
	}
	return nil
}

// burst asks for addresses of six pods of the first node at once. They are
// static pods, which a kubelet starts, and asks the CNI plugin for, before the
// API server knows them: so the agent is the first to hear of this demand, and
// it is a pod's request that needs another ENI.
func (d *demo) burst(ctx context.Context) error {
	node := d.nodes[0]
	results := make([]given, burstSize)
	errs := make([]error, burstSize)
	begin := time.Now()
	var wg sync.WaitGroup
	for i := range burstSize {
		wg.Go(func() { results[i], errs[i] = d.allocate(ctx, node, fmt.Sprintf("static-%s-%d", node, i+1)) })
	}
	wg.Wait()
	took := time.Since(begin)
	for i := range burstSize {
		if errs[i] != nil {
			return errs[i]
		}
		if err := d.stack.Kube().CreatePod(ctx, namespace, results[i].pod, node); err != nil {
			return err
		}
		if err := d.accept(ctx, results[i]); err != nil {
			return err
		}
	}
	d.print("\n%d pods of %s asked for an address at once and had them after %d ms.\n", burstSize, node, took.Milliseconds())
	return nil
}

// allocate asks the agent of a node for a pod's address, in a trace of its own.
func (d *demo) allocate(ctx context.Context, node, pod string) (given, error) {
	ctx, span := d.tracer.Start(ctx, "CNI ADD "+namespace+"/"+pod)
	defer span.End()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	resp, err := d.agents[node].AllocateIP(ctx, &agentv1.AllocateIPRequest{Owner: namespace + "/" + pod})
	if err != nil {
		return given{}, fmt.Errorf("address for %s/%s on %s: %w", namespace, pod, node, err)
	}
	return given{
		node: node, pod: pod, address: resp.GetAddress(), eni: resp.GetEniId(),
		traceID: span.SpanContext().TraceID().String(),
	}, nil
}

// accept notes an address and lets the Pod run with it.
func (d *demo) accept(ctx context.Context, g given) error {
	for _, other := range d.given {
		d.check(other.address != g.address, "%s has the address %s of %s", g.pod, g.address, other.pod)
	}
	d.given = append(d.given, g)
	return d.stack.Kube().RunPod(ctx, namespace, g.pod, g.address)
}
