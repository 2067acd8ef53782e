package index

import (
	"net/netip"

	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

// Record is what one key of the store says. Deleted records carry only what
// names them.
type Record interface{ rank() int }

// Meta is the record of the ledger itself.
type Meta struct {
	LedgerID string
	Range    ledger.Range
	// Revision is that of the key; every commit is guarded on it.
	Revision int64
	Deleted  bool
}

// Prefix gives a prefix its number.
type Prefix struct {
	ledger.Grant
	Created ledger.Millis
	// Revision is the one at which it was allocated.
	Revision int64
	Deleted  bool
}

// Number gives a number its prefix: the other direction of Prefix.
type Number struct {
	ledger.Grant
	Deleted bool
}

// Chunk is one part of a set, in order.
type Chunk struct {
	Set      ledger.Digest
	Part     int
	Prefixes []netip.Prefix
	Deleted  bool
}

// SetMeta says that a set is stored as a whole.
type SetMeta struct {
	Set      ledger.Digest
	Parts    int
	Prefixes int
	// Condemned marks a set that nobody holds and that will be deleted unless
	// somebody takes it up.
	Condemned bool
	Revision  int64
	Deleted   bool
}

// Session is a session.
type Session struct {
	ledger.Session
	Revision int64
	Deleted  bool
}

// Holding is a holding.
type Holding struct {
	ID ledger.HoldingID
	ledger.Holding
	Revision int64
	Deleted  bool
}

// Malformed is a key that cannot be understood. It concerns nothing else.
type Malformed struct {
	Key string
	// Err says why. Nil means that the key is gone, or right again.
	Err error
}

// Records of one revision are applied in this order: what is referred to comes
// before what refers to it.
func (Meta) rank() int      { return 0 }
func (Prefix) rank() int    { return 1 }
func (Number) rank() int    { return 2 }
func (Chunk) rank() int     { return 3 }
func (SetMeta) rank() int   { return 4 }
func (Session) rank() int   { return 5 }
func (Holding) rank() int   { return 6 }
func (Malformed) rank() int { return 7 }
