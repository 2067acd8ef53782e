package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRun(t *testing.T) {
	ports := filepath.Join(t.TempDir(), "ports.json")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out, in := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := run(ctx, []string{"--topology", "../../topology.example.json", "--ports-file", ports}, in, io.Discard)
		_ = in.Close()
		ended <- err
	}()
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "ec2sim ready: ec2 http://127.0.0.1:") {
		t.Fatalf("%q, %v", line, err)
	}
	endpoints := readPorts(t, ports)
	if len(endpoints.IMDS) != 3 || !strings.Contains(line, endpoints.EC2) {
		t.Errorf("ports file %+v", endpoints)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post(endpoints.EC2+"/_sim/launch", "application/json", strings.NewReader(`{"type":"t3.micro","subnet":"nodes-a"}`))
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if n := len(readPorts(t, ports).IMDS); resp.StatusCode != http.StatusCreated || n != 4 {
		t.Errorf("after a launch: %s, %d instances", resp.Status, n)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if rest, _ := io.ReadAll(lines); len(rest) > 0 {
		t.Errorf("more output: %s", rest)
	}
	left, err := filepath.Glob(filepath.Join(filepath.Dir(ports), "*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestRunRefuses(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.json")
	if err := os.WriteFile(bad, []byte(`{"vpc":1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"--frobnicate"},
		{"extra"},
		{"--topology", "/nonexistent.json"},
		{"--topology", bad},
		{"--ports-file", "/nonexistent/ports.json"},
		{"--listen", "nowhere"},
	} {
		if err := run(t.Context(), args, io.Discard, io.Discard); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
}

func readPorts(t *testing.T, path string) ec2sim.Endpoints {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var endpoints ec2sim.Endpoints
	if err := json.Unmarshal(text, &endpoints); err != nil {
		t.Fatal(err)
	}
	return endpoints
}
