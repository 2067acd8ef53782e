package view

import (
	"fmt"
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
		lines = append(lines, reason.Reason(c.GetReason()).String()+": "+clip(oneLine.Replace(c.GetMessage())))
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
			r, message = reason.ObjectMalformed, line // Written by somebody else.
		}
		out = append(out, &nodev1.Condition{Reason: reasonv1.Reason(r), Message: message})
	}
	return out
}

// parseReason also understands a reason that only a newer allocator knows.
func parseReason(name string) (reason.Reason, bool) {
	if r, ok := reason.Parse(name); ok {
		return r, true
	}
	var number int32
	if _, err := fmt.Sscanf(name, "REASON(%d)", &number); err != nil || reason.Reason(number).String() != name {
		return reason.Unspecified, false
	}
	return reason.Reason(number), true
}
