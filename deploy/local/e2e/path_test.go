package e2e_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
)

// account reads the state of the simulated EC2 and has it check itself.
func account(t *testing.T) ec2sim.State {
	t.Helper()
	base := st.Record().EC2
	var state ec2sim.State
	for path, status := range map[string]int{"/_sim/state": http.StatusOK, "/_sim/check": http.StatusNoContent} {
		resp, err := http.Get(base + path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		if resp.StatusCode != status {
			t.Fatalf("%s: %s", path, resp.Status)
		}
		if status == http.StatusOK {
			if err := json.NewDecoder(resp.Body).Decode(&state); err != nil {
				t.Fatal(err)
			}
		}
	}
	return state
}

// onENI tells whether EC2 has an address on an ENI that is attached to an
// instance.
func onENI(state ec2sim.State, instance, eni, address string) bool {
	addr := netip.MustParseAddr(address)
	for _, e := range state.NetworkInterfaces {
		if string(e.ID) == eni && e.Attachment != nil && string(e.Attachment.Instance) == instance {
			return slices.Contains(e.Addresses(), addr)
		}
	}
	return false
}

func TestPodGetsAnAddress(t *testing.T) {
	const node, pod = "node-1", "path-1"
	if err := st.Kube().CreatePod(t.Context(), "default", pod, node); err != nil {
		t.Fatal(err)
	}
	got := allocate(t, node, "default/"+pod)
	if again := allocate(t, node, "default/"+pod); again.GetAddress() != got.GetAddress() {
		t.Errorf("asked again: %s, then %s", got.GetAddress(), again.GetAddress())
	}
	if !onENI(account(t), record(t, node).Instance, got.GetEniId(), got.GetAddress()) {
		t.Errorf("EC2 does not have %s on %s of %s", got.GetAddress(), got.GetEniId(), node)
	}
	subnet, gateway := netip.MustParsePrefix(got.GetSubnetCidr()), netip.MustParseAddr(got.GetGateway())
	if !subnet.Contains(netip.MustParseAddr(got.GetAddress())) || gateway != subnet.Masked().Addr().Next() {
		t.Errorf("address %s, subnet %s, gateway %s", got.GetAddress(), subnet, gateway)
	}
	if len(got.GetVpcCidrs()) == 0 || got.GetEniMac() == "" {
		t.Errorf("not enough for a CNI plugin: %v", got)
	}
	eventually(t, "the object shows the use", func() string {
		n := object(t, node)
		if n.Spec.IPAM.Pool[got.GetAddress()].Resource != got.GetEniId() {
			return fmt.Sprintf("the pool has %v", n.Spec.IPAM.Pool)
		}
		if n.Status.IPAM.Used[got.GetAddress()].Owner != "default/"+pod {
			return fmt.Sprintf("used are %v", n.Status.IPAM.Used)
		}
		return ""
	})
}

// TestManyAtOnce wants more addresses than one ENI has.
func TestManyAtOnce(t *testing.T) {
	const node, many = "node-2", 6
	answers := make([]*agentv1.AllocateIPResponse, many)
	t.Run("group", func(t *testing.T) {
		client := agent(t, node)
		var wg sync.WaitGroup
		for i := range many {
			wg.Go(func() {
				var err error
				answers[i], err = client.AllocateIP(t.Context(), &agentv1.AllocateIPRequest{Owner: fmt.Sprintf("default/many-%d", i)})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
	if t.Failed() {
		return
	}
	addresses, enis := make(map[string]bool), make(map[string]bool)
	state := account(t)
	for i, a := range answers {
		if addresses[a.GetAddress()] {
			t.Errorf("%s was given twice", a.GetAddress())
		}
		addresses[a.GetAddress()], enis[a.GetEniId()] = true, true
		if !onENI(state, record(t, node).Instance, a.GetEniId(), a.GetAddress()) {
			t.Errorf("EC2 does not have %s on %s of %s", a.GetAddress(), a.GetEniId(), node)
		}
		allocate(t, node, fmt.Sprintf("default/many-%d", i)) // the same again, and released at the end
	}
	if len(enis) < 2 {
		t.Errorf("all on %v; with the router's, one ENI of a t3.medium does not have so many", enis)
	}
	for _, e := range state.NetworkInterfaces {
		if e.Attachment == nil {
			t.Errorf("%s is attached to nothing", e.ID)
		}
	}
}
