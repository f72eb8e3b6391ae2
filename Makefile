# make run     install into .venv, fetch the embedded target, run the lab end to end
# make test    install, unit tests, every notebook at the quick preset
#
# Variables: PYTHON, VENV, TORCH_INDEX (see README), PROFILE, PRESET, RUN_ARGS, PYTEST_ARGS, WORKERS (test processes).

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install fetch run test test-needs test-unit test-notebooks test-browser test-engines test-all lint docs figures bench-training

VENV ?= .venv
PROFILE ?= smollm2
PRESET ?= default
RUN_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
export VENV
BIN := $(VENV)/bin
NOTEBOOK_TIMEOUT ?= 600

# File by file in WORKERS processes of one thread: tests wait and interpret more than they multiply (2 cores: 13 min, not 27).
UNIT = OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests tests/notebooks -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# $(call extra,MODULE,EXTRA): what only one target needs is installed when that target is asked for.
extra = $(BIN)/python -c 'import $(1)' 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints/lab.txt -e '.[$(2)]'

help:
	@sed -n 's/^# \?//p' Makefile | head -4
	@echo 'others       install fetch test-unit test-notebooks test-browser test-engines test-all lint docs figures bench-training'

install:
	@scripts/install.sh

fetch: install
	@$(BIN)/eagle3lab fetch --profile $(PROFILE)

run: fetch
	@$(BIN)/eagle3lab run --profile $(PROFILE) --preset $(PRESET) $(RUN_ARGS)

test: test-unit test-notebooks

# Fetched and installed first, so that no test of the corpus, the docs or the cluster is skipped.
test-needs: install fetch
	@$(call extra,mkdocstrings,docs)
	@$(call extra,submitit,cluster)

test-unit: test-needs
	@$(UNIT)

# The batch rule of the notebooks: build what is missing, never take the latest run.
test-notebooks: install fetch
	@EAGLE3LAB_BATCH=1 MPLBACKEND=agg $(BIN)/python -m pytest --nbmake --nbmake-timeout=$(NOTEBOOK_TIMEOUT) --durations=0 notebooks

# JupyterLab in Debian's Chromium (apt-get install chromium); screenshots in build/screenshots. Skips say why.
test-browser: install fetch
	@$(call extra,playwright,browser)
	@$(BIN)/python -m pytest -rs tests/browser $(PYTEST_ARGS)

test-engines: install
	@scripts/test_engines.sh

# Everything at full count; the marker `slow` stands for what `make test` leaves out.
test-all: test-needs
	@EAGLE3LAB_FULL=1 $(UNIT)
	@$(MAKE) --no-print-directory test-notebooks
	@$(MAKE) --no-print-directory test-engines

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/nbstripout --verify --keep-id notebooks/*.ipynb

docs: install
	@$(call extra,mkdocstrings,docs)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo 'docs: build/site/index.html'

figures: install
	@$(BIN)/python scripts/export_figures.py $(RUN)

# Against the peers' own code where scripts/install_peers.sh has put it; BENCH_ARGS: see the script's --help.
bench-training: install
	@$(BIN)/python benchmarks/bench_training.py $(BENCH_ARGS)
	@$(BIN)/python benchmarks/training_cuda.py
