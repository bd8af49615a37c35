# One word per command; no step asks anything.
# `setup` is a stamp, so every other command may lean on it and pays nothing the second time.

PYTHON ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet

# Hundreds of processes of the tests import the same modules, which are to be compiled once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test changed matrix check docs notebooks bench soak dist lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## everything installed into .venv, from requirements.lock (PYTHON=… chooses one)

demo: setup ## flights through a log and back out of its table, with Spark
	@$(BIN)/python -m examples.flights_demo $(ARGS)

test: setup ## all tests that take minutes (ARGS="-k name" or a path for some)
	@$(BIN)/python -m tools.run_tests $(ARGS)

changed: setup ## the tests that are nearest to what differs from main, within two minutes
	@$(BIN)/python -m tools.run_tests --changed $(ARGS)

matrix: setup ## the tests of Spark with each version of Spark, and with the oldest packages
	@$(BIN)/python -m tools.matrix $(ARGS)

check: setup ## format, lint, types, direction of imports, documentation
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tools.build_docs

docs: setup ## the documentation site, in build/site
	@$(BIN)/python -m tools.build_docs

notebooks: setup ## runs the notebooks and writes their results into them (ARGS=explore for one)
	@$(BIN)/python -m tools.notebooks $(ARGS)

bench: setup ## measures of this machine; beside Kafka: .venv/bin/python -m benchmarks
	@$(BIN)/sparklog bench $(ARGS)

soak: setup ## the long tests, for a night (ARGS="--minutes 60 --only kills", or a path)
	@$(BIN)/python -m tools.soak $(ARGS)

dist: setup ## what a release consists of, in dist, each tried in a clean environment
	@$(BIN)/python -m tools.dist $(ARGS)

lock: setup ## writes requirements.lock from pyproject.toml (ARGS=--upgrade for newer versions)
	@$(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 \
	    --all-extras --group dev --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --custom-compile-command "make lock" --output-file requirements.lock $(ARGS)
	@! grep -n '://' requirements.lock

clean: ## back to what git knows, .venv included
	@rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@rm -rf artifacts derby.log metastore_db spark-warehouse
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Modules are compiled when they are imported: most never are, and it takes a third of the time.
$(STAMP): requirements.lock pyproject.toml
	@tools/check-java
	@python=$$(tools/find-python $(PYTHON)) && { \
	    $(BIN)/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear $(VENV); }
	@echo "installing what requirements.lock pins into $(VENV); the first time takes some minutes"
	@$(PIP) install --no-compile --require-hashes --requirement requirements.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@
