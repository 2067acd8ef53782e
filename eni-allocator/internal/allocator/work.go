package allocator

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/telemetry"

	"github.com/eniplane/eniplane/eni-allocator/internal/ec2"
	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
	"github.com/eniplane/eniplane/eni-allocator/internal/wire"
)

// maxPlans is how many plans one round of work carries out at most. Filling an
// instance takes one for each of its ENIs; more means that EC2 and our reading
// disagree, and the next round may wait.
const maxPlans = 20

// work plans and acts for one node until ctx ends.
func (n *node) work(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-n.term.ready.done:
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
	nudge(n.wake)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-n.wake:
		case <-timer.C:
		}
		// A failure is waited out, whoever wants something meanwhile.
		if wait := time.Until(n.decided.notBefore); wait > 0 && n.decided.about(n.currentDemand()) {
			timer.Reset(wait)
			continue
		}
		if err := n.term.acting.Acquire(ctx, 1); err != nil {
			return nil
		}
		next := n.round(ctx)
		n.term.acting.Release(1)
		timer.Stop()
		if !next.IsZero() {
			// Whatever asks for another look in the past shall not spin.
			timer.Reset(max(time.Until(next), n.term.config.Backoff.Initial/2))
		}
	}
}

// round observes, plans and acts until there is nothing to do, or something
// failed. It returns when to look again without being told; zero means never.
func (n *node) round(ctx context.Context) time.Time {
	w := &round{node: n, task: n.take()}
	ctx = w.begin(ctx)
	defer w.end()
	n.decided.follow(w.reported)
	w.run(ctx)
	w.later(n.decided.rereadAt)
	return w.next
}

// round is one round of work on a node.
type round struct {
	*node
	task
	span     trace.Span // nil until there is something to trace
	next     time.Time
	plans    int
	refusals int
}

// begin lets the work be part of the trace of the first who waits for it. The
// others are linked.
func (w *round) begin(ctx context.Context) context.Context {
	if len(w.asking) == 0 {
		return ctx
	}
	var links []trace.Link
	for _, other := range w.asking[1:] {
		links = append(links, trace.Link{SpanContext: other.span})
	}
	return w.trace(trace.ContextWithSpanContext(ctx, w.asking[0].span), links)
}

func (w *round) trace(ctx context.Context, links []trace.Link) context.Context {
	if w.span != nil {
		return trace.ContextWithSpan(ctx, w.span)
	}
	ctx, w.span = w.term.deps.Tracer.Start(ctx, "allocator.Reconcile",
		trace.WithLinks(links...), trace.WithAttributes(attribute.String(telemetry.KeyNode, w.name)))
	return ctx
}

func (w *round) end() {
	if w.span != nil {
		w.span.End()
	}
}

// later asks for another look at a time, if none is due before.
func (w *round) later(at time.Time) {
	if !at.IsZero() && (w.next.IsZero() || at.Before(w.next)) {
		w.next = at
	}
}

func (w *round) run(ctx context.Context) {
	id := plan.InstanceID(w.reported.GetInstanceId())
	if id == "" {
		w.decided.rereadAt = time.Time{} // There is nothing to read.
		w.conclude(ctx, plan.Reading{}, plan.Plan{Blocked: &plan.Blocked{Reason: reason.InstanceUnknown, Message: "the node's object names no instance"}})
		return
	}
	for {
		r, p, ok := w.observe(ctx, id)
		if !ok {
			return
		}
		w.remember(r, p)
		if len(p.Actions) == 0 || w.plans == maxPlans {
			if len(p.Actions) > 0 {
				w.later(time.Now().Add(w.term.config.Recheck))
			}
			w.conclude(ctx, r, p)
			return
		}
		w.plans++
		ctx = w.trace(ctx, nil)
		w.log(ctx, p)
		if err := w.execute(ctx, r, p.Actions); err != nil {
			if !w.react(ctx, err) {
				return
			}
			continue
		}
		w.succeeded()
	}
}

// observe returns what is known of the instance, read anew if need be, and the
// plan for it. It is false if that failed, or if the instance is not known.
func (w *round) observe(ctx context.Context, id plan.InstanceID) (plan.Reading, plan.Plan, bool) {
	r, known := w.term.cache.Reading(id)
	if d := &w.decided; !d.rereadAt.IsZero() && !time.Now().Before(d.rereadAt) {
		w.stale = true
	}
	if w.stale || !known {
		ctx = w.trace(ctx, nil)
		if err := w.term.readInstance(ctx, id); err != nil {
			w.fail(ctx, "read instance", err)
			return plan.Reading{}, plan.Plan{}, false
		}
		w.stale, w.decided.rereadAt = false, time.Time{}
		r, known = w.term.cache.Reading(id)
	}
	if w.term.cache.Doubtful(id) {
		w.readAgain(time.Now().Add(w.term.config.Confirm))
	}
	if !known {
		w.readAgain(time.Now().Add(w.term.config.Recheck))
		w.conclude(ctx, plan.Reading{}, plan.Plan{Blocked: &plan.Blocked{Reason: reason.InstanceUnknown, Message: fmt.Sprintf("EC2 shows no instance %s", id)}})
		return plan.Reading{}, plan.Plan{}, false
	}
	if err := w.term.complete(ctx, r); err != nil {
		w.fail(ctx, "read network", err)
		return plan.Reading{}, plan.Plan{}, false
	}
	r, _ = w.term.cache.Reading(id)
	now := time.Now()
	r = w.decided.correct(r, now)
	w.need = w.decided.amend(w.need, now)
	return r, plan.Pool(r, w.need, w.term.config.Policy, now), true
}

// readAgain has the instance read again at a time, unless it is before.
func (w *round) readAgain(at time.Time) {
	if d := &w.decided; d.rereadAt.IsZero() || at.Before(d.rereadAt) {
		d.rereadAt = at
	}
}

// remember keeps the plan for those who ask.
func (w *round) remember(r plan.Reading, p plan.Plan) {
	at := w.term.cache.ReadAt(r.Instance.ID)
	var enis []*nodev1.Eni
	for _, e := range r.ENIs {
		if e.Instance == r.Instance.ID && e.Instance != "" {
			subnet, _ := w.term.cache.Subnet(e.Subnet)
			vpc, _ := w.term.cache.VPC(e.VPC)
			enis = append(enis, wire.ENI(e, subnet, vpc, w.need.UsePrimary))
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.latest.Demand, w.latest.Reading, w.latest.ENIs, w.latest.Plan, w.latest.ReadAt = w.need, r, enis, p, at
}

func (w *round) log(ctx context.Context, p plan.Plan) {
	actions := make([]string, 0, len(p.Actions))
	for _, a := range p.Actions {
		actions = append(actions, fmt.Sprintf("%s: %s", actionName(a), a.Account().Grounds))
	}
	w.term.deps.Logger.InfoContext(ctx, "plan", telemetry.KeyNode, w.name, telemetry.KeyInstance, w.reported.GetInstanceId(),
		"actions", actions, "available", p.Available, "used", p.Used, "needed", p.Needed, "capacity", p.Capacity)
}

// conclude ends a round that has done what it could: it publishes, answers those
// who cannot be helped, and says when to look again.
func (w *round) conclude(ctx context.Context, r plan.Reading, p plan.Plan) {
	w.succeeded()
	w.remember(r, p)
	pool := w.offerPool(ctx, r, p)
	now := time.Now()
	if p.Blocked == nil {
		if len(pool.Withheld) > 0 {
			why := plan.Blocked{Reason: reason.CIDRUnknown, Message: withheldMessage(pool)}
			w.later(now.Add(w.term.config.Recheck))
			w.refuse(w.asking, why, w.term.config.Recheck)
		}
		w.served()
		return
	}
	w.later(p.RetryAt)
	retry := time.Duration(0)
	switch p.Blocked.Reason {
	case reason.InstanceTypeUnknown, reason.SubnetFull, reason.SubnetNoMatch, reason.SecurityGroupNoMatch, reason.CIDRUnknown:
		if err := w.term.refreshNetwork(ctx, r.Instance.VPC); err != nil {
			w.term.deps.Logger.WarnContext(ctx, "network was not read", telemetry.KeyNode, w.name, telemetry.KeyError, err)
		}
		retry = w.term.config.Recheck
	case reason.ReadingStale, reason.InstanceUnknown, reason.InstanceNotRunning:
		retry = w.term.config.Recheck
		w.readAgain(now.Add(retry))
	}
	if retry > 0 {
		w.later(now.Add(retry))
	}
	w.refuse(w.asking, *p.Blocked, retry)
	w.served()
}

// offerPool hands the publisher what a reading comes to.
func (w *round) offerPool(ctx context.Context, r plan.Reading, p plan.Plan) wire.Pool {
	var blocks []plan.Blocked
	if p.Blocked != nil {
		blocks = append(blocks, *p.Blocked)
	}
	blocks = append(blocks, p.Notes...)
	if t := w.decided.persistent(); t != nil {
		blocks = append(blocks, *t)
	}
	var vpcs []plan.VPC
	if v, ok := w.term.cache.VPC(r.Instance.VPC); ok {
		vpcs = append(vpcs, v)
	}
	pool := wire.PoolOf(r, vpcs, w.need, w.term.config.Policy)
	if len(pool.Withheld) > 0 {
		blocks = append(blocks, plan.Blocked{Reason: reason.CIDRUnknown, Message: withheldMessage(pool)})
	}
	for _, e := range pool.Malformed {
		blocks = append(blocks, plan.Blocked{Reason: reason.ENIMalformed, Message: fmt.Sprintf("%s: %s", e.ID, e.Malformed)})
	}
	now := time.Now()
	conditions := w.conditionsOf(blocks, now)
	w.mu.Lock()
	w.latest.Conditions = conditions
	w.mu.Unlock()

	// What was never read, or an instance without any ENI, which there is not,
	// never overwrites what is stored.
	if r.Instance.ID == "" || r.Instance.State == plan.InstanceTerminated || len(pool.ENIs)+len(pool.Withheld)+len(pool.Malformed) == 0 {
		return pool
	}
	w.later(w.offer(newSnapshot(w.name, r.Instance.ID, pool, conditions, trace.SpanContextFromContext(ctx)), now))
	return pool
}

func withheldMessage(pool wire.Pool) string {
	return fmt.Sprintf("%d ENIs are withheld, such as %s: the CIDR of subnet %s or of %s is not known",
		len(pool.Withheld), pool.Withheld[0].ID, pool.Withheld[0].Subnet, pool.Withheld[0].VPC)
}

// execute carries out actions in order and stops at the first error.
func (w *round) execute(ctx context.Context, r plan.Reading, actions []plan.Action) error {
	cache, api := w.term.cache, w.term.deps.EC2
	var eni plan.ENIID
	var attachment plan.AttachmentID
	for _, a := range actions {
		if err := w.term.Check(); err != nil {
			return err
		}
		var err error
		switch a := a.(type) {
		case plan.AssignAddresses:
			release := cache.Reserve(a.Subnet, a.Count)
			got, failed := api.Assign(ctx, a)
			if err = failed; err == nil {
				cache.Assigned(time.Now(), a.ENI, got)
			}
			release()
		case plan.CreateENI:
			w.decided.intend(a, time.Now())
			release := cache.Reserve(a.Subnet, a.Count+1)
			made, failed := api.Create(ctx, a)
			if err = failed; err == nil {
				cache.Created(time.Now(), made)
				eni = made.ID
			}
			release()
		case plan.AttachENI:
			if a.ENI == "" {
				a.ENI = eni
			}
			eni = a.ENI
			if attachment, err = api.Attach(ctx, a.ENI, a.Instance, a.Index); err == nil {
				cache.Attached(time.Now(), a.ENI, attachment, a.Instance, a.Index)
				w.decided.attached()
			}
			err = about(err, a)
		case plan.SetDeleteOnTermination:
			if a.Attachment == "" {
				a.ENI, a.Attachment = eni, attachment
			}
			if err = api.SetDeleteOnTermination(ctx, a.ENI, a.Attachment); err == nil {
				cache.SetDeleteOnTermination(time.Now(), a.ENI)
			}
		case plan.DeleteENI:
			if err = api.Delete(ctx, a.ENI); err == nil || errors.Is(err, ec2.ErrNotFound) {
				cache.Deleted(time.Now(), a.ENI)
				err = nil
			}
		}
		w.term.metrics.acted(actionName(a), err)
		if err != nil {
			return &actionError{action: a, err: err}
		}
		w.offerProgress(ctx, r.Instance.ID)
	}
	return nil
}

// about keeps which ENI an attachment was about.
func about(err error, a plan.AttachENI) error {
	if err == nil {
		return nil
	}
	return &attachError{eni: a.ENI, index: a.Index, err: err}
}

// offerProgress publishes what is there already, before the plan is done.
func (w *round) offerProgress(ctx context.Context, id plan.InstanceID) {
	r, ok := w.term.cache.Reading(id)
	if !ok {
		return
	}
	// Whoever asks sees what is published, and what is left to do.
	now := time.Now()
	r = w.decided.correct(r, now)
	w.remember(r, plan.Pool(r, w.decided.amend(w.need, now), w.term.config.Policy, now))
	w.offerPool(ctx, r, plan.Plan{})
}

// actionName is the EC2 action, for logs and metrics.
func actionName(a plan.Action) string {
	switch a.(type) {
	case plan.AssignAddresses:
		return "AssignPrivateIpAddresses"
	case plan.CreateENI:
		return "CreateNetworkInterface"
	case plan.AttachENI:
		return "AttachNetworkInterface"
	case plan.SetDeleteOnTermination:
		return "ModifyNetworkInterfaceAttribute"
	case plan.DeleteENI:
		return "DeleteNetworkInterface"
	}
	return "unknown"
}
