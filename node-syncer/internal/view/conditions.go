package view

import (
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/internal/reason"
)

// separator stands between conditions in the one line that Cilium's schema has
// room for.
const separator = " | "

// maxMessage bounds the message of one condition, in bytes: an object that
// becomes too large for the API server could not be written at all.
const maxMessage = 1024

// errorText returns conditions as one line that conditionsOf understands.
func errorText(conditions []*nodev1.Condition) string {
	oneLine := strings.NewReplacer("|", "/", "\n", " ", "\r", " ")
	var lines []string
	for _, c := range conditions {
		lines = append(lines, reasonText(c.GetReason())+": "+clip(oneLine.Replace(c.GetMessage())))
	}
	return strings.Join(lines, separator)
}

// clip returns the first maxMessage bytes of s, without half a character.
func clip(s string) string {
	if len(s) <= maxMessage {
		return s
	}
	end := maxMessage
	for end > 0 && !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end]
}

func conditionsOf(text string) []*nodev1.Condition {
	if text == "" {
		return nil
	}
	var out []*nodev1.Condition
	for line := range strings.SplitSeq(text, separator) {
		name, message, _ := strings.Cut(line, ": ")
		r, ok := parseReason(name)
		if !ok {
			r, message = reasonv1.Reason_REASON_OBJECT_MALFORMED, line // Written by somebody else.
		}
		out = append(out, &nodev1.Condition{Reason: r, Message: message})
	}
	return out
}

// reasonText names a reason, and gives the number of one that only a newer
// allocator knows.
func reasonText(r reasonv1.Reason) string {
	if r >= 0 && r <= math.MaxUint16 && reason.Reason(r).Known() {
		return reason.Reason(r).String()
	}
	return fmt.Sprintf("REASON(%d)", int32(r))
}

// parseReason undoes reasonText.
func parseReason(text string) (reasonv1.Reason, bool) {
	if r, ok := reason.Parse(text); ok {
		return reasonv1.Reason(r), true
	}
	var number int32
	if _, err := fmt.Sscanf(text, "REASON(%d)", &number); err != nil || reasonText(reasonv1.Reason(number)) != text {
		return 0, false
	}
	return reasonv1.Reason(number), true
}
