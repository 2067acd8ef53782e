// Package imds serves the instance metadata service, version 2 only: every
// read needs a session token. It shows one instance as the account has it at
// the time of the request.
package imds

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/account"
)

const (
	headerTTL   = "X-Aws-Ec2-Metadata-Token-Ttl-Seconds"
	headerToken = "X-Aws-Ec2-Metadata-Token"
	maxTTL      = 21600 // seconds; six hours, as EC2 has it
)

// Service serves the metadata of one instance.
type Service struct {
	acc      *account.Account
	instance account.InstanceID
	now      func() time.Time
	key      []byte
}

// New makes the service of an instance. Tokens it gives out are good for this
// service only, and their lifetime follows the clock.
func New(acc *account.Account, instance account.InstanceID, now func() time.Time) *Service {
	key := make([]byte, sha256.Size)
	_, _ = rand.Read(key) // never fails
	return &Service{acc: acc, instance: instance, now: now, key: key}
}

// ServeHTTP implements http.Handler.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/latest/api/token" {
		s.serveToken(w, r)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
		return
	}
	if !s.valid(r.Header.Get(headerToken)) {
		http.Error(w, "unauthorized", http.StatusUnauthorized)
		return
	}
	meta, ok := s.acc.Metadata(s.instance)
	if !ok {
		http.NotFound(w, r)
		return
	}
	body, contentType, ok := s.lookup(meta, r.URL.Path)
	if !ok {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", contentType)
	_, _ = w.Write([]byte(body)) // the client is gone: nobody to tell
}

func (s *Service) serveToken(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPut {
		http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
		return
	}
	if r.Header.Get("X-Forwarded-For") != "" {
		http.Error(w, "forbidden", http.StatusForbidden) // EC2 gives no token through proxies
		return
	}
	ttl, err := strconv.Atoi(r.Header.Get(headerTTL))
	if err != nil || ttl < 1 || ttl > maxTTL {
		http.Error(w, "bad request", http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/plain")
	w.Header().Set(headerTTL, strconv.Itoa(ttl))
	_, _ = w.Write([]byte(s.token(s.now().Add(time.Duration(ttl) * time.Second))))
}

// token seals the time until which it is good.
func (s *Service) token(expires time.Time) string {
	text := binary.BigEndian.AppendUint64(nil, uint64(expires.UnixNano()))
	return base64.URLEncoding.EncodeToString(append(text, s.sum(text)...))
}

func (s *Service) valid(token string) bool {
	raw, err := base64.URLEncoding.DecodeString(token)
	if err != nil || len(raw) != 8+sha256.Size || !hmac.Equal(raw[8:], s.sum(raw[:8])) {
		return false
	}
	return s.now().UnixNano() < int64(binary.BigEndian.Uint64(raw))
}

func (s *Service) sum(text []byte) []byte {
	mac := hmac.New(sha256.New, s.key)
	mac.Write(text)
	return mac.Sum(nil)
}

// lookup finds the value at a path, or the listing of a directory, and its
// content type.
func (s *Service) lookup(meta account.Metadata, path string) (string, string, bool) {
	if path == "/latest/dynamic/instance-identity/document" {
		return s.identity(meta), "application/json", true
	}
	rest, ok := strings.CutPrefix(path, "/latest/meta-data")
	if !ok || (rest != "" && rest[0] != '/') {
		return "", "", false
	}
	values := s.values(meta)
	rest = strings.TrimPrefix(rest, "/")
	if value, ok := values[strings.TrimSuffix(rest, "/")]; ok {
		return value, "text/plain", true
	}
	listing := list(values, strings.TrimSuffix(rest, "/"))
	return strings.Join(listing, "\n"), "text/plain", len(listing) > 0
}

// list names what is in a directory; directories end in a slash.
func list(values map[string]string, dir string) []string {
	var entries []string
	for path := range values {
		rest := path
		if dir != "" {
			var ok bool
			if rest, ok = strings.CutPrefix(path, dir+"/"); !ok {
				continue
			}
		}
		name, _, isDir := strings.Cut(rest, "/")
		if isDir {
			name += "/"
		}
		entries = append(entries, name)
	}
	slices.Sort(entries)
	return slices.Compact(entries)
}

// values lists the leaves below meta-data.
func (s *Service) values(meta account.Metadata) map[string]string {
	values := map[string]string{
		"ami-id": meta.Image, "ami-launch-index": strconv.Itoa(meta.LaunchIndex), "instance-id": string(meta.ID),
		"instance-type": meta.Type, "instance-life-cycle": "on-demand", "reservation-id": meta.Reservation,
		"placement/availability-zone": meta.Zone, "placement/availability-zone-id": meta.ZoneID, "placement/region": s.acc.Region(),
		"local-ipv4":         meta.Address.String(),
		"local-hostname":     account.PrivateDNSName(s.acc.Region(), meta.Address),
		"hostname":           account.PrivateDNSName(s.acc.Region(), meta.Address),
		"services/domain":    "amazonaws.com",
		"services/partition": "aws",
	}
	for i, eni := range meta.Attached {
		if i == 0 {
			values["mac"] = eni.MAC
			values["security-groups"] = joined(eni.Groups, func(g account.GroupRef) string { return g.Name })
		}
		dir := "network/interfaces/macs/" + eni.MAC + "/"
		vpc := meta.VPCs[eni.VPC]
		for name, value := range map[string]string{
			"mac": eni.MAC, "interface-id": string(eni.ID), "owner-id": s.acc.Owner(),
			"device-number": strconv.Itoa(eni.Attachment.DeviceIndex), "network-card": strconv.Itoa(eni.Attachment.NetworkCard),
			"subnet-id": string(eni.Subnet), "subnet-ipv4-cidr-block": meta.Subnets[eni.Subnet].CIDR.String(),
			"vpc-id": string(eni.VPC), "vpc-ipv4-cidr-block": vpc.CIDRs[0].String(),
			"vpc-ipv4-cidr-blocks": joined(vpc.CIDRs, netip.Prefix.String),
			"local-ipv4s":          joined(eni.Addresses(), netip.Addr.String),
			"local-hostname":       account.PrivateDNSName(s.acc.Region(), eni.Primary),
			"security-group-ids":   joined(eni.Groups, func(g account.GroupRef) string { return string(g.ID) }),
			"security-groups":      joined(eni.Groups, func(g account.GroupRef) string { return g.Name }),
		} {
			values[dir+name] = value
		}
		if len(eni.Prefixes) > 0 {
			values[dir+"ipv4-prefix"] = joined(eni.Prefixes, netip.Prefix.String)
		}
	}
	return values
}

func joined[T any](items []T, text func(T) string) string {
	texts := make([]string, 0, len(items))
	for _, item := range items {
		texts = append(texts, text(item))
	}
	return strings.Join(texts, "\n")
}

// identity is the instance identity document.
func (s *Service) identity(meta account.Metadata) string {
	text, err := json.MarshalIndent(map[string]any{
		"accountId": s.acc.Owner(), "architecture": "x86_64", "availabilityZone": meta.Zone, "billingProducts": nil,
		"devpayProductCodes": nil, "marketplaceProductCodes": nil, "imageId": meta.Image, "instanceId": meta.ID,
		"instanceType": meta.Type, "kernelId": nil, "pendingTime": meta.LaunchTime.UTC().Format(time.RFC3339),
		"privateIp": meta.Address, "ramdiskId": nil, "region": s.acc.Region(), "version": "2017-09-30",
	}, "", "  ")
	if err != nil {
		panic("imds: document can not be marshalled: " + err.Error()) // plain values
	}
	return string(text)
}
