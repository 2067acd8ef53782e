package ec2

import (
	"context"
	"errors"
	"strings"

	"github.com/aws/smithy-go"
)

// What EC2 may answer, as far as it makes a difference. Every error of a Client
// matches exactly one of them with errors.Is, or is a context's.
var (
	// ErrThrottled: too many requests. Nothing happened.
	ErrThrottled = errors.New("EC2 throttles")
	// ErrDenied: the credentials do not allow the call. Nothing happened.
	ErrDenied = errors.New("EC2 denies")
	// ErrUnavailable: EC2 was not reached, or failed, or did not answer in time.
	// What was asked may have happened.
	ErrUnavailable = errors.New("EC2 is unavailable")
	// ErrNotRunning: the instance is in a state in which this cannot be done.
	ErrNotRunning = errors.New("instance is not running")
	// ErrDeviceIndexTaken: another ENI is attached at this device index.
	ErrDeviceIndexTaken = errors.New("device index is taken")
	// ErrAttachmentLimit: the instance can have no more ENIs.
	ErrAttachmentLimit = errors.New("instance can have no more ENIs")
	// ErrAddressLimit: the ENI can have no more addresses.
	ErrAddressLimit = errors.New("ENI can have no more addresses")
	// ErrSubnetFull: the subnet has too few free addresses.
	ErrSubnetFull = errors.New("subnet is full")
	// ErrNotFound: EC2 does not know what was named, or not yet.
	ErrNotFound = errors.New("not found in EC2")
	// ErrInUse: the ENI is attached.
	ErrInUse = errors.New("ENI is in use")
	// ErrTokenMismatch: the client token was used for another creation.
	ErrTokenMismatch = errors.New("client token was used otherwise")
	// ErrRefused: any other refusal. Nothing happened.
	ErrRefused = errors.New("EC2 refuses")
	// ErrNotLeading: the call was not sent because the write role may be lost.
	ErrNotLeading = errors.New("the write role is not held")
	// ErrUnintelligible: EC2 answered what cannot be understood.
	ErrUnintelligible = errors.New("answer of EC2 is unintelligible")
)

// sentinel says which of the above an error code of EC2 is. A few codes mean
// several things, which only the message tells apart.
func sentinel(code, message string) error {
	switch code {
	case "RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled", "RequestThrottledException", "EC2ThrottledException", "SlowDown":
		return ErrThrottled
	case "UnauthorizedOperation", "AuthFailure", "AccessDenied", "AccessDeniedException", "InvalidClientTokenId", "ExpiredToken",
		"ExpiredTokenException", "OptInRequired", "SignatureDoesNotMatch", "MissingAuthenticationToken", "Blocked", "PendingVerification":
		return ErrDenied
	case "InternalError", "InternalFailure", "Unavailable", "ServiceUnavailable", "RequestTimeout", "RequestCanceled":
		return ErrUnavailable
	case "IncorrectState", "IncorrectInstanceState":
		return ErrNotRunning
	case "AttachmentLimitExceeded":
		return ErrAttachmentLimit
	case "PrivateIpAddressLimitExceeded", "InvalidInterface.IpAddressLimitExceeded":
		return ErrAddressLimit
	case "InsufficientFreeAddressesInSubnet", "InsufficientCidrBlocks":
		return ErrSubnetFull
	case "IdempotentParameterMismatch", "InvalidClientToken":
		return ErrTokenMismatch
	case "InvalidNetworkInterface.InUse", "InvalidNetworkInterfaceID.InUse":
		return ErrInUse
	case "InvalidInstanceType", "InvalidAttachmentID.NotFound", "InvalidNetworkInterfaceAttachmentID.NotFound":
		return ErrNotFound
	}
	if strings.HasSuffix(code, ".NotFound") {
		return ErrNotFound
	}
	// EC2 has no code of their own for these; the texts are recorded in the test.
	switch {
	case code != "InvalidParameterValue":
		return ErrRefused
	case strings.Contains(message, "interface attached at device"):
		return ErrDeviceIndexTaken
	case strings.Contains(message, "is not 'running'"):
		return ErrNotRunning
	case strings.Contains(message, "sufficient free Ipv4 addresses"):
		return ErrSubnetFull
	case strings.Contains(message, "is currently in use"), strings.Contains(message, "is already attached"):
		return ErrInUse
	case strings.Contains(message, "nvalid instance type"), strings.Contains(message, "nstance type does not exist"):
		return ErrNotFound
	}
	return ErrRefused
}

// failure is an error of a call: it matches its sentinel, and says what EC2 said.
type failure struct {
	action string
	kind   error
	cause  error
}

func (f *failure) Error() string {
	var api smithy.APIError
	if errors.As(f.cause, &api) {
		return f.action + ": " + f.kind.Error() + ": " + api.ErrorCode() + ": " + api.ErrorMessage()
	}
	if f.cause == nil {
		return f.action + ": " + f.kind.Error()
	}
	return f.action + ": " + f.kind.Error() + ": " + f.cause.Error()
}

func (f *failure) Is(target error) bool { return target == f.kind }

// translate says what err of an action means. ctx is the caller's: when that is
// over, its error passes; the time that we allow a call is EC2's failure.
func translate(ctx context.Context, action string, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, ErrNotLeading) {
		return &failure{action: action, kind: ErrNotLeading}
	}
	var api smithy.APIError
	if errors.As(err, &api) {
		return &failure{action: action, kind: sentinel(api.ErrorCode(), api.ErrorMessage()), cause: err}
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return &failure{action: action, kind: ErrUnavailable, cause: err}
}

// Code returns EC2's error code for an error of a Client, such as
// "RequestLimitExceeded"; "" if EC2 gave none.
func Code(err error) string {
	var f *failure
	var api smithy.APIError
	if errors.As(err, &f) && errors.As(f.cause, &api) {
		return api.ErrorCode()
	}
	return ""
}
