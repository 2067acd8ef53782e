package ec2sim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// client makes requests to a Server and keeps no connections.
func client() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
}

func request(t *testing.T, method, target, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, target, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if method == http.MethodPost {
		req.Header.Set("Content-Type", form)
	}
	resp, err := client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

func startServer(t *testing.T, change ...func(*Config)) *Server {
	t.Helper()
	cfg := Config{Topology: testTopology(), Seed: 1}
	for _, f := range change {
		f(&cfg)
	}
	s, err := Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func TestServerFollowsInstances(t *testing.T) {
	var mu sync.Mutex
	var told []Endpoints
	s := startServer(t, func(cfg *Config) {
		cfg.OnEndpoints = func(e Endpoints) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, e)
		}
	})
	ids := func() []InstanceID { return slices.Sorted(maps.Keys(s.Endpoints().IMDS)) }
	if want := []InstanceID{medium, tiny, faraway, cards}; !slices.Equal(ids(), want) {
		t.Fatalf("endpoints of %v, want %v", ids(), want)
	}
	status, body := request(t, http.MethodPost, s.URL(), "Action=RunInstances&ImageId=ami-1&InstanceType=t3.micro&MinCount=2&MaxCount=2&SubnetId="+subnetA)
	if status != http.StatusOK {
		t.Fatalf("%d %s", status, body)
	}
	launched := answer{body: body}.all("instanceId")
	for _, id := range launched {
		if status, _ := request(t, http.MethodGet, s.IMDSURL(InstanceID(id))+"/latest/meta-data/instance-id", ""); status != http.StatusUnauthorized {
			t.Errorf("%s: got %d without a token, want 401", id, status)
		}
	}
	one, err := s.Launch(InstanceSpec{Name: "late", Type: "t3.micro", Subnet: "a"})
	if err != nil || s.IMDSURL(one.ID) == "" {
		t.Errorf("launched %s at %q: %v", one.ID, s.IMDSURL(one.ID), err)
	}
	gone := s.IMDSURL(medium)
	if status, body := request(t, http.MethodPost, s.URL(), "Action=TerminateInstances&InstanceId.1="+medium); status != http.StatusOK {
		t.Fatalf("%d %s", status, body)
	}
	if s.IMDSURL(medium) != "" {
		t.Error("a terminated instance has an endpoint")
	}
	if resp, err := client().Get(gone); err == nil {
		_ = resp.Body.Close()
		t.Error("the metadata service of a terminated instance listens")
	}
	if err := s.SetInstanceState(one.ID, StateTerminated); err != nil || s.IMDSURL(one.ID) != "" {
		t.Errorf("terminated by hand: %q, %v", s.IMDSURL(one.ID), err)
	}
	mu.Lock()
	defer mu.Unlock()
	var counts []int
	for _, e := range told {
		counts = append(counts, len(e.IMDS))
	}
	if !slices.Equal(counts, []int{4, 6, 7, 6, 5}) || told[0].EC2 != s.URL() {
		t.Errorf("told of %v instances", counts)
	}
}

func TestServerWaitAndClose(t *testing.T) {
	s := startServer(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Wait(ctx); err != nil {
		t.Error(err)
	}
	s.Close()
	s.Close()
	if resp, err := client().Get(s.URL()); err == nil {
		_ = resp.Body.Close()
		t.Error("listens after Close")
	}
	if _, err := s.Launch(InstanceSpec{Type: "t3.micro", Subnet: "a"}); err != nil {
		t.Errorf("the account is there after Close: %v", err)
	}
}

func TestStartRefuses(t *testing.T) {
	taken := startServer(t)
	for name, cfg := range map[string]Config{
		"taken port":  {Listen: strings.TrimPrefix(taken.URL(), "http://")},
		"bad address": {Listen: "nowhere"},
		"imds host":   {Topology: testTopology(), IMDSHost: "192.0.2.1"},
		"topology":    {Topology: Topology{Region: "nowhere"}},
	} {
		if s, err := Start(cfg); err == nil {
			s.Close()
			t.Errorf("%s: started", name)
		}
	}
}

func TestAdminEndpoints(t *testing.T) {
	s := startServer(t)
	request(t, http.MethodPost, s.URL(), "Action=DescribeVpcs")
	var state struct {
		State
		Calls     Calls     `json:"calls"`
		Endpoints Endpoints `json:"endpoints"`
	}
	status, body := request(t, http.MethodGet, s.URL()+"/_sim/state", "")
	if err := json.Unmarshal([]byte(body), &state); err != nil || status != http.StatusOK {
		t.Fatalf("%d %v: %s", status, err, body)
	}
	if len(state.Instances) != 4 || len(state.NetworkInterfaces) != 4 || state.Calls.Started["DescribeVpcs"] != 1 || state.Endpoints.EC2 != s.URL() {
		t.Errorf("got %+v", state)
	}
	tests := []struct {
		name, method, path, body string
		status                   int
	}{
		{"check", http.MethodGet, "/_sim/check", "", http.StatusNoContent},
		{"endpoints", http.MethodGet, "/_sim/endpoints", "", http.StatusOK},
		{"reset", http.MethodPost, "/_sim/reset-counters", "", http.StatusNoContent},
		{"launch", http.MethodPost, "/_sim/launch", `{"name":"n","type":"t3.micro","subnet":"a"}`, http.StatusCreated},
		{"launch the same name", http.MethodPost, "/_sim/launch", `{"name":"n","type":"t3.micro","subnet":"a"}`, http.StatusBadRequest},
		{"launch in no subnet", http.MethodPost, "/_sim/launch", `{"type":"t3.micro","subnet":"z"}`, http.StatusBadRequest},
		{"launch nonsense", http.MethodPost, "/_sim/launch", `{"kind":"t3.micro"}`, http.StatusBadRequest},
		{"stop", http.MethodPost, "/_sim/instances/" + medium + "/state/stopped", "", http.StatusNoContent},
		{"unknown state", http.MethodPost, "/_sim/instances/" + medium + "/state/dancing", "", http.StatusBadRequest},
		{"unknown instance", http.MethodPost, "/_sim/instances/i-12345678/state/stopped", "", http.StatusBadRequest},
		{"wrong method", http.MethodGet, "/_sim/reset-counters", "", http.StatusMethodNotAllowed},
		{"unknown path", http.MethodGet, "/_sim/other", "", http.StatusNotFound},
		{"not the root", http.MethodGet, "/other", "", http.StatusNotFound},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if status, body := request(t, tt.method, s.URL()+tt.path, tt.body); status != tt.status {
				t.Errorf("got %d: %s", status, body)
			}
		})
	}
	if s.Calls().Total() != 0 {
		t.Error("counters were not reset")
	}
	if i, _ := s.State().Instance(medium); i.State != StateStopped {
		t.Errorf("state %s", i.State)
	}
}

// TestConcurrentCalls has many clients do random things at once, over sockets,
// and then looks for contradictions.
func TestConcurrentCalls(t *testing.T) {
	s := startServer(t)
	const clients, callsEach = 8, 60
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(c), 1))
			for range callsEach {
				if err := randomCall(s, random); err != nil {
					t.Error(err)
					return
				}
				if random.IntN(10) == 0 {
					s.State()
					s.Calls()
					s.Endpoints()
				}
			}
		})
	}
	wg.Wait()
	if err := s.Check(); err != nil {
		t.Error(err)
	}
	if got := s.Calls().Total(); got != clients*callsEach {
		t.Errorf("%d calls counted, want %d", got, clients*callsEach)
	}
	living := 0
	for _, i := range s.State().Instances {
		if i.State != StateTerminated {
			living++
		}
	}
	if got := len(s.Endpoints().IMDS); got != living {
		t.Errorf("%d metadata services for %d instances", got, living)
	}
}

func randomCall(s *Server, random *rand.Rand) error {
	state := s.State()
	values := url.Values{}
	set := func(action string, pairs ...string) {
		values.Set("Action", action)
		for i := 0; i < len(pairs); i += 2 {
			values.Set(pairs[i], pairs[i+1])
		}
	}
	instance := state.Instances[random.IntN(len(state.Instances))]
	var eni NetworkInterface
	if n := len(state.NetworkInterfaces); n > 0 {
		eni = state.NetworkInterfaces[random.IntN(n)]
	}
	switch random.IntN(8) {
	case 0:
		set("CreateNetworkInterface", "SubnetId", subnetA, "SecondaryPrivateIpAddressCount", fmt.Sprint(random.IntN(4)), "ClientToken", fmt.Sprint("t", random.IntN(40)))
	case 1, 2:
		set("AttachNetworkInterface", "NetworkInterfaceId", string(eni.ID), "InstanceId", string(instance.ID), "DeviceIndex", fmt.Sprint(random.IntN(4)))
	case 3:
		set("AssignPrivateIpAddresses", "NetworkInterfaceId", string(eni.ID), "SecondaryPrivateIpAddressCount", "1")
	case 4:
		set("DeleteNetworkInterface", "NetworkInterfaceId", string(eni.ID))
	case 5:
		set("DetachNetworkInterface")
		if eni.Attachment != nil {
			values.Set("AttachmentId", string(eni.Attachment.ID))
		}
	case 6:
		if random.IntN(4) == 0 {
			set("TerminateInstances", "InstanceId.1", string(instance.ID))
		} else {
			set("RunInstances", "ImageId", "ami-1", "InstanceType", "t3.small", "MinCount", "1", "MaxCount", "1", "SubnetId", subnetC)
		}
	default:
		set("DescribeNetworkInterfaces", "MaxResults", "5")
	}
	resp, err := client().PostForm(s.URL(), values)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	if resp.StatusCode >= http.StatusInternalServerError {
		err = errors.Join(err, fmt.Errorf("%s: %s", values.Encode(), resp.Status))
	}
	return errors.Join(err, resp.Body.Close())
}
