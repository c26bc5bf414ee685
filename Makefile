# Each target sets up what it needs in a virtual environment of its own.
PYTHON ?= python3
VENV ?= .venv
# A file of versions for pip, such as .ci/oldest.txt.
CONSTRAINTS ?=
PYTEST_ARGS ?=
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal -q $(PYTEST_ARGS)

# Python keeps the modules that it compiled, also where the shell says not to: many
# processes import the same ones. So pip need not compile those that nobody imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test test-optimized test-slow test-experiments test-all \
	test-thorough check speed notebooks docs release-check \
	clean

demo: $(VENV)/demo
	$(BIN)/python -m benchmarks.digits.run --output-dir demo

# The rings of the house, the public names, and the contract of each of them.
quick: $(VENV)/test
	$(PYTEST) -m "not slow and not thorough" tests/layering_test.py tests/memory_test.py \
		tests/api_test.py tests/contract_test.py tests/array_contract_test.py

# Recipes train.
test: $(VENV)/test
	$(PYTEST) -m "not slow and not thorough" --ignore=tests/experiments \
		--deselect=docs/recipes/

# Of these the guarantees of numbers once more, on code that XLA has optimized.
test-optimized: $(VENV)/test
	DPADAMBC_OPTIMIZED_TESTS=1 $(PYTEST) -m "optimized and not slow and not thorough" \
		--ignore=tests/experiments

# Slow tests, and all guarantees of numbers on optimized code.
test-slow: $(VENV)/test
	$(PYTEST) docs/recipes/*.md
	$(PYTEST) -m "slow and not optimized and not thorough" --ignore=tests/experiments
	DPADAMBC_OPTIMIZED_TESTS=1 $(PYTEST) -m "optimized and not thorough" \
		--ignore=tests/experiments

# The benchmarks, at small size, and the notebooks.
test-experiments: $(VENV)/test
	$(PYTEST) -m "not thorough" tests/experiments

# All of these, each once: guarantees of numbers on optimized code, which is what users
# run.
test-all: $(VENV)/test
	DPADAMBC_OPTIMIZED_TESTS=1 $(PYTEST) -m "optimized and not thorough" \
		--ignore=tests/experiments
	$(PYTEST) -m "not optimized and not thorough"

# More rows of tables, and more draws: before a release, and after a change of their
# subject.
test-thorough: $(VENV)/test
	$(PYTEST) -m thorough

check: $(VENV)/check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

speed: $(VENV)/speed
	$(BIN)/python -m benchmarks.speed.run

notebooks: $(VENV)/notebooks
	$(BIN)/jupyter-execute --inplace notebooks/*.ipynb

# The site, in docs/_build/html; a warning, or a public name without a page, ends it.
docs: $(VENV)/docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

# The archives to publish, in dist: built, checked, and tried in an environment of their own.
release-check:
	$(PYTHON) .ci/release.py

# The marker file of an extra is newer than pyproject.toml once it is installed.
$(VENV)/%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		$(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) demo dist docs/benchmarks \
		docs/_build docs/_generated docs/api docs/notebooks
