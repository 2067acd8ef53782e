package demo

import (
	"slices"
	"testing"

	"github.com/eniplane/eniplane/deploy/local/internal/traces"
)

func TestMissing(t *testing.T) {
	patch := map[string]string{"http.request.method": "PATCH"}
	whole := []traces.Span{
		{Service: "demo", Name: "CNI ADD default/a"},
		{Service: "agent", Name: "eniplane.agent.v1.AgentService/AllocateIP"},
		{Service: "agent", Name: "eniplane.eni.v1.EniAllocatorService/EnsureAddresses"},
		{Service: "eni-allocator", Name: "eniplane.eni.v1.EniAllocatorService/EnsureAddresses"},
		{Service: "eni-allocator", Name: "EC2.CreateNetworkInterface"},
		{Service: "eni-allocator", Name: "EC2.AttachNetworkInterface"},
		{Service: "node-syncer", Name: "eniplane.node.v1.NodeSyncerService/PublishPool"},
		{Service: "node-syncer", Name: "HTTP PATCH", Attributes: patch},
	}
	if got := missing(whole); len(got) != 0 {
		t.Errorf("of the whole: %v", got)
	}
	if got := missing(nil); len(got) != len(crossing) {
		t.Errorf("of nothing: %v", got)
	}
	// Each process must have sent its own span: a caller's does not do.
	for i, want := range map[int]string{
		1: "the agent's AllocateIP", 3: "eni-allocator's EnsureAddresses", 4: "EC2's CreateNetworkInterface",
		5: "EC2's AttachNetworkInterface", 6: "node-syncer's PublishPool", 7: "a write to the API server",
	} {
		if got := missing(slices.Delete(slices.Clone(whole), i, i+1)); !slices.Equal(got, []string{want}) {
			t.Errorf("without %s: %v, want %s", whole[i].Name, got, want)
		}
	}
	read := slices.Clone(whole)
	read[7].Attributes = map[string]string{"http.request.method": "GET"}
	if got := missing(read); !slices.Equal(got, []string{"a write to the API server"}) {
		t.Errorf("with a read only: %v", got)
	}
}

func TestWantedOverlap(t *testing.T) {
	prefixes := wanted()
	overlaps := 0
	for i, a := range prefixes {
		for _, b := range prefixes[i+1:] {
			if a == b {
				t.Errorf("%s twice", a)
			}
			if a.Overlaps(b) {
				overlaps++
			}
		}
	}
	if overlaps < 3 {
		t.Errorf("%d overlaps in %v", overlaps, prefixes)
	}
}
