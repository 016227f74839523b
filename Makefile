# Every target is one script that also runs without make.
.PHONY: demo serve test test-slow check bench clean

demo: ## ASPIRE against plain decoding on a real model; writes demo-report.json
	@bench/demo.sh

serve: ## the demo's model with ASPIRE on port 30000, until Ctrl-C
	@bench/serve.sh

test: ## unit tests and tests against a real SGLang server
	@tests/run.sh

test-slow: ## the tests that take minutes each: many requests, many scenarios, other servers
	@tests/run.sh -m slow

check: ## style and types
	@bench/check.sh

bench: ## speed of ASPIRE against plain decoding on this machine
	@bench/bench.sh

clean: ## remove the virtual environment and all build products
	@bench/clean.sh
