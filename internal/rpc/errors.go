// Package rpc is how the programs of eniplane serve and call each other: one
// server with its interceptors, one client, one shape of errors. What an RPC
// means does not belong here.
package rpc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/eniplane/eniplane/internal/reason"
)

// Domain is the domain of every google.rpc.ErrorInfo that eniplane sends.
const Domain = "eniplane.dev"

// FieldViolation is one field of a request that is wrong.
type FieldViolation struct {
	// Field is the path of the field in proto names, such as
	// "snapshot.pool[3].address".
	Field string
	// Description says in words what is wrong.
	Description string
	// Reason says it for programs. Zero means the reason of the whole error.
	Reason reason.Reason
}

// Error is a refusal with everything that its caller may need. It becomes a
// gRPC status with google.rpc.ErrorInfo, and with BadRequest and RetryInfo
// where they apply.
type Error struct {
	// Code is the gRPC code; OK is sent as Internal.
	Code codes.Code
	// Reason is the reason. Zero is sent as reason.Internal.
	Reason reason.Reason
	// Message is one sentence for people.
	Message string
	// Fields are the wrong fields of a request; nil for other errors.
	Fields []FieldViolation
	// Metadata are the numbers and names that led to it; may be nil.
	Metadata map[string]string
	// RetryAfter is when it makes sense to call again. Zero means not said.
	RetryAfter time.Duration
}

// Refuse returns an Error with the given code, reason and sentence.
func Refuse(code codes.Code, r reason.Reason, format string, args ...any) *Error {
	return &Error{Code: code, Reason: r, Message: fmt.Sprintf(format, args...)}
}

// InvalidField returns an INVALID_ARGUMENT that names one field by its path and
// says what is wrong with it.
func InvalidField(field string, r reason.Reason, format string, args ...any) *Error {
	description := fmt.Sprintf(format, args...)
	return &Error{
		Code:    codes.InvalidArgument,
		Reason:  r,
		Message: field + ": " + description,
		Fields:  []FieldViolation{{Field: field, Description: description, Reason: r}},
	}
}

// With returns a copy of e whose metadata has one more entry.
func (e *Error) With(key, value string) *Error {
	c := *e
	c.Metadata = make(map[string]string, len(e.Metadata)+1)
	for k, v := range e.Metadata {
		c.Metadata[k] = v
	}
	c.Metadata[key] = value
	return &c
}

// Error returns the reason and the sentence.
func (e *Error) Error() string {
	return e.Reason.String() + ": " + e.Message
}

// GRPCStatus returns the error as gRPC sends it. It makes status.FromError and
// status.Code work on an *Error.
func (e *Error) GRPCStatus() *status.Status {
	code, why := e.Code, e.Reason
	if code == codes.OK {
		code = codes.Internal
	}
	if why == reason.Unspecified {
		why = reason.Internal
	}
	details := []protoadapt.MessageV1{&errdetails.ErrorInfo{Reason: why.String(), Domain: Domain, Metadata: e.Metadata}}
	if len(e.Fields) > 0 {
		bad := &errdetails.BadRequest{}
		for _, f := range e.Fields {
			v := &errdetails.BadRequest_FieldViolation{Field: f.Field, Description: f.Description, Reason: f.Reason.String()}
			if f.Reason == reason.Unspecified {
				v.Reason = why.String()
			}
			bad.FieldViolations = append(bad.FieldViolations, v)
		}
		details = append(details, bad)
	}
	if e.RetryAfter > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(e.RetryAfter)})
	}
	st := status.New(code, e.Message)
	if withDetails, err := st.WithDetails(details...); err == nil {
		return withDetails
	}
	return st // Details are marshalled from our own messages, which cannot fail.
}

// Rule says how one sentinel leaves a server.
type Rule struct {
	// Err is matched with errors.Is.
	Err error
	// Code and Reason are what the caller gets.
	Code   codes.Code
	Reason reason.Reason
	// RetryAfter is sent as RetryInfo if it is positive.
	RetryAfter time.Duration
}

// Table maps the errors of a service to what its callers get, in order. Every
// service has one.
type Table []Rule

// Status translates err for the wire. nil stays nil; an *Error in the chain and
// a gRPC status pass; context errors become CANCELLED and DEADLINE_EXCEEDED; the
// first rule that matches decides about the rest; what nothing matches is
// INTERNAL with a fixed text that gives nothing away. The original stays in the
// chain, for the log.
func (t Table) Status(err error) error {
	if err == nil {
		return nil
	}
	var refusal *Error
	if errors.As(err, &refusal) {
		return refusal
	}
	if errors.Is(err, context.Canceled) {
		return status.FromContextError(context.Canceled).Err()
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return status.FromContextError(context.DeadlineExceeded).Err()
	}
	for _, rule := range t {
		if errors.Is(err, rule.Err) {
			return &Error{Code: rule.Code, Reason: rule.Reason, Message: err.Error(), RetryAfter: rule.RetryAfter}
		}
	}
	var remote interface{ GRPCStatus() *status.Status }
	if errors.As(err, &remote) {
		return remote.GRPCStatus().Err()
	}
	return &unforeseen{cause: err}
}

// unforeseen is an error that no rule knows: its text is for the log only.
type unforeseen struct{ cause error }

func (u *unforeseen) Error() string { return "unforeseen: " + u.cause.Error() }

func (u *unforeseen) Unwrap() error { return u.cause }

func (u *unforeseen) GRPCStatus() *status.Status {
	return Refuse(codes.Internal, reason.Internal, "internal error; the log of this service has the cause").GRPCStatus()
}

func detail[T any](err error) (found T, ok bool) {
	st, isStatus := status.FromError(err)
	if !isStatus {
		return found, false
	}
	for _, d := range st.Details() {
		if v, matches := d.(T); matches {
			return v, true
		}
	}
	return found, false
}

// ReasonOf returns the reason of an error that came over gRPC, or of an *Error.
// It is reason.Unspecified if there is none, or one that this program does not
// know.
func ReasonOf(err error) reason.Reason {
	if info, ok := detail[*errdetails.ErrorInfo](err); ok && info.GetDomain() == Domain {
		r, _ := reason.Parse(info.GetReason())
		return r
	}
	return reason.Unspecified
}

// MetadataOf returns the metadata of an error that came over gRPC; nil if it has
// none.
func MetadataOf(err error) map[string]string {
	if info, ok := detail[*errdetails.ErrorInfo](err); ok {
		return info.GetMetadata()
	}
	return nil
}

// RetryAfter returns when the server wants to be called again. ok is false if
// it did not say.
func RetryAfter(err error) (after time.Duration, ok bool) {
	if info, found := detail[*errdetails.RetryInfo](err); found {
		return info.GetRetryDelay().AsDuration(), true
	}
	return 0, false
}
