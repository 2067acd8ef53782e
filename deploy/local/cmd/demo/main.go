// Command demo starts a local stack, plays the demo on it and stops it again.
// With KEEP=1 it leaves the stack running until Ctrl-C.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/pflag"

	"github.com/eniplane/eniplane/deploy/local/internal/command"
	"github.com/eniplane/eniplane/deploy/local/internal/demo"
	"github.com/eniplane/eniplane/deploy/local/internal/stack"
)

func main() {
	ctx, cancel := command.Signals()
	defer cancel()
	if err := run(ctx, os.Args[1:]); err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	var flags command.Flags
	fs := pflag.NewFlagSet("demo", pflag.ContinueOnError)
	flags.Add(fs)
	if err := fs.Parse(args); err != nil {
		return err
	}
	if flags.Nodes < 2 {
		return fmt.Errorf("--nodes: the demo needs 2 or more, not %d", flags.Nodes)
	}
	cfg, err := flags.Config(os.Stdout)
	if err != nil {
		return err
	}
	begin := time.Now()
	s, err := stack.Start(ctx, cfg)
	if err != nil {
		return err
	}
	err = play(ctx, s)
	fmt.Printf("\nThe demo took %.1f s.\n", time.Since(begin).Seconds())
	if os.Getenv("KEEP") == "1" && ctx.Err() == nil {
		fmt.Println("\nThe stack keeps running (KEEP=1): Ctrl-C or make stack-down ends it.")
		err = errors.Join(err, s.Run(ctx))
	}
	return errors.Join(err, command.Stop(s, os.Stdout))
}

// play plays the demo, but not beyond the end of a process of the stack.
func play(ctx context.Context, s *stack.Stack) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		err := s.Run(ctx)
		cancel()
		ended <- err
	}()
	err := demo.Run(ctx, s, os.Stdout)
	cancel()
	return errors.Join(err, <-ended)
}
