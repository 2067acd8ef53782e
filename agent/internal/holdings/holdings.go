// Package holdings keeps the identity ledger told of what this node holds: one
// session, the whole set of each owner, and an acknowledgement of what the map
// has. Numbers come back and are wished; nothing here writes the map or decides
// who wants what. While the service is away everything stays as it is.
package holdings

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/eniplane/eniplane/agent/internal/condition"
	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/agent/internal/retry"
	"github.com/eniplane/eniplane/agent/internal/wish"
	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/internal/telemetry"
)

// Service is the name of the identity service as a dependency.
const Service = "identity-service"

const (
	// refusedRetry is when a set that was refused for good is tried again: an
	// operator may have made room.
	refusedRetry = 30 * time.Second
	// setTimeout bounds the declaration of one set, up to 16 MiB.
	setTimeout = time.Minute
	// defaultTTL is used if a server names none.
	defaultTTL = 30 * time.Second
)

// errSessionLost: the session is unknown, expired or somebody else's.
var errSessionLost = errors.New("session lost")

// errNotRecorded: the owners could not be saved, so the ledger must not be told.
var errNotRecorded = errors.New("owners not recorded")

// Map is the map that follows the wish.
type Map interface {
	// Sync returns when everything wished before the call was tried.
	Sync(ctx context.Context) error
	// Failures returns what keeps the map from being as the ledger has it: of the
	// prefixes given with their numbers there, 0 for those that are gone; with all,
	// they are everything that it has.
	Failures(held map[netip.Prefix]uint32, all bool) map[netip.Prefix]reason.Reason
}

// Config is what a Client works with.
type Config struct {
	Client identityv1.IdentityServiceClient
	Wish   *wish.Wish
	Map    Map
	Board  *condition.Board
	Logger *slog.Logger
	Tracer trace.Tracer
	// NodeName is the Kubernetes node name, BootID the kernel's boot id.
	NodeName, BootID string
	// NodeUID returns the UID of the Node. It is asked until it knows.
	NodeUID func(ctx context.Context) (string, error)
	// Declare saves the owners that the ledger is going to know, so that the next
	// process can end those that are no more. It returns when they are safe.
	Declare func(owners []ipcache.Owner) error
}

// Client is the node's side of its session.
type Client struct {
	Config
	ledger     string // the id of the ledger of the last session
	generation uint64 // the last one used
	recorded   uint64 // which owners were saved by the last Declare
	watched    watched

	acknowledged atomic.Int64
}

// New returns a Client.
func New(config Config) *Client {
	return &Client{Config: config}
}

// Acknowledged returns the revision of the ledger up to which the map was last
// written; 0 means none yet.
func (c *Client) Acknowledged() int64 { return c.acknowledged.Load() }

// session is the session of the moment.
type session struct {
	proto *identityv1.Session
	ttl   time.Duration
}

// Run keeps a session until ctx ends. It never gives up.
func (c *Client) Run(ctx context.Context) error {
	for wait := time.Duration(0); retry.Sleep(ctx, wait); {
		s, err := c.open(ctx)
		if err == nil {
			wait = 0
			err = c.hold(ctx, s)
		}
		if !errors.Is(err, errSessionLost) {
			c.away(ctx, err)
		}
		wait = retry.Next(wait, err)
	}
	return nil
}

func (c *Client) open(ctx context.Context) (session, error) {
	uid, err := c.NodeUID(ctx)
	if err != nil {
		return session{}, err
	}
	r, err := c.Client.OpenSession(ctx, &identityv1.OpenSessionRequest{
		RequestId: uuid.NewString(), NodeName: c.NodeName, NodeUid: uid, BootId: c.BootID,
	})
	if err != nil {
		return session{}, fmt.Errorf("open a session: %w", err)
	}
	c.there(ctx)
	if c.ledger != "" && c.ledger != r.GetLedgerId() {
		c.Logger.ErrorContext(ctx, "the ledger is another one than before", "before", c.ledger, "now", r.GetLedgerId())
	}
	if c.ledger != r.GetLedgerId() {
		c.Wish.NewLedger()
		c.watched = watched{}
	}
	c.ledger = r.GetLedgerId()
	s := session{proto: r.GetSession(), ttl: r.GetTtl().AsDuration()}
	if s.ttl <= 0 {
		s.ttl = defaultTTL
	}
	c.Logger.InfoContext(ctx, "session opened", telemetry.KeySession, s.proto.GetId(), telemetry.KeyEpoch, s.proto.GetEpoch())
	c.Wish.Replay()
	return s, nil
}

// hold uses a session until it is lost or ctx ends.
func (c *Client) hold(ctx context.Context, s session) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return c.keepAlive(ctx, s) })
	g.Go(func() error { return c.declare(ctx, s) })
	g.Go(func() error { return c.watch(ctx, s) })
	return g.Wait()
}

func (c *Client) keepAlive(ctx context.Context, s session) error {
	interval := s.ttl / 3
	for retry.Sleep(ctx, interval) {
		r, err := c.Client.KeepAlive(ctx, &identityv1.KeepAliveRequest{Session: s.proto})
		switch {
		case lost(err):
			return fmt.Errorf("%w: %w", errSessionLost, err)
		case err != nil:
			c.away(ctx, err)
			interval = min(s.ttl/3, retry.Last)
		default:
			c.there(ctx)
			interval = s.ttl / 3
			if ttl := r.GetTtl().AsDuration(); ttl > 0 {
				interval = ttl / 3
			}
		}
	}
	return ctx.Err()
}

// declare tells the ledger of every owner whose set changed.
func (c *Client) declare(ctx context.Context, s session) error {
	pause := time.Duration(0) // while the service is away, for all owners alike
	for {
		if !retry.Sleep(ctx, pause) {
			return ctx.Err()
		}
		task, wait := c.Wish.Next(time.Now())
		if task == nil {
			if err := c.idle(ctx, wait); err != nil {
				return err
			}
			continue
		}
		err := c.tell(ctx, s, task)
		switch {
		case err == nil:
			pause = 0
		case lost(err):
			c.Wish.Retry(task, time.Time{}, err)
			return fmt.Errorf("%w: %w", errSessionLost, err)
		case errors.Is(err, errNotRecorded):
			pause = retry.Next(pause, err)
			c.Wish.Retry(task, time.Time{}, err)
			c.Board.Set(reason.Internal, "state", err.Error())
		case status.Code(err) == codes.Unavailable:
			pause = retry.Next(pause, err)
			c.Wish.Retry(task, time.Time{}, err)
			c.away(ctx, err)
		case transient(err):
			// It may be this owner's set: the others go on.
			c.Wish.Retry(task, time.Now().Add(retry.Last), err)
			c.refused(ctx, task.Owner, err)
		default:
			c.Wish.Retry(task, time.Now().Add(refusedRetry), err)
			c.refused(ctx, task.Owner, err)
		}
	}
}

// idle waits until there may be a task, at most so long if wait is positive.
func (c *Client) idle(ctx context.Context, wait time.Duration) error {
	var due <-chan time.Time
	if wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		due = timer.C
	}
	select {
	case <-c.Wish.HoldingChanges():
		return nil
	case <-due:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// tell declares, or drops, one owner and waits until the map follows.
func (c *Client) tell(ctx context.Context, s session, task *wish.Task) error {
	// An owner must be on record before the ledger knows it.
	if owners, now := c.Wish.Declared(c.recorded); now != c.recorded {
		if err := c.Declare(owners); err != nil {
			return fmt.Errorf("%w: %w", errNotRecorded, err)
		}
		c.recorded = now
	}
	ctx = trace.ContextWithSpanContext(ctx, task.Span)
	name := "declare holding"
	if task.Drop {
		name = "drop holding"
	}
	ctx, span := c.Tracer.Start(ctx, name)
	defer span.End()
	c.Wish.Follow(span.SpanContext())
	ctx, cancel := context.WithTimeout(ctx, setTimeout)
	defer cancel()

	c.generation++
	if task.Drop {
		r, err := c.Client.DropHolding(ctx, &identityv1.DropHoldingRequest{
			RequestId: uuid.NewString(), Session: s.proto, Owner: ownerProto(task.Owner), Generation: c.generation,
		})
		if err != nil {
			return fmt.Errorf("drop %s: %w", task.Owner, err)
		}
		c.committed(ctx, task, nil, r.GetRevision())
		return nil
	}
	request := &identityv1.SetHoldingRequest{
		RequestId: uuid.NewString(), Session: s.proto, Owner: ownerProto(task.Owner), Generation: c.generation,
		Prefixes: make([]*identityv1.WantedPrefix, len(task.Wanted)),
	}
	for i, w := range task.Wanted {
		request.Prefixes[i] = &identityv1.WantedPrefix{Prefix: w.Prefix.String(), PreferredNumber: w.Number}
	}
	r, err := c.Client.SetHolding(ctx, request)
	if err != nil {
		return fmt.Errorf("declare %s: %w", task.Owner, err)
	}
	numbers := make([]wish.Wanted, 0, len(r.GetAssignments()))
	for i, a := range r.GetAssignments() {
		if i >= len(task.Wanted) {
			break
		}
		numbers = append(numbers, wish.Wanted{Prefix: task.Wanted[i].Prefix, Number: a.GetNumber()})
		if a.GetPreferredRefused() != 0 {
			c.Logger.WarnContext(ctx, "the number of a prefix changes", telemetry.KeyPrefix, a.GetPrefix(),
				"before", task.Wanted[i].Number, telemetry.KeyNumber, a.GetNumber(), telemetry.KeyReason, a.GetPreferredRefused().String())
		}
	}
	c.committed(ctx, task, numbers, r.GetRevision())
	return nil
}

func (c *Client) committed(ctx context.Context, task *wish.Task, numbers []wish.Wanted, revision int64) {
	c.there(ctx)
	c.Board.ClearAbout(about(task.Owner))
	c.Board.Clear(reason.Internal, "state")
	c.Wish.Committed(task, numbers, revision)
	if err := c.Map.Sync(ctx); err != nil {
		c.Wish.Poke() // nobody waits for it any more, but it must follow
	}
	c.Wish.Follow(trace.SpanContext{})
	c.Logger.InfoContext(ctx, "holding committed", telemetry.KeyOwner, task.Owner.String(),
		"prefixes", len(task.Wanted), "dropped", task.Drop, telemetry.KeyRevision, revision)
}

func (c *Client) refused(ctx context.Context, owner ipcache.Owner, err error) {
	r := rpc.ReasonOf(err)
	if r == reason.Unspecified {
		r = reason.Internal
	}
	c.Board.Set(r, about(owner), err.Error())
	c.Logger.ErrorContext(ctx, "holding refused", telemetry.KeyOwner, owner.String(), telemetry.KeyReason, r.String(), telemetry.KeyError, err.Error())
}

func (c *Client) away(ctx context.Context, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	if c.Board.Depend(Service, err) {
		c.Logger.WarnContext(ctx, "the identity service is away", telemetry.KeyError, err.Error())
	}
	c.Wish.Away(err)
	c.Board.Set(reason.ServiceAway, Service, "new prefixes wait for their numbers; what is in the map stays")
}

func (c *Client) there(ctx context.Context) {
	if c.Board.Depend(Service, nil) {
		c.Logger.InfoContext(ctx, "the identity service is there")
	}
	c.Wish.Away(nil)
	c.Board.Clear(reason.ServiceAway, Service)
}

func ownerProto(o ipcache.Owner) *identityv1.Owner {
	return &identityv1.Owner{Kind: identityv1.OwnerKind(o.Kind), Namespace: o.Namespace, Name: o.Name, Uid: o.UID}
}

// about is an owner's holding on the board.
func about(owner ipcache.Owner) string { return "holding of " + owner.String() }

func wireReason(r reason.Reason) reasonv1.Reason { return reasonv1.Reason(r) }

// lost reports whether an error says that the session is no more.
func lost(err error) bool {
	switch rpc.ReasonOf(err) {
	case reason.SessionUnknown, reason.SessionExpired, reason.SessionEvicted, reason.StaleSession:
		return true
	default:
		return false
	}
}

// transient reports whether the same call may work later without anybody's doing.
func transient(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.Aborted, codes.DeadlineExceeded, codes.Canceled, codes.Internal, codes.Unknown:
		return true
	case codes.ResourceExhausted:
		_, again := rpc.RetryAfter(err)
		return again
	default:
		return false
	}
}
