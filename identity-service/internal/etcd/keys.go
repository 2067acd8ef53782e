package etcd

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/prefix"
)

// Root is the prefix of all our keys.
const Root = "/eniplane/identity/v1/"

// The kinds of keys under Root:
//
//	meta                    which ledger this is
//	p/<prefix>              its number and when it was given
//	n/<number>              its prefix
//	s/<digest>/<part>       a part of a set
//	s/<digest>/meta         the set is complete
//	ss/<session>            a session
//	h/<session>/<owner>     a holding
const (
	keyMeta     = Root + "meta"
	dirPrefix   = Root + "p/"
	dirNumber   = Root + "n/"
	dirSet      = Root + "s/"
	dirSession  = Root + "ss/"
	dirHolding  = Root + "h/"
	setMetaName = "meta"
)

var errMalformed = errors.New("malformed key")

// prefixKey keeps the order of prefixes: family, address in hexadecimal, length.
func prefixKey(p netip.Prefix) string {
	if p.Addr().Is4() {
		a := p.Addr().As4()
		return dirPrefix + "4/" + hex.EncodeToString(a[:]) + "/" + fmt.Sprintf("%03d", p.Bits())
	}
	a := p.Addr().As16()
	return dirPrefix + "6/" + hex.EncodeToString(a[:]) + "/" + fmt.Sprintf("%03d", p.Bits())
}

func parsePrefixKey(rest string) (netip.Prefix, error) {
	parts := strings.Split(rest, "/")
	if len(parts) != 3 {
		return netip.Prefix{}, errMalformed
	}
	raw, err := hex.DecodeString(parts[1])
	if err != nil {
		return netip.Prefix{}, errMalformed
	}
	addr, ok := netip.AddrFromSlice(raw)
	bits, err := strconv.Atoi(parts[2])
	if !ok || err != nil {
		return netip.Prefix{}, errMalformed
	}
	p, err := prefix.Canonical(netip.PrefixFrom(addr, bits))
	if err != nil || prefixKey(p) != dirPrefix+rest {
		return netip.Prefix{}, errMalformed
	}
	return p, nil
}

func numberKey(n ledger.Number) string { return dirNumber + fmt.Sprintf("%010d", n) }

func chunkKey(d ledger.Digest, part int) string {
	return dirSet + d.String() + "/" + fmt.Sprintf("%06d", part)
}

func setMetaKey(d ledger.Digest) string { return dirSet + d.String() + "/" + setMetaName }

func sessionKey(id ledger.SessionID) string { return dirSession + string(id) }

func holdingKey(id ledger.HoldingID) string {
	return dirHolding + string(id.Session) + "/" + string(id.Owner)
}

type metaValue struct {
	LedgerID string        `json:"ledger_id"`
	Format   int           `json:"format"`
	First    ledger.Number `json:"first_number"`
	Last     ledger.Number `json:"last_number"`
}

type setMetaValue struct {
	Parts     int  `json:"parts"`
	Prefixes  int  `json:"prefixes"`
	Condemned bool `json:"condemned,omitempty"`
}

type sessionValue struct {
	Node    string       `json:"node"`
	NodeUID string       `json:"node_uid"`
	BootID  string       `json:"boot_id"`
	Epoch   ledger.Epoch `json:"epoch"`
	Request string       `json:"request"`
	Body    digest       `json:"body"`
}

type holdingValue struct {
	Kind       ledger.OwnerKind  `json:"kind"`
	Namespace  string            `json:"namespace,omitempty"`
	Name       string            `json:"name"`
	UID        string            `json:"uid"`
	Dropped    bool              `json:"dropped,omitempty"`
	Set        digest            `json:"set"`
	Epoch      ledger.Epoch      `json:"epoch"`
	Generation ledger.Generation `json:"generation"`
	Request    string            `json:"request"`
	Body       digest            `json:"body"`
	Changed    ledger.Millis     `json:"changed_ms"`
}

// digest is a ledger.Digest in JSON: hexadecimal.
type digest ledger.Digest

func (d digest) MarshalText() ([]byte, error) { return []byte(ledger.Digest(d).String()), nil }

func (d *digest) UnmarshalText(b []byte) error {
	parsed, err := parseDigest(string(b))
	*d = digest(parsed)
	return err
}

func parseDigest(s string) (ledger.Digest, error) {
	raw, err := hex.DecodeString(s)
	if err != nil || len(raw) != len(ledger.Digest{}) {
		return ledger.Digest{}, fmt.Errorf("%w: %q is no digest", errMalformed, s)
	}
	return ledger.Digest(raw), nil
}

func numberValue(g ledger.Grant) string { return g.Prefix.String() }

func prefixValue(g ledger.Grant, at ledger.Millis) string {
	return strconv.FormatUint(uint64(g.Number), 10) + " " + strconv.FormatInt(int64(at), 10)
}

// decode says what a key means. What cannot be understood is index.Malformed.
func decode(kv *mvccpb.KeyValue, deleted bool) index.Record {
	r, err := decodeKey(strings.TrimPrefix(string(kv.Key), Root), kv, deleted)
	switch {
	case err == nil:
		return r
	case deleted:
		return index.Malformed{Key: string(kv.Key)}
	default:
		return index.Malformed{Key: string(kv.Key), Err: err}
	}
}

func decodeKey(key string, kv *mvccpb.KeyValue, deleted bool) (index.Record, error) {
	kind, rest, _ := strings.Cut(key, "/")
	switch kind {
	case "meta":
		return decodeMeta(kv, deleted)
	case "p":
		return decodePrefix(rest, kv, deleted)
	case "n":
		return decodeNumber(rest, kv, deleted)
	case "s":
		return decodeSet(rest, kv, deleted)
	case "ss":
		return decodeSession(rest, kv, deleted)
	case "h":
		return decodeHolding(rest, kv, deleted)
	default:
		return nil, fmt.Errorf("%w: nobody writes %q", errMalformed, kind)
	}
}

func decodeMeta(kv *mvccpb.KeyValue, deleted bool) (index.Record, error) {
	r := index.Meta{Revision: kv.ModRevision, Deleted: deleted}
	if deleted {
		return r, nil
	}
	var v metaValue
	if err := json.Unmarshal(kv.Value, &v); err != nil {
		return nil, fmt.Errorf("read meta: %w", err)
	}
	r.LedgerID, r.Range = v.LedgerID, ledger.Range{First: v.First, Last: v.Last}
	return r, nil
}

func decodePrefix(rest string, kv *mvccpb.KeyValue, deleted bool) (index.Record, error) {
	p, err := parsePrefixKey(rest)
	if err != nil {
		return nil, err
	}
	r := index.Prefix{Grant: ledger.Grant{Prefix: p}, Revision: kv.CreateRevision, Deleted: deleted}
	if deleted {
		return r, nil
	}
	number, created, _ := strings.Cut(string(kv.Value), " ")
	n, err := strconv.ParseUint(number, 10, 32)
	if err != nil || n == 0 {
		return nil, fmt.Errorf("%w: %q is no number", errMalformed, number)
	}
	ms, err := strconv.ParseInt(created, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%w: %q is no time", errMalformed, created)
	}
	r.Number, r.Created = ledger.Number(n), ledger.Millis(ms)
	return r, nil
}

func decodeNumber(rest string, kv *mvccpb.KeyValue, deleted bool) (index.Record, error) {
	n, err := strconv.ParseUint(rest, 10, 32)
	if err != nil || n == 0 || numberKey(ledger.Number(n)) != string(kv.Key) {
		return nil, fmt.Errorf("%w: %q is no number", errMalformed, rest)
	}
	r := index.Number{Grant: ledger.Grant{Number: ledger.Number(n)}, Deleted: deleted}
	if deleted {
		return r, nil
	}
	if r.Prefix, err = prefix.Parse(string(kv.Value)); err != nil {
		return nil, fmt.Errorf("prefix of number %d: %w", n, err)
	}
	return r, nil
}

func decodeSet(rest string, kv *mvccpb.KeyValue, deleted bool) (index.Record, error) {
	name, part, _ := strings.Cut(rest, "/")
	d, err := parseDigest(name)
	if err != nil {
		return nil, err
	}
	if part == setMetaName {
		r := index.SetMeta{Set: d, Revision: kv.ModRevision, Deleted: deleted}
		if deleted {
			return r, nil
		}
		var v setMetaValue
		if err := json.Unmarshal(kv.Value, &v); err != nil {
			return nil, fmt.Errorf("read meta of a set: %w", err)
		}
		r.Parts, r.Prefixes, r.Condemned = v.Parts, v.Prefixes, v.Condemned
		return r, nil
	}
	i, err := strconv.Atoi(part)
	if err != nil || chunkKey(d, i) != string(kv.Key) {
		return nil, fmt.Errorf("%w: %q is no part of a set", errMalformed, part)
	}
	r := index.Chunk{Set: d, Part: i, Deleted: deleted}
	if deleted {
		return r, nil
	}
	if r.Prefixes, err = ledger.ParsePrefixes(kv.Value); err != nil {
		return nil, err
	}
	return r, nil
}

func decodeSession(rest string, kv *mvccpb.KeyValue, deleted bool) (index.Record, error) {
	r := index.Session{Session: ledger.Session{ID: ledger.SessionID(rest)}, Revision: kv.ModRevision, Deleted: deleted}
	if deleted {
		return r, nil
	}
	var v sessionValue
	if err := json.Unmarshal(kv.Value, &v); err != nil {
		return nil, fmt.Errorf("read session: %w", err)
	}
	if ledger.SessionIDOf(v.Node, v.NodeUID) != r.ID || v.Epoch == 0 {
		return nil, fmt.Errorf("%w: it is not the session of node %q", errMalformed, v.Node)
	}
	r.Session = ledger.Session{
		ID: r.ID, Node: v.Node, NodeUID: v.NodeUID, BootID: v.BootID,
		Epoch: v.Epoch, Request: ledger.RequestID(v.Request), Body: ledger.Digest(v.Body),
	}
	return r, nil
}

func decodeHolding(rest string, kv *mvccpb.KeyValue, deleted bool) (index.Record, error) {
	id, owner, ok := strings.Cut(rest, "/")
	if !ok || id == "" || owner == "" {
		return nil, fmt.Errorf("%w: it names no holding", errMalformed)
	}
	r := index.Holding{
		ID:       ledger.HoldingID{Session: ledger.SessionID(id), Owner: ledger.OwnerKey(owner)},
		Revision: kv.ModRevision, Deleted: deleted,
	}
	if deleted {
		return r, nil
	}
	var v holdingValue
	if err := json.Unmarshal(kv.Value, &v); err != nil {
		return nil, fmt.Errorf("read holding: %w", err)
	}
	r.Holding = ledger.Holding{
		Owner:   ledger.Owner{Kind: v.Kind, Namespace: v.Namespace, Name: v.Name, UID: v.UID},
		Dropped: v.Dropped, Set: ledger.Digest(v.Set), Epoch: v.Epoch, Generation: v.Generation,
		Request: ledger.RequestID(v.Request), Body: ledger.Digest(v.Body), Changed: v.Changed,
	}
	if r.Owner.Key() != r.ID.Owner {
		return nil, fmt.Errorf("%w: it is of another owner", errMalformed)
	}
	return r, nil
}

// encode marshals a value of ours, which cannot fail.
func encode(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("marshal %T: %v", v, err))
	}
	return string(b)
}

func encodeSession(s ledger.Session) string {
	return encode(sessionValue{
		Node: s.Node, NodeUID: s.NodeUID, BootID: s.BootID, Epoch: s.Epoch,
		Request: string(s.Request), Body: digest(s.Body),
	})
}

func encodeHolding(h ledger.Holding) string {
	return encode(holdingValue{
		Kind: h.Owner.Kind, Namespace: h.Owner.Namespace, Name: h.Owner.Name, UID: h.Owner.UID,
		Dropped: h.Dropped, Set: digest(h.Set), Epoch: h.Epoch, Generation: h.Generation,
		Request: string(h.Request), Body: digest(h.Body), Changed: h.Changed,
	})
}
