# Two commands: `make compare` runs the main experiment, `make test` runs the tests.
# Each makes its own virtual environment first; a second run starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv compare test lint types bench clean

venv: $(STAMP)

# torch is named by its exact version, because a bare `torch` pulls several GB of CUDA libraries that nothing here needs.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

compare: $(STAMP)
	$(BIN)/halfstep compare $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_step.py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis halfstep-compare halfstep-compare-quick
