package account

import (
	"fmt"
	"net/http"
)

// Error is a refusal as EC2 words it.
type Error struct {
	// Code is EC2's error code, such as "InvalidSubnetID.NotFound".
	Code string
	// Message is the text for people. Some clients tell cases apart by it, so
	// where EC2's text is known it is used.
	Message string
	// Status is the HTTP status. Zero means 400.
	Status int
}

// Error implements error.
func (e *Error) Error() string { return e.Code + ": " + e.Message }

// HTTPStatus is Status, or 400 if that is zero.
func (e *Error) HTTPStatus() int {
	if e.Status == 0 {
		return http.StatusBadRequest
	}
	return e.Status
}

// Errorf makes an Error with status 400.
func Errorf(code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Codes that more than one place uses.
const (
	codeInvalidParameterValue       = "InvalidParameterValue"
	codeInvalidParameterCombination = "InvalidParameterCombination"
	codeMissingParameter            = "MissingParameter"
	codeUnsupportedOperation        = "UnsupportedOperation"
	codeSubnetFull                  = "InsufficientFreeAddressesInSubnet"
)

func dryRunSucceeded() *Error {
	return &Error{
		Code: "DryRunOperation", Message: "Request would have succeeded, but DryRun flag is set.",
		Status: http.StatusPreconditionFailed,
	}
}

func missing(parameter string) *Error {
	return Errorf(codeMissingParameter, "The request must contain the parameter %s", parameter)
}

func invalid(format string, args ...any) *Error {
	return Errorf(codeInvalidParameterValue, format, args...)
}

func combination(format string, args ...any) *Error {
	return Errorf(codeInvalidParameterCombination, format, args...)
}

func badPrefix(text string) *Error {
	return invalid("Value (%s) for parameter Ipv4Prefix is invalid. It must be a /28 on its boundary.", text)
}
