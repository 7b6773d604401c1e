# `make demo` and `make test` do all set-up: each creates .venv if it is missing.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What tests and development need; scripts/lock-dependencies reads this line.
EXTRAS := roles,studio,onnx,cluster,parquet,serve,dev

.PHONY: setup locked demo test test-gpu test-oldest test-newest lint docs fuzz faults load package clean
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing dear and what its tests need into $(VENV) (about 4 GB, a few minutes, once):"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python scripts/install.py --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@

# The same environment with every file checked against a hash (Linux x86-64, Python 3.11).
locked:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python scripts/install.py --require-hashes --requirement requirements-dev.txt
	$(BIN)/python scripts/install.py --no-deps --no-build-isolation --editable .
	touch $(STAMP)

demo: setup
	$(BIN)/dear demo --out demo

lint: setup
	$(BIN)/ruff check src tests benchmarks research
	$(BIN)/ruff format --check src tests benchmarks research
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Every test that needs a CUDA device, and a short run of every benchmark: no .venv needed, only pytest and this
# folder. None is skipped on an H200.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -p no:cacheprovider -rs

# The same tests with the oldest and the newest PyTorch that pyproject.toml allows, each in a
# separate virtual environment. On Linux the package index offers CUDA builds only (6 GB each); a CPU runs them.
OLDEST_TORCH := 2.10.0
NEWEST_TORCH := 2.15.0
test-oldest: TORCH := $(OLDEST_TORCH)
test-newest: TORCH := $(NEWEST_TORCH)
test-oldest test-newest:
	test -x .venv-$(TORCH)/bin/python || $(PYTHON) -m venv .venv-$(TORCH)
	.venv-$(TORCH)/bin/python scripts/install.py "torch==$(TORCH)" --editable ".[$(EXTRAS)]"
	.venv-$(TORCH)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Every reader of files, changed inputs: an answer or a sentence. About a quarter of an hour on two cores.
fuzz: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run_fuzz.py --cases 100000 --seed 1

# SIGKILL and Ctrl-C at random moments of adapt, discover and bench; about an hour on one core.
faults: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/killing.py --kills 50

# Many images and classes, a day's work in one process, twenty people in the studio; about twenty minutes.
load: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/load_data.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/load_loop.py --days 1
	$(BIN)/python benchmarks/load_studio.py --users 20 --minutes 5

# Guides, glossary and API reference as a site in site/; nothing is loaded from other hosts.
docs: setup
	$(BIN)/python scripts/install.py --constraint constraints.txt --editable ".[docs]"
	$(BIN)/python scripts/architecture.py
	$(BIN)/zensical build --clean --strict

# Build, install into an empty environment, run the quick demo there.
package: setup
	scripts/check-package $(BIN)/python

clean:
	rm -rf $(VENV) build dist demo site
