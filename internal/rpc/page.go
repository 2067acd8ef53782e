package rpc

import (
	"encoding/base64"
	"strings"

	"github.com/eniplane/eniplane/internal/reason"
)

const pagePrefix = "1:"

// PageToken returns the token of the page that begins after the item with this
// key. The text is opaque to callers, so that its form may change.
func PageToken(after string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(pagePrefix + after))
}

// ParsePageToken returns the key that PageToken was given; empty for the empty
// token, which begins at the first page. A token of somebody else is an *Error
// with PAGE_TOKEN_INVALID on the field page_token.
func ParsePageToken(token string) (string, error) {
	if token == "" {
		return "", nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(token)
	after, ours := strings.CutPrefix(string(raw), pagePrefix)
	if err != nil || !ours {
		return "", InvalidField("page_token", reason.PageTokenInvalid, "not a token of this service")
	}
	return after, nil
}
