package rpc

import (
	"encoding/base64"
	"strings"

	"github.com/eniplane/eniplane/internal/reason"
)

// separator stands in no name of a list.
const separator = "\n"

// PageToken returns the token of the page of a list that begins after the item
// with this key. list names the list with whatever narrows it, such as a filter:
// a token serves no other one. The text is opaque to callers, so that its form
// may change.
func PageToken(list, after string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(list + separator + after))
}

// ParsePageToken returns the key that PageToken was given for the same list;
// empty for the empty token, which begins at the first page. Any other token is
// an *Error with PAGE_TOKEN_INVALID on the field page_token.
func ParsePageToken(list, token string) (string, error) {
	if token == "" {
		return "", nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(token)
	after, ours := strings.CutPrefix(string(raw), list+separator)
	if err != nil || !ours {
		return "", ForeignPageToken()
	}
	return after, nil
}

// ForeignPageToken is the refusal of a token that was made elsewhere or for
// another request, for those who look into its key.
func ForeignPageToken() *Error {
	return InvalidField("page_token", reason.PageTokenInvalid, "not a token of a page of this list")
}
