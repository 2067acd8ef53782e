// The agent of a node: addresses for its pods, and its ipcache map.
package main

import (
	"os"

	"github.com/eniplane/eniplane/agent/internal/app"
)

func main() { os.Exit(app.Main()) }
