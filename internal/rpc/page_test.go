package rpc_test

import (
	"testing"

	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

func TestPageToken(t *testing.T) {
	for _, key := range []string{"node-1", "10.0.0.0/8", "a\nb", ""} {
		got, err := rpc.ParsePageToken("nodes", rpc.PageToken("nodes", key))
		if err != nil || got != key {
			t.Errorf("%q came back as %q, %v", key, got, err)
		}
	}
	if got, err := rpc.ParsePageToken("nodes", ""); err != nil || got != "" {
		t.Errorf("the first page: %q, %v", got, err)
	}
	for name, token := range map[string]string{
		"not ours":              "!",
		"base64 of nothing":     "bm9wZQ",
		"of another list":       rpc.PageToken("subnets", "x"),
		"of a narrower list":    rpc.PageToken("nodes 5", "x"),
		"of a list's beginning": rpc.PageToken("node", "s\nx"),
	} {
		if _, err := rpc.ParsePageToken("nodes", token); rpc.ReasonOf(err) != reason.PageTokenInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}
