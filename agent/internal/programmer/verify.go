package programmer

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"go.opentelemetry.io/otel/trace"

	"github.com/eniplane/eniplane/agent/internal/bpf"
	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/agent/internal/plan"
	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/reason"
)

// Difference is one entry that is not as it should be.
type Difference struct {
	Prefix netip.Prefix
	// Have and Want are numbers; 0 means none.
	Have, Want uint32
	// Reason is why it was not repaired; Unspecified if it was, or was not to be.
	Reason reason.Reason
}

// Report is how the map differs from the wish. Each list is sorted by prefix.
type Report struct {
	// Missing are wanted and not there.
	Missing []Difference
	// Foreign are there and wanted by nobody.
	Foreign []Difference
	// Wrong are there with another value than wanted.
	Wrong []Difference
	// Compared counts entries; Repaired those that are right now.
	Compared, Repaired int
}

// Verify compares what the map itself holds with the wish. With repair it writes
// what is missing or wrong, and deletes what nobody wants: only here entries go
// that another program wrote. Keys of another cluster or family are left alone,
// and nothing is deleted before the wish is a full view.
func (p *Programmer) Verify(ctx context.Context, repair bool) (Report, error) {
	return p.ask(ctx, request{span: trace.SpanContextFromContext(ctx), verify: true, repair: repair})
}

func (p *Programmer) verify(ctx context.Context, repair bool) (Report, error) {
	raw, err := p.Map.Dump(ctx)
	if err != nil {
		return Report{}, err
	}
	have := make(ipcache.Entries, len(raw))
	for _, r := range raw {
		if q, err := bpf.DecodeKey(r.Key); err == nil {
			have[q] = bpf.DecodeValue(r.Value)
		}
	}
	want, complete := p.Wish.AllWanted()
	report := Report{Compared: len(have)}
	for q, w := range want {
		h, ok := have[q]
		switch {
		case !ok:
			report.Missing = append(report.Missing, Difference{Prefix: q, Want: w.Number})
			report.Compared++
		case h != w:
			report.Wrong = append(report.Wrong, Difference{Prefix: q, Have: h.Number, Want: w.Number})
		}
	}
	for q, h := range have {
		if _, ok := want[q]; !ok {
			report.Foreign = append(report.Foreign, Difference{Prefix: q, Have: h.Number})
		}
	}
	for _, list := range [][]Difference{report.Missing, report.Foreign, report.Wrong} {
		slices.SortFunc(list, func(a, b Difference) int { return prefix.Compare(a.Prefix, b.Prefix) })
	}
	drift := len(report.Missing) + len(report.Wrong)
	if drift > 0 && !repair {
		p.Board.Set(reason.MapDrift, "verify", fmt.Sprintf("%d entries are missing and %d are wrong", len(report.Missing), len(report.Wrong)))
	}
	if !repair {
		if drift == 0 {
			p.Board.Clear(reason.MapDrift, "verify")
		}
		return report, nil
	}
	p.repair(ctx, have, want, complete, &report)
	return report, nil
}

// repair makes the map as wished, from what it really holds.
func (p *Programmer) repair(ctx context.Context, have, want ipcache.Entries, complete bool, report *Report) {
	p.mu.Lock()
	p.table = ipcache.Table{}
	for q, e := range have {
		p.table.Set(q, e)
	}
	p.mu.Unlock()

	todo := plan.Diff(plan.Input{Have: have, Want: want, Complete: complete, Exclusive: numbers, BatchSize: p.BatchSize})
	refused := make(map[netip.Prefix]bpf.Refusal)
	if len(todo.Ops) > 0 {
		p.execute(ctx, nil, todo.Ops, refused)
	}
	look := make(map[netip.Prefix]struct{}, len(have)+len(want))
	for q := range have {
		look[q] = struct{}{}
	}
	for q := range want {
		look[q] = struct{}{}
	}
	for _, b := range todo.Blocked {
		p.blocked[b] = struct{}{}
	}
	p.settle(ctx, look, complete, todo, refused)

	left := make(map[netip.Prefix]reason.Reason, len(refused)+len(todo.Blocked))
	for _, b := range todo.Blocked {
		left[b] = todo.Why
	}
	for q, f := range refused {
		left[q] = f.Reason
	}
	for _, list := range [][]Difference{report.Missing, report.Foreign, report.Wrong} {
		for i := range list {
			if list[i].Reason = left[list[i].Prefix]; list[i].Reason == reason.Unspecified {
				report.Repaired++
			}
		}
	}
	if len(left) == 0 {
		p.Board.Clear(reason.MapDrift, "verify")
		p.Board.Clear(reason.MapDrift, "foreign")
	} else {
		p.Board.Set(reason.MapDrift, "verify", fmt.Sprintf("%d entries could not be repaired, the first %s", len(left), slices.SortedFunc(maps.Keys(left), prefix.Compare)[0]))
	}
}
