package app

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"k8s.io/client-go/rest"

	"github.com/eniplane/eniplane/agent/internal/bpf"
	"github.com/eniplane/eniplane/agent/internal/kube"
	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
)

// api is what these tests need of the API server.
type api struct {
	t      *testing.T
	client *http.Client
	url    string
}

func newAPI(t *testing.T) *api {
	t.Helper()
	config, err := kube.RESTConfig(cluster.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.CloseIdleConnections)
	return &api{t: t, client: client, url: cluster.URL + "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"}
}

func (a *api) do(method, url string, body any) {
	a.t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		a.t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(context.Background(), method, url, bytes.NewReader(text))
	if err != nil {
		a.t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := a.client.Do(request)
	if err != nil {
		a.t.Fatal(err)
	}
	answer, _ := io.ReadAll(response.Body)
	_ = response.Body.Close()
	if response.StatusCode >= http.StatusBadRequest && response.StatusCode != http.StatusNotFound {
		a.t.Fatalf("%s %s: %s %s", method, url, response.Status, answer)
	}
}

// apply creates a policy that lets its prefixes in; it goes with the test.
func (a *api) apply(name string, prefixes ...string) {
	a.t.Helper()
	var from []any
	for _, p := range prefixes {
		from = append(from, map[string]any{"ipBlock": map[string]any{"cidr": p}})
	}
	a.do(http.MethodPost, a.url, map[string]any{
		"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": map[string]any{"name": name},
		"spec": map[string]any{"podSelector": map[string]any{}, "ingress": []any{map[string]any{"from": from}}},
	})
	a.t.Cleanup(func() { a.remove(name) })
}

func (a *api) remove(name string) {
	a.t.Helper()
	a.do(http.MethodDelete, a.url+"/"+name, nil)
}

// poller reads prefixes from the kernel's map as fast as it can and remembers
// whether one was ever missing or had another number.
type poller struct {
	m    *ebpf.Map
	want map[netip.Prefix]uint32
	stop chan struct{}
	wg   sync.WaitGroup

	mu    sync.Mutex
	wrong []string
	reads int
}

func (w *world) poll(prefixes ...string) *poller {
	w.t.Helper()
	m, err := ebpf.LoadPinnedMap(w.flags["map-pin-path"], nil)
	if err != nil {
		w.t.Fatal(err)
	}
	p := &poller{m: m, want: make(map[netip.Prefix]uint32), stop: make(chan struct{})}
	for _, text := range prefixes {
		p.want[netip.MustParsePrefix(text)] = w.identity.Number(text)
	}
	p.wg.Go(p.run)
	w.t.Cleanup(p.end)
	return p
}

func (p *poller) run() {
	for {
		select {
		case <-p.stop:
			return
		default:
		}
		for q, number := range p.want {
			// The wanted prefixes do not cover each other, so an address tells.
			key := bpf.EncodeKey(netip.PrefixFrom(q.Addr(), q.Addr().BitLen()))
			var value bpf.Value
			err := p.m.Lookup(&key, &value)
			p.mu.Lock()
			p.reads++
			if n := bpf.DecodeValue(value).Number; (err != nil || n != number) && len(p.wrong) < 5 {
				p.wrong = append(p.wrong, fmt.Sprintf("%s: %d, %v", q, n, err))
			}
			p.mu.Unlock()
		}
	}
}

func (p *poller) end() {
	select {
	case <-p.stop:
		return
	default:
	}
	close(p.stop)
	p.wg.Wait()
	_ = p.m.Close()
}

func (p *poller) verdict(t *testing.T) {
	t.Helper()
	p.end()
	if len(p.wrong) > 0 || p.reads == 0 {
		t.Errorf("in %d reads: %v", p.reads, p.wrong)
	}
}

func (w *world) heldOwners(want ...string) {
	w.t.Helper()
	slices.Sort(want)
	eventually(w.t, fmt.Sprint("the ledger has the owners ", want), func() error {
		var got []string
		for _, o := range w.identity.Owners() {
			got = append(got, o.Kind.String()+" "+o.Name)
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
}

var (
	policyOwner  = identityv1.OwnerKind_OWNER_KIND_NETWORK_POLICY.String() + " "
	localKind    = identityv1.OwnerKind_OWNER_KIND_LOCAL.String() + " "
	restoreOwner = identityv1.OwnerKind_OWNER_KIND_RESTORE.String() + " "
)

// cilium#27210, #19360: killed and started again with a deadline that is over at
// once, every number stays and no prefix that somebody still wants is ever absent.
// What nobody wants any more goes, from the map and from the ledger.
func TestB01B18RestartKeepsNumbers(t *testing.T) {
	w := newWorld(t)
	w.useKube()
	a := newAPI(t)
	w.flags["restore-deadline"] = "0s"
	a.apply("stays", "10.1.0.0/16", "10.2.0.0/16")
	a.apply("goes", "10.2.0.0/16", "10.9.0.0/16")
	r := w.startProcess()
	r.mustReplace("vpn", "10.3.0.0/16", "10.1.0.0/16")
	all := []string{"10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16", "10.9.0.0/16"}
	w.wantEntries(r, all...)
	eventually(t, "an address", func() error {
		_, err := r.AllocateIP(t.Context(), &agentv1.AllocateIPRequest{Owner: "default/a"})
		return err
	})
	p := w.poll("10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16")
	for range 3 {
		r.crash()
		r = w.startProcess()
		w.wantEntries(r, all...)
	}
	r.crash()
	a.remove("goes")
	r = w.startProcess()
	w.wantEntries(r, "10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16")
	w.heldOwners(policyOwner+"stays", localKind+"vpn")
	s, err := r.GetStatus(t.Context(), &agentv1.GetStatusRequest{})
	if err != nil || s.GetRestoreDeadline() != nil {
		t.Errorf("status %s, %v", compact(s), err)
	}
	if got, err := r.AllocateIP(t.Context(), &agentv1.AllocateIPRequest{Owner: "default/a"}); err != nil || got.GetAddress() != "10.0.1.2" {
		t.Errorf("the pod has %s, %v", compact(got), err)
	}
	p.verdict(t)
	r.stop()
}

// The agent restarts while the API server is away past the deadline, so that no
// policy can be read: nothing is dropped.
func TestRestartWithoutTheAPIServer(t *testing.T) {
	w := newWorld(t)
	cut := w.useKube()
	a := newAPI(t)
	w.flags["restore-deadline"] = "50ms"
	a.apply("stays", "10.1.0.0/16")
	a.apply("goes", "10.9.0.0/16")
	r := w.startProcess()
	w.wantEntries(r, "10.1.0.0/16", "10.9.0.0/16")
	p := w.poll("10.1.0.0/16")
	both := w.poll("10.1.0.0/16", "10.9.0.0/16")
	r.crash()

	cut.cutOff(true)
	r = w.startProcess()
	w.heldOwners(policyOwner+"stays", policyOwner+"goes", restoreOwner+nodeName)
	r.wantCondition("SOURCE_NOT_LISTED", true)
	r.mustReplace("vpn", "10.3.0.0/16") // new prefixes are still served
	if _, err := r.RemovePrefixes(t.Context(), &agentv1.RemovePrefixesRequest{OwnerName: "vpn"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the ledger knows that the removal waits", func() error {
		ack, newest := w.identity.LastAck()
		if f := ack.GetFailures(); !newest || len(f) != 1 || f[0].GetPrefix() != "10.3.0.0/16" {
			return fmt.Errorf("%s", compact(ack))
		}
		return nil
	})
	w.wantEntries(r, "10.1.0.0/16", "10.9.0.0/16", "10.3.0.0/16")
	s, err := r.GetStatus(t.Context(), &agentv1.GetStatusRequest{})
	if err != nil || s.GetRestoreDeadline() == nil || time.Now().Before(s.GetRestoreDeadline().AsTime()) {
		t.Errorf("the deadline is not over: %s, %v", compact(s), err)
	}
	both.verdict(t)

	a.remove("goes")
	cut.cutOff(false)
	w.wantEntries(r, "10.1.0.0/16")
	w.heldOwners(policyOwner + "stays")
	r.wantCondition("SOURCE_NOT_LISTED", false)
	p.verdict(t)
	r.stop()
}

// The agent restarts while the identity service is away: nothing is dropped, not
// even what no policy wants any more, until the service has answered.
func TestRestartWithoutTheIdentityService(t *testing.T) {
	w := newWorld(t)
	w.useKube()
	a := newAPI(t)
	w.flags["restore-deadline"] = "0s"
	a.apply("stays", "10.1.0.0/16")
	a.apply("goes", "10.9.0.0/16")
	r := w.startProcess()
	w.wantEntries(r, "10.1.0.0/16", "10.9.0.0/16")
	p := w.poll("10.1.0.0/16")
	both := w.poll("10.1.0.0/16", "10.9.0.0/16")
	r.crash()

	a.remove("goes")
	w.services["identity-service"].Stop()
	r = w.startProcess()
	r.wantCondition("SERVICE_AWAY", true)
	eventually(t, "policies are listed", func() error {
		s, err := r.GetStatus(t.Context(), &agentv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		for _, source := range s.GetSources() {
			if !source.GetListed() || source.GetName() == kube.Policies && source.GetOwners() != 1 {
				return fmt.Errorf("%s", compact(s.GetSources()))
			}
		}
		return nil
	})
	w.wantEntries(r, "10.1.0.0/16", "10.9.0.0/16")
	both.verdict(t)

	if err := w.services["identity-service"].Start(); err != nil {
		t.Fatal(err)
	}
	w.wantEntries(r, "10.1.0.0/16")
	w.heldOwners(policyOwner + "stays")
	p.verdict(t)
	r.stop()
}

// cilium#33120: a policy and a local caller acquire and release one prefix, with
// a restart between any two steps.
func TestB03OrdersWithRestarts(t *testing.T) {
	w := newWorld(t)
	w.useKube()
	a := newAPI(t)
	w.flags["restore-deadline"] = "0s"
	r := w.startProcess()
	const prefix = "10.1.0.0/16"
	owners := map[string]bool{}
	steps := map[string]func(){
		"Ap": func() { a.apply("policy", prefix); owners["p"] = true },
		"Rp": func() { a.remove("policy"); delete(owners, "p") },
		"Al": func() { r.mustReplace("caller", prefix); owners["l"] = true },
		"Rl": func() {
			for range 2 { // cilium#6017: the second one changes nothing
				if _, err := r.RemovePrefixes(t.Context(), &agentv1.RemovePrefixesRequest{OwnerName: "caller"}); err != nil {
					t.Fatal(err)
				}
			}
			delete(owners, "l")
		},
	}
	number := uint32(0)
	for i, order := range [][]string{
		{"Ap", "Al", "Rp", "Rl"},
		{"Ap", "Al", "Rl", "Rp"},
		{"Al", "Ap", "Rp", "Rl"},
		{"Al", "Ap", "Rl", "Rp"},
		{"Ap", "Rp", "Al", "Rl"},
		{"Al", "Rl", "Ap", "Rp"},
	} {
		for j, step := range order {
			steps[step]()
			if len(owners) == 0 {
				w.wantEntries(r)
			} else {
				w.wantEntries(r, prefix)
			}
			if number == 0 {
				number = w.identity.Number(prefix)
			}
			if got := w.identity.Number(prefix); got != number {
				t.Fatalf("the number changed from %d to %d", number, got)
			}
			if j == i%len(order) {
				r.crash()
				r = w.startProcess()
			}
		}
	}
	w.heldOwners()
	r.stop()
}
