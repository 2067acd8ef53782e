package allocator

import (
	"errors"
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

// metrics counts what the allocator does. No label holds a name or an id.
type metrics struct {
	actions  *prometheus.CounterVec
	snapshot *prometheus.CounterVec
}

func newMetrics(registerer prometheus.Registerer, a *Allocator) (*metrics, error) {
	m := &metrics{
		actions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "eniplane_eni_actions_total", Help: "Changes asked of EC2, by action and outcome.",
		}, []string{"action", "outcome"}),
		snapshot: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "eniplane_eni_publishes_total", Help: "Snapshots sent to node-syncer, by outcome.",
		}, []string{"outcome"}),
	}
	if registerer == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.actions, m.snapshot, &census{a: a, nodes: prometheus.NewDesc(
		"eniplane_eni_nodes", "Nodes by state: all, with a deficit, blocked, at capacity. A standby has none.", []string{"state"}, nil,
	)}} {
		if err := registerer.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return m, nil
}

func (m *metrics) acted(action string, err error) {
	m.actions.WithLabelValues(action, outcome(err)).Inc()
}

func (m *metrics) published(err error) {
	switch {
	case err == nil:
		m.snapshot.WithLabelValues("ok").Inc()
	default:
		m.snapshot.WithLabelValues(strings.ToLower(troubleOf(rpc.ReasonOf(err), err).String())).Inc()
	}
}

func outcome(err error) string {
	if err == nil {
		return "ok"
	}
	return strings.ToLower(causeOf(err).String())
}

// census counts nodes when it is asked.
type census struct {
	a     *Allocator
	nodes *prometheus.Desc
}

func (c *census) Describe(out chan<- *prometheus.Desc) { out <- c.nodes }

func (c *census) Collect(out chan<- prometheus.Metric) {
	all, err := c.a.Nodes()
	if errors.Is(err, ErrNotLeader) || errors.Is(err, ErrNotReady) {
		all = nil
	}
	count := map[string]int{"all": len(all), "deficit": 0, "blocked": 0, "at_capacity": 0}
	for _, s := range all {
		if s.Plan.Needed > 0 {
			count["deficit"]++
		}
		if b := s.Plan.Blocked; b != nil {
			count["blocked"]++
			if b.Reason == reason.OutOfENIs {
				count["at_capacity"]++
			}
		}
	}
	for state, n := range count {
		out <- prometheus.MustNewConstMetric(c.nodes, prometheus.GaugeValue, float64(n), state)
	}
}
