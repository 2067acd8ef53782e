package pooldigest_test

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/pooldigest"
)

func sample() ([]*nodev1.Eni, []*nodev1.PoolAddress) {
	eni := func(id, a, b string) *nodev1.Eni {
		return &nodev1.Eni{
			Id: id, Ip: "10.0.0.4", Mac: "02:00:00:00:00:01", AvailabilityZone: "z",
			Subnet:    &nodev1.Subnet{Id: "subnet-1", Cidr: "10.0.0.0/24"},
			Vpc:       &nodev1.Vpc{Id: "vpc-1", PrimaryCidr: "10.0.0.0/16", Cidrs: []string{"10.1.0.0/16", "10.2.0.0/16"}},
			Addresses: []string{a, b}, SecurityGroups: []string{"sg-1", "sg-2"},
			Tags: map[string]string{"a": "1", "b": "2"},
		}
	}
	return []*nodev1.Eni{eni("eni-1", "10.0.0.5", "10.0.0.6"), eni("eni-2", "10.0.0.7", "10.0.0.8")},
		[]*nodev1.PoolAddress{{Address: "10.0.0.5", EniId: "eni-1"}, {Address: "10.0.0.7", EniId: "eni-2"}}
}

func TestOrderDoesNotMatter(t *testing.T) {
	enis, pool := sample()
	want := pooldigest.Of(enis, pool)
	first := enis[0]

	slices.Reverse(enis)
	slices.Reverse(pool)
	for _, e := range enis {
		slices.Reverse(e.Addresses)
		slices.Reverse(e.SecurityGroups)
		slices.Reverse(e.Vpc.Cidrs)
		e.Prefixes = []string{}
	}
	if got := pooldigest.Of(enis, pool); got != want {
		t.Error("another order gave another digest")
	}
	if enis[1] != first || enis[1].Addresses[0] != "10.0.0.6" {
		t.Error("an argument was changed")
	}
}

func TestEveryFieldMatters(t *testing.T) {
	base := func() string { e, p := sample(); return pooldigest.Of(e, p) }()
	for name, edit := range map[string]func(*nodev1.Eni, *nodev1.PoolAddress){
		"id":            func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.Id = "eni-9" },
		"ip":            func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.Ip = "10.0.0.9" },
		"mac":           func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.Mac = "02:00:00:00:00:09" },
		"zone":          func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.AvailabilityZone = "y" },
		"description":   func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.Description = "d" },
		"device index":  func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.DeviceIndex = 7 },
		"subnet":        func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.Subnet.Id = "subnet-9" },
		"subnet cidr":   func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.Subnet.Cidr = "" },
		"vpc":           func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.Vpc.Id = "vpc-9" },
		"primary cidr":  func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.Vpc.PrimaryCidr = "" },
		"vpc cidrs":     func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.Vpc.Cidrs = nil },
		"address":       func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.Addresses = e.Addresses[:1] },
		"prefix":        func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.Prefixes = []string{"10.0.0.16/28"} },
		"group":         func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.SecurityGroups = nil },
		"tag":           func(e *nodev1.Eni, _ *nodev1.PoolAddress) { e.Tags["a"] = "2" },
		"pool address":  func(_ *nodev1.Eni, p *nodev1.PoolAddress) { p.Address = "10.0.0.6" },
		"pool resource": func(_ *nodev1.Eni, p *nodev1.PoolAddress) { p.EniId = "eni-2" },
	} {
		enis, pool := sample()
		edit(enis[0], pool[0])
		if pooldigest.Of(enis, pool) == base {
			t.Errorf("%s: another value gave the same digest", name)
		}
	}
}

// Values next to each other must not run together.
func TestFieldsAreSeparated(t *testing.T) {
	a := []*nodev1.Eni{{Id: "ab", Ip: "c"}}
	b := []*nodev1.Eni{{Id: "a", Ip: "bc"}}
	if pooldigest.Of(a, nil) == pooldigest.Of(b, nil) {
		t.Error("different ENIs have one digest")
	}
	if got, want := pooldigest.Of(nil, nil), pooldigest.Of([]*nodev1.Eni{}, []*nodev1.PoolAddress{}); got != want {
		t.Error("nil and empty differ")
	}
	if !proto.Equal(a[0], &nodev1.Eni{Id: "ab", Ip: "c"}) {
		t.Error("an argument was changed")
	}
}
