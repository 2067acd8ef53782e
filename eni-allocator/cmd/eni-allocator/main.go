// Command eni-allocator keeps the pool of every node filled from EC2.
package main

import (
	"os"

	"github.com/eniplane/eniplane/eni-allocator/internal/app"
)

func main() { os.Exit(app.Main()) }
