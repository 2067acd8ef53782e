package localkube

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestCluster(t *testing.T) {
	c := ForTest(t)

	status, body := get(t, c, "/version", c.Token, nil)
	if status != http.StatusOK || !strings.Contains(body, "gitVersion") {
		t.Fatalf("version: %d %s", status, body)
	}
	if status, body = get(t, c, "/api/v1/nodes", "wrong", nil); status != http.StatusUnauthorized {
		t.Errorf("wrong token: %d %s", status, body)
	}
	if status, body = get(t, c, "/api/v1/nodes", "", nil); status != http.StatusForbidden {
		t.Errorf("nobody: %d %s", status, body)
	}

	stranger := userCertificate(t, c, "stranger")
	if status, body = get(t, c, "/api/v1/nodes", "", stranger); status != http.StatusForbidden || !strings.Contains(body, "stranger") {
		t.Errorf("user without a role: %d %s", status, body)
	}
	if status, body = get(t, c, "/api/v1/nodes", "", userCertificate(t, c, "chief", "system:masters")); status != http.StatusOK {
		t.Errorf("user in system:masters: %d %s", status, body)
	}

	c.StopAPIServer()
	if conn, err := net.Dial("tcp", strings.TrimPrefix(c.URL, "https://")); err == nil {
		_ = conn.Close()
		t.Error("a stopped API server still listens")
	}
	if err := c.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	if status, body = get(t, c, "/api/v1/nodes", "", stranger); status != http.StatusForbidden {
		t.Errorf("user without a role after a restart: %d %s", status, body)
	}
	if err := c.Wait(canceled(t)); err != nil {
		t.Errorf("both run, yet Wait says: %v", err)
	}
	c.Stop()
	c.Stop()
	if err := c.Wait(t.Context()); !errors.Is(err, ErrNotReady) {
		t.Errorf("neither runs, yet Wait says: %v", err)
	}
	if _, err := os.Stat(c.Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left behind: %v", c.Dir, err)
	}
}

func TestStartErrors(t *testing.T) {
	t.Run("no binary", func(t *testing.T) {
		t.Setenv("ENIPLANE_ETCD", "")
		t.Setenv("ENIPLANE_KUBE_APISERVER", "")
		t.Chdir(t.TempDir())
		if _, err := Start(t.Context(), Config{}); !errors.Is(err, ErrNoBinary) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("dies", func(t *testing.T) {
		dir := t.TempDir()
		script := filepath.Join(dir, "apiserver")
		if err := os.WriteFile(script, []byte("#!/bin/sh\necho such a pity\nexit 3\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		_, err := Start(t.Context(), Config{Dir: filepath.Join(dir, "run"), LogDir: dir, APIServerBinary: script})
		if _, err := os.Stat(filepath.Join(dir, "etcd.log")); err != nil {
			t.Error(err)
		}
		if !errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), "such a pity") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("port always taken", func(t *testing.T) {
		dir := t.TempDir()
		script := filepath.Join(dir, "apiserver")
		if err := os.WriteFile(script, []byte("#!/bin/sh\necho x >>"+dir+"/starts\necho listen: address already in use\nexit 1\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		_, err := Start(t.Context(), Config{Dir: filepath.Join(dir, "run"), APIServerBinary: script})
		if !errors.Is(err, errPortTaken) {
			t.Errorf("got %v", err)
		}
		starts, err := os.ReadFile(filepath.Join(dir, "starts"))
		if got := strings.Count(string(starts), "x"); err != nil || got != startAttempts {
			t.Errorf("%d starts, want %d (%v)", got, startAttempts, err)
		}
	})
}

func canceled(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

func get(t *testing.T, c *Cluster, path, token string, cert *tls.Certificate) (int, string) {
	t.Helper()
	ca, err := os.ReadFile(c.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	cfg := &tls.Config{RootCAs: x509.NewCertPool()}
	cfg.RootCAs.AppendCertsFromPEM(ca)
	if cert != nil {
		cfg.Certificates = []tls.Certificate{*cert}
	}
	transport := &http.Transport{TLSClientConfig: cfg}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// userCertificate reads back what KubeconfigFor wrote.
func userCertificate(t *testing.T, c *Cluster, user string, groups ...string) *tls.Certificate {
	t.Helper()
	path, err := c.KubeconfigFor(user, groups...)
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var decoded [2][]byte
	for i, field := range []string{"client-certificate-data", "client-key-data"} {
		found := regexp.MustCompile(field + `: (\S+)`).FindSubmatch(content)
		if found == nil {
			t.Fatalf("no %s in %s", field, content)
		}
		if decoded[i], err = base64.StdEncoding.DecodeString(string(found[1])); err != nil {
			t.Fatal(err)
		}
	}
	pair, err := tls.X509KeyPair(decoded[0], decoded[1])
	if err != nil {
		t.Fatal(err)
	}
	return &pair
}
