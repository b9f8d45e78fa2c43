# `make demo` and `make test` do all set-up on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
AIM_PORT ?= 43800

.PHONY: setup demo test test-all lint dashboard clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/dd-lightning launch experiment=demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

# Two at a time where the clock has no say, then the rest, each with the processors for itself.
TOGETHER := unit or property or virtual
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test: lint
	@failed=0; set -x; \
	$(PYTEST) -n 2 --dist loadfile -m "not slow and ($(TOGETHER))" || failed=1; \
	$(PYTEST) -m "not slow and not ($(TOGETHER))" || failed=1; \
	exit $$failed

test-all: lint
	$(PYTEST)

# Ctrl-C ends `aim up` but not the server it starts: hence a session of its own, ended as a group.
dashboard: $(STAMP)
	$(BIN)/python scripts/dashboard.py --port $(AIM_PORT)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
