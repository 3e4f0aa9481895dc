# Everything here makes what it needs in .venv first. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Two files of tests at a time, one thread each: more would wait for one another. Those that start processes spend half of
# their time on waiting for them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-full test-quick lint format clean

help:
	@echo "make quickstart   prepare a small corpus, train, stop, resume, finish (minutes, no network)"
	@echo "make test         run all tests"
	@echo "make test-full    run all tests, with every variant where \`make test\` trains some (tests/rotation.py)"
	@echo "make test-quick   run the tests that neither start training processes nor compile"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff format the code"
	@echo "make clean        remove .venv, runs/quickstart and data/quickstart"

quickstart: $(VENV)/.installed
	$(BIN)/depth quickstart

test: $(VENV)/.installed-test
	$(PYTEST)

test-full: $(VENV)/.installed-test
	TEST_ROTATION=all $(PYTEST)

test-quick: $(VENV)/.installed-test
	$(PYTEST) -m "not slow"

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs/quickstart data/quickstart

$(BIN)/python:
	@echo "making the environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 2; }
	@$(PYTHON) -m venv $(VENV)

# The pinned torch comes first, so that no other package's looser bound picks one.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing torch and torchtitan (several GB the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	@echo "installing the linters"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[lint]"
	@touch $@
