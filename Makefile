# make help lists what there is. PYTHON chooses the interpreter, PIP_FLAGS is passed to pip, VENV moves the environment.
# Where there is no NVIDIA GPU, PyTorch is its CPU build; TORCH_BUILD=cuda or cpu decides instead.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
BIN := $(VENV)/bin
# As many processes as there are processors, and no more than a laptop's memory has room for.
# tests/integration comes first and takes longest, so files are handed out in that order.
PARALLEL := --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# The same verdict every time: sets of strings have one order, and sums of floats one number of threads. Hundreds of
# processes import the course, so its bytecode is kept, whatever the shell says. The memory of freed models returns to
# the system; by default glibc would keep 1 GB.
SUITE := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 PYTHONHASHSEED=0 MALLOC_MMAP_THRESHOLD_=1048576 $(BIN)/python -m pytest $(PARALLEL) -rs --durations 20 --durations-min 5
GPU_SUITE := $(BIN)/python -m pytest -p tests.gpu_run --seconds $(SECONDS_ON_GPU) tests phases
SECONDS_ON_GPU ?= 480
MINUTES ?= 10

.DEFAULT_GOAL := help
.PHONY: help demo test test-all measure fuzz mutants test-gpu test-gpu-2 lint format env map recordings docs workshop clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: env ## fetch the demo model, let it answer, and show what each phase gains on this machine
	@$(BIN)/infer model pull smollm2-135m
	@echo
	$(BIN)/infer generate --model smollm2-135m --chat --max-tokens 64 --prompt "Tell me what a neural network is, in one sentence."
	@echo
	$(BIN)/infer ladder --model smollm2-135m --quick

test: env ## run the tests of the engine, the server and the kernels, and of what the chapters quote: minutes
	$(SUITE) -m "not slow and not measured"
	TRITON_INTERPRET=1 $(SUITE) -m "not slow and not measured" tests/kernels

test-all: env ## run every test that this machine can run and that decides: also chapters' code, browsers, exercises, benchmarks, compilation
	$(SUITE) -m "not measured"
	TRITON_INTERPRET=1 $(SUITE) -m "not measured" tests/kernels

measure: env ## check the ratios of times, one test after the other; wants the machine for itself
	$(BIN)/python -m pytest -m measured --ignore tutorial

fuzz: env ## search for failing examples at random, for MINUTES=10; a found one belongs into its test as @example
	@until=$$(( $$(date +%s) + 60 * $(MINUTES) )); while [ $$(date +%s) -lt $$until ]; do \
	  OMP_NUM_THREADS=1 INFER_FUZZ_UNTIL=$$until $(BIN)/python -m pytest $(PARALLEL) -q -x -m "hypothesis and not measured" || exit 1; done

mutants: env ## put known faults into a copy, and see which test finds them; one folder: make mutants shared/grammar
	@OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/python -m tests.mutants.run $(filter-out mutants,$(MAKECMDGOALS))

test-gpu: env ## run every test that needs a GPU, with a summary at the end even if the time is up
	$(GPU_SUITE) --summary build/gpu.json -m "gpu and not measured and not several_gpus" --numprocesses 12 --dist worksteal

test-gpu-2: env ## run the tests that need several GPUs
	$(GPU_SUITE) --summary build/gpu-2.json -m "gpu and not measured and several_gpus"

lint: env ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env ## bring the code into format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

map: env ## write docs/MAP.md anew, the list of all modules
	$(BIN)/python -m tests.source_map

recordings: env ## make the recordings that chapters show line by line anew; of one phase: PHASES=07
	OMP_NUM_THREADS=1 $(BIN)/python -m tutorial.recordings $(PHASES)

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
