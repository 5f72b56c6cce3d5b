# make help lists what there is. PYTHON chooses the interpreter, PIP_FLAGS is passed to pip, VENV moves the environment.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
CONSTRAINTS := constraints/constraints.txt
TRITON := 3.6.0
READY := $(VENV)/.ready
BIN := $(VENV)/bin
# As many processes as there are processors, and no more than a laptop's memory has room for.
# tests/integration comes first and takes longest, so files are handed out in that order.
PARALLEL := --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 5
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format env docs workshop clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(READY) ## fetch the demo model, let it answer, and measure every phase on this machine
	@$(BIN)/infer model pull smollm2-135m
	@echo
	$(BIN)/infer generate --model smollm2-135m --chat --max-tokens 64 --prompt "Tell me what a neural network is, in one sentence."
	@echo
	$(BIN)/infer ladder --model smollm2-135m --quick

test: $(READY) ## run the tests of the engine, the server, the chapters and the kernels: minutes
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow and not measured" $(PARALLEL)
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" tests/kernels $(PARALLEL)

test-all: $(READY) ## run every test that this machine can run: also browsers, exercises, measured ratios, compilation
	OMP_NUM_THREADS=1 $(PYTEST) -m "not measured" $(PARALLEL)
	$(PYTEST) -m measured
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels $(PARALLEL)

lint: $(READY) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## bring the code into format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## build the site of the course into site/
	@rm -rf site
	$(BIN)/python -m sphinx -b html -E -q -W --keep-going -c docs/site -d build/doctrees . site
	@echo "open site/index.html"

workshop: docs ## prepare this machine for a class that then needs no network
	$(BIN)/infer workshop prepare

env: $(READY) ## make the environment alone

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

# Made anew whenever what it depends on changed; otherwise every target starts at once.
$(READY): pyproject.toml $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON) here; name a Python of at least 3.11: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version) is too old; name a Python of at least 3.11: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) cannot make environments; install its venv package (on Debian and Ubuntu: python3-venv)." >&2; exit 2; }
	@echo "making the environment in $(VENV) (once; PyTorch is large)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c $(CONSTRAINTS) -e '.[dev]'
	@# PyTorch for CUDA brings the Triton it was built for; the CPU build brings none, and kernels run interpreted there.
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) --no-deps triton==$(TRITON)
	@touch $@
