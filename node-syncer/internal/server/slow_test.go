package server_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/server"
	"github.com/eniplane/eniplane/node-syncer/internal/syncer"
)

// clogged is a stream whose reader takes nothing.
type clogged[T any] struct {
	grpc.ServerStream
	ctx context.Context
}

func (c *clogged[T]) Context() context.Context { return c.ctx }

func (c *clogged[T]) Send(*T) error {
	<-c.ctx.Done()
	return c.ctx.Err()
}

// A reader that takes nothing is told to start again, and does not stay forever.
func TestSlowReaderIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := syncer.NewStore("test")
		store.CiliumNodeChanged(&ciliumnode.CiliumNode{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "u", ResourceVersion: "1"}})
		store.Synced()
		s := server.New(nil, store, nil, nil)
		ctx, cancel := context.WithCancel(t.Context())
		for name, watch := range map[string]func() error{
			"node": func() error {
				return s.WatchNode(&nodev1.WatchNodeRequest{NodeName: "n"}, &clogged[nodev1.WatchNodeResponse]{ctx: ctx})
			},
			"demand": func() error {
				return s.WatchDemand(&nodev1.WatchDemandRequest{}, &clogged[nodev1.WatchDemandResponse]{ctx: ctx})
			},
		} {
			began := time.Now()
			err := watch()
			if status.Code(err) != codes.ResourceExhausted || rpc.ReasonOf(err) != reason.SlowReader {
				t.Errorf("%s: %v", name, err)
			}
			if took := time.Since(began); took > time.Minute {
				t.Errorf("%s: cut after %v", name, took)
			}
		}
		cancel() // As gRPC does when a handler returned.
	})
}
