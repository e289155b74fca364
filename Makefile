# make quickstart   train the quickstart recipe, installing into .venv first where needed
# make test         lint, types and tests
# make screens      docs/screens/*.svg and docs/keys.md, from runs trained for it; five minutes
# make gpu-check    what ten minutes of a GPU are worth, most valuable first, with the interpreter in PYTHON; installs
#                   nothing; RESULTS=DIR keeps all of it as it is found, ARGS="--resume --only suites" and the like
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test lint types screens gpu-check clean

quickstart: $(VENV)/.installed
	$(BIN)/python recipes/quickstart.py

test: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal

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
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tui.capture docs/screens

gpu-check:
	PYTHONPATH=. $(PYTHON) -m app.gpu_check $(if $(RESULTS),--results "$(RESULTS)") $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
