package account

import "testing"

func TestWildcard(t *testing.T) {
	tests := []struct {
		pattern, text string
		want          bool
	}{
		{"", "", true},
		{"", "a", false},
		{"a", "a", true},
		{"a", "A", false},
		{"a", "ab", false},
		{"*", "", true},
		{"*", "anything", true},
		{"a*", "abc", true},
		{"*c", "abc", true},
		{"*b*", "abc", true},
		{"a*c*e", "abcde", true},
		{"a*c*f", "abcde", false},
		{"?", "", false},
		{"?", "é", true},
		{"a?c", "abc", true},
		{"a?c", "ac", false},
		{`\*`, "*", true},
		{`\*`, "a", false},
		{`a\?`, "a?", true},
		{`a\?`, "ab", false},
		{`\\`, `\`, true},
		{"**a", "ba", true},
		{"10.0.0.*", "10.0.0.12", true},
		{"10.0.0.*", "10.0.1.12", false},
	}
	for _, tt := range tests {
		if got := wildcard(tt.pattern, tt.text); got != tt.want {
			t.Errorf("wildcard(%q, %q) = %t", tt.pattern, tt.text, got)
		}
	}
}
