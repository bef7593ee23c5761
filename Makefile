# Everstep. On a fresh machine `make demo` or `make test` does all the set-up; `make` lists what there is.
PYTHON ?= python3
TORCH ?= torch==2.13.0
CLUSTER ?= 1
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
export CLUSTER

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test lint bench cluster-up cluster-down clean

help: ## list what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

venv: $(VENV)/.installed ## make .venv, with the command .venv/bin/everstep

demo: $(VENV)/.installed ## train on three nodes played by this machine, kill a worker, compare the results
	@$(BIN)/python -m examples.demo

test: $(VENV)/.tools ## run all tests; CLUSTER=0 leaves out those that need the Slurm cluster in Docker
	@$(BIN)/pytest --durations=15 tests/unit tests/embedded $(if $(filter 0,$(CLUSTER)),,tests/cluster)

lint: $(VENV)/.tools ## ruff, and mypy --strict on the packages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@mkdir -p build/lint/everstep
	@ln -sfn ../../../launcher build/lint/everstep/launcher
	@ln -sfn ../../../recovery build/lint/everstep/recovery
	@ln -sfn ../../../healthcheck build/lint/everstep/healthcheck
	@MYPYPATH=build/lint $(BIN)/mypy --strict -p everstep.launcher -p everstep.recovery -p everstep.healthcheck

bench: $(VENV)/.installed ## measure recovery against torchrun's restart; writes build/bench.json
	@mkdir -p build
	@$(BIN)/python -m benchmarks.recovery --json build/bench.json

cluster-up: ## bring up the Slurm cluster in Docker, and say how to log in and submit
	@docker/up.sh

cluster-down: ## take it down
	@docker/down.sh --engine

clean: ## remove what was built here: .venv, build, caches
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: a second run is instant, and a change of what is to be installed installs it.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo 'error: Python 3.10 or later is needed: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
			echo 'installing python3-venv ...'; \
			apt-get update -qq && \
			DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-venv > /dev/null; \
		else \
			echo 'error: $(PYTHON) cannot make a virtual environment: install python3-venv, then make again' >&2; \
			exit 1; \
		fi; }
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made setup.cfg pyproject.toml
	@echo 'installing everstep and $(TORCH) into $(VENV) ...'
	@$(PIP) install '$(TORCH)'
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.tools: $(VENV)/.installed
	@echo 'installing what tests and lint need ...'
	@$(PIP) install --editable '.[test,lint]'
	@touch $@
