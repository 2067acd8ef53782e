package rpc

import (
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// ServerConfig is where and how a program serves.
type ServerConfig struct {
	// Listen is host:port, or unix:///path for a socket of mode 0600. Port 0
	// takes a free one.
	Listen string
	// HealthListen is host:port of grpc.health.v1, in plain text.
	HealthListen string
	// MetricsListen is host:port of /metrics.
	MetricsListen string
	// MaxRecvBytes bounds one request; zero means 4 MiB.
	MaxRecvBytes int
	// GracePeriod is how long calls may run on after a stop; zero means 10 s.
	GracePeriod time.Duration
	// DefaultTimeout bounds a unary call that has no deadline; zero means 30 s.
	DefaultTimeout time.Duration
}

func (c *ServerConfig) withDefaults() ServerConfig {
	d := *c
	if d.MaxRecvBytes == 0 {
		d.MaxRecvBytes = 4 << 20
	}
	if d.GracePeriod == 0 {
		d.GracePeriod = 10 * time.Second
	}
	if d.DefaultTimeout == 0 {
		d.DefaultTimeout = 30 * time.Second
	}
	return d
}

// AddFlags binds the configuration to flags, with its present values as
// defaults.
func (c *ServerConfig) AddFlags(fs *pflag.FlagSet) {
	*c = c.withDefaults()
	fs.StringVar(&c.Listen, "listen", c.Listen, "address of the gRPC server: host:port, or unix:///path")
	fs.StringVar(&c.HealthListen, "health-listen", c.HealthListen, "host:port of grpc.health.v1, in plain text")
	fs.StringVar(&c.MetricsListen, "metrics-listen", c.MetricsListen, "host:port of /metrics")
	fs.IntVar(&c.MaxRecvBytes, "max-request-bytes", c.MaxRecvBytes, "largest request that is read; 0 means 4 MiB")
	fs.DurationVar(&c.GracePeriod, "grace-period", c.GracePeriod, "how long calls may run on after a stop; 0 means 10s")
	fs.DurationVar(&c.DefaultTimeout, "default-timeout", c.DefaultTimeout, "deadline of a unary call that has none; 0 means 30s")
}

// Validate returns an error that names the flag whose value cannot work.
func (c *ServerConfig) Validate() error {
	if path, isSocket := strings.CutPrefix(c.Listen, unixScheme); isSocket {
		if path == "" {
			return fmt.Errorf("--listen: %q names no path", c.Listen)
		}
	} else if err := validateHostPort("listen", c.Listen); err != nil {
		return err
	}
	if err := validateHostPort("health-listen", c.HealthListen); err != nil {
		return err
	}
	if err := validateHostPort("metrics-listen", c.MetricsListen); err != nil {
		return err
	}
	if c.MaxRecvBytes < 0 {
		return fmt.Errorf("--max-request-bytes: %d is negative", c.MaxRecvBytes)
	}
	if c.GracePeriod < 0 {
		return fmt.Errorf("--grace-period: %v is negative", c.GracePeriod)
	}
	if c.DefaultTimeout < 0 {
		return fmt.Errorf("--default-timeout: %v is negative", c.DefaultTimeout)
	}
	return nil
}

func validateHostPort(flag, value string) error {
	if _, _, err := net.SplitHostPort(value); err != nil {
		return fmt.Errorf("--%s: %q is not host:port: %w", flag, value, err)
	}
	return nil
}
