.PHONY: generate
generate: ## Regenerate gen/, CRDs and other generated files
	.ci/generate
