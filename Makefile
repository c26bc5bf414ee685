# Each target sets up what it needs in a virtual environment of its own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow check speed notebooks clean

demo: $(VENV)/demo
	$(BIN)/python -m benchmarks.digits.run --output-dir demo

test: $(VENV)/test
	$(BIN)/python -m pytest -n auto -q -m "not slow"

test-slow: $(VENV)/test
	$(BIN)/python -m pytest -n auto -q -m slow

check: $(VENV)/check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

speed: $(VENV)/speed
	$(BIN)/python -m benchmarks.speed.run

notebooks: $(VENV)/notebooks
	$(BIN)/jupyter-execute --inplace notebooks/*.ipynb

# The marker file of an extra is newer than pyproject.toml once it is installed.
$(VENV)/%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) demo
