package main

import (
	"encoding/json"
	"fmt"
)

// plainPatches returns the two merge patches of a client that knows nothing but
// what the status and the pool should be.
func plainPatches(n int) ([]byte, []byte) {
	const most = 20
	pool := make(map[string]any, most)
	for i, a := range addresses(most) {
		pool[a] = nil
		if i < n {
			pool[a] = map[string]string{"resource": "eni-0"}
		}
	}
	return encode(map[string]any{"status": map[string]any{"eni": map[string]any{"enis": map[string]any{"eni-0": map[string]any{
			"id": "eni-0", "ip": "10.0.0.4", "mac": "02:00:00:00:00:00", "addresses": addresses(n),
			"subnet": map[string]string{"id": "subnet-1", "cidr": "10.0.0.0/24"},
			"vpc":    map[string]string{"id": "vpc-1", "primary-cidr": "10.0.0.0/16"},
		}}}}}),
		encode(map[string]any{"spec": map[string]any{"ipam": map[string]any{"pool": pool}}})
}

func encode(v any) []byte {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("encode a patch of our own: %v", err))
	}
	return raw
}
