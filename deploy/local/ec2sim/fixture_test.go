package ec2sim

import (
	"encoding/xml"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

const (
	vpcMain   = "vpc-00000001"
	vpcOther  = "vpc-00000002"
	subnetA   = "subnet-0000000a" // 10.0.0.0/24, us-east-1a
	subnetB   = "subnet-0000000b" // 10.0.1.0/28, us-east-1a: 11 addresses
	subnetC   = "subnet-0000000c" // 10.0.2.0/24, us-east-1b
	groupMain = "sg-00000001"
	groupFar  = "sg-00000002" // of vpcOther
	medium    = "i-00000001"  // t3.medium in subnetA: 3 interfaces of 6 addresses
	tiny      = "i-00000002"  // t3.micro in subnetA: 2 interfaces of 2 addresses
	faraway   = "i-00000003"  // t3.medium in subnetC
	cards     = "i-00000004"  // p4d.24xlarge in subnetA: 4 cards of 15 interfaces
)

func testTopology() Topology {
	return Topology{
		VPCs: []VPCSpec{
			{ID: vpcMain, Name: "main", CIDRs: prefixes("10.0.0.0/16", "100.64.0.0/20")},
			{ID: vpcOther, CIDRs: prefixes("10.0.0.0/16")},
		},
		Subnets: []SubnetSpec{
			{ID: subnetA, Name: "a", VPC: "main", CIDR: netip.MustParsePrefix("10.0.0.0/24"), Zone: "us-east-1a", Tags: map[string]string{"role": "nodes"}},
			{ID: subnetB, VPC: "main", CIDR: netip.MustParsePrefix("10.0.1.0/28"), Zone: "us-east-1a"},
			{ID: subnetC, VPC: "main", CIDR: netip.MustParsePrefix("10.0.2.0/24"), Zone: "us-east-1b"},
		},
		SecurityGroups: []SecurityGroupSpec{
			{ID: groupMain, Name: "nodes", VPC: "main", Tags: map[string]string{"role": "nodes"}},
			{ID: groupFar, Name: "far", VPC: vpcOther},
		},
		RouteTables: []RouteTableSpec{{ID: "rtb-00000001", VPC: "main", Subnets: []string{"a", subnetB}}},
		Instances: []InstanceSpec{
			{ID: medium, Name: "medium", Type: "t3.medium", Subnet: "a", SecurityGroups: []string{"nodes"}},
			{ID: tiny, Type: "t3.micro", Subnet: "a"},
			{ID: faraway, Type: "t3.medium", Subnet: subnetC},
			{ID: cards, Type: "p4d.24xlarge", Subnet: "a"},
		},
	}
}

func prefixes(texts ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

// testClock stands still until it is moved.
type testClock struct {
	mu  sync.Mutex // guards now
	now time.Time
}

func newTestClock() *testClock { return &testClock{now: time.Unix(1_700_000_000, 0)} }

func (c *testClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *testClock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// bench is a simulator and a way to talk to it without sockets.
type bench struct {
	*Simulator
	t     *testing.T
	clock *testClock
}

func newBench(t *testing.T, change ...func(*Config)) bench {
	t.Helper()
	clock := newTestClock()
	cfg := Config{Topology: testTopology(), Seed: 1, Clock: clock}
	for _, f := range change {
		f(&cfg)
	}
	sim, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Check(); err != nil {
			t.Errorf("inconsistent account: %v", err)
		}
	})
	return bench{Simulator: sim, t: t, clock: clock}
}

// answer is what a call brought.
type answer struct {
	status        int
	code, message string
	body          string
}

// call makes a call with parameters in form syntax; an "&" ends each.
func (b bench) call(action, form string) answer {
	b.t.Helper()
	body := "Version=2016-11-15&Action=" + url.QueryEscape(action)
	if form != "" {
		body += "&" + form
	}
	return b.post(body)
}

func (b bench) post(body string) answer {
	b.t.Helper()
	r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	return b.do(r)
}

func (b bench) do(r *http.Request) answer {
	b.t.Helper()
	w := httptest.NewRecorder()
	b.Handler().ServeHTTP(w, r)
	text, err := io.ReadAll(w.Result().Body)
	if err != nil {
		b.t.Fatal(err)
	}
	a := answer{status: w.Code, body: string(text)}
	if w.Code != http.StatusOK {
		var doc struct {
			XMLName xml.Name `xml:"Response"`
			Errors  []struct {
				Code    string `xml:"Code"`
				Message string `xml:"Message"`
			} `xml:"Errors>Error"`
			RequestID string `xml:"RequestID"`
		}
		if err := xml.Unmarshal(text, &doc); err != nil || len(doc.Errors) != 1 || doc.RequestID == "" {
			b.t.Fatalf("not an error document (%v): %s", err, text)
		}
		a.code, a.message = doc.Errors[0].Code, doc.Errors[0].Message
		return a
	}
	if !strings.Contains(a.body, "<requestId>") {
		b.t.Fatalf("no request id: %s", text)
	}
	return a
}

// must makes a call that has to succeed.
func (b bench) must(action, form string) answer {
	b.t.Helper()
	a := b.call(action, form)
	if a.status != http.StatusOK {
		b.t.Fatalf("%s %s: %d %s: %s", action, form, a.status, a.code, a.message)
	}
	return a
}

// all returns the texts of an element wherever it occurs.
func (a answer) all(element string) []string {
	var texts []string
	for _, m := range regexp.MustCompile("<"+element+">([^<]*)</"+element+">").FindAllStringSubmatch(a.body, -1) {
		texts = append(texts, m[1])
	}
	return texts
}

// first returns the text of the first such element, or "".
func (a answer) first(element string) string {
	if texts := a.all(element); len(texts) > 0 {
		return texts[0]
	}
	return ""
}

// create makes an interface and returns its id.
func (b bench) create(form string) string {
	b.t.Helper()
	return b.must("CreateNetworkInterface", form).first("networkInterfaceId")
}

// attach attaches an interface and returns the id of the attachment.
func (b bench) attach(eni, instance, index string) string {
	b.t.Helper()
	return b.must("AttachNetworkInterface", "NetworkInterfaceId="+eni+"&InstanceId="+instance+"&DeviceIndex="+index).first("attachmentId")
}

func (b bench) eni(id string) NetworkInterface {
	b.t.Helper()
	eni, ok := b.State().NetworkInterface(ENIID(id))
	if !ok {
		b.t.Fatalf("no interface %s", id)
	}
	return eni
}

func (b bench) free(subnet string) int {
	b.t.Helper()
	s, ok := b.State().Subnet(SubnetID(subnet))
	if !ok {
		b.t.Fatalf("no subnet %s", subnet)
	}
	return s.Free
}

// primary is the id of an instance's interface at index 0.
func (b bench) primary(instance string) string {
	b.t.Helper()
	i, ok := b.State().Instance(InstanceID(instance))
	if !ok || len(i.Interfaces) == 0 {
		b.t.Fatalf("no instance %s with an interface", instance)
	}
	return string(i.Interfaces[0])
}

// stateOptions lets cmp compare states.
func stateOptions() cmp.Options {
	return cmp.Options{
		cmpopts.IgnoreUnexported(Subnet{}),
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	}
}
