// Command identity-service gives every CIDR of a cluster one number and
// remembers who holds it.
package main

import (
	"os"

	"github.com/eniplane/eniplane/identity-service/internal/app"
	"github.com/eniplane/eniplane/internal/program"
)

func main() { os.Exit(program.Main(app.Spec())) }
