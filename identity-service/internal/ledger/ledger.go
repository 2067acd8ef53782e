// Package ledger decides who holds which prefix and which number a prefix has.
// It is pure: Apply takes what an operation read and returns what the operation
// changes. There are no counters: a reference is a Holding, and a prefix is live
// while any holding's set contains it. Reading, committing and telling others do
// not belong here.
package ledger

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"strings"
)

type (
	// Number is the identity number of a prefix. Zero means none.
	Number uint32
	// SessionID names the session of one node; see SessionIDOf.
	SessionID string
	// Epoch counts how often a session was opened, from 1.
	Epoch uint64
	// Generation orders the sets of one owner within an epoch, from 1.
	Generation uint64
	// RequestID names one call of a client.
	RequestID string
	// Millis is a time in milliseconds since the Unix epoch.
	Millis int64
)

// Digest is a SHA-256: of a set (which it names) or of the body of a request.
type Digest [sha256.Size]byte

// String returns the digest in hexadecimal.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// OwnerKind is what kind of thing wants prefixes, equal to
// eniplane.identity.v1.OwnerKind.
type OwnerKind uint8

// Owner is who wants a set of prefixes. All four fields are its identity: an
// object that was created again under the same name is another owner.
type Owner struct {
	Kind      OwnerKind
	Namespace string
	Name      string
	UID       string
}

// OwnerKey is the fixed-length name of an Owner: 64 hexadecimal digits.
type OwnerKey string

// Key returns the name under which the owner's holdings are stored.
func (o Owner) Key() OwnerKey {
	return OwnerKey(Body(string(rune(o.Kind)), o.Namespace, o.Name, o.UID).String())
}

// Compare orders owners by kind, namespace, name, uid.
func (o Owner) Compare(other Owner) int {
	if o.Kind != other.Kind {
		return int(o.Kind) - int(other.Kind)
	}
	for _, c := range []int{
		strings.Compare(o.Namespace, other.Namespace),
		strings.Compare(o.Name, other.Name),
		strings.Compare(o.UID, other.UID),
	} {
		if c != 0 {
			return c
		}
	}
	return 0
}

// Body returns the digest of a list of texts; no two lists have the same.
func Body(parts ...string) Digest {
	h := sha256.New()
	var length [8]byte
	for _, p := range parts {
		binary.BigEndian.PutUint64(length[:], uint64(len(p)))
		h.Write(length[:])
		h.Write([]byte(p))
	}
	return Digest(h.Sum(nil))
}

// SessionIDOf returns the session of a node: its name and a digest of its uid,
// so that a Node created again under the same name has another session.
func SessionIDOf(node, nodeUID string) SessionID {
	return SessionID(node + "." + Body(node, nodeUID).String()[:16])
}

// Session is the one session of a node. It never ends by itself.
type Session struct {
	ID      SessionID
	Node    string
	NodeUID string
	BootID  string
	// Epoch is the highest that was given out; a lower one is fenced off.
	Epoch Epoch
	// Request and Body are of the call that gave Epoch out.
	Request RequestID
	Body    Digest
}

// HoldingID names the holding of one owner on one session.
type HoldingID struct {
	Session SessionID
	Owner   OwnerKey
}

// Holding is a reference: this owner, on this session, holds this set.
type Holding struct {
	Owner Owner
	// Dropped means that the owner holds nothing any more. The record stays for
	// a while, so that a late call of an older generation is still refused.
	Dropped bool
	// Set names the set. It is zero if Dropped.
	Set Digest
	// Epoch and Generation order the changes of this holding.
	Epoch      Epoch
	Generation Generation
	// Request and Body are of the call that made this holding.
	Request RequestID
	Body    Digest
	// Changed is when it was made.
	Changed Millis
}

// Grant is a prefix with the number that it has, or shall get.
type Grant struct {
	Prefix netip.Prefix
	Number Number
}

// Wanted is a prefix that shall have a number, and the number that it had on
// some node. Zero means that any will do.
type Wanted struct {
	Prefix    netip.Prefix
	Preferred Number
}
