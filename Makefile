# Everything a checkout can do. `make` alone lists the targets.
# Only git, make and python3 (3.11 or newer, with venv) are assumed; databases and the rest are installed when needed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Named after the content of the lock and of what is compiled, so that switching branches back and forth reinstalls only when the lock differs.
STAMP := $(VENV)/.installed-$(shell cksum requirements.lock pyproject.toml hatch_build.py tao/cache/*.pyx 2>/dev/null | cksum | cut -d' ' -f1)

PROTOS := $(wildcard protos/tao/wire/v1/*.proto)

.PHONY: help env proto proto-check format lint types layers check unit test demo bench report wheel-check lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

env: $(STAMP) ## create .venv with the locked dependencies and this package, editable

$(STAMP):
	@.ci/ensure-environment "$(PYTHON)" "$(VENV)"
	@rm -f $(VENV)/.installed-*
	@touch $@

proto: $(STAMP) ## regenerate tao/wire/v1 from protos/
	@.ci/generate-code "$(BIN)" .

proto-check: $(STAMP) ## is the generated code what protos/ says?
	@$(BIN)/pytest -q -p no:cacheprovider tests/unit/test_generated_code.py

format: $(STAMP) ## put the code into its form and fix what can be fixed by itself
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lint: $(STAMP) ## ruff: rules and form
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP) ## mypy --strict on the product, its tests and its benchmarks
	$(BIN)/mypy tao $(wildcard loadtest) $(wildcard tests)

layers: $(STAMP) ## the floors: who may import whom
	$(BIN)/lint-imports --no-cache

check: lint types layers proto-check ## everything that needs no database: lint, types, layers, generated code

unit: $(STAMP) ## the tests that start no process and no database
	$(BIN)/pytest -m 'not database and not e2e' tests/unit tests/properties $(wildcard tests/paper)

# Debian's memcached starts a daemon, which a developer may not want: where CI is not set, and there is none, its tests are skipped.
test: check ## check, and every test, on a real database
	@.ci/ensure-database
	@.ci/ensure-redis build/bin
	@$(if $(CI),.ci/ensure-memcached)
	@PATH="$(CURDIR)/build/bin:$$PATH" .ci/run-tests $(BIN)

demo: $(STAMP) ## start a cluster, show a page, a social graph and two regions, stop (EDGES=file OBJECTS=file)
	@.ci/ensure-database
	@$(BIN)/tao demo $(if $(EDGES),--edges "$(EDGES)") $(if $(OBJECTS),--objects "$(OBJECTS)")

bench: $(STAMP) ## measure reads, writes, regions and whole workloads, beside their peers; JSON in build/bench.json
	@.ci/ensure-database
	@.ci/ensure-redis build/bin
	@.ci/ensure-memcached
	PATH="$(CURDIR)/build/bin:$$PATH" $(BIN)/python -m loadtest bench --json build/bench.json

report: $(STAMP) ## make docs/benchmarks.md of the JSON files in build/benchmarks (REMARK=text)
	$(BIN)/python -m loadtest report --from build/benchmarks --out docs/benchmarks.md $(if $(REMARK),--remark "$(REMARK)")

wheel-check: $(STAMP) ## build the wheel and install it in clean environments: the SDK alone, then a server
	@.ci/check-wheel "$(PYTHON)" "$(BIN)"

lock: ## resolve the dependencies anew into requirements.lock
	@.ci/lock "$(PYTHON)"

clean: ## remove what the other targets made (not .tao-dev, which holds your data)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(VENV)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
