package server

import "github.com/eniplane/eniplane/internal/rpc"

const defaultPage = 100

// page returns the items of one page of a list that is sorted by key, and the
// token of the next. A token names the list it belongs to and the last key of
// its page, so that what comes and goes in between disturbs nobody.
func page[T any](items []T, key func(T) string, list string, size uint32, token string) ([]T, string, error) {
	after, err := rpc.ParsePageToken(list, token)
	if err != nil {
		return nil, "", err
	}
	if size == 0 {
		size = defaultPage
	}
	out := make([]T, 0, min(len(items), int(size)))
	for _, item := range items {
		if token != "" && key(item) <= after {
			continue
		}
		if len(out) == int(size) {
			return out, rpc.PageToken(list, key(out[len(out)-1])), nil
		}
		out = append(out, item)
	}
	return out, "", nil
}
