# make run    train on this machine, no account     make test   the tests
# make check  what CI runs                          make bench  performance beside the peers
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BEGAN := $(shell date +%s)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first that exists; `make PYTHON=/path/to/python3.12 setup` chooses another.
PYTHON ?= $(firstword $(foreach name,python3.11 python3,$(shell command -v $(name))))
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
TORCH := $(shell grep '^torch==' constraints.txt)

PACKAGES := sdk/tinker_atropos $(wildcard adapters/*/tinker_atropos_* plugins/*/*/tinker_atropos_*)
TESTS := $(wildcard tests sdk/tests adapters/*/tests plugins/*/*/tests scripts benchmarks conformance)
# Small models gain nothing from more threads than cores, and lose much when the tests share a machine.
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup run test check lint docs wheels bench bench-api \
	bench-humanoid bench-control-learning bench-endpoints bench-grading bench-quickstart conformance clean

help:
	@echo "make setup             create $(VENV) and install everything, editable"
	@echo "make run               train SmolLM2-135M on small sums on this machine; ARGS='--steps 8' adds options"
	@echo "make test              the tests; ARGS='-k name' selects some"
	@echo "make check             ruff, mypy, then the tests: what CI runs"
	@echo "make docs              only the tests of the docs: links, commands, examples"
	@echo "make wheels            build every wheel into dist and try them in empty environments"
	@echo "make bench             performance, beside the peers; ARGS='control_overlap' selects some"
	@echo "make bench-api         the trajectory API, in memory and on Redis, beside atroposlib's run-api"
	@echo "make bench-humanoid    environment steps/s of Humanoid beside MuJoCo alone, Gymnasium and EnvPool"
	@echo "make bench-control-learning  PPO on Humanoid, three seeds; ARGS='--cleanrl PATH' beside CleanRL's"
	@echo "make bench-endpoints   what a request of /generate costs over the bare policy"
	@echo "make bench-grading     graded answers/s of math_server beside math-verify in a loop"
	@echo "make bench-quickstart  learning: three seeds, and a learning rate of 0"
	@echo "make conformance       tinker-cookbook's own loops on the local Tinker server, Atropos' tests and scripts"
	@echo "make clean             remove $(VENV), dist and caches; runs stay"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "error: neither python3.11 nor python3 was found; install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: $(PYTHON) is $$($(PYTHON) --version), 3.11 or newer is needed; say make PYTHON=/path/to/python3.11 setup" >&2; exit 1; }
	@[ -x $(BIN)/python ] || { echo "setup: creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: installing $(TORCH)"
	@$(PIP) install "$(TORCH)"
	@echo "setup: installing tinker-atropos and what it needs"
	@$(PIP) install -c constraints.txt -e '.[all,dev]'
	@touch $(STAMP)
	@echo "setup: done in $$(($$(date +%s) - $(BEGAN))) s"

run: setup
	@$(BIN)/python scripts/quickstart.py --began $(BEGAN) -- $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

check: lint test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/mypy --explicit-package-bases $(TESTS)

docs: setup
	$(BIN)/python -m pytest tests/test_docs.py

wheels: setup
	scripts/check_wheels.sh

bench: setup
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-api: setup
	$(BIN)/python benchmarks/api.py $(ARGS)

bench-humanoid: setup
	$(BIN)/python benchmarks/humanoid.py $(ARGS)

bench-endpoints: setup
	$(BIN)/python benchmarks/endpoints.py $(ARGS)

bench-grading: setup
	$(BIN)/python benchmarks/grading.py $(ARGS)

bench-control-learning: setup
	$(BIN)/python benchmarks/control_learning.py $(ARGS)

conformance: setup
	$(BIN)/python conformance/cookbook.py
	$(BIN)/python conformance/atropos_scripts.py $(ARGS)
	$(BIN)/python conformance/protocol.py

bench-quickstart: setup
	$(BIN)/python benchmarks/learning.py $(ARGS)

clean:
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
