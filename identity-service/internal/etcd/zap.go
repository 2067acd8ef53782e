package etcd

import (
	"context"
	"log/slog"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// zapTo returns a zap logger, which etcd wants, that writes warnings and errors
// to ours one level lower: etcd calls an error what it handles itself, such as
// its listeners closing at a stop. What matters comes back as an error value.
func zapTo(logger *slog.Logger) *zap.Logger {
	return zap.New(&zapCore{logger: logger}, zap.WithFatalHook(zapcore.WriteThenPanic))
}

type zapCore struct {
	logger *slog.Logger
	fields []zapcore.Field
}

func (c *zapCore) Enabled(l zapcore.Level) bool { return l >= zapcore.WarnLevel }

func (c *zapCore) With(fields []zapcore.Field) zapcore.Core {
	all := append(append([]zapcore.Field(nil), c.fields...), fields...)
	return &zapCore{logger: c.logger, fields: all}
}

func (c *zapCore) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return checked.AddCore(e, c)
	}
	return checked
}

func (c *zapCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range c.fields {
		f.AddTo(enc)
	}
	for _, f := range fields {
		f.AddTo(enc)
	}
	level := slog.LevelDebug
	switch {
	case e.Level >= zapcore.DPanicLevel:
		level = slog.LevelError
	case e.Level >= zapcore.ErrorLevel:
		level = slog.LevelInfo
	}
	c.logger.Log(context.Background(), level, "etcd", slog.String("what", e.Message), slog.Any("fields", enc.Fields))
	return nil
}

func (c *zapCore) Sync() error { return nil }
