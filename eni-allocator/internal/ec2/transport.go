package ec2

import (
	"bytes"
	"fmt"
	"io"
	"net/http"

	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
)

// memory is a transport that hands net/http a body of its own. The SDK closes
// the body of its request as soon as the head of the answer is there; if
// net/http has not quite finished with that body by then, it drops the
// connection in the middle of the answer.
type memory struct{ next http.RoundTripper }

// RoundTrip sends the request with its body in memory. Requests to EC2 are small.
func (t memory) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Body == nil || req.Body == http.NoBody {
		return t.next.RoundTrip(req)
	}
	body, err := io.ReadAll(req.Body)
	closeErr := req.Body.Close()
	if err != nil {
		return nil, fmt.Errorf("read request: %w", err)
	}
	if closeErr != nil {
		return nil, fmt.Errorf("close request: %w", closeErr)
	}
	own := req.Clone(req.Context())
	own.Body = io.NopCloser(bytes.NewReader(body))
	own.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	own.ContentLength = int64(len(body))
	return t.next.RoundTrip(own)
}

// newHTTPClient returns the client for EC2 over a transport of the SDK's, which
// knows of AWS_CA_BUNDLE and the like, and a function that closes its idle
// connections.
func newHTTPClient(sdk *awshttp.BuildableClient) (*http.Client, func()) {
	base := sdk.GetTransport()
	base.MaxIdleConnsPerHost = 32
	return &http.Client{
		Transport: memory{base},
		// EC2 does not redirect; following one would send a signed request elsewhere.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, base.CloseIdleConnections
}
