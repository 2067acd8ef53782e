package ec2

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
)

// closable is a body that cannot be read once it is closed.
type closable struct {
	io.Reader
	closed bool
}

func (b *closable) Read(p []byte) (int, error) {
	if b.closed {
		return 0, errors.New("read after close")
	}
	return b.Reader.Read(p)
}

func (b *closable) Close() error {
	b.closed = true
	return nil
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// The SDK closes the body of its request when the head of the answer is there,
// which may be before net/http is done with the body.
func TestBodyOutlivesTheSDKs(t *testing.T) {
	const text = "Action=DescribeVpcs"
	theirs := &closable{Reader: strings.NewReader(text)}
	var got []string
	client := memory{roundTripper(func(r *http.Request) (*http.Response, error) {
		_ = theirs.Close() // As the SDK does.
		again, err := r.GetBody()
		if err != nil {
			t.Fatal(err)
		}
		for _, body := range []io.Reader{r.Body, again} {
			raw, err := io.ReadAll(body)
			if err != nil {
				t.Error(err)
			}
			got = append(got, string(raw))
		}
		if r.ContentLength != int64(len(text)) {
			t.Errorf("length %d", r.ContentLength)
		}
		return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody}, nil
	})}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://ec2", theirs)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if len(got) != 2 || got[0] != text || got[1] != text {
		t.Errorf("sent %q", got)
	}
	if !theirs.closed {
		t.Error("the SDK's body is left open")
	}
}

func TestRequestWithoutBodyPasses(t *testing.T) {
	called := false
	client := memory{roundTripper(func(r *http.Request) (*http.Response, error) {
		called = true
		if r.Body != nil {
			t.Error("a body appeared")
		}
		return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody}, nil
	})}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://ec2", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.RoundTrip(req)
	if err != nil || !called {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
}
