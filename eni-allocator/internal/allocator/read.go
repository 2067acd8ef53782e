package allocator

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/telemetry"

	"github.com/eniplane/eniplane/eni-allocator/internal/ec2"
	"github.com/eniplane/eniplane/eni-allocator/internal/lease"
	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
	"github.com/eniplane/eniplane/eni-allocator/internal/reading"
)

// attempts remembers what was tried last, and what came of it, until it may be
// tried again.
type attempts struct {
	mu   sync.Mutex // guards last
	last map[string]attempt
}

type attempt struct {
	until    time.Time // when it may be tried again
	err      error
	failures int // in a row
}

// try does something unless it was tried a moment ago: then it returns what came
// of that. Success lasts for an interval, failure as long as backoff says.
func (a *attempts) try(key string, interval time.Duration, backoff Backoff, f func() error) error {
	a.mu.Lock()
	last := a.last[key]
	a.mu.Unlock()
	if time.Now().Before(last.until) {
		return last.err
	}
	err := f()
	now := time.Now()
	next := attempt{until: now.Add(interval), err: err}
	if err != nil {
		next.failures = last.failures + 1
		next.until = now.Add(min(backoff.after(next.failures), interval))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.last == nil {
		a.last = make(map[string]attempt)
	}
	// How often it failed is worth knowing for a while longer.
	maps.DeleteFunc(a.last, func(_ string, t attempt) bool { return now.Sub(t.until) > interval })
	a.last[key] = next
	return err
}

// resync reads everything, again and again, on a schedule of its own that no
// other work postpones.
func (t *term) resync(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.synced.done:
	}
	for failures := 0; ; {
		err := t.readAll(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		wait := t.config.ResyncInterval
		if err != nil {
			failures++
			wait = min(t.config.Backoff.after(failures), wait)
			t.deps.Logger.ErrorContext(ctx, "EC2 was not read", telemetry.KeyError, err, "retry_in", wait.String())
		} else {
			failures = 0
			t.ready.happen()
		}
		t.mu.Lock()
		t.failure = err
		t.mu.Unlock()
		for _, n := range t.all() {
			n.resynced(err == nil)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// readAll reads all VPCs in which there are nodes.
func (t *term) readAll(ctx context.Context) error {
	ctx, span := t.deps.Tracer.Start(ctx, "allocator.Resync")
	defer span.End()
	var vpcs []plan.VPCID
	types := make(map[string]bool)
	for _, n := range t.all() {
		d := n.currentDemand()
		types[d.GetInstanceType()] = true
		vpcs = append(vpcs, plan.VPCID(d.GetVpcId()))
		if r, ok := t.cache.Reading(plan.InstanceID(d.GetInstanceId())); ok {
			types[r.Instance.Type] = true
			vpcs = append(vpcs, r.Instance.VPC)
		}
	}
	slices.Sort(vpcs)
	vpcs = slices.DeleteFunc(slices.Compact(vpcs), func(v plan.VPCID) bool { return v == "" })
	if len(vpcs) == 0 {
		return nil // Each node's own reading will tell where it is.
	}

	began := time.Now()
	first := began
	instances, err := t.deps.EC2.Instances(ctx, vpcs)
	if err != nil {
		return err
	}
	t.cache.FoldInstances(began, instances, nil)
	if err := t.readNetwork(ctx, vpcs); err != nil {
		return err
	}
	began = time.Now()
	enis, err := t.deps.EC2.ENIs(ctx, vpcs)
	if err != nil {
		return err
	}
	t.cache.FoldENIs(began, enis, reading.Scope{VPCs: vpcs})
	t.cache.Retain(first, t.shared)
	for typ := range types {
		// What is not known blocks the nodes of that type, and nobody else.
		if err := t.learnLimits(ctx, typ); err != nil && ctx.Err() == nil {
			t.deps.Logger.WarnContext(ctx, "limits were not read", "type", typ, telemetry.KeyError, err)
		}
	}
	return ctx.Err()
}

func (t *term) readNetwork(ctx context.Context, vpcs []plan.VPCID) error {
	began := time.Now()
	n, err := t.deps.EC2.Network(ctx, vpcs)
	if err != nil {
		return err
	}
	t.cache.FoldNetwork(began, vpcs, n)
	return nil
}

// refreshNetwork reads a VPC again, for whoever asks at the same time once, and
// at most once per Recheck unless that failed.
func (t *term) refreshNetwork(ctx context.Context, vpc plan.VPCID) error {
	if vpc == "" {
		return nil
	}
	key := "vpc/" + string(vpc)
	return t.together(ctx, key, func(ctx context.Context) error {
		return t.lastTry.try(key, t.config.Recheck, t.config.Backoff, func() error { return t.readNetwork(ctx, []plan.VPCID{vpc}) })
	})
}

// learnLimits makes sure that the limits of an instance type are known, if EC2
// knows them. One that EC2 does not know is asked for at most once per Recheck
// (B22, B23); that is no error.
func (t *term) learnLimits(ctx context.Context, typ string) error {
	if _, known := t.cache.Limits(typ); known || typ == "" {
		return nil
	}
	key := "type/" + typ
	return t.together(ctx, key, func(ctx context.Context) error {
		return t.lastTry.try(key, t.config.Recheck, t.config.Backoff, func() error {
			l, err := t.deps.EC2.Limits(ctx, typ)
			if errors.Is(err, ec2.ErrNotFound) {
				return nil
			}
			if err != nil {
				return err
			}
			t.cache.SetLimits(typ, l)
			return nil
		})
	})
}

// together does something once for all who want it at the same time. Nobody's
// context ends it for the others; the term's end does.
func (t *term) together(ctx context.Context, key string, f func(context.Context) error) error {
	result := t.flights.DoChan(key, func() (any, error) {
		shared, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		go func() {
			select {
			case <-t.over:
				cancel()
			case <-shared.Done():
			}
		}()
		return nil, f(shared)
	})
	select {
	case r := <-result:
		return r.Err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// readInstance reads one instance and all that belongs to it. That EC2 does not
// show the instance is no error: it is gone once a second reading lacks it too.
func (t *term) readInstance(ctx context.Context, id plan.InstanceID) error {
	began := time.Now()
	i, err := t.deps.EC2.Instance(ctx, id)
	switch {
	case errors.Is(err, ec2.ErrNotFound):
		t.cache.FoldInstances(began, nil, []plan.InstanceID{id})
		return nil
	case err != nil:
		return err
	}
	t.cache.FoldInstances(began, []plan.Instance{i}, []plan.InstanceID{id})
	began = time.Now()
	enis, err := t.deps.EC2.ENIsOf(ctx, t.config.Policy.Cluster, id)
	if err != nil {
		return err
	}
	t.cache.FoldENIs(began, enis, reading.Scope{Instance: id})
	return nil
}

// complete reads what a reading of an instance needs beside itself and lacks:
// the limits of its type, its VPC, and subnets that are new.
func (t *term) complete(ctx context.Context, r plan.Reading) error {
	if err := t.learnLimits(ctx, r.Instance.Type); err != nil {
		return err
	}
	known := make(map[plan.SubnetID]bool, len(r.Subnets))
	for _, s := range r.Subnets {
		known[s.ID] = s.CIDR.IsValid()
	}
	v, ok := t.cache.VPC(r.Instance.VPC)
	missing := !ok || len(v.CIDRs) == 0
	for _, e := range r.ENIs {
		missing = missing || !known[e.Subnet]
	}
	if !missing {
		return nil
	}
	return t.refreshNetwork(ctx, r.Instance.VPC)
}

// causeOf says which reason a failed call to EC2 has.
func causeOf(err error) reason.Reason {
	for _, c := range []struct {
		err    error
		reason reason.Reason
	}{
		{ec2.ErrThrottled, reason.EC2Throttled},
		{ec2.ErrDenied, reason.EC2Denied},
		{ec2.ErrUnavailable, reason.EC2Unavailable},
		{ec2.ErrUnintelligible, reason.EC2Unavailable},
		{ec2.ErrNotRunning, reason.InstanceNotRunning},
		{ec2.ErrDeviceIndexTaken, reason.DeviceIndexTaken},
		{ec2.ErrAttachmentLimit, reason.OutOfENIs},
		{ec2.ErrAddressLimit, reason.ReadingStale},
		{ec2.ErrSubnetFull, reason.SubnetFull},
		{ec2.ErrNotFound, reason.ReadingStale},
		{ec2.ErrInUse, reason.ReadingStale},
		{ec2.ErrTokenMismatch, reason.ReadingStale},
		{ec2.ErrNotLeading, reason.NotLeader},
		{lease.ErrLost, reason.NotLeader},
	} {
		if errors.Is(err, c.err) {
			return c.reason
		}
	}
	return reason.EC2Refused
}
