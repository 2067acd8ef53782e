package api

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/xml"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/account"
	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/query"
)

// apiVersion is the one version of the EC2 API that is spoken.
const apiVersion = "2016-11-15"

// maxBody bounds a request's form, in bytes.
const maxBody = 1 << 20

const namespace = "http://ec2.amazonaws.com/doc/" + apiVersion + "/"

// Server answers EC2 query requests over HTTP.
type Server struct {
	acc     *account.Account
	now     func() time.Time
	counter *Counter
	table   map[string]action
	handle  Handler
	seq     atomic.Uint64
}

// NewServer makes a server for an account. The middlewares stand between the
// decoding of the form and the account, the first one outermost.
func NewServer(acc *account.Account, now func() time.Time, counter *Counter, middlewares ...Middleware) *Server {
	s := &Server{acc: acc, now: now, counter: counter, table: actions()}
	s.handle = s.dispatch
	for _, m := range slices.Backward(middlewares) {
		s.handle = m(s.handle)
	}
	return s
}

// dispatch is the innermost handler.
func (s *Server) dispatch(_ context.Context, call Call) (Response, *account.Error) {
	params, err := query.Parse(call.Params)
	if err != nil {
		return nil, refuse(err)
	}
	return s.table[call.Action](s.acc, params)
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	call := Call{RequestID: requestID(s.seq.Add(1)), Start: s.now(), AccessKey: accessKey(r.Header.Get("Authorization"))}
	resp, err := s.serve(w, r, &call)
	if err != nil {
		writeError(w, call.RequestID, err)
		return
	}
	writeResponse(w, call, resp)
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request, call *Call) (Response, *account.Error) {
	form, err := readForm(w, r)
	if err != nil {
		return nil, err
	}
	call.Params = form
	call.Action = call.Param("Action")
	if call.Action == "" {
		return nil, account.Errorf("MissingAction", "The request must contain the parameter Action")
	}
	if version := call.Param("Version"); version != "" && version != apiVersion {
		return nil, account.Errorf("NoSuchVersion", "The requested version (%s) is not valid for Amazon EC2.", version)
	}
	if s.table[call.Action] == nil {
		return nil, account.Errorf("InvalidAction", "The action %s is not valid for this web service.", call.Action)
	}
	call.N = s.counter.start(call.Action)
	resp, err := s.handle(r.Context(), *call)
	if err != nil {
		s.counter.fail(call.Action, err.Code)
		return nil, err
	}
	return resp, nil
}

func readForm(w http.ResponseWriter, r *http.Request) (url.Values, *account.Error) {
	if r.Method != http.MethodPost && r.Method != http.MethodGet {
		return nil, &account.Error{Code: "MethodNotAllowed", Message: "Use GET or POST.", Status: http.StatusMethodNotAllowed}
	}
	r.Body = http.MaxBytesReader(w, r.Body, maxBody)
	if err := r.ParseForm(); err != nil {
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			return nil, &account.Error{Code: "RequestEntityTooLarge", Message: "The request is too large.", Status: http.StatusRequestEntityTooLarge}
		}
		return nil, account.Errorf("MalformedQueryString", "The query string contains a syntax error.")
	}
	return r.Form, nil
}

// accessKey finds the access key id in a Signature Version 4 header.
func accessKey(header string) string {
	_, rest, ok := strings.Cut(header, "Credential=")
	if !ok {
		return ""
	}
	key, _, ok := strings.Cut(rest, "/")
	if !ok {
		return ""
	}
	return key
}

func writeResponse(w http.ResponseWriter, call Call, resp Response) {
	var inner bytes.Buffer
	root := xml.StartElement{Name: xml.Name{Local: "x"}}
	if err := xml.NewEncoder(&inner).EncodeElement(resp, root); err != nil {
		writeError(w, call.RequestID, &account.Error{Code: "InternalError", Message: err.Error(), Status: http.StatusInternalServerError})
		return
	}
	// The root is named for the action and begins with the request id.
	elements := bytes.TrimSuffix(bytes.TrimPrefix(inner.Bytes(), []byte("<x>")), []byte("</x>"))
	var body bytes.Buffer
	fmt.Fprintf(&body, "%s<%sResponse xmlns=%q><requestId>%s</requestId>", xml.Header, call.Action, namespace, call.RequestID)
	body.Write(elements)
	fmt.Fprintf(&body, "</%sResponse>", call.Action)
	send(w, call.RequestID, http.StatusOK, body.Bytes())
}

type errorXML struct {
	XMLName xml.Name `xml:"Response"`
	Errors  []struct {
		Code    string `xml:"Code"`
		Message string `xml:"Message"`
	} `xml:"Errors>Error"`
	RequestID string `xml:"RequestID"`
}

func writeError(w http.ResponseWriter, id string, refusal *account.Error) {
	doc := errorXML{RequestID: id}
	doc.Errors = append(doc.Errors, struct {
		Code    string `xml:"Code"`
		Message string `xml:"Message"`
	}{refusal.Code, refusal.Message})
	body, err := xml.Marshal(doc)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	send(w, id, refusal.HTTPStatus(), append([]byte(xml.Header), body...))
}

func send(w http.ResponseWriter, id string, status int, body []byte) {
	w.Header().Set("Content-Type", "text/xml;charset=UTF-8")
	w.Header().Set("X-Amzn-Requestid", id)
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client is gone: nobody to tell
}

// requestID makes ids that look like UUIDs, in order of arrival.
func requestID(n uint64) string { return uuid(fmt.Sprintf("request/%d", n)) }

func uuid(of string) string {
	d := sha256.Sum256([]byte(of))
	d[6], d[8] = d[6]&0x0f|0x40, d[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", d[0:4], d[4:6], d[6:8], d[8:10], d[10:16])
}

// derived makes the id of a part that has none of its own in the account.
func derived(prefix, of string, n int) string {
	d := sha256.Sum256(fmt.Appendf(nil, "%s/%d", of, n))
	return prefix + "0" + hex.EncodeToString(d[:8])
}
