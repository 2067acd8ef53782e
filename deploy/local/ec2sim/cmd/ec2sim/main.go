// Command ec2sim runs the EC2 simulator until it is told to stop.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "ec2sim:", err)
		os.Exit(1)
	}
}

// run starts the simulator, says so in one line on out, and returns when the
// context ends.
func run(ctx context.Context, args []string, out, usage io.Writer) error {
	flags := flag.NewFlagSet("ec2sim", flag.ContinueOnError)
	flags.SetOutput(usage)
	listen := flags.String("listen", "127.0.0.1:0", "address of the EC2 API and of the endpoints below /_sim/; port 0 takes a free one")
	imdsHost := flags.String("imds-host", "127.0.0.1", "address at which the metadata services listen, each on a free port")
	topologyFile := flags.String("topology", "", "JSON file that describes the account; none means an empty one")
	portsFile := flags.String("ports-file", "", "file to keep the endpoints in, as JSON; it is removed at the end")
	seed := flags.Uint64("seed", 1, "seed of the identifiers")
	latency := flags.Duration("latency", ec2sim.DefaultLatency, "how long a call takes at the least; below a few milliseconds the AWS SDK for Go may lose long answers")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	topology, err := readTopology(*topologyFile)
	if err != nil {
		return err
	}
	running, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	cfg := ec2sim.Config{Topology: topology, Seed: *seed, Listen: *listen, IMDSHost: *imdsHost, Latency: *latency}
	if *latency == 0 {
		cfg.Latency = -1 // the library reads zero as its default
	}
	if *portsFile != "" {
		cfg.OnEndpoints = func(e ec2sim.Endpoints) {
			if err := writeFile(*portsFile, e); err != nil {
				cancel(err)
			}
		}
		defer func() { _ = os.Remove(*portsFile) }()
	}
	server, err := ec2sim.Start(cfg)
	if err != nil {
		return err
	}
	defer server.Close()
	if running.Err() == nil {
		fmt.Fprintf(out, "ec2sim ready: ec2 %s, %d instances\n", server.URL(), len(server.Endpoints().IMDS))
	}
	if err := server.Wait(running); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return nil // told to stop
	}
	return context.Cause(running)
}

func readTopology(path string) (ec2sim.Topology, error) {
	if path == "" {
		return ec2sim.Topology{}, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return ec2sim.Topology{}, err
	}
	defer func() { _ = f.Close() }() // only read
	topology, err := ec2sim.ReadTopology(f)
	if err != nil {
		return ec2sim.Topology{}, fmt.Errorf("%s: %w", path, err)
	}
	return topology, nil
}

// writeFile replaces the file in one step, so that a reader sees the old or the
// new endpoints.
func writeFile(path string, endpoints ec2sim.Endpoints) error {
	text, err := json.MarshalIndent(endpoints, "", "  ")
	if err != nil {
		return err
	}
	temp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(temp.Name()) }() // fails after the rename, which is fine
	_, err = temp.Write(append(text, '\n'))
	if err := errors.Join(err, temp.Close()); err != nil {
		return err
	}
	return os.Rename(temp.Name(), path)
}
