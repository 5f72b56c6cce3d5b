# make help lists what there is. PYTHON chooses the interpreter, PIP_FLAGS is passed to pip, VENV moves the environment.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
CONSTRAINTS := constraints/constraints.txt
READY := $(VENV)/.ready
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint format env clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(READY) ## fetch the demo model, let it answer, and measure every phase on this machine
	@$(BIN)/infer model pull smollm2-135m
	@echo
	$(BIN)/infer generate --model smollm2-135m --chat --max-tokens 64 --prompt "Tell me what a neural network is, in one sentence."
	@echo
	$(BIN)/infer ladder --model smollm2-135m --quick

test: $(READY) ## run every test that this machine can run
	$(BIN)/python -m pytest

lint: $(READY) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## bring the code into format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

env: $(READY) ## make the environment alone

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

# Made anew whenever what it depends on changed; otherwise every target starts at once.
$(READY): pyproject.toml $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON) here; name a Python of at least 3.11: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version) is too old; name a Python of at least 3.11: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) cannot make environments; install its venv package (on Debian and Ubuntu: python3-venv)." >&2; exit 2; }
	@echo "making the environment in $(VENV) (once; PyTorch is large)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@
