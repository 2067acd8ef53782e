package server

import "github.com/prometheus/client_golang/prometheus"

// metric is one gauge that is read from the index at each scrape.
type metric struct {
	desc  *prometheus.Desc
	value func(*scrape) float64
}

type scrape struct {
	live, draining, free, sets, sessions, holdings, broken, failing float64
	revision                                                        float64
}

type collector struct {
	server  *Server
	metrics []metric
}

// Collector returns the gauges of this replica.
func (s *Server) Collector() prometheus.Collector {
	gauge := func(name, help string, value func(*scrape) float64) metric {
		return metric{desc: prometheus.NewDesc("eniplane_identity_"+name, help, nil, nil), value: value}
	}
	return &collector{server: s, metrics: []metric{
		gauge("prefixes_live", "Prefixes that somebody holds.", func(s *scrape) float64 { return s.live }),
		gauge("prefixes_draining", "Prefixes that keep their number though nobody holds them.", func(s *scrape) float64 { return s.draining }),
		gauge("numbers_free", "Numbers that were never given out.", func(s *scrape) float64 { return s.free }),
		gauge("sets", "Distinct sets that are stored.", func(s *scrape) float64 { return s.sets }),
		gauge("sessions", "Sessions.", func(s *scrape) float64 { return s.sessions }),
		gauge("holdings", "Holdings: owners that hold a set, per session.", func(s *scrape) float64 { return s.holdings }),
		gauge("broken_records", "Records in the store that cannot be understood.", func(s *scrape) float64 { return s.broken }),
		gauge("sessions_failing", "Sessions whose last acknowledgement here named failures.", func(s *scrape) float64 { return s.failing }),
		gauge("revision", "Revision of the store that this replica has seen.", func(s *scrape) float64 { return s.revision }),
	}}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range c.metrics {
		ch <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	sizes := c.server.index.Sizes()
	now := scrape{
		live: float64(sizes.Live), draining: float64(sizes.Prefixes - sizes.Live),
		sets: float64(sizes.Sets), sessions: float64(sizes.Sessions), holdings: float64(sizes.Holdings),
		broken: float64(sizes.Broken), failing: float64(c.server.acks.failing()),
		free:     float64(c.server.store.Range().Size() - sizes.InRange),
		revision: float64(c.server.index.Revision()),
	}
	for _, m := range c.metrics {
		ch <- prometheus.MustNewConstMetric(m.desc, prometheus.GaugeValue, m.value(&now))
	}
}
