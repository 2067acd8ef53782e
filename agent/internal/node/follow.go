package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"time"

	"github.com/google/uuid"

	"github.com/eniplane/eniplane/agent/internal/condition"
	"github.com/eniplane/eniplane/agent/internal/ipam"
	"github.com/eniplane/eniplane/agent/internal/retry"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/internal/telemetry"
)

// Syncer is the name of node-syncer as a dependency.
const Syncer = "node-syncer"

const (
	// reportEvery repeats the report of an idle node, for a replica that did not
	// see the last one.
	reportEvery = time.Minute
)

// FollowerConfig is what a Follower works with.
type FollowerConfig struct {
	Client    nodev1.NodeSyncerServiceClient
	Addresses *Addresses
	Board     *condition.Board
	Logger    *slog.Logger
	NodeName  string
	// Registration returns what to register with. It is asked until it knows.
	Registration func(ctx context.Context) (*nodev1.RegisterNodeRequest, error)
}

// Follower registers the node, follows its view and reports its use.
type Follower struct {
	FollowerConfig
	registered chan struct{} // holds a token after each registration: report again
	sequence   uint64        // of the last report
}

// NewFollower returns a Follower.
func NewFollower(config FollowerConfig) *Follower {
	return &Follower{FollowerConfig: config, registered: make(chan struct{}, 1)}
}

// Follow registers the node and hands each newer view to the addresses, until
// ctx ends. It never gives up.
func (f *Follower) Follow(ctx context.Context) error {
	for wait := time.Duration(0); retry.Sleep(ctx, wait); {
		revision, err := f.register(ctx)
		if err == nil {
			wait = 0
			err = f.watch(ctx, revision)
		}
		f.away(ctx, err)
		wait = retry.Next(wait, err)
	}
	return nil
}

func (f *Follower) register(ctx context.Context) (string, error) {
	request, err := f.Registration(ctx)
	if err != nil {
		return "", err
	}
	r, err := f.Client.RegisterNode(ctx, request)
	if err != nil {
		return "", fmt.Errorf("register: %w", err)
	}
	f.there(ctx)
	f.Logger.InfoContext(ctx, "node registered", telemetry.KeyInstance, request.GetInstanceId(), telemetry.KeyRevision, r.GetView().GetRevision())
	f.show(ctx, r.GetView())
	signal(f.registered)
	return r.GetView().GetRevision(), nil
}

// errRemoved: the node is gone as far as node-syncer knows.
var errRemoved = errors.New("the node was removed")

// watch follows the view until the node must be registered again. It returns the
// cause.
func (f *Follower) watch(ctx context.Context, revision string) error {
	for wait := time.Duration(0); retry.Sleep(ctx, wait); {
		stream, err := f.Client.WatchNode(ctx, &nodev1.WatchNodeRequest{NodeName: f.NodeName, Revision: revision})
		for err == nil {
			var r *nodev1.WatchNodeResponse
			if r, err = stream.Recv(); err != nil {
				break
			}
			wait = 0
			f.there(ctx)
			if r.GetRemoved() {
				f.Board.Set(reason.NodeRemoved, Syncer, "node-syncer says that the node is gone; it is registered again")
				return errRemoved
			}
			f.show(ctx, r.GetView())
			revision = r.GetView().GetRevision()
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case rpc.ReasonOf(err) == reason.NodeUnknown:
			return err
		case !errors.Is(err, io.EOF):
			f.away(ctx, err)
		}
		wait = retry.Next(wait, err)
		signal(f.registered) // another replica may answer now: it must know the use
	}
	return ctx.Err()
}

func (f *Follower) show(ctx context.Context, v *nodev1.NodeView) {
	view := f.parse(ctx, v)
	f.Board.ClearAbout("node")
	for _, b := range view.Blocked {
		f.Board.Set(b.Reason, "node", b.Message)
	}
	f.Addresses.SetView(ctx, view)
	f.Logger.DebugContext(ctx, "view of the node", telemetry.KeyRevision, v.GetRevision(), "addresses", len(view.Pool), "enis", len(view.ENIs),
		telemetry.KeyEpoch, view.Fence.Epoch, telemetry.KeyGeneration, view.Fence.Generation)
}

// parse takes a view from the wire. What of it can not be understood is left out
// and told.
func (f *Follower) parse(ctx context.Context, v *nodev1.NodeView) View {
	view := View{
		View:  ipam.View{ENIs: make(map[ipam.ENIID]ipam.ENI), Pool: make(map[netip.Addr]ipam.ENIID)},
		Fence: Fence{Epoch: v.GetFence().GetEpoch(), Generation: v.GetFence().GetGeneration()},
	}
	wrong := func(what, text string, err error) {
		f.Logger.ErrorContext(ctx, "part of the node's view is not understood", "what", what, "text", text, telemetry.KeyError, err.Error())
	}
	cidr := func(text string) (netip.Prefix, bool) {
		if text == "" {
			return netip.Prefix{}, false
		}
		p, err := prefix.Parse(text)
		if err != nil {
			wrong("cidr", text, err)
		}
		return p, err == nil
	}
	for _, e := range v.GetEnis() {
		eni := ipam.ENI{ID: ipam.ENIID(e.GetId()), MAC: e.GetMac(), DeviceIndex: e.GetDeviceIndex()}
		eni.SubnetCIDR, _ = cidr(e.GetSubnet().GetCidr())
		for _, text := range append([]string{e.GetVpc().GetPrimaryCidr()}, e.GetVpc().GetCidrs()...) {
			if p, ok := cidr(text); ok {
				eni.VPCCIDRs = append(eni.VPCCIDRs, p)
			}
		}
		view.ENIs[eni.ID] = eni
	}
	for _, p := range v.GetPool() {
		addr, err := netip.ParseAddr(p.GetAddress())
		if err != nil {
			wrong("pool", p.GetAddress(), err)
			continue
		}
		view.Pool[addr] = ipam.ENIID(p.GetEniId())
	}
	for _, r := range v.GetReleases() {
		addr, err := netip.ParseAddr(r.GetAddress())
		if err != nil {
			wrong("release", r.GetAddress(), err)
			continue
		}
		view.Releases = append(view.Releases, ipam.Release{
			Address: addr, State: ipam.ReleaseState(r.GetState()), Round: ipam.RoundID(r.GetRoundId()),
		})
	}
	for _, c := range v.GetConditions() {
		view.Blocked = append(view.Blocked, Blocked{Reason: reason.Reason(c.GetReason()), Message: c.GetMessage()})
	}
	return view
}

// Report tells node-syncer what is in use, at once when that changes, until ctx
// ends. Changes during a call are told together in the next.
func (f *Follower) Report(ctx context.Context) error {
	select {
	case <-f.registered: // before that nobody knows the node
	case <-ctx.Done():
		return nil
	}
	idle := time.NewTimer(reportEvery)
	defer idle.Stop()
	for wait := time.Duration(0); ; {
		err := f.report(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			wait = retry.Next(wait, err)
			f.Logger.DebugContext(ctx, "use not reported", telemetry.KeyError, err.Error())
			if !retry.Sleep(ctx, wait) {
				return nil
			}
			continue
		}
		wait = 0
		idle.Reset(reportEvery)
		select {
		case <-f.Addresses.toReport:
		case <-f.registered:
		case <-idle.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func (f *Follower) report(ctx context.Context) error {
	usage, err := f.Addresses.usage(ctx)
	if err != nil {
		return err
	}
	f.sequence = max(f.sequence+1, uint64(time.Now().UnixNano()))
	request := &nodev1.ReportUsageRequest{
		RequestId: uuid.NewString(), NodeName: f.NodeName, Sequence: f.sequence, Waiting: uint32(min(usage.Waiting, 65536)),
	}
	for _, u := range usage.Used {
		request.Used = append(request.Used, &nodev1.UsedAddress{
			Address: u.Address.String(), Owner: string(u.Owner), EniId: string(u.ENI.ID),
		})
	}
	for _, a := range usage.Answers {
		answer := nodev1.ReleaseState_RELEASE_STATE_DO_NOT_RELEASE
		if a.Yes {
			answer = nodev1.ReleaseState_RELEASE_STATE_READY
		}
		request.ReleaseAnswers = append(request.ReleaseAnswers, &nodev1.ReleaseAnswer{
			Address: a.Address.String(), RoundId: string(a.Round), Answer: answer,
		})
	}
	r, err := f.Client.ReportUsage(ctx, request)
	if rpc.ReasonOf(err) == reason.StaleGeneration {
		// The clock went back since the last report that was taken.
		f.sequence += uint64(time.Hour)
	}
	if err != nil {
		return fmt.Errorf("report use: %w", err)
	}
	for _, refused := range r.GetRefused() {
		f.Logger.InfoContext(ctx, "answer to a release not taken", telemetry.KeyAddress, refused.GetAddress(), telemetry.KeyReason, refused.GetReason().String())
	}
	return nil
}

func (f *Follower) away(ctx context.Context, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	if f.Board.Depend(Syncer, err) {
		f.Logger.WarnContext(ctx, "node-syncer is away or refuses", telemetry.KeyReason, rpc.ReasonOf(err).String(), telemetry.KeyError, err.Error())
	}
	r := rpc.ReasonOf(err)
	if r == reason.Unspecified {
		r = reason.ServiceAway
	}
	f.Board.ClearAbout(Syncer)
	f.Board.Set(r, Syncer, "addresses are given from the last view: "+err.Error())
}

func (f *Follower) there(ctx context.Context) {
	if f.Board.Depend(Syncer, nil) {
		f.Logger.InfoContext(ctx, "node-syncer is there")
	}
	f.Board.ClearAbout(Syncer)
}
