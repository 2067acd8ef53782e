// Package reason is the closed set of reasons for which eniplane refuses, blocks
// or degrades, for code that must not import protobuf. It is numerically equal
// to the enum eniplane.reason.v1.Reason, so that a conversion is a cast. What a
// caller is told in words does not belong here.
package reason

import (
	"cmp"
	"slices"
	"strconv"
)

// Reason says why. The zero value means that no reason was given, and is never
// sent with a refusal.
type Reason uint16

// The reasons. Their meanings for users stand in reason.proto, the same words.
const (
	// Unspecified: no reason was given. Never sent with a refusal.
	Unspecified Reason = 0
	// FieldInvalid: a field of the request is missing, malformed, out of range
	// or oversized.
	FieldInvalid Reason = 1
	// FieldsContradict: fields of one request contradict each other.
	FieldsContradict Reason = 2
	// RequestIDReused: the same request id was used before with another body.
	RequestIDReused Reason = 3
	// Internal: a bug or an unforeseen error of this service; details are in its
	// log.
	Internal Reason = 4
	// Unauthenticated: the caller presented no valid credential.
	Unauthenticated Reason = 5
	// PermissionDenied: the caller may not call this RPC.
	PermissionDenied Reason = 6
	// ForeignNode: the caller may act for its own node only.
	ForeignNode Reason = 7
	// Overloaded: too many requests; come back after the given delay.
	Overloaded Reason = 8
	// NotReady: the server is starting, stopping or has not seen its inputs yet.
	NotReady Reason = 9
	// NotLeader: another replica holds the write role.
	NotLeader Reason = 10
	// Paused: an operator paused this node.
	Paused Reason = 11
	// PageTokenInvalid: a page token that this server did not make, or made for
	// another request.
	PageTokenInvalid Reason = 12
	// SlowReader: the reader of a stream was too slow and must start again.
	SlowReader Reason = 13
	// RevisionUnknown: the revision to resume from is no longer, or not yet,
	// known: start again.
	RevisionUnknown Reason = 14
	// NodeUnknown: no such node is registered.
	NodeUnknown Reason = 30
	// NodeRemoved: the node was removed.
	NodeRemoved Reason = 31
	// InstanceUnknown: EC2 shows no such instance (which alone proves nothing).
	InstanceUnknown Reason = 32
	// InstanceMismatch: the instance id contradicts the Node or an earlier
	// registration.
	InstanceMismatch Reason = 33
	// InstanceTypeUnknown: EC2 describes no such instance type, or its limits
	// cannot be read.
	InstanceTypeUnknown Reason = 34
	// InstanceNotRunning: the instance is not running or stopped; nothing can be
	// attached.
	InstanceNotRunning Reason = 35
	// OutOfENIs: every ENI slot and every address slot of the instance is taken.
	OutOfENIs Reason = 36
	// MaxAllocate: max-allocate forbids more addresses.
	MaxAllocate Reason = 37
	// MaxPods: the node can run no more pods.
	MaxPods Reason = 38
	// SubnetFull: the chosen subnets have no free address.
	SubnetFull Reason = 39
	// SubnetNoMatch: the node's selection of subnets matches none.
	SubnetNoMatch Reason = 40
	// SubnetFragmented: the subnet has free addresses but no contiguous /28.
	SubnetFragmented Reason = 41
	// SecurityGroupNoMatch: the node's selection of security groups matches
	// none.
	SecurityGroupNoMatch Reason = 42
	// CIDRUnknown: the CIDR of a subnet or VPC is not known yet; its ENIs are
	// withheld.
	CIDRUnknown Reason = 43
	// DeviceIndexTaken: the device index is taken on the instance.
	DeviceIndexTaken Reason = 44
	// EC2Throttled: EC2 throttled the call.
	EC2Throttled Reason = 45
	// EC2Denied: the credentials lack a permission that the call needs.
	EC2Denied Reason = 46
	// EC2Unavailable: EC2 could not be reached or answered with a server error.
	EC2Unavailable Reason = 47
	// EC2Refused: EC2 refused the call for another cause, given in the message.
	EC2Refused Reason = 48
	// ReadingStale: a newer reading of EC2 is awaited before the next decision.
	ReadingStale Reason = 49
	// ENIMalformed: EC2 described an interface that cannot be understood.
	ENIMalformed Reason = 50
	// WatermarkUnreachable: the watermarks cannot be met by this instance type.
	WatermarkUnreachable Reason = 51
	// StaleEpoch: the snapshot's epoch is older than the one that the object
	// carries.
	StaleEpoch Reason = 60
	// StaleGeneration: the snapshot's generation is older than the one that the
	// object carries.
	StaleGeneration Reason = 61
	// Conflict: somebody else wrote the object first; it is read and planned
	// again.
	Conflict Reason = 62
	// AddressNotOnENI: an address of the pool names an ENI that the snapshot
	// lacks, or that does not list it.
	AddressNotOnENI Reason = 63
	// Duplicate: the same ENI or address appears twice.
	Duplicate Reason = 64
	// AddressOutsideSubnet: an address lies outside the subnet of its ENI, or is
	// of the wrong family.
	AddressOutsideSubnet Reason = 65
	// ObjectMalformed: the stored object cannot be understood; it is served as
	// far as it makes sense.
	ObjectMalformed Reason = 66
	// StaleRound: the answer belongs to a round of release that is over.
	StaleRound Reason = 67
	// APIServerUnavailable: the Kubernetes API server could not be reached or
	// refused the write.
	APIServerUnavailable Reason = 68
	// APIServerRefused: the Kubernetes API server refused the object as invalid
	// or forbidden.
	APIServerRefused Reason = 69
	// PrefixInvalid: not a CIDR, or one that cannot be made canonical.
	PrefixInvalid Reason = 90
	// PrefixReserved: the prefix is reserved (0.0.0.0/0 and ::/0 are the world
	// identities).
	PrefixReserved Reason = 91
	// PrefixUnknown: no prefix covers the address, or the prefix has no number.
	PrefixUnknown Reason = 92
	// IdentityUnknown: no such number is in use.
	IdentityUnknown Reason = 93
	// SessionUnknown: no such session.
	SessionUnknown Reason = 94
	// SessionExpired: the session expired; open a new one and declare every
	// holding again.
	SessionExpired Reason = 95
	// SessionEvicted: an operator evicted the session.
	SessionEvicted Reason = 96
	// StaleSession: the session's epoch, or the holding's generation, is older
	// than the stored one.
	StaleSession Reason = 97
	// OwnerUnknown: the session holds nothing for this owner.
	OwnerUnknown Reason = 98
	// NumberOutOfRange: the preferred number is outside the configured range.
	NumberOutOfRange Reason = 99
	// NumberTaken: the preferred number belongs to another prefix, or is in
	// quarantine.
	NumberTaken Reason = 100
	// NumbersExhausted: no number is free.
	NumbersExhausted Reason = 101
	// Recovering: the store is new or foreign; no new numbers until sessions re-
	// asserted theirs.
	Recovering Reason = 102
	// StoreUnavailable: the store could not be reached or has no quorum.
	StoreUnavailable Reason = 103
	// StoreFull: the store is out of space.
	StoreFull Reason = 104
	// StoreCorrupt: a key in the store cannot be understood.
	StoreCorrupt Reason = 105
	// StoreContended: another holder changed the same keys; try again.
	StoreContended Reason = 106
	// PoolEmpty: no free address on this node.
	PoolEmpty Reason = 120
	// AddressUnknown: this node has no such address.
	AddressUnknown Reason = 121
	// AddressInUse: the address belongs to another owner.
	AddressInUse Reason = 122
	// MapFull: the kernel's map is full.
	MapFull Reason = 123
	// MapRefused: the kernel refused the write for another cause.
	MapRefused Reason = 124
	// MapInMemory: no kernel map can be used here; entries are kept in memory
	// only.
	MapInMemory Reason = 125
	// MapLayout: the pinned map has another layout than configured.
	MapLayout Reason = 126
	// MapDrift: the map holds what was not wanted, or lacks what was.
	MapDrift Reason = 127
	// SourceNotListed: a source of prefixes has not been listed yet.
	SourceNotListed Reason = 128
	// ServiceAway: a service that this one depends on is away; the last state
	// stays in force.
	ServiceAway Reason = 129
	// AddressRetained: the address is in use by a pod and stays.
	AddressRetained Reason = 130
)

func name(r Reason) (string, bool) {
	switch r {
	case Unspecified:
		return "UNSPECIFIED", true
	case FieldInvalid:
		return "FIELD_INVALID", true
	case FieldsContradict:
		return "FIELDS_CONTRADICT", true
	case RequestIDReused:
		return "REQUEST_ID_REUSED", true
	case Internal:
		return "INTERNAL", true
	case Unauthenticated:
		return "UNAUTHENTICATED", true
	case PermissionDenied:
		return "PERMISSION_DENIED", true
	case ForeignNode:
		return "FOREIGN_NODE", true
	case Overloaded:
		return "OVERLOADED", true
	case NotReady:
		return "NOT_READY", true
	case NotLeader:
		return "NOT_LEADER", true
	case Paused:
		return "PAUSED", true
	case PageTokenInvalid:
		return "PAGE_TOKEN_INVALID", true
	case SlowReader:
		return "SLOW_READER", true
	case RevisionUnknown:
		return "REVISION_UNKNOWN", true
	case NodeUnknown:
		return "NODE_UNKNOWN", true
	case NodeRemoved:
		return "NODE_REMOVED", true
	case InstanceUnknown:
		return "INSTANCE_UNKNOWN", true
	case InstanceMismatch:
		return "INSTANCE_MISMATCH", true
	case InstanceTypeUnknown:
		return "INSTANCE_TYPE_UNKNOWN", true
	case InstanceNotRunning:
		return "INSTANCE_NOT_RUNNING", true
	case OutOfENIs:
		return "OUT_OF_ENIS", true
	case MaxAllocate:
		return "MAX_ALLOCATE", true
	case MaxPods:
		return "MAX_PODS", true
	case SubnetFull:
		return "SUBNET_FULL", true
	case SubnetNoMatch:
		return "SUBNET_NO_MATCH", true
	case SubnetFragmented:
		return "SUBNET_FRAGMENTED", true
	case SecurityGroupNoMatch:
		return "SECURITY_GROUP_NO_MATCH", true
	case CIDRUnknown:
		return "CIDR_UNKNOWN", true
	case DeviceIndexTaken:
		return "DEVICE_INDEX_TAKEN", true
	case EC2Throttled:
		return "EC2_THROTTLED", true
	case EC2Denied:
		return "EC2_DENIED", true
	case EC2Unavailable:
		return "EC2_UNAVAILABLE", true
	case EC2Refused:
		return "EC2_REFUSED", true
	case ReadingStale:
		return "READING_STALE", true
	case ENIMalformed:
		return "ENI_MALFORMED", true
	case WatermarkUnreachable:
		return "WATERMARK_UNREACHABLE", true
	case StaleEpoch:
		return "STALE_EPOCH", true
	case StaleGeneration:
		return "STALE_GENERATION", true
	case Conflict:
		return "CONFLICT", true
	case AddressNotOnENI:
		return "ADDRESS_NOT_ON_ENI", true
	case Duplicate:
		return "DUPLICATE", true
	case AddressOutsideSubnet:
		return "ADDRESS_OUTSIDE_SUBNET", true
	case ObjectMalformed:
		return "OBJECT_MALFORMED", true
	case StaleRound:
		return "STALE_ROUND", true
	case APIServerUnavailable:
		return "API_SERVER_UNAVAILABLE", true
	case APIServerRefused:
		return "API_SERVER_REFUSED", true
	case PrefixInvalid:
		return "PREFIX_INVALID", true
	case PrefixReserved:
		return "PREFIX_RESERVED", true
	case PrefixUnknown:
		return "PREFIX_UNKNOWN", true
	case IdentityUnknown:
		return "IDENTITY_UNKNOWN", true
	case SessionUnknown:
		return "SESSION_UNKNOWN", true
	case SessionExpired:
		return "SESSION_EXPIRED", true
	case SessionEvicted:
		return "SESSION_EVICTED", true
	case StaleSession:
		return "STALE_SESSION", true
	case OwnerUnknown:
		return "OWNER_UNKNOWN", true
	case NumberOutOfRange:
		return "NUMBER_OUT_OF_RANGE", true
	case NumberTaken:
		return "NUMBER_TAKEN", true
	case NumbersExhausted:
		return "NUMBERS_EXHAUSTED", true
	case Recovering:
		return "RECOVERING", true
	case StoreUnavailable:
		return "STORE_UNAVAILABLE", true
	case StoreFull:
		return "STORE_FULL", true
	case StoreCorrupt:
		return "STORE_CORRUPT", true
	case StoreContended:
		return "STORE_CONTENDED", true
	case PoolEmpty:
		return "POOL_EMPTY", true
	case AddressUnknown:
		return "ADDRESS_UNKNOWN", true
	case AddressInUse:
		return "ADDRESS_IN_USE", true
	case MapFull:
		return "MAP_FULL", true
	case MapRefused:
		return "MAP_REFUSED", true
	case MapInMemory:
		return "MAP_IN_MEMORY", true
	case MapLayout:
		return "MAP_LAYOUT", true
	case MapDrift:
		return "MAP_DRIFT", true
	case SourceNotListed:
		return "SOURCE_NOT_LISTED", true
	case ServiceAway:
		return "SERVICE_AWAY", true
	case AddressRetained:
		return "ADDRESS_RETAINED", true
	default:
		return "", false
	}
}

// String returns the name on the wire without its prefix, such as
// "POOL_EMPTY". A value outside the set gives "REASON(n)".
func (r Reason) String() string {
	if s, ok := name(r); ok {
		return s
	}
	return "REASON(" + strconv.Itoa(int(r)) + ")"
}

// Known reports whether r is in the set. Unspecified is.
func (r Reason) Known() bool {
	_, ok := name(r)
	return ok
}

// All returns every reason but Unspecified, in numeric order. The caller owns
// the slice.
func All() []Reason {
	all := []Reason{
		FieldInvalid,
		FieldsContradict,
		RequestIDReused,
		Internal,
		Unauthenticated,
		PermissionDenied,
		ForeignNode,
		Overloaded,
		NotReady,
		NotLeader,
		Paused,
		PageTokenInvalid,
		SlowReader,
		RevisionUnknown,
		NodeUnknown,
		NodeRemoved,
		InstanceUnknown,
		InstanceMismatch,
		InstanceTypeUnknown,
		InstanceNotRunning,
		OutOfENIs,
		MaxAllocate,
		MaxPods,
		SubnetFull,
		SubnetNoMatch,
		SubnetFragmented,
		SecurityGroupNoMatch,
		CIDRUnknown,
		DeviceIndexTaken,
		EC2Throttled,
		EC2Denied,
		EC2Unavailable,
		EC2Refused,
		ReadingStale,
		ENIMalformed,
		WatermarkUnreachable,
		StaleEpoch,
		StaleGeneration,
		Conflict,
		AddressNotOnENI,
		Duplicate,
		AddressOutsideSubnet,
		ObjectMalformed,
		StaleRound,
		APIServerUnavailable,
		APIServerRefused,
		PrefixInvalid,
		PrefixReserved,
		PrefixUnknown,
		IdentityUnknown,
		SessionUnknown,
		SessionExpired,
		SessionEvicted,
		StaleSession,
		OwnerUnknown,
		NumberOutOfRange,
		NumberTaken,
		NumbersExhausted,
		Recovering,
		StoreUnavailable,
		StoreFull,
		StoreCorrupt,
		StoreContended,
		PoolEmpty,
		AddressUnknown,
		AddressInUse,
		MapFull,
		MapRefused,
		MapInMemory,
		MapLayout,
		MapDrift,
		SourceNotListed,
		ServiceAway,
		AddressRetained,
	}
	slices.SortFunc(all, cmp.Compare[Reason])
	return all
}

// Parse returns the reason of a name as String gives it, and whether the name is
// in the set.
func Parse(s string) (Reason, bool) {
	for _, r := range All() {
		if n, _ := name(r); n == s {
			return r, true
		}
	}
	return Unspecified, false
}
