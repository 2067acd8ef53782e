package traces

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// Jaeger finds spans through the query API of a Jaeger.
type Jaeger struct {
	query  string
	client *http.Client
}

// NewJaeger makes a Jaeger client; query is the base URL of its query API.
func NewJaeger(query string) *Jaeger {
	return &Jaeger{query: query, client: &http.Client{Timeout: 10 * time.Second}}
}

// maxAnswer bounds an answer of the query API.
const maxAnswer = 64 << 20

// answer is what /api/traces/<id> returns, as far as it is used.
type answer struct {
	Data []struct {
		Spans []struct {
			TraceID       string `json:"traceID"`
			SpanID        string `json:"spanID"`
			OperationName string `json:"operationName"`
			References    []struct {
				RefType string `json:"refType"`
				TraceID string `json:"traceID"`
				SpanID  string `json:"spanID"`
			} `json:"references"`
			StartTime int64  `json:"startTime"` // microseconds
			Duration  int64  `json:"duration"`  // microseconds
			ProcessID string `json:"processID"`
			Tags      []struct {
				Key   string `json:"key"`
				Value any    `json:"value"`
			} `json:"tags"`
		} `json:"spans"`
		Processes map[string]struct {
			ServiceName string `json:"serviceName"`
		} `json:"processes"`
	} `json:"data"`
}

// Trace returns the spans of one trace that have arrived, in no order. A trace
// that is not known has none.
func (j *Jaeger) Trace(ctx context.Context, traceID string) ([]Span, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, j.query+"/api/traces/"+traceID, nil)
	if err != nil {
		return nil, err
	}
	resp, err := j.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return nil, nil
	default:
		return nil, fmt.Errorf("jaeger answered %s for trace %s", resp.Status, traceID)
	}
	var a answer
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&a); err != nil {
		return nil, fmt.Errorf("jaeger's answer for trace %s: %w", traceID, err)
	}
	var spans []Span
	for _, trace := range a.Data {
		for _, s := range trace.Spans {
			span := Span{
				TraceID: s.TraceID, SpanID: s.SpanID, Name: s.OperationName,
				Service:    trace.Processes[s.ProcessID].ServiceName,
				Start:      time.UnixMicro(s.StartTime),
				End:        time.UnixMicro(s.StartTime + s.Duration),
				Attributes: make(map[string]string, len(s.Tags)),
			}
			for _, ref := range s.References {
				// Links to other traces are references, too.
				if ref.RefType == "CHILD_OF" && ref.TraceID == s.TraceID {
					span.ParentID = ref.SpanID
				}
			}
			for _, tag := range s.Tags {
				span.Attributes[tag.Key] = fmt.Sprint(tag.Value)
			}
			span.Failed = span.Attributes["error"] == "true"
			spans = append(spans, span)
		}
	}
	return spans, nil
}
