// Command stack starts and stops a local stack.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/eniplane/eniplane/deploy/local/internal/command"
	"github.com/eniplane/eniplane/deploy/local/internal/stack"
)

func main() {
	ctx, cancel := command.Signals()
	defer cancel()
	if err := root().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "stack:", err)
		os.Exit(1)
	}
}

func root() *cobra.Command {
	var flags command.Flags
	root := &cobra.Command{Use: "stack", Short: "Run eniplane on this machine", SilenceUsage: true, SilenceErrors: true}
	up := &cobra.Command{
		Use: "up", Short: "Start a stack and run it until Ctrl-C", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runUp(cmd, flags) },
	}
	flags.Add(up.Flags())
	run := ""
	down := &cobra.Command{
		Use: "down", Short: "Stop the stack that runs, or remove what a crashed one left", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), time.Minute)
			defer cancel()
			return stack.Down(ctx, run)
		},
	}
	down.Flags().StringVar(&run, "run", "run", "folder of the stack")
	root.AddCommand(up, down)
	return root
}

func runUp(cmd *cobra.Command, flags command.Flags) error {
	out := cmd.OutOrStdout()
	cfg, err := flags.Config(out)
	if err != nil {
		return err
	}
	s, err := stack.Start(cmd.Context(), cfg)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	rec := s.Record()
	fmt.Fprintln(w, "\nPROCESS\tGRPC\tHEALTH\tMETRICS\tPID")
	for _, p := range rec.Processes {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\n", p.Name, p.GRPC, p.Health, p.Metrics, p.PID)
	}
	fmt.Fprintf(w, "\nEC2 simulator\t%s\nkubeconfig\t%s\nOTLP\t%s\nlogs\t%s\n", rec.EC2, rec.Kubeconfig, rec.OTLP, filepath.Join(cfg.Run, "logs"))
	if rec.Jaeger != "" {
		fmt.Fprintf(w, "Jaeger\t%s\n", rec.Jaeger)
	}
	fmt.Fprintln(w, "\nCtrl-C stops it; so does: make stack-down")
	if err := w.Flush(); err != nil {
		return errors.Join(err, command.Stop(s, out))
	}
	err = s.Run(cmd.Context())
	return errors.Join(err, command.Stop(s, out))
}
