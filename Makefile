# Everything a contributor or CI runs. `make demo` and `make test` set up the environment themselves.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check

.PHONY: help install demo test test-slow check docs bench browser stress fuzz sanitize clean
.DEFAULT_GOAL := help

help:
	@echo "make install    create $(VENV) with everything (pinned by constraints.txt)"
	@echo "make demo       train, generate, measure, look inside; ends with the path of a page (LONG=1: longer runs)"
	@echo "make test       the test suite (under 10 minutes on 2 cores)"
	@echo "make test-slow  the long checks"
	@echo "make check      lint, format, types, spelling"
	@echo "make docs       the documentation, into site/; any warning is an error"
	@echo "make bench      measure the operators, write benchmarks/results/*.json"
	@echo "make browser    try the page of tost explore in Chromium, with pictures in build/browser"
	@echo "make stress     kill, starve and damage runs, and check that nothing is lost (KILLS=60)"
	@echo "make fuzz       attack every parser of files for SECONDS (60) each, add to results/fuzz.json"
	@echo "make sanitize   run the native kernel under the sanitizers, add to results/sanitize.json"

# The stamp holds what the environment was made from, so a changed pin or kernel reinstalls.
STAMP := $(VENV)/.installed
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/tost/ops/csrc/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/tost info
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	@$(BIN)/python scripts/demo.py --out demo$(if $(LONG),-long --long)

test: $(STAMP)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(STAMP)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m slow

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

docs: $(STAMP)
	$(BIN)/python -m research pages --check
	$(BIN)/python scripts/update_promises.py --check
	$(BIN)/python scripts/update_explore.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python scripts/website/links.py site
	@echo site/index.html

bench: $(STAMP)
	$(BIN)/tost bench ops --out benchmarks/results

# Test tools of the page that pip does not have: axe-core checks accessibility. Chromium is the machine's.
browser: $(STAMP)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[browser]'
	npm install --silent --no-save --prefix build/browser axe-core@4.14.0
	$(BIN)/python -m pytest -m browser tests/explore

KILLS ?= 60
stress: $(STAMP)
	$(BIN)/python scripts/stress --kills $(KILLS)

SECONDS ?= 60
fuzz: $(STAMP)
	-$(PIP) install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m fuzz.run --seconds $(SECONDS)

sanitize: $(STAMP)
	$(BIN)/python scripts/sanitize.py

clean:
	rm -rf build demo demo-long site .pytest_cache .mypy_cache .ruff_cache .hypothesis
