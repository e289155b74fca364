# make quickstart     install into .venv if needed and train the quickstart recipe; ARGS="--set FIELD=VALUE" changes a field
# make test           lint, types and tests: nine minutes on 2 cores
# make test-long      ten minutes of the long tests: a slice, which rotates with the commit count
# make test-all       all tests, with longer soaks, more seeds and more kills: two to three hours
# make screens        train some runs and write docs/screens/*.svg and docs/keys.md from them: ten minutes
# make gpu-check      test and measure on a GPU in ten minutes, the most valuable parts first; installs nothing.
#                     PYTHON=the interpreter to use, RESULTS=DIR keeps the results, ARGS="--only smoke,short --limit-s 300"
# make standin        run tests/standin, PyTorch's CUDA build on a machine without a GPU; see tests/standin/README.md.
#                     The first time it installs 5 GB into .venv-cuda; or give STANDIN_PYTHON=an interpreter that has it
# make gpu-emulated   run tests/gpu and tests/emulated on the stand-in with kernels that compute, 20 minutes;
#                     STANDIN_ARGS="-m '' --slices 4 --long-slice 3": a quarter of them
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CUDA_VENV := .venv-cuda
STANDIN_PYTHON ?= $(CUDA_VENV)/bin/python
STANDIN_TORCH := 2.11.0
STANDIN := build/standin
# Three processes on two cores, as many tests wait for a process that they started.
SPREAD := -n 3 --dist worksteal
COMMITS = $(shell git rev-list --count HEAD 2>/dev/null || echo 0)
# Tests start hundreds of processes, each of which would otherwise compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test pytest test-all test-long lint types screens gpu-check standin gpu-emulated clean

quickstart: $(VENV)/.installed
	$(BIN)/python recipes/quickstart.py $(ARGS)

# Types beside the tests, as they keep one core busy and tests do not keep both.
test: lint
	@$(MAKE) --no-print-directory -j2 types pytest

pytest: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(SPREAD)

test-all: lint types
	ALL_SAMPLES=1 $(BIN)/python -m pytest $(SPREAD) -m ''

# A slice of the tests that test-all has and test has not.
test-long: $(VENV)/.installed-dev
	ALL_SAMPLES=1 $(BIN)/python -m pytest $(SPREAD) -m 'long or sampled' --long-slice $(COMMITS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV): minutes the first time, as torch is large"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV): minutes the first time, as torch is large"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.installed

screens: $(VENV)/.installed
	PYTHONPATH=src $(BIN)/python -m benchmarks screens

gpu-check:
	PYTHONPATH=src $(PYTHON) -m benchmarks gpu_check $(if $(RESULTS),--results "$(RESULTS)") $(ARGS)

define on_standin
	@if ! tests/standin/build.sh --headers; then exit 0; fi; \
	set -e; [ "$(STANDIN_PYTHON)" != "$(CUDA_VENV)/bin/python" ] || $(MAKE) --no-print-directory $(CUDA_VENV)/.installed; \
	tests/standin/build.sh "$(STANDIN_PYTHON)" $(STANDIN); \
	PYTHONPATH=$(CURDIR)/src $(STANDIN)/$(1) "$(STANDIN_PYTHON)" -m pytest -p no:cacheprovider $(2) $(STANDIN_ARGS)
endef

standin:
	$(call on_standin,run,tests/standin)

# One test at a time is given out, so that the longest, which come first, are spread.
gpu-emulated:
	$(call on_standin,compute,-n 3 --maxschedchunk 1 -m '' tests/gpu tests/emulated)

$(CUDA_VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing torch $(STANDIN_TORCH) with CUDA into $(CUDA_VENV): 5 GB, minutes the first time"
	$(PYTHON) -m venv $(CUDA_VENV)
	grep -v '^torch==' constraints.txt >$(CUDA_VENV)/constraints.txt
	$(CUDA_VENV)/bin/python -m pip install --quiet -c $(CUDA_VENV)/constraints.txt torch==$(STANDIN_TORCH) -e '.[dev]'
	$(CUDA_VENV)/bin/python -m pip install --quiet --no-deps "kvikio-cu13==26.10.*" "libkvikio-cu13==26.10.*" "rapids-logger==0.3.*"
	touch $@

clean:
	rm -rf $(VENV) $(CUDA_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
