package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/eniplane/eniplane/agent/internal/checkpoint"
	"github.com/eniplane/eniplane/agent/internal/condition"
	"github.com/eniplane/eniplane/agent/internal/imds"
	"github.com/eniplane/eniplane/agent/internal/retry"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/telemetry"
)

// The files of the state folder.
const (
	nodeFile      = "node.json"
	addressesFile = "addresses.json"
	ownersFile    = "owners.json"
	localFile     = "local.json"
)

// metadataService is the name of the metadata service as a dependency.
const metadataService = "instance-metadata"

// patience is how long a node that knows itself from before waits for the
// metadata service, which answers within milliseconds if it does.
const patience = 500 * time.Millisecond

// self is what is known of the node that the agent runs on.
type self struct {
	// BootID is the boot in which it was learnt.
	BootID string `json:"boot_id"`
	// Instance is the instance.
	Instance imds.Instance `json:"instance"`
	// NodeUID is the UID of the Node. Empty means that it is not known yet.
	NodeUID string `json:"node_uid,omitempty"`
}

// errOtherInstance: the instance is not the one of the checkpoint.
var errOtherInstance = errors.New("this is another instance than before the restart")

// findSelf returns who the node is, and its folder: from the metadata service, or
// while that is away from the checkpoint, if the machine was not booted since: then
// it is the same. It tries until ctx ends.
func findSelf(ctx context.Context, config Config, client *imds.Client, board *condition.Board, logger *slog.Logger) (self, *checkpoint.Folder, error) {
	boot, err := bootID(config.BootIDFile)
	if err != nil {
		return self{}, nil, err
	}
	before, remembered := remember(config, boot)
	for pause := retry.First; ; {
		asking, cancel := ctx, context.CancelFunc(func() {})
		if remembered {
			asking, cancel = context.WithTimeout(ctx, patience)
		}
		instance, err := client.Read(asking)
		cancel()
		board.Depend(metadataService, err)
		if err == nil || remembered {
			me := before
			if err == nil {
				me = self{BootID: boot, Instance: instance}
			}
			folder, err := checkpoint.Open(config.StateDir, checkpoint.Identity{NodeName: config.NodeName, InstanceID: me.Instance.ID})
			if err != nil {
				return self{}, nil, err
			}
			if remembered && before.Instance.ID == me.Instance.ID {
				me.NodeUID = before.NodeUID
			}
			return me, folder, nil
		}
		if ctx.Err() != nil {
			return self{}, nil, ctx.Err()
		}
		board.Set(reason.NotReady, "agent", "the instance metadata service does not answer: "+err.Error())
		logger.WarnContext(ctx, "instance not known", telemetry.KeyError, err.Error())
		if !retry.Sleep(ctx, pause) {
			return self{}, nil, ctx.Err()
		}
		pause = retry.Next(pause, nil)
	}
}

// remember returns what the checkpoint says of this node in this boot.
func remember(config Config, boot string) (self, bool) {
	id, ok := checkpoint.Peek(config.StateDir, nodeFile)
	if !ok || id.NodeName != config.NodeName {
		return self{}, false
	}
	folder, err := checkpoint.Open(config.StateDir, id)
	if err != nil {
		return self{}, false
	}
	var before self
	if ok, err := folder.Load(nodeFile, &before); !ok || err != nil {
		return self{}, false
	}
	return before, before.BootID == boot && before.Instance.ID == id.InstanceID
}

func bootID(path string) (string, error) {
	text, err := os.ReadFile(filepath.Clean(path))
	if err != nil {
		return "", fmt.Errorf("--boot-id-file: %w", err)
	}
	id := strings.TrimSpace(string(text))
	if id == "" || len(id) > 64 {
		return "", fmt.Errorf("--boot-id-file: %s holds no boot id", path)
	}
	return id, nil
}

// load reads a file of the state folder. What is refused is kept aside and told;
// the agent goes on without.
func load[T any](ctx context.Context, folder *checkpoint.Folder, name string, board *condition.Board, logger *slog.Logger) T {
	var content T
	ok, err := folder.Load(name, &content)
	if err != nil {
		board.Set(reason.ObjectMalformed, name, err.Error())
		logger.ErrorContext(ctx, "checkpoint refused", telemetry.KeyError, err.Error())
	}
	if !ok {
		var none T
		return none
	}
	return content
}
