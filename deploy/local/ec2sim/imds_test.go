package ec2sim

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/feature/ec2/imds"
)

// sdkClient is the SDK's own client for the metadata service of an instance.
func sdkClient(endpoint string) *imds.Client {
	return imds.New(imds.Options{Endpoint: endpoint, HTTPClient: client()})
}

func TestIMDSThroughSDK(t *testing.T) {
	s := startServer(t)
	sdk := sdkClient(s.IMDSURL(medium))
	doc, err := sdk.GetInstanceIdentityDocument(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	instance, _ := s.State().Instance(medium)
	if doc.InstanceID != medium || doc.InstanceType != "t3.medium" || doc.AvailabilityZone != "us-east-1a" || doc.Region != "us-east-1" ||
		doc.AccountID != "123456789012" || doc.PrivateIP != instance.Address.String() {
		t.Errorf("document %+v", doc)
	}
	if region, err := sdk.GetRegion(t.Context(), nil); err != nil || region.Region != "us-east-1" {
		t.Errorf("region %v, %v", region, err)
	}
	eni, _ := s.State().NetworkInterface(instance.Interfaces[0])
	mac := "network/interfaces/macs/" + eni.MAC + "/"
	for path, want := range map[string]string{
		"instance-id":                  medium,
		"instance-type":                "t3.medium",
		"placement/availability-zone":  "us-east-1a",
		"placement/region":             "us-east-1",
		"local-ipv4":                   "10.0.0.4",
		"local-hostname":               "ip-10-0-0-4.ec2.internal",
		"mac":                          eni.MAC,
		"network/interfaces/macs/":     eni.MAC + "/",
		"network/interfaces/macs":      eni.MAC + "/",
		"network/interfaces/":          "macs/",
		mac + "interface-id":           string(eni.ID),
		mac + "subnet-id":              subnetA,
		mac + "vpc-id":                 vpcMain,
		mac + "subnet-ipv4-cidr-block": "10.0.0.0/24",
		mac + "vpc-ipv4-cidr-block":    "10.0.0.0/16",
		mac + "vpc-ipv4-cidr-blocks":   "10.0.0.0/16\n100.64.0.0/20",
		mac + "device-number":          "0",
		mac + "local-ipv4s":            "10.0.0.4",
		mac + "security-group-ids":     groupMain,
		mac + "owner-id":               "123456789012",
	} {
		if got := metadata(t, sdk, path); got != want {
			t.Errorf("%s: got %q, want %q", path, got, want)
		}
	}
	for _, path := range []string{"nothing", "instance-id/more", mac + "ipv4-prefix", "network/interfaces/macs/00:00:00:00:00:00/"} {
		if out, err := sdk.GetMetadata(t.Context(), &imds.GetMetadataInput{Path: path}); err == nil {
			_ = out.Content.Close()
			t.Errorf("%s: found", path)
		}
	}
}

func TestIMDSFollowsTheAccount(t *testing.T) {
	s := startServer(t)
	sdk := sdkClient(s.IMDSURL(medium))
	status, body := request(t, http.MethodPost, s.URL(), "Action=CreateNetworkInterface&SubnetId="+subnetA+"&Ipv4PrefixCount=2")
	if status != http.StatusOK {
		t.Fatal(body)
	}
	eni := answer{body: body}.first("networkInterfaceId")
	if status, body := request(t, http.MethodPost, s.URL(), "Action=AttachNetworkInterface&DeviceIndex=2&InstanceId="+medium+"&NetworkInterfaceId="+eni); status != http.StatusOK {
		t.Fatal(body)
	}
	row, _ := s.State().NetworkInterface(ENIID(eni))
	dir := "network/interfaces/macs/" + row.MAC + "/"
	if got := strings.Count(metadata(t, sdk, "network/interfaces/macs/"), "/"); got != 2 {
		t.Errorf("%d interfaces, want 2", got)
	}
	if got := metadata(t, sdk, dir+"device-number"); got != "2" {
		t.Errorf("device number %s", got)
	}
	if got := metadata(t, sdk, dir+"ipv4-prefix"); got != "10.0.0.16/28\n10.0.0.32/28" {
		t.Errorf("prefixes %q", got)
	}
}

func TestIMDSTokens(t *testing.T) {
	b := newBench(t)
	service, other := b.IMDS(medium), b.IMDS(tiny)
	do := func(h http.Handler, method, path string, headers ...string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(method, path, nil)
		for i := 0; i < len(headers); i += 2 {
			r.Header.Set(headers[i], headers[i+1])
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	const ttl, auth = "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"
	for name, tt := range map[string]struct {
		method  string
		headers []string
		want    int
	}{
		"no lifetime":        {http.MethodPut, nil, http.StatusBadRequest},
		"zero lifetime":      {http.MethodPut, []string{ttl, "0"}, http.StatusBadRequest},
		"long lifetime":      {http.MethodPut, []string{ttl, "21601"}, http.StatusBadRequest},
		"nonsense lifetime":  {http.MethodPut, []string{ttl, "long"}, http.StatusBadRequest},
		"through a proxy":    {http.MethodPut, []string{ttl, "60", "X-Forwarded-For", "10.0.0.1"}, http.StatusForbidden},
		"the wrong method":   {http.MethodGet, []string{ttl, "60"}, http.StatusMethodNotAllowed},
		"a lifetime of 1 s":  {http.MethodPut, []string{ttl, "1"}, http.StatusOK},
		"a lifetime of 6 hr": {http.MethodPut, []string{ttl, "21600"}, http.StatusOK},
	} {
		if got := do(service, tt.method, "/latest/api/token", tt.headers...).Code; got != tt.want {
			t.Errorf("token with %s: got %d, want %d", name, got, tt.want)
		}
	}
	w := do(service, http.MethodPut, "/latest/api/token", ttl, "60")
	token := w.Body.String()
	if w.Header().Get(ttl) != "60" {
		t.Errorf("lifetime %q", w.Header().Get(ttl))
	}
	const path = "/latest/meta-data/instance-id"
	get := func(h http.Handler, token string) int { return do(h, http.MethodGet, path, auth, token).Code }
	if got := get(service, token); got != http.StatusOK {
		t.Errorf("good token: got %d", got)
	}
	if got := do(service, http.MethodPost, path, auth, token).Code; got != http.StatusMethodNotAllowed {
		t.Errorf("POST: got %d", got)
	}
	if got := do(service, http.MethodGet, "/latest/user-data", auth, token).Code; got != http.StatusNotFound {
		t.Errorf("user data: got %d", got)
	}
	for name, bad := range map[string]string{"no": "", "a foreign": do(other, http.MethodPut, "/latest/api/token", ttl, "60").Body.String(), "a forged": "AAAA" + token[4:], "a broken": "%"} {
		if got := get(service, bad); got != http.StatusUnauthorized {
			t.Errorf("%s token: got %d, want 401", name, got)
		}
	}
	b.clock.advance(59 * time.Second)
	if got := get(service, token); got != http.StatusOK {
		t.Errorf("just before its end: got %d", got)
	}
	b.clock.advance(time.Second)
	if got := get(service, token); got != http.StatusUnauthorized {
		t.Errorf("at its end: got %d", got)
	}
	b.must("TerminateInstances", url.Values{"InstanceId.1": {medium}}.Encode())
	fresh := do(service, http.MethodPut, "/latest/api/token", ttl, "60").Body.String()
	if got := get(service, fresh); got != http.StatusNotFound {
		t.Errorf("terminated: got %d, want 404", got)
	}
}

func metadata(t *testing.T, sdk *imds.Client, path string) string {
	t.Helper()
	out, err := sdk.GetMetadata(t.Context(), &imds.GetMetadataInput{Path: path})
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	defer func() { _ = out.Content.Close() }()
	text, err := io.ReadAll(out.Content)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
