# One word per command; no step is interactive.
# `setup` uses a stamp file, so the other commands can depend on it at no cost the second time.

PYTHON ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet

# Hundreds of test processes import the same modules, which should be compiled only once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test changed matrix check docs notebooks bench soak dist lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## install everything into .venv, from requirements.lock (PYTHON=… selects an interpreter)

demo: setup ## send flights through a log and read them from its table, with Spark
	@$(BIN)/python -m examples.flights_demo $(ARGS)

test: setup ## run all tests but the long ones (ARGS="-k name" or a path for some)
	@$(BIN)/python -m tools.run_tests $(ARGS)

changed: setup ## run the tests closest to the changes since main, within two minutes
	@$(BIN)/python -m tools.run_tests --changed $(ARGS)

matrix: setup ## run the Spark tests with each Spark version, and with the oldest packages
	@$(BIN)/python -m tools.matrix $(ARGS)

check: setup ## check format, lint, types, import directions and documentation
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tools.build_docs

docs: setup ## build the documentation site, in build/site
	@$(BIN)/python -m tools.build_docs

notebooks: setup ## run the notebooks and save their results in them (ARGS=explore for one)
	@$(BIN)/python -m tools.notebooks $(ARGS)

bench: setup ## measure this machine; for a comparison with Kafka: .venv/bin/python -m benchmarks
	@$(BIN)/sparklog bench $(ARGS)

soak: setup ## run the long tests, overnight (ARGS="--minutes 60 --only kills", or a path)
	@$(BIN)/python -m tools.soak $(ARGS)

dist: setup ## build the artifacts of a release, in dist, and try each in a clean environment
	@$(BIN)/python -m tools.dist $(ARGS)

lock: setup ## write requirements.lock from pyproject.toml (ARGS=--upgrade for newer versions)
	@$(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 \
	    --all-extras --group dev --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --custom-compile-command "make lock" --output-file requirements.lock $(ARGS)
	@! grep -n '://' requirements.lock

clean: ## remove all generated files, including .venv
	@rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@rm -rf artifacts derby.log metastore_db spark-warehouse
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Modules are compiled on import: most are never imported, and compiling takes a third of the time.
$(STAMP): requirements.lock pyproject.toml
	@tools/check-java
	@python=$$(tools/find-python $(PYTHON)) && { \
	    $(BIN)/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear $(VENV); }
	@echo "installing the packages of requirements.lock into $(VENV); the first time takes a few minutes"
	@$(PIP) install --no-compile --require-hashes --requirement requirements.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@
