package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"buf.build/go/protovalidate"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/eniplane/eniplane/internal/reason"
)

// AuthFunc decides whether a call may go on. fullMethod is "/package.Service/RPC".
// It returns the context for the handler, which may carry who calls, or an
// *Error with code UNAUTHENTICATED or PERMISSION_DENIED.
type AuthFunc func(ctx context.Context, fullMethod string) (context.Context, error)

// logger adapts slog to the middleware's interface. The ends of calls are all
// that the middleware is asked to log.
func logger(l *slog.Logger) logging.Logger {
	return logging.LoggerFunc(func(ctx context.Context, lvl logging.Level, _ string, fields ...any) {
		l.Log(ctx, slog.Level(lvl), "finished call", fields...)
	})
}

// level logs what the caller got wrong at debug, what we got wrong at error.
func level(code codes.Code) logging.Level {
	switch code {
	case codes.Internal, codes.Unknown, codes.DataLoss:
		return logging.LevelError
	case codes.Unauthenticated, codes.PermissionDenied, codes.ResourceExhausted:
		return logging.LevelWarn
	default:
		return logging.LevelDebug
	}
}

func authUnary(auth AuthFunc) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		ctx, err := auth(ctx, info.FullMethod)
		if err != nil {
			return nil, err
		}
		return next(ctx, req)
	}
}

func authStream(auth AuthFunc) grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		ctx, err := auth(ss.Context(), info.FullMethod)
		if err != nil {
			return err
		}
		return next(srv, &contextStream{ServerStream: ss, ctx: ctx})
	}
}

type contextStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *contextStream) Context() context.Context { return s.ctx }

// deadline bounds a unary call whose caller did not.
func deadline(d time.Duration) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if _, ok := ctx.Deadline(); ok {
			return next(ctx, req)
		}
		ctx, cancel := context.WithTimeout(ctx, d)
		defer cancel()
		return next(ctx, req)
	}
}

// fullReport is the largest message of which every violation is looked for: in a
// larger one there may be hundreds of thousands, and the first has to do.
const fullReport = 64 << 10

// check returns nil, or an *Error that names the fields that break a rule of
// their proto.
func check(v protovalidate.Validator, msg any) error {
	m, ok := msg.(proto.Message)
	if !ok {
		return nil
	}
	var options []protovalidate.ValidationOption
	if proto.Size(m) > fullReport {
		options = append(options, protovalidate.WithFailFast())
	}
	err := v.Validate(m, options...)
	if err == nil {
		return nil
	}
	var invalid *protovalidate.ValidationError
	if !errors.As(err, &invalid) {
		return fmt.Errorf("validate %s: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	out := &Error{Code: codes.InvalidArgument, Reason: reason.FieldInvalid}
	for _, violation := range invalid.Violations {
		path := protovalidate.FieldPathString(violation.Proto.GetField())
		out.Fields = append(out.Fields, FieldViolation{Field: path, Description: violation.Proto.GetMessage(), Reason: reason.FieldInvalid})
	}
	// A rule about a whole message has no field.
	out.Message = out.Fields[0].Description
	if path := out.Fields[0].Field; path != "" {
		out.Message = path + ": " + out.Message
	}
	if n := len(out.Fields) - 1; n > 0 {
		out.Message += fmt.Sprintf(" (and %d more)", n)
	}
	return out
}

func validateUnary(v protovalidate.Validator) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if err := check(v, req); err != nil {
			return nil, err
		}
		return next(ctx, req)
	}
}

func validateStream(v protovalidate.Validator) grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		return next(srv, &validatingStream{ServerStream: ss, validator: v})
	}
}

type validatingStream struct {
	grpc.ServerStream
	validator protovalidate.Validator
}

func (s *validatingStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	return check(s.validator, m)
}

// completeStatus gives every refusal a status: what left a handler without going
// through its Table, or an interceptor, is translated as by an empty one.
func completeStatus(err error) error {
	var known *unforeseen
	if errors.As(err, &known) {
		return known // Its cause is for the log.
	}
	return Table(nil).Status(err)
}

func completeUnary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	resp, err := next(ctx, req)
	return resp, completeStatus(err)
}

func completeStream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	return completeStatus(next(srv, ss))
}

var errStopping = errors.New("the server is stopping")

// endWith ends the context of every stream when stopping ends, so that watchers
// do not use up the grace period, which is for calls. The client gets
// UNAVAILABLE and opens its stream again, elsewhere or later.
func endWith(stopping context.Context) grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		ctx, cancel := context.WithCancelCause(ss.Context())
		defer cancel(nil)
		release := context.AfterFunc(stopping, func() { cancel(errStopping) })
		defer release()
		err := next(srv, &contextStream{ServerStream: ss, ctx: ctx})
		canceled := errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled
		if canceled && errors.Is(context.Cause(ctx), errStopping) {
			return Refuse(codes.Unavailable, reason.NotReady, "%v", errStopping)
		}
		return err
	}
}

// recovered turns a panic into an INTERNAL error and logs its stack once.
func recovered(l *slog.Logger) recovery.Option {
	return recovery.WithRecoveryHandlerContext(func(ctx context.Context, p any) error {
		l.ErrorContext(ctx, "handler panicked", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
		return (&unforeseen{cause: errPanic}).GRPCStatus().Err()
	})
}

var errPanic = errors.New("handler panicked")
