// Command node-syncer is the only writer of CiliumNode objects.
package main

import (
	"os"

	"github.com/eniplane/eniplane/node-syncer/internal/app"
)

func main() { os.Exit(app.Main()) }
