package localkube

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// binary finds a binary: the configured path, else the one the environment
// names, else what the repository's .ci/tool prints (which builds it if it is
// not in the cache yet).
func binary(configured, variable, tool string) (string, error) {
	if configured != "" {
		return configured, nil
	}
	if path := os.Getenv(variable); path != "" {
		return path, nil
	}
	root, err := repositoryRoot()
	if err != nil {
		return "", fmt.Errorf("%s: %w: set %s: %w", tool, ErrNoBinary, variable, err)
	}
	var stderr bytes.Buffer
	cmd := exec.Command(filepath.Join(root, ".ci", "tool"), tool)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: .ci/tool: %w\n%s", tool, ErrNoBinary, err, stderr.Bytes())
	}
	return strings.TrimSpace(string(out)), nil
}

// repositoryRoot is the nearest folder above the working directory that holds
// .ci/tool.
func repositoryRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, ".ci", "tool")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("the working directory is in no checkout of eniplane")
		}
		dir = parent
	}
}
