package bpf

import (
	"context"
	"net/netip"
	"sync"

	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/agent/internal/plan"
)

// Memory is an ipcache map in memory: same contract, no datapath reads it. It is
// safe for concurrent use.
type Memory struct {
	maxEntries uint32

	mu    sync.RWMutex // guards table
	table ipcache.Table
}

// NewMemory returns an empty map that takes maxEntries entries; 0 means
// DefaultMaxEntries.
func NewMemory(maxEntries uint32) *Memory {
	if maxEntries == 0 {
		maxEntries = DefaultMaxEntries
	}
	return &Memory{maxEntries: maxEntries}
}

// Info tells what the map is.
func (m *Memory) Info() Info {
	return Info{Layout: LayoutV2, MaxEntries: m.maxEntries}
}

// Upsert writes entries in order, in place where the prefix is there already,
// and returns those that were refused; all others were written.
func (m *Memory) Upsert(items []plan.Item) []Refusal {
	m.mu.Lock()
	defer m.mu.Unlock()
	var refused []Refusal
	for _, i := range items {
		if _, ok := m.table.Get(i.Prefix); !ok && uint32(m.table.Len()) >= m.maxEntries {
			refused = append(refused, refusal(i.Prefix, ErrFull))
			continue
		}
		m.table.Set(i.Prefix, DecodeValue(EncodeValue(i.Entry)))
	}
	return refused
}

// Delete removes prefixes; one that is absent is done already. It returns those
// that are still there, which is none.
func (m *Memory) Delete(prefixes []netip.Prefix) []Refusal {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range prefixes {
		m.table.Delete(p)
	}
	return nil
}

// Lookup returns what the datapath would find for an address.
func (m *Memory) Lookup(addr netip.Addr) (Value, bool, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	_, e, ok := m.table.Lookup(addr)
	return EncodeValue(e), ok, nil
}

// Dump returns every entry once, in any order.
func (m *Memory) Dump(context.Context) ([]Raw, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	all := make([]Raw, 0, m.table.Len())
	for p, e := range m.table.Entries() {
		all = append(all, Raw{Key: EncodeKey(p), Value: EncodeValue(e)})
	}
	return all, nil
}

// Close does nothing.
func (m *Memory) Close() error { return nil }
