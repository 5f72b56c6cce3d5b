# make help lists what there is. PYTHON chooses the interpreter, PIP_FLAGS is passed to pip, VENV moves the environment.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
BIN := $(VENV)/bin
# As many processes as there are processors, and no more than a laptop's memory has room for.
# tests/integration comes first and takes longest, so files are handed out in that order.
PARALLEL := --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 5
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format env docs workshop clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: env ## fetch the demo model, let it answer, and measure every phase on this machine
	@$(BIN)/infer model pull smollm2-135m
	@echo
	$(BIN)/infer generate --model smollm2-135m --chat --max-tokens 64 --prompt "Tell me what a neural network is, in one sentence."
	@echo
	$(BIN)/infer ladder --model smollm2-135m --quick

test: env ## run the tests of the engine, the server, the chapters and the kernels: minutes
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow and not measured" $(PARALLEL)
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" tests/kernels $(PARALLEL)

test-all: env ## run every test that this machine can run: also browsers, exercises, measured ratios, compilation
	OMP_NUM_THREADS=1 $(PYTEST) -m "not measured" $(PARALLEL)
	$(PYTEST) -m measured --ignore tests/kernels --ignore tutorial
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels $(PARALLEL)

lint: env ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env ## bring the code into format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: env ## build the site of the course into site/
	@rm -rf site
	$(BIN)/python -m sphinx -b html -E -q -W --keep-going -c docs/site -d build/doctrees . site
	@echo "open site/index.html"

workshop: docs ## prepare this machine for a class that then needs no network
	$(BIN)/infer workshop prepare

# Every target asks whether the environment is ready, which takes milliseconds when it is.
env: ## make the environment alone
	@command -v $(PYTHON) >/dev/null || test -x $(BIN)/python || { echo "error: there is no $(PYTHON) here; name a Python of at least 3.11: make PYTHON=python3.12 ..." >&2; exit 2; }
	@python=$(BIN)/python; test -x $$python || python=$(PYTHON); $$python constraints/environment.py $(VENV) $(PIP_FLAGS)

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
