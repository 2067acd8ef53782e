package server

import (
	"cmp"
	"context"
	"math"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/eniplane/eniplane/agent/internal/bpf"
	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/agent/internal/kube"
	"github.com/eniplane/eniplane/agent/internal/local"
	"github.com/eniplane/eniplane/agent/internal/programmer"
	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

// defaultPage is the size of a page of entries whose request names none.
const defaultPage = 1000

// ListIPs implements AgentService.
func (s *Server) ListIPs(ctx context.Context, _ *agentv1.ListIPsRequest) (*agentv1.ListIPsResponse, error) {
	p, err := s.bound(ctx)
	if err != nil {
		return nil, err
	}
	response := &agentv1.ListIPsResponse{}
	for _, ip := range p.Addresses.List() {
		state := &agentv1.IPState{Address: ip.Address.String(), EniId: string(ip.ENI), Owner: string(ip.Owner), InPool: ip.InPool}
		if !ip.Since.IsZero() {
			state.Since = timestamppb.New(ip.Since)
		}
		response.Ips = append(response.Ips, state)
	}
	return response, nil
}

// GetStatus implements AgentService.
func (s *Server) GetStatus(context.Context, *agentv1.GetStatusRequest) (*agentv1.GetStatusResponse, error) {
	response := &agentv1.GetStatusResponse{
		NodeName: s.nodeName,
		Map:      &agentv1.MapStatus{PinPath: s.info.PinPath, Layout: s.info.Layout, MaxEntries: s.info.MaxEntries},
	}
	if p := s.parts.Load(); p != nil {
		s.describe(response, p)
	} else {
		s.board.Set(reason.NotReady, "agent", "the agent does not know yet on which instance it runs")
	}
	for _, c := range s.board.Conditions() {
		response.Conditions = append(response.Conditions, &nodev1.Condition{
			Reason: reasonv1.Reason(c.Reason), Message: c.Message, Since: timestamppb.New(c.Since),
		})
	}
	for _, d := range s.board.Dependencies() {
		response.Dependencies = append(response.Dependencies, &agentv1.Dependency{
			Name: d.Name, Available: d.Available, Since: timestamppb.New(d.Since), Message: d.Message,
		})
	}
	return response, nil
}

// describe adds what the parts know.
func (s *Server) describe(response *agentv1.GetStatusResponse, p *Parts) {
	s.board.Clear(reason.NotReady, "agent")
	response.InstanceId = p.InstanceID
	if router := p.Addresses.Router(); router.IsValid() {
		response.RouterAddress = router.String()
	}
	w := p.Wish.Status()
	response.Map.Wanted = count(w.Prefixes - w.Unnumbered)
	response.Map.Refused = count(len(p.Programmer.Refusals()))
	response.Map.ProgrammedRevision = p.Holdings.Acknowledged()
	kinds := map[string]ipcache.Kind{kube.Policies: ipcache.KindNetworkPolicy, local.Source: ipcache.KindLocal}
	for _, source := range w.Sources {
		response.Sources = append(response.Sources, &agentv1.PrefixSource{
			Name: source.Name, Listed: source.Listed, Owners: count(w.Owners[kinds[source.Name]]),
		})
		if source.Listed {
			s.board.Clear(reason.SourceNotListed, source.Name)
		} else {
			s.board.Set(reason.SourceNotListed, source.Name, source.Name+" were not listed yet; nothing is deleted from the map before that")
		}
	}
	if deadline, ok := p.Restore.Deadline(); ok {
		response.RestoreDeadline = timestamppb.New(deadline)
	}
}

// ListEntries implements AgentService.
func (s *Server) ListEntries(ctx context.Context, r *agentv1.ListEntriesRequest) (*agentv1.ListEntriesResponse, error) {
	p, err := s.bound(ctx)
	if err != nil {
		return nil, err
	}
	after, err := decodeToken(r.GetPageToken())
	if err != nil {
		return nil, err
	}
	raw, err := p.Programmer.Dump(ctx)
	if err != nil {
		return nil, table.Status(err)
	}
	type entry struct {
		prefix netip.Prefix
		raw    bpf.Raw
	}
	entries := make([]entry, 0, len(raw))
	for _, r := range raw {
		// What no agent of ours could have written has no prefix to show.
		if q, err := bpf.DecodeKey(r.Key); err == nil && (!after.IsValid() || prefix.Compare(q, after) > 0) {
			entries = append(entries, entry{q, r})
		}
	}
	slices.SortFunc(entries, func(a, b entry) int { return prefix.Compare(a.prefix, b.prefix) })
	response := &agentv1.ListEntriesResponse{}
	size := int(cmp.Or(r.GetPageSize(), defaultPage))
	for i, e := range entries {
		if i == size {
			response.NextPageToken = rpc.PageToken(entriesList, entries[i-1].prefix.String())
			break
		}
		response.Entries = append(response.Entries, entryProto(p, e.prefix, e.raw))
	}
	return response, nil
}

// entriesList names the list of ListEntries; the key of a page is its last prefix.
const entriesList = "entries"

func decodeToken(token string) (netip.Prefix, error) {
	key, err := rpc.ParsePageToken(entriesList, token)
	if err != nil || key == "" {
		return netip.Prefix{}, err
	}
	p, err := prefix.Parse(key)
	if err != nil {
		return netip.Prefix{}, rpc.ForeignPageToken()
	}
	return p, nil
}

func entryProto(p *Parts, q netip.Prefix, raw bpf.Raw) *agentv1.Entry {
	e := bpf.DecodeValue(raw.Value)
	out := &agentv1.Entry{
		Prefix: q.String(), Number: e.Number, EncryptKey: uint32(e.EncryptKey), Flags: bpf.FlagsOf(e).Names(),
		RawKey: raw.Key[:], RawValue: raw.Value[:],
	}
	if e.TunnelEndpoint.IsValid() {
		out.TunnelEndpoint = e.TunnelEndpoint.String()
	}
	for _, o := range p.Wish.OwnersOf(q) {
		out.Owners = append(out.Owners, o.String())
	}
	return out
}

// LookupIP implements AgentService.
func (s *Server) LookupIP(ctx context.Context, r *agentv1.LookupIPRequest) (*agentv1.LookupIPResponse, error) {
	p, err := s.bound(ctx)
	if err != nil {
		return nil, err
	}
	addr, err := netip.ParseAddr(r.GetAddress())
	if err != nil || addr.Zone() != "" {
		return nil, rpc.InvalidField("address", reason.FieldInvalid, "no address: %q", r.GetAddress())
	}
	raw, err := p.Programmer.Lookup(ctx, addr)
	if err != nil {
		return nil, table.Status(err)
	}
	q, err := bpf.DecodeKey(raw.Key)
	if err != nil {
		return nil, table.Status(err)
	}
	return &agentv1.LookupIPResponse{Entry: entryProto(p, q, raw)}, nil
}

// VerifyMap implements AgentService.
func (s *Server) VerifyMap(ctx context.Context, r *agentv1.VerifyMapRequest) (*agentv1.VerifyMapResponse, error) {
	p, err := s.bound(ctx)
	if err != nil {
		return nil, err
	}
	report, err := p.Programmer.Verify(ctx, r.GetRepair())
	if err != nil {
		return nil, table.Status(err)
	}
	return &agentv1.VerifyMapResponse{
		Missing: differences(report.Missing), Foreign: differences(report.Foreign), Wrong: differences(report.Wrong),
		Compared: count(report.Compared), Repaired: count(report.Repaired),
	}, nil
}

func differences(in []programmer.Difference) []*agentv1.Difference {
	var out []*agentv1.Difference
	for _, d := range in {
		out = append(out, &agentv1.Difference{Prefix: d.Prefix.String(), Have: d.Have, Want: d.Want, Reason: reasonv1.Reason(d.Reason)})
	}
	return out
}

// count returns a number of things as the wire has it.
func count(n int) uint32 { return uint32(min(max(n, 0), math.MaxUint32)) }
