// Package rpc is how the programs of eniplane serve and call each other: one
// server with its interceptors, one client, one shape of errors. What an RPC
// means does not belong here.
package rpc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

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

// What is sent of an error is bounded, because it travels in HTTP/2 headers,
// which peers limit, and because a request may have put any text into it.
const (
	maxMessageBytes = 1024
	maxFieldBytes   = 256
	maxFields       = 16
	maxMetadata     = 32
)

// GRPCStatus returns the error as gRPC sends it. It makes status.FromError and
// status.Code work on an *Error. Texts that are too long for headers are cut
// (sentences at 1 KiB, the rest at 256 bytes), and of the wrong fields and the
// metadata the first 16 and 32 are sent.
func (e *Error) GRPCStatus() *status.Status {
	code, why := e.Code, e.Reason
	if code == codes.OK {
		code = codes.Internal
	}
	if why == reason.Unspecified {
		why = reason.Internal
	}
	info := &errdetails.ErrorInfo{Reason: why.String(), Domain: Domain}
	if len(e.Metadata) > 0 {
		info.Metadata = make(map[string]string, min(len(e.Metadata), maxMetadata))
		for _, key := range slices.Sorted(maps.Keys(e.Metadata))[:min(len(e.Metadata), maxMetadata)] {
			info.Metadata[clip(key, maxFieldBytes)] = clip(e.Metadata[key], maxFieldBytes)
		}
	}
	details := []protoadapt.MessageV1{info}
	if len(e.Fields) > 0 {
		bad := &errdetails.BadRequest{}
		for _, f := range e.Fields[:min(len(e.Fields), maxFields)] {
			fieldWhy := cmp.Or(f.Reason, why)
			bad.FieldViolations = append(bad.FieldViolations, &errdetails.BadRequest_FieldViolation{
				Field: clip(f.Field, maxFieldBytes), Description: clip(f.Description, maxFieldBytes), Reason: fieldWhy.String(),
			})
		}
		details = append(details, bad)
	}
	if e.RetryAfter > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(e.RetryAfter)})
	}
	st := status.New(code, clip(e.Message, maxMessageBytes))
	if withDetails, err := st.WithDetails(details...); err == nil {
		return withDetails
	}
	return st // Our own messages with valid UTF-8 can be marshalled.
}

// clip returns at most limit bytes of s, as valid UTF-8: protobuf refuses
// anything else. What was cut ends in an ellipsis.
func clip(s string, limit int) string {
	const ellipsis = "…"
	cut := len(s) > limit
	if cut {
		s = s[:limit-len(ellipsis)]
		// Do not leave the first bytes of a character behind.
		for len(s) > 0 {
			if r, size := utf8.DecodeLastRuneInString(s); r != utf8.RuneError || size > 1 {
				break
			}
			s = s[:len(s)-1]
		}
	}
	s = strings.ToValidUTF8(s, "?")
	if cut {
		s += ellipsis
	}
	return s
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

// Status translates err for the wire. nil stays nil; an *Error in the chain
// passes; context errors become CANCELLED and DEADLINE_EXCEEDED; then the first
// rule that matches decides; a gRPC status in the chain that no rule knows, such
// as the answer of another service, passes; what is left is INTERNAL with a
// fixed text that gives nothing away, and keeps its cause for the log.
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
		// An error must not become a success, whatever it says of itself.
		if remoteErr := remote.GRPCStatus().Err(); remoteErr != nil {
			return remoteErr
		}
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

// detail returns the first detail of type T, and whether there is one.
func detail[T any](err error) (T, bool) {
	var none T
	st, isStatus := status.FromError(err)
	if !isStatus {
		return none, false
	}
	for _, d := range st.Details() {
		if v, matches := d.(T); matches {
			return v, true
		}
	}
	return none, false
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

// MetadataOf returns the metadata of an error of eniplane that came over gRPC;
// nil if it has none.
func MetadataOf(err error) map[string]string {
	if info, ok := detail[*errdetails.ErrorInfo](err); ok && info.GetDomain() == Domain {
		return info.GetMetadata()
	}
	return nil
}

// RetryAfter returns how long the server wants not to be called, and whether it
// said so.
func RetryAfter(err error) (time.Duration, bool) {
	if info, found := detail[*errdetails.RetryInfo](err); found {
		return info.GetRetryDelay().AsDuration(), true
	}
	return 0, false
}
