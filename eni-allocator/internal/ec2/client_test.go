package ec2

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace/noop"
	"go.uber.org/goleak"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	nodeID   = plan.InstanceID("i-00000001")
	subnetID = plan.SubnetID("subnet-0000000a")
	groupID  = plan.GroupID("sg-00000001")
	vpcID    = plan.VPCID("vpc-00000001")
)

func topology() ec2sim.Topology {
	return ec2sim.Topology{
		Region: "us-east-1",
		VPCs:   []ec2sim.VPCSpec{{ID: string(vpcID), CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("100.64.0.0/16")}}},
		Subnets: []ec2sim.SubnetSpec{
			{ID: string(subnetID), VPC: string(vpcID), CIDR: netip.MustParsePrefix("10.0.0.0/24"), Zone: "us-east-1a", Tags: map[string]string{"k": "v"}},
			{ID: "subnet-0000000b", VPC: string(vpcID), CIDR: netip.MustParsePrefix("10.0.1.0/28"), Zone: "us-east-1a"},
		},
		SecurityGroups: []ec2sim.SecurityGroupSpec{{ID: string(groupID), Name: "nodes", VPC: string(vpcID), Tags: map[string]string{"role": "pods"}}},
		RouteTables:    []ec2sim.RouteTableSpec{{ID: "rtb-00000001", VPC: string(vpcID), Main: true}, {ID: "rtb-00000002", VPC: string(vpcID), Subnets: []string{"subnet-0000000b"}}},
		Instances:      []ec2sim.InstanceSpec{{ID: string(nodeID), Type: "t3.medium", Subnet: string(subnetID), SecurityGroups: []string{"nodes"}}},
	}
}

func start(t *testing.T, edit func(*ec2sim.Config), cfg Config, deps Deps) (*Client, *ec2sim.Server) {
	t.Helper()
	for k, v := range map[string]string{
		"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true",
		"AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent", "AWS_REGION": "us-east-1",
	} {
		t.Setenv(k, v)
	}
	sc := ec2sim.Config{Topology: topology(), Latency: -1}
	if edit != nil {
		edit(&sc)
	}
	sim, err := ec2sim.Start(sc)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Check(); err != nil {
			t.Error(err)
		}
		sim.Close()
	})
	cfg.Endpoint = sim.URL()
	if deps.TracerProvider == nil {
		deps.TracerProvider = noop.NewTracerProvider()
	}
	c, err := New(t.Context(), cfg, deps)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c, sim
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func creation(token string) plan.CreateENI {
	return plan.CreateENI{
		Subnet: subnetID, Groups: []plan.GroupID{groupID}, Count: 3, Token: token, Description: "eniplane n (i-00000001)",
		Tags: map[string]string{plan.TagCluster: "c", plan.TagInstance: string(nodeID), plan.TagIntent: token},
	}
}

func TestReading(t *testing.T) {
	c, _ := start(t, nil, Config{PageSize: 5}, Deps{})
	ctx := t.Context()

	got := must(c.Instance(ctx, nodeID))(t)
	want := plan.Instance{ID: nodeID, Type: "t3.medium", State: plan.InstanceRunning, Zone: "us-east-1a", VPC: vpcID, Subnet: subnetID}
	if got != want {
		t.Errorf("instance %+v, want %+v", got, want)
	}
	if all := must(c.Instances(ctx, []plan.VPCID{vpcID}))(t); len(all) != 1 || all[0] != want {
		t.Errorf("instances %+v", all)
	}
	if got := must(c.Limits(ctx, "t3.medium"))(t); got != (plan.Limits{Interfaces: 3, IPv4: 6}) {
		t.Errorf("limits %+v", got)
	}
	enis := must(c.ENIsOf(ctx, "c", nodeID))(t)
	if len(enis) != 1 {
		t.Fatalf("ENIs %+v", enis)
	}
	e := enis[0]
	if e.Instance != nodeID || e.Index != 0 || e.Card != 0 || !e.Primary.Is4() || len(e.Addresses) != 0 || e.Malformed != "" || e.Type != "interface" ||
		e.Subnet != subnetID || e.VPC != vpcID || e.Zone != "us-east-1a" || len(e.MAC) != 17 || !slices.Equal(e.Groups, []plan.GroupID{groupID}) || e.Attachment == "" {
		t.Errorf("ENI %+v", e)
	}

	n := must(c.Network(ctx, []plan.VPCID{vpcID}))(t)
	slices.SortFunc(n.Subnets, func(a, b plan.Subnet) int { return strings.Compare(string(a.ID), string(b.ID)) })
	slices.SortFunc(n.Tables, func(a, b plan.RouteTable) int { return strings.Compare(a.ID, b.ID) })
	wantNetwork := plan.Network{
		VPCs: []plan.VPC{{ID: vpcID, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("100.64.0.0/16")}}},
		Subnets: []plan.Subnet{
			{ID: subnetID, VPC: vpcID, Zone: "us-east-1a", CIDR: netip.MustParsePrefix("10.0.0.0/24"), Free: 250, Tags: map[string]string{"k": "v"}},
			{ID: "subnet-0000000b", VPC: vpcID, Zone: "us-east-1a", CIDR: netip.MustParsePrefix("10.0.1.0/28"), Free: 11, Tags: map[string]string{}},
		},
		Groups: []plan.SecurityGroup{{ID: groupID, VPC: vpcID, Tags: map[string]string{"role": "pods"}}},
		Tables: []plan.RouteTable{{ID: "rtb-00000001", VPC: vpcID, Main: true}, {ID: "rtb-00000002", VPC: vpcID, Subnets: []plan.SubnetID{"subnet-0000000b"}}},
	}
	n.Groups = slices.DeleteFunc(n.Groups, func(g plan.SecurityGroup) bool { return g.ID != groupID }) // The VPC has a default one.
	byValue := cmp.Options{cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })}
	if diff := cmp.Diff(wantNetwork, n, byValue); diff != "" {
		t.Error(diff)
	}
}

// Nothing asked for is nothing, not everything (an empty filter is none).
func TestNoVPCIsNoCall(t *testing.T) {
	c, sim := start(t, nil, Config{}, Deps{})
	for _, empty := range []bool{
		len(must(c.Instances(t.Context(), nil))(t)) == 0, len(must(c.ENIs(t.Context(), nil))(t)) == 0,
		len(must(c.Network(t.Context(), nil))(t).Subnets) == 0,
	} {
		if !empty {
			t.Error("something was found")
		}
	}
	if calls := sim.Calls(); calls.Total() != 0 {
		t.Errorf("calls %+v", calls)
	}
}

func TestLifeOfAnENI(t *testing.T) {
	c, sim := start(t, nil, Config{}, Deps{})
	ctx := t.Context()
	created := must(c.Create(ctx, creation("t1")))(t)
	if len(created.Addresses) != 3 || created.Instance != "" || !created.Owned("c", nodeID) || created.Malformed != "" {
		t.Errorf("created %+v", created)
	}
	again := must(c.Create(ctx, creation("t1")))(t)
	if again.ID != created.ID || len(sim.State().NetworkInterfaces) != 2 {
		t.Errorf("a repetition made %s beside %s", again.ID, created.ID)
	}
	other := creation("t1")
	other.Count = 4
	if _, err := c.Create(ctx, other); !errors.Is(err, ErrTokenMismatch) {
		t.Errorf("got %v, want a token mismatch", err)
	}
	if found := must(c.ENIsOf(ctx, "c", nodeID))(t); len(found) != 2 {
		t.Errorf("the new ENI is not found by its tags: %+v", found)
	}
	if found := must(c.ENIsOf(ctx, "other", nodeID))(t); len(found) != 1 {
		t.Errorf("an ENI of another cluster is found: %+v", found)
	}

	attachment := must(c.Attach(ctx, created.ID, nodeID, 1))(t)
	if err := c.SetDeleteOnTermination(ctx, created.ID, attachment); err != nil {
		t.Fatal(err)
	}
	added := must(c.Assign(ctx, plan.AssignAddresses{ENI: created.ID, Count: 2}))(t)
	if len(added) != 2 {
		t.Errorf("assigned %v", added)
	}
	found := must(c.ENIs(ctx, []plan.VPCID{vpcID}))(t)
	at := slices.IndexFunc(found, func(e plan.ENI) bool { return e.ID == created.ID })
	if e := found[at]; e.Instance != nodeID || e.Index != 1 || !e.DeleteOnTermination || e.Attachment != attachment || len(e.Addresses) != 5 {
		t.Errorf("described %+v", e)
	}
	if err := c.Delete(ctx, created.ID); !errors.Is(err, ErrInUse) {
		t.Errorf("delete while attached: %v", err)
	}
	spare := must(c.Create(ctx, creation("t2")))(t)
	if err := c.Delete(ctx, spare.ID); err != nil {
		t.Error(err)
	}
	if err := c.Delete(ctx, spare.ID); !errors.Is(err, ErrNotFound) {
		t.Errorf("delete twice: %v", err)
	}
}

// TestErrors has EC2's own rules answer, texts included.
func TestErrors(t *testing.T) {
	c, sim := start(t, nil, Config{}, Deps{})
	ctx := t.Context()
	make := func(count int) plan.ENIID {
		in := creation(fmt.Sprintf("%s-%d", t.Name(), len(sim.State().NetworkInterfaces)))
		in.Count = count
		return must(c.Create(ctx, in))(t).ID
	}
	attach := func(id plan.ENIID, index int) error {
		_, err := c.Attach(ctx, id, nodeID, index)
		return err
	}
	for _, tt := range []struct {
		name string
		call func() error
		want error
	}{
		{"unknown instance", func() error { _, err := c.Instance(ctx, "i-00000099"); return err }, ErrNotFound},
		{"unknown type", func() error { _, err := c.Limits(ctx, "z9.none"); return err }, ErrNotFound},
		{"device index taken", func() error { return attach(make(0), 0) }, ErrDeviceIndexTaken},
		{"assign beyond the limit", func() error {
			id := make(5)
			if err := attach(id, 1); err != nil {
				return err
			}
			_, err := c.Assign(ctx, plan.AssignAddresses{ENI: id, Count: 1})
			return err
		}, ErrAddressLimit},
		{"attach twice", func() error { id := make(0); return errors.Join(attach(id, 2), attach(id, 3)) }, ErrInUse},
		{"no slot left", func() error { return attach(make(0), 5) }, ErrAttachmentLimit},
		{"subnet full", func() error {
			in := creation("full")
			in.Subnet, in.Count = "subnet-0000000b", 11
			_, err := c.Create(ctx, in)
			return err
		}, ErrSubnetFull},
		{"unknown subnet", func() error {
			in := creation("nowhere")
			in.Subnet = "subnet-00000099"
			_, err := c.Create(ctx, in)
			return err
		}, ErrNotFound},
		{"unknown ENI", func() error {
			_, err := c.Assign(ctx, plan.AssignAddresses{ENI: "eni-00000099", Count: 1})
			return err
		}, ErrNotFound},
		{"stopping", func() error {
			if err := sim.SetInstanceState(ec2sim.InstanceID(nodeID), ec2sim.StateStopping); err != nil {
				return err
			}
			return attach(make(0), 7)
		}, ErrNotRunning},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := tt.call(); !errors.Is(err, tt.want) || Code(err) == "" && tt.name != "attach twice" {
				t.Errorf("got %v (code %q), want %v", err, Code(err), tt.want)
			}
		})
	}
}

// The texts are EC2's, as it has sent them.
func TestRecordedTexts(t *testing.T) {
	for _, tt := range []struct {
		code, message string
		want          error
	}{
		{"InvalidParameterValue", "Instance 'i-0a' already has an interface attached at device index '1'.", ErrDeviceIndexTaken},
		{"InvalidParameterValue", "There aren't sufficient free Ipv4 addresses or prefixes", ErrSubnetFull},
		{"InvalidParameterValue", "Network interface 'eni-0a' is currently in use.", ErrInUse},
		{"InvalidParameterValue", "Instance 'i-0a' is not 'running' or 'stopped'.", ErrNotRunning},
		{"InvalidParameterValue", "Value (x) for parameter y is invalid.", ErrRefused},
		{"IncorrectState", "Instance 'i-0a' is not 'running' or 'stopped'.", ErrNotRunning},
		{"RequestLimitExceeded", "Request limit exceeded.", ErrThrottled},
		{"UnauthorizedOperation", "You are not authorized to perform this operation.", ErrDenied},
		{"InsufficientCidrBlocks", "The specified subnet does not have enough free cidr blocks to satisfy the request.", ErrSubnetFull},
		{"InvalidNetworkInterfaceID.NotFound", "The networkInterface ID 'eni-0a' does not exist", ErrNotFound},
		{"InvalidInstanceType", "The following supplied instance types do not exist: [x]", ErrNotFound},
		{"InternalError", "An internal error has occurred", ErrUnavailable},
		{"InvalidInterface.IpAddressLimitExceeded", "Address count 7 exceeds the limit", ErrAddressLimit},
		{"SomethingNew", "", ErrRefused},
	} {
		if got := sentinel(tt.code, tt.message); !errors.Is(got, tt.want) {
			t.Errorf("%s %q: %v, want %v", tt.code, tt.message, got, tt.want)
		}
	}
}

func throttle(action string, times int64) func(*ec2sim.Config) {
	var left atomic.Int64
	left.Store(times)
	return func(cfg *ec2sim.Config) {
		cfg.Intercept = func(_ context.Context, call ec2sim.Call) *ec2sim.APIError {
			if call.Action == action && left.Add(-1) >= 0 {
				return &ec2sim.APIError{Code: "RequestLimitExceeded", Message: "Request limit exceeded.", Status: 503}
			}
			return nil
		}
	}
}

// What may be repeated is, a few times; an assignment never is, for nobody knows
// whether it happened.
func TestRetries(t *testing.T) {
	t.Run("describe", func(t *testing.T) {
		c, sim := start(t, throttle("DescribeInstances", 2), Config{}, Deps{})
		must(c.Instance(t.Context(), nodeID))(t)
		if n := sim.Calls().Total("DescribeInstances"); n != 3 {
			t.Errorf("%d calls, want 3", n)
		}
	})
	t.Run("describe gives up", func(t *testing.T) {
		c, sim := start(t, throttle("DescribeInstances", 100), Config{}, Deps{})
		if _, err := c.Instance(t.Context(), nodeID); !errors.Is(err, ErrThrottled) || Code(err) != "RequestLimitExceeded" {
			t.Errorf("got %v", err)
		}
		if n := sim.Calls().Total("DescribeInstances"); n != 3 {
			t.Errorf("%d calls, want 3", n)
		}
	})
	t.Run("assign", func(t *testing.T) {
		c, sim := start(t, throttle("AssignPrivateIpAddresses", 100), Config{}, Deps{})
		id := plan.ENIID(sim.State().NetworkInterfaces[0].ID)
		if _, err := c.Assign(t.Context(), plan.AssignAddresses{ENI: id, Count: 1}); !errors.Is(err, ErrThrottled) {
			t.Errorf("got %v", err)
		}
		if n := sim.Calls().Total("AssignPrivateIpAddresses"); n != 1 {
			t.Errorf("%d calls, want 1", n)
		}
	})
}

// A call that EC2 does not answer ends, and counts as one that may have happened.
func TestTimeout(t *testing.T) {
	release := make(chan struct{})
	c, sim := start(t, func(cfg *ec2sim.Config) {
		cfg.Middleware = []ec2sim.Middleware{func(next ec2sim.Handler) ec2sim.Handler {
			return func(ctx context.Context, call ec2sim.Call) (ec2sim.Response, *ec2sim.APIError) {
				out, err := next(ctx, call)
				if call.Action == "AssignPrivateIpAddresses" {
					<-release
				}
				return out, err
			}
		}}
	}, Config{CallTimeout: 100 * time.Millisecond}, Deps{})
	defer close(release)
	id := plan.ENIID(sim.State().NetworkInterfaces[0].ID)
	if _, err := c.Assign(t.Context(), plan.AssignAddresses{ENI: id, Count: 1}); !errors.Is(err, ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if n := len(sim.State().NetworkInterfaces[0].Secondary); n != 1 {
		t.Errorf("%d addresses; the test means one that happened", n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Instance(ctx, nodeID); !errors.Is(err, context.Canceled) || errors.Is(err, ErrUnavailable) {
		t.Errorf("a caller that is gone: %v", err)
	}
}

func TestUnreachable(t *testing.T) {
	c, sim := start(t, nil, Config{}, Deps{})
	sim.Close()
	if _, err := c.Instance(t.Context(), nodeID); !errors.Is(err, ErrUnavailable) || Code(err) != "" {
		t.Errorf("got %v", err)
	}
}

// A leader that may have lost its role sends nothing that changes anything.
func TestNotLeading(t *testing.T) {
	var leading atomic.Bool
	c, sim := start(t, nil, Config{}, Deps{Leading: leading.Load})
	must(c.Instance(t.Context(), nodeID))(t)
	if _, err := c.Create(t.Context(), creation("t")); !errors.Is(err, ErrNotLeading) {
		t.Errorf("got %v", err)
	}
	if n := sim.Calls().Total("CreateNetworkInterface"); n != 0 {
		t.Errorf("%d calls were sent", n)
	}
	leading.Store(true)
	must(c.Create(t.Context(), creation("t")))(t)
}

func TestTracesAndMetrics(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	registry := prometheus.NewRegistry()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder))
	c, _ := start(t, nil, Config{}, Deps{TracerProvider: provider, Registerer: registry})
	must(c.Instance(t.Context(), nodeID))(t)
	spans := recorder.Ended()
	if len(spans) != 1 {
		t.Fatalf("%d spans", len(spans))
	}
	attributes := fmt.Sprint(spans[0].Attributes())
	if !strings.Contains(attributes, "request_id") {
		t.Errorf("span %s has %s", spans[0].Name(), attributes)
	}
	if n, err := testutil.GatherAndCount(registry, "eniplane_eni_ec2_call_seconds"); err != nil || n != 1 {
		t.Errorf("%d series, %v", n, err)
	}
}

func TestMalformedENIs(t *testing.T) {
	good := func() types.NetworkInterface {
		return types.NetworkInterface{
			NetworkInterfaceId: aws.String("eni-1"), SubnetId: aws.String("subnet-1"), VpcId: aws.String("vpc-1"), MacAddress: aws.String("02:00:00:00:00:01"),
			PrivateIpAddress:   aws.String("10.0.0.1"),
			PrivateIpAddresses: []types.NetworkInterfacePrivateIpAddress{{PrivateIpAddress: aws.String("10.0.0.1"), Primary: aws.Bool(true)}, {PrivateIpAddress: aws.String("10.0.0.2")}},
			Attachment:         &types.NetworkInterfaceAttachment{InstanceId: aws.String("i-1"), DeviceIndex: aws.Int32(1), Status: types.AttachmentStatusAttached},
		}
	}
	if e := eni(good()); e.Malformed != "" || e.Instance != "i-1" || len(e.Addresses) != 1 {
		t.Fatalf("%+v", e)
	}
	for _, tt := range []struct {
		name     string
		edit     func(*types.NetworkInterface)
		flawed   bool
		instance plan.InstanceID
	}{
		{"B29 no attachment", func(e *types.NetworkInterface) { e.Attachment = nil }, false, ""},
		{"detached", func(e *types.NetworkInterface) { e.Attachment.Status = types.AttachmentStatusDetached }, false, ""},
		{"no device index", func(e *types.NetworkInterface) { e.Attachment.DeviceIndex = nil }, true, "i-1"},
		{"no MAC", func(e *types.NetworkInterface) { e.MacAddress = nil }, true, "i-1"},
		{"no primary address", func(e *types.NetworkInterface) { e.PrivateIpAddress = nil }, true, "i-1"},
		{"nonsense address", func(e *types.NetworkInterface) { e.PrivateIpAddresses[1].PrivateIpAddress = aws.String("10.0.0") }, true, "i-1"},
		{"nonsense prefix", func(e *types.NetworkInterface) {
			e.Ipv4Prefixes = []types.Ipv4PrefixSpecification{{Ipv4Prefix: aws.String("10.0.0.0/27")}}
		}, true, "i-1"},
		{"nothing at all", func(e *types.NetworkInterface) { *e = types.NetworkInterface{} }, true, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := good()
			tt.edit(&e)
			if got := eni(e); (got.Malformed != "") != tt.flawed || got.Instance != tt.instance {
				t.Errorf("%+v", got)
			}
		})
	}
}

// Only network card 0 counts.
func TestB25LimitsOfManyCards(t *testing.T) {
	c, _ := start(t, nil, Config{}, Deps{})
	for typ, want := range map[string]plan.Limits{"p4d.24xlarge": {Interfaces: 15, IPv4: 50}, "p5.48xlarge": {Interfaces: 2, IPv4: 50}} {
		if got := must(c.Limits(t.Context(), typ))(t); got != want {
			t.Errorf("%s: %+v, want %+v", typ, got, want)
		}
	}
}

func TestConfig(t *testing.T) {
	for _, bad := range []Config{{CallTimeout: -1}, {Rate: -1}, {Rate: 1}, {PageSize: 4}, {PageSize: 1001}} {
		if bad.Validate() == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
	if err := (Config{Rate: 20, Burst: 100}).Validate(); err != nil {
		t.Error(err)
	}
}
