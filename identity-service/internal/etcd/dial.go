package etcd

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// ClientConfig is how to reach an etcd cluster outside this process.
type ClientConfig struct {
	// Endpoints are URLs, or host:port, of its members.
	Endpoints []string
	// CA is the file with the certificates that sign the members'. Empty means
	// that of the system; it only counts for https.
	CA string
	// Cert and Key are the files of the client certificate. Both or none.
	Cert, Key string
}

// Dial prepares a client of an etcd cluster. It connects when first used, and
// again whenever it must.
func Dial(config ClientConfig, logger *slog.Logger) (*clientv3.Client, error) {
	security, err := config.tls()
	if err != nil {
		return nil, err
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            config.Endpoints,
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: 5 * time.Second,
		PermitWithoutStream:  true,
		TLS:                  security,
		Logger:               zapTo(logger),
	})
	if err != nil {
		return nil, fmt.Errorf("etcd client for %v: %w", config.Endpoints, err)
	}
	return client, nil
}

func (c ClientConfig) tls() (*tls.Config, error) {
	if c.CA == "" && c.Cert == "" && c.Key == "" {
		return nil, nil //nolint:nilnil // No TLS settings is what nil says to the client.
	}
	if (c.Cert == "") != (c.Key == "") {
		return nil, errors.New("the client certificate of etcd needs both a certificate and a key")
	}
	out := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CA != "" {
		pem, err := os.ReadFile(c.CA)
		if err != nil {
			return nil, fmt.Errorf("read the CA of etcd: %w", err)
		}
		out.RootCAs = x509.NewCertPool()
		if !out.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("the CA of etcd, %s, has no certificate", c.CA)
		}
	}
	if c.Cert != "" {
		// Read again at every handshake: certificates are renewed in place.
		out.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
			if err != nil {
				return nil, fmt.Errorf("client certificate of etcd: %w", err)
			}
			return &pair, nil
		}
		if _, err := tls.LoadX509KeyPair(c.Cert, c.Key); err != nil {
			return nil, fmt.Errorf("client certificate of etcd: %w", err)
		}
	}
	return out, nil
}
