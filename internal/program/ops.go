package program

import (
	"context"
	"log/slog"

	opsv1 "github.com/eniplane/eniplane/gen/eniplane/ops/v1"
)

// ops serves OpsService for the program of env.
type ops struct {
	opsv1.UnimplementedOpsServiceServer
	env   *Env
	level *slog.LevelVar
}

func (o *ops) GetConfig(context.Context, *opsv1.GetConfigRequest) (*opsv1.GetConfigResponse, error) {
	resp := &opsv1.GetConfigResponse{LogLevel: wireLevel(o.level.Level()), Version: o.env.Version}
	for _, e := range o.env.Config {
		resp.Entries = append(resp.Entries, &opsv1.ConfigEntry{Name: e.Name, Value: e.Value, Origin: e.Origin})
	}
	return resp, nil
}

func (o *ops) SetLogLevel(ctx context.Context, req *opsv1.SetLogLevelRequest) (*opsv1.SetLogLevelResponse, error) {
	previous := o.level.Level()
	next := slogLevel(req.GetLogLevel())
	o.level.Set(next)
	o.env.Logger.InfoContext(ctx, "log level changed", "from", previous.String(), "to", next.String())
	return &opsv1.SetLogLevelResponse{Previous: wireLevel(previous)}, nil
}

func wireLevel(l slog.Level) opsv1.LogLevel {
	switch {
	case l < slog.LevelInfo:
		return opsv1.LogLevel_LOG_LEVEL_DEBUG
	case l < slog.LevelWarn:
		return opsv1.LogLevel_LOG_LEVEL_INFO
	case l < slog.LevelError:
		return opsv1.LogLevel_LOG_LEVEL_WARN
	default:
		return opsv1.LogLevel_LOG_LEVEL_ERROR
	}
}

func slogLevel(l opsv1.LogLevel) slog.Level {
	switch l {
	case opsv1.LogLevel_LOG_LEVEL_DEBUG:
		return slog.LevelDebug
	case opsv1.LogLevel_LOG_LEVEL_WARN:
		return slog.LevelWarn
	case opsv1.LogLevel_LOG_LEVEL_ERROR:
		return slog.LevelError
	default:
		return slog.LevelInfo
	}
}
