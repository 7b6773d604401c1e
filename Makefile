# `make demo` and `make test` need nothing typed before them: each makes .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup locked demo test lint fuzz faults load package clean
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[roles,studio,onnx,cluster,dev]"
	touch $@

# The same environment with every file checked against a hash (Linux x86-64, Python 3.11).
locked:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(STAMP)

demo: setup
	$(BIN)/dear demo --out demo

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

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

# Build, install into an empty environment, run the quick demo there.
package: setup
	scripts/check-package $(BIN)/python

clean:
	rm -rf $(VENV) build dist demo
