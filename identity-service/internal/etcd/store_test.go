package etcd_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/eniplane/eniplane/identity-service/internal/etcd"
	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// embedded starts an etcd of its own for a test that writes what it likes.
func embedded(t *testing.T) *etcd.Server {
	t.Helper()
	s, err := etcd.Start(t.Context(), etcd.ServerConfig{Dir: t.TempDir()}, discard())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

var numbers = ledger.Range{First: 100, Last: 199}

// feed runs a store on an index until stop. Its error is that of Run.
func feed(t *testing.T, client *clientv3.Client, x *index.Index, r ledger.Range) (*etcd.Store, func() error) {
	t.Helper()
	store := etcd.NewStore(client.KV, client.Watcher, x, etcd.Config{Range: r}, discard())
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- store.Run(ctx) }()
	var result error
	done := false
	stop := func() error {
		cancel()
		if !done {
			result, done = <-ended, true
		}
		return result
	}
	t.Cleanup(func() { _ = stop() })
	return store, stop
}

// outcome waits for Run to end by itself.
func outcome(t *testing.T, client *clientv3.Client, r ledger.Range) error {
	t.Helper()
	store := etcd.NewStore(client.KV, client.Watcher, index.New(0), etcd.Config{Range: r}, discard())
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	return store.Run(ctx)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func put(t *testing.T, client *clientv3.Client, key, value string) {
	t.Helper()
	if _, err := client.Put(t.Context(), key, value); err != nil {
		t.Fatal(err)
	}
}

func give(t *testing.T, store *etcd.Store, x *index.Index, text string, n ledger.Number) error {
	t.Helper()
	g := ledger.Grant{Prefix: netip.MustParsePrefix(text), Number: n}
	revision, ok, err := store.Commit(t.Context(), x.Meta().Revision, nil, ledger.NumberGiven{Grant: g, At: 1})
	if err != nil {
		return err
	}
	if !ok {
		return ledger.ErrLost
	}
	return store.Reach(t.Context(), revision)
}

// Uniqueness both ways is decided in the commit, not before.
func TestCommitGuardsBothWays(t *testing.T) {
	client := embedded(t).Client
	x := index.New(0)
	store, _ := feed(t, client, x, numbers)
	eventually(t, "ready", func() bool { return x.Revision() > 0 })
	if err := give(t, store, x, "10.0.0.0/8", 100); err != nil {
		t.Fatal(err)
	}
	if err := give(t, store, x, "10.0.0.0/8", 101); !errors.Is(err, ledger.ErrLost) {
		t.Errorf("a second number for a prefix: %v", err)
	}
	if err := give(t, store, x, "11.0.0.0/8", 100); !errors.Is(err, ledger.ErrLost) {
		t.Errorf("a second prefix for a number: %v", err)
	}
	for _, g := range []etcd.Guard{
		etcd.SessionAt("s", 5), etcd.HoldingAt(ledger.HoldingID{Session: "s", Owner: "o"}, 5), etcd.SetAt(ledger.Body("d"), 5),
	} {
		if _, ok, err := store.Commit(t.Context(), x.Meta().Revision, []etcd.Guard{g}); ok || err != nil {
			t.Errorf("%+v held: %v", g, err)
		}
	}
	if _, ok, err := store.Commit(t.Context(), x.Meta().Revision+1, nil); ok || err != nil {
		t.Errorf("committed to another ledger: %v", err)
	}
	if id, known := x.IdentityOf(100, 1); !known || id.Prefix.String() != "10.0.0.0/8" {
		t.Errorf("%+v", id)
	}
}

// A replica that was away while the store was compacted reads it all anew.
func TestCompactedWhileAway(t *testing.T) {
	client := embedded(t).Client
	x := index.New(0)
	store, stop := feed(t, client, x, numbers)
	eventually(t, "ready", func() bool { return x.Revision() > 0 })
	if err := give(t, store, x, "10.0.0.0/8", 100); err != nil {
		t.Fatal(err)
	}
	_, before, cursor := x.Snapshot(index.Cluster)
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	y := index.New(0)
	other, _ := feed(t, client, y, numbers)
	eventually(t, "ready", func() bool { return y.Revision() > 0 })
	for i := range 5 {
		if err := give(t, other, y, fmt.Sprintf("11.%d.0.0/16", i), ledger.Number(101+i)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := client.Compact(t.Context(), y.Revision(), clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}

	again, _ := feed(t, client, x, numbers)
	if err := again.Reach(t.Context(), y.Revision()); err != nil {
		t.Fatal(err)
	}
	if s := x.Sizes(); s.Prefixes != 6 {
		t.Errorf("%+v", s)
	}
	if _, _, _, standing := x.Next(cursor); standing != index.Replaced {
		t.Errorf("a follower of before: %v", standing)
	}
	if _, ok := x.Resume(before); ok {
		t.Error("resumed from before the compaction")
	}
}

// A replica that was away goes on where it was if the store still knows.
func TestAwayForAMoment(t *testing.T) {
	client := embedded(t).Client
	x := index.New(0)
	store, stop := feed(t, client, x, numbers)
	eventually(t, "ready", func() bool { return x.Revision() > 0 })
	_, _, cursor := x.Snapshot(index.Cluster)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	g := ledger.Grant{Prefix: netip.MustParsePrefix("10.0.0.0/8"), Number: 150}
	revision, ok, err := store.Commit(t.Context(), x.Meta().Revision, nil, ledger.NumberGiven{Grant: g})
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	again, _ := feed(t, client, x, numbers)
	if err := again.Reach(t.Context(), revision); err != nil {
		t.Fatal(err)
	}
	if _, _, _, standing := x.Next(cursor); standing != index.Good {
		t.Errorf("a follower of before: %v", standing)
	}
}

// What others write to the same etcd has no revision of ours: a barrier must not
// wait for one.
func TestBarrierOnABusyForeignStore(t *testing.T) {
	client := embedded(t).Client
	x := index.New(0)
	store, _ := feed(t, client, x, numbers)
	eventually(t, "ready", func() bool { return x.Revision() > 0 })
	for i := range 20 {
		put(t, client, "/somebody/else", fmt.Sprint(i))
		begin := time.Now()
		if err := store.Barrier(t.Context()); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took > 2*time.Second {
			t.Errorf("took %v", took)
		}
	}
}

func TestForeignStores(t *testing.T) {
	for _, tc := range []struct {
		name     string
		prepare  map[string]string
		numbers  ledger.Range
		mentions string
	}{
		{"another range", map[string]string{"meta": `{"ledger_id":"l","format":1,"first_number":1,"last_number":9}`}, numbers, "1..9"},
		{"another format", map[string]string{"meta": `{"ledger_id":"l","format":2,"first_number":100,"last_number":199}`}, numbers, "format is 2"},
		{"nonsense", map[string]string{"meta": "x"}, numbers, "cannot be understood"},
		{"no meta record", map[string]string{"n/0000000100": "10.0.0.0/8"}, numbers, "missing"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			client := embedded(t).Client
			for k, v := range tc.prepare {
				put(t, client, etcd.Root+k, v)
			}
			if err := outcome(t, client, tc.numbers); !errors.Is(err, etcd.ErrForeign) || !strings.Contains(err.Error(), tc.mentions) {
				t.Errorf("error %v", err)
			}
			resp, err := client.Get(t.Context(), etcd.Root, clientv3.WithPrefix())
			if err != nil || len(resp.Kvs) != len(tc.prepare) {
				t.Errorf("a foreign store was written to: %v, %v", resp.Kvs, err)
			}
		})
	}
}

// A store that is emptied or replaced under a running service must stop it: its
// numbers would mean something else.
func TestLedgerReplacedUnderUs(t *testing.T) {
	for name, replace := range map[string]func(*testing.T, *clientv3.Client){
		"deleted": func(t *testing.T, c *clientv3.Client) {
			if _, err := c.Delete(t.Context(), etcd.Root, clientv3.WithPrefix()); err != nil {
				t.Fatal(err)
			}
		},
		"replaced": func(t *testing.T, c *clientv3.Client) {
			put(t, c, etcd.Root+"meta", `{"ledger_id":"other","format":1,"first_number":100,"last_number":199}`)
		},
	} {
		t.Run(name, func(t *testing.T) {
			client := embedded(t).Client
			x := index.New(0)
			store := etcd.NewStore(client.KV, client.Watcher, x, etcd.Config{Range: numbers}, discard())
			ended := make(chan error, 1)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			go func() { ended <- store.Run(ctx) }()
			eventually(t, "ready", func() bool { return x.Revision() > 0 })
			replace(t, client)
			if err := <-ended; !errors.Is(err, etcd.ErrForeign) {
				t.Errorf("error %v", err)
			}
			if err := give(t, store, x, "10.0.0.0/8", 100); !errors.Is(err, ledger.ErrLost) {
				t.Errorf("committed to another ledger: %v", err)
			}
		})
	}
}

// Nonsense in the store is reported, stops nothing, and is forgotten once it is
// gone.
func TestNonsenseInTheStore(t *testing.T) {
	client := embedded(t).Client
	x := index.New(0)
	store, _ := feed(t, client, x, numbers)
	eventually(t, "ready", func() bool { return x.Revision() > 0 })
	bad := []string{etcd.Root + "nobody/wrote/this", etcd.Root + "ss/a", etcd.Root + "p/4/zz/008"}
	for _, key := range bad {
		put(t, client, key, "nonsense")
	}
	if err := give(t, store, x, "10.0.0.0/8", 100); err != nil {
		t.Fatal(err)
	}
	broken := x.Broken()
	for _, key := range bad {
		if broken[key] == "" {
			t.Errorf("%s is not reported: %v", key, broken)
		}
	}
	fresh := index.New(0) // And so it is for one that starts now.
	feed(t, client, fresh, numbers)
	eventually(t, "ready", func() bool { return fresh.Revision() > 0 })
	if len(fresh.Broken()) != len(bad) || fresh.Sizes().Prefixes != 1 {
		t.Errorf("%v, %+v", fresh.Broken(), fresh.Sizes())
	}
	for _, key := range bad {
		if _, err := client.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	if err := give(t, store, x, "11.0.0.0/8", 101); err != nil {
		t.Fatal(err)
	}
	if broken := x.Broken(); len(broken) != 0 {
		t.Errorf("still reported: %v", broken)
	}
}

func TestTwoProcessesOnOneFolder(t *testing.T) {
	dir := t.TempDir()
	first, err := etcd.Start(t.Context(), etcd.ServerConfig{Dir: dir}, discard())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := etcd.Start(t.Context(), etcd.ServerConfig{Dir: dir}, discard()); !errors.Is(err, etcd.ErrLocked) || !strings.Contains(err.Error(), dir) {
		t.Errorf("error %v", err)
	}
	put(t, first.Client, "kept", "yes")
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := etcd.Start(t.Context(), etcd.ServerConfig{Dir: dir}, discard())
	if err != nil {
		t.Fatal(err)
	}
	resp, err := second.Client.Get(t.Context(), "kept")
	if err != nil || len(resp.Kvs) != 1 {
		t.Errorf("%v, %v", resp, err)
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
}

func TestStartRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := etcd.Start(t.Context(), etcd.ServerConfig{Dir: filepath.Join(file, "data")}, discard()); err == nil {
		t.Error("started in a file")
	}
}

func TestDialRefuses(t *testing.T) {
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty.pem")
	if err := os.WriteFile(empty, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, config := range map[string]etcd.ClientConfig{
		"no such CA":             {CA: filepath.Join(dir, "none")},
		"a CA without content":   {CA: empty},
		"a certificate alone":    {Cert: empty},
		"a key alone":            {Key: empty},
		"no certificate in file": {Cert: empty, Key: empty},
	} {
		config.Endpoints = []string{"https://127.0.0.1:1"}
		if client, err := etcd.Dial(config, discard()); err == nil {
			_ = client.Close()
			t.Errorf("%s: no error", name)
		}
	}
}
