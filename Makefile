# The commands of a checkout. `make` alone lists them.
# Only git, make and python3 (3.11 or newer, with venv) are assumed; databases and the rest are installed when needed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Named after the content of the lock and of the compiled modules, so that switching branches reinstalls only when they differ.
STAMP := $(VENV)/.installed-$(shell cksum requirements.lock pyproject.toml hatch_build.py tao/*/*.pyx 2>/dev/null | cksum | cut -d' ' -f1)

.PHONY: help env proto proto-check format lint types layers commits check unit test test-newest thorough demo bench bench-compare report reference docs wheels wheel-check sbom audit lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

env: $(STAMP) ## Create .venv with the locked dependencies and this package, editable

$(STAMP):
	@.ci/ensure-environment "$(PYTHON)" "$(VENV)"
	@rm -f $(VENV)/.installed-*
	@touch $@

proto: $(STAMP) ## Regenerate tao/wire/v1 and tao/etcd/v3 from protos/
	@.ci/generate-code "$(BIN)" .

proto-check: $(STAMP) ## Check that the generated code is up to date with protos/
	@$(BIN)/pytest -q -p no:cacheprovider tests/unit/test_generated_code.py

format: $(STAMP) ## Format the code and apply automatic fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lint: $(STAMP) ## Check rules and format with ruff
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP) ## Check types of product, tests and benchmarks with mypy --strict
	$(BIN)/mypy tao $(wildcard loadtest) $(wildcard tests)

layers: $(STAMP) ## Check which packages may import which
	$(BIN)/lint-imports --no-cache

commits: ## Check the subjects and bodies of new commits
	@.ci/check-commits

check: lint types layers proto-check commits ## Run all checks that need no database

unit: $(STAMP) ## Run the tests that start no process and no database
	$(BIN)/pytest -m 'not database and not e2e' tests/unit tests/properties $(wildcard tests/paper)

# Debian's memcached and PostgreSQL start daemons, which a developer may not want: without CI=true, tests that need a missing
# memcached, PostgreSQL or kubectl are skipped. Where Valkey is not to be had, Redis' server stands in for it.
# The check of types takes longest, and runs beside the tests.
test: lint layers proto-check commits ## Run the checks and every test, on a real database
	@.ci/ensure-database
	@.ci/ensure-redis build/bin
	@.ci/ensure-etcd build/bin
	@$(if $(CI),.ci/ensure-memcached && .ci/ensure-postgres && .ci/ensure-kubectl && { .ci/ensure-valkey build/bin || true; })
	@PATH="$(CURDIR)/build/bin:$$PATH" .ci/run-tests $(BIN)

test-newest: $(STAMP) ## Run the tests that start no process on the newest CPython, of Debian's testing release (NEWEST=/path/to/python3)
	@.ci/test-newest "$(BIN)" $(NEWEST)

thorough: ## Run every test with over twenty times as many examples and simulated clusters
	@TAO_TEST_EFFORT=400 $(MAKE) test

demo: $(STAMP) ## Show a page, a social graph and two regions on a private cluster (EDGES=file OBJECTS=file)
	@.ci/ensure-database
	@$(BIN)/tao demo $(if $(EDGES),--edges "$(EDGES)") $(if $(OBJECTS),--objects "$(OBJECTS)")

bench: $(STAMP) ## Run the benchmarks beside their peers; JSON in build/bench.json
	@.ci/ensure-database
	@.ci/ensure-redis build/bin
	@.ci/ensure-memcached
	@.ci/ensure-postgres
	@.ci/ensure-valkey build/bin || true
	PATH="$(CURDIR)/build/bin:$$PATH" $(BIN)/python -m loadtest bench --json build/bench.json

bench-compare: $(STAMP) ## Compare this tree with an earlier commit, in pairs: BASE=COMMIT (OPTIONS="--pairs 10 --only stream")
	@$(if $(BASE),,echo "BASE is missing: make bench-compare BASE=COMMIT" >&2; exit 1)
	@.ci/ensure-database
	@.ci/ensure-redis build/bin
	PATH="$(CURDIR)/build/bin:$$PATH" $(BIN)/python -m loadtest compare --base "$(BASE)" --json build/bench-compare.json $(OPTIONS)

report: $(STAMP) ## Write docs/explanation/benchmarks.md from the JSON files in build/benchmarks (REMARK=text)
	$(BIN)/python -m loadtest report --from build/benchmarks --out docs/explanation/benchmarks.md $(if $(REMARK),--remark "$(REMARK)")

reference: $(STAMP) ## Regenerate the reference pages of settings, commands, errors and metrics
	$(BIN)/python docs/generate.py

docs: $(STAMP) ## Build the documentation as a site in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet --site-dir build/site
	@echo build/site/index.html

wheels: $(STAMP) ## Build the compiled wheels and the pure-Python one into dist (PYTHONS="python3.12 python3.13": for these, too)
	@.ci/build-wheels "$(BIN)" dist $(PYTHONS)
	@ls dist/*.whl

wheel-check: $(STAMP) ## Build the wheels and install them in clean environments: the SDK, beside Flask, a server
	@.ci/check-wheel "$(PYTHON)" "$(BIN)"

sbom: ## Write build/sbom.json: what an image of the servers contains, in CycloneDX's form
	@.ci/supply-chain sbom "$(PYTHON)"

audit: ## Look the locked dependencies up in the Python advisory database (needs a network)
	@.ci/supply-chain audit "$(PYTHON)"

lock: ## Resolve the dependencies again into requirements.lock
	@.ci/lock "$(PYTHON)"

clean: ## Remove the files that the other targets made (not .tao-dev, which holds your data)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(VENV)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
