package ec2sim

import (
	"encoding/json"
	"errors"
	"io"
)

// ReadTopology reads a Topology from JSON. Unknown fields and anything after
// the object are errors.
func ReadTopology(r io.Reader) (Topology, error) {
	dec := json.NewDecoder(r)
	dec.DisallowUnknownFields()
	var topology Topology
	if err := dec.Decode(&topology); err != nil {
		return Topology{}, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Topology{}, errors.New("more than one JSON value")
	}
	return topology, nil
}
