package ec2sim

import (
	"encoding/json"
	"net/http"
)

// maxAdminBody bounds the body of a request to the simulator's own endpoints.
const maxAdminBody = 1 << 20

// routes joins the EC2 API with the simulator's own endpoints.
func (s *Simulator) routes(endpoints func() Endpoints) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/{$}", s.api)
	mux.HandleFunc("GET /_sim/state", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, struct {
			State
			Calls     Calls     `json:"calls"`
			Endpoints Endpoints `json:"endpoints"`
		}{s.State(), s.Calls(), endpoints()})
	})
	mux.HandleFunc("GET /_sim/endpoints", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, endpoints())
	})
	mux.HandleFunc("GET /_sim/check", func(w http.ResponseWriter, _ *http.Request) {
		if err := s.Check(); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("POST /_sim/reset-counters", func(w http.ResponseWriter, _ *http.Request) {
		s.ResetCalls()
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("POST /_sim/launch", func(w http.ResponseWriter, r *http.Request) {
		var spec InstanceSpec
		dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxAdminBody))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&spec); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		instance, err := s.Launch(spec)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		writeJSON(w, http.StatusCreated, instance)
	})
	mux.HandleFunc("POST /_sim/instances/{id}/state/{state}", func(w http.ResponseWriter, r *http.Request) {
		if err := s.SetInstanceState(InstanceID(r.PathValue("id")), InstanceState(r.PathValue("state"))); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	return mux
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	body, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // the client is gone: nobody to tell
}
