package localkube

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"strings"
	"time"
)

// validity is longer than any run.
const validity = 7 * 24 * time.Hour

// authority signs the server's and the users' certificates.
type authority struct {
	cert    *x509.Certificate
	certPEM []byte
	key     *ecdsa.PrivateKey
}

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template, err := certificate("localkube-ca", nil)
	if err != nil {
		return nil, err
	}
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &authority{cert: cert, certPEM: pemBlock("CERTIFICATE", der), key: key}, nil
}

// server returns certificate and key of a server on loopback, PEM encoded.
func (a *authority) server() ([]byte, []byte, error) {
	template, err := certificate("kube-apiserver", nil)
	if err != nil {
		return nil, nil, err
	}
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}
	template.DNSNames = []string{"localhost", "kubernetes.default.svc"}
	return a.sign(template)
}

// user returns certificate and key of a user: Kubernetes takes the common name
// for the user's name and the organizations for its groups.
func (a *authority) user(name string, groups []string) ([]byte, []byte, error) {
	template, err := certificate(name, groups)
	if err != nil {
		return nil, nil, err
	}
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	return a.sign(template)
}

func (a *authority) sign(template *x509.Certificate) ([]byte, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, nil, err
	}
	keyPEM, err := privatePEM(key)
	if err != nil {
		return nil, nil, err
	}
	return pemBlock("CERTIFICATE", der), keyPEM, nil
}

func certificate(name string, organizations []string) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name, Organization: organizations},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(validity),
	}, nil
}

// serviceAccountKeys returns the keys that sign and verify the tokens of
// ServiceAccounts.
func serviceAccountKeys() ([]byte, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	private, err := privatePEM(key)
	if err != nil {
		return nil, nil, err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, nil, err
	}
	return private, pemBlock("PUBLIC KEY", public), nil
}

func privatePEM(key crypto.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pemBlock("PRIVATE KEY", der), nil
}

func pemBlock(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func randomToken() (string, error) {
	b := make([]byte, 24)
	if _, err := rand.Read(b); err != nil {
		return "", err
	}
	return hex.EncodeToString(b), nil
}

// KubeconfigFor writes a kubeconfig for a user of that name in those groups,
// who may do what RBAC says, and returns its path. A second call for the same
// name, or one that differs in punctuation only, replaces the file.
func (c *Cluster) KubeconfigFor(user string, groups ...string) (string, error) {
	cert, key, err := c.pki.user(user, groups)
	if err != nil {
		return "", fmt.Errorf("certificate of %s: %w", user, err)
	}
	path := c.path("kubeconfig-" + strings.Map(fileCharacter, user))
	content := c.kubeconfig(fmt.Sprintf("client-certificate-data: %s\n    client-key-data: %s",
		base64.StdEncoding.EncodeToString(cert), base64.StdEncoding.EncodeToString(key)))
	if err := os.WriteFile(path, content, 0o600); err != nil {
		return "", err
	}
	return path, nil
}

// fileCharacter keeps what may stand in a file's name, also in a list of files.
func fileCharacter(r rune) rune {
	switch {
	case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', r == '-', r == '.':
		return r
	default:
		return '_'
	}
}

func (c *Cluster) tokenKubeconfig() []byte { return c.kubeconfig("token: " + c.Token) }

func (c *Cluster) kubeconfig(user string) []byte {
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: localkube
clusters:
- name: localkube
  cluster:
    server: %s
    certificate-authority-data: %s
users:
- name: user
  user:
    %s
contexts:
- name: localkube
  context:
    cluster: localkube
    user: user
`, c.URL, base64.StdEncoding.EncodeToString(c.pki.certPEM), user)
}
