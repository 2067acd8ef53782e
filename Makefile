# Each target is a thin line; what takes more than a line lives in .ci/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Programs are the folders cmd/<name> of the workspace's modules, but benches.
programs = $(filter-out %/cmd/bench,$(patsubst %/main.go,./%,$(wildcard */cmd/*/main.go deploy/local/cmd/*/main.go deploy/local/ec2sim/cmd/*/main.go)))
export ENIPLANE_BIN := $(CURDIR)/bin
# Flags for a single run, as in: make test GOTEST='-run TestX -v'
GOTEST ?=
# Packages to test; "work" is every package of the workspace.
PKG ?= work

.PHONY: help
help: ## Print this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: tools
tools: ## Build every pinned tool into the cache (Jaeger only with JAEGER=1)
	@for t in $$(.ci/tool --list); do \
		if [[ $$t != jaeger-all-in-one || "$${JAEGER:-}" == 1 ]]; then .ci/tool $$t; fi; \
	done

.PHONY: generate
generate: ## Regenerate gen/, CRDs and other generated files; format the protos
	.ci/generate

.PHONY: build
build: ## Build all programs into ./bin
	@mkdir -p bin
	$(if $(programs),go build -o bin/ $(programs),@echo "no programs yet")

# End-to-end tests start the programs that build left in $ENIPLANE_BIN.
.PHONY: test
test: build ## Test everything: race detector, small sizes (PKG=, GOTEST= narrow it)
	ENIPLANE_TEST_SIZE=test exec .ci/with --bpffs go test -race -shuffle=on -timeout 20m $(GOTEST) $(PKG)

.PHONY: soak
soak: build ## The same tests at full size, no race detector
	ENIPLANE_TEST_SIZE=soak exec .ci/with --bpffs go test -shuffle=on -timeout 90m $(GOTEST) $(PKG)

.PHONY: verify
verify: ## Fail on anything not generated, tidied, formatted or linted
	.ci/verify

.PHONY: bench
bench: build ## Measure against references (SERVICE=agent for one service)
	exec .ci/with --bpffs .ci/bench

# The stack program mounts and unmounts what it needs by itself.
.PHONY: demo
demo: build ## One node path end to end on a local stack (JAEGER=1, KEEP=1)
	cd deploy/local && exec ../../.ci/with ../../bin/demo

.PHONY: stack
stack: build ## Start the local stack and leave it running
	cd deploy/local && exec ../../.ci/with ../../bin/stack up

.PHONY: stack-down
stack-down: build ## Stop the local stack and remove what it left
	cd deploy/local && exec ../../.ci/with ../../bin/stack down

.PHONY: clean
clean: ## Remove build results; the tool cache stays
	rm -rf bin third_party
