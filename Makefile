# `make demo` trains a real classifier, `make compare` compares strategies, `make test` tests the package.
# All set everything up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SUITE := PATH="$(CURDIR)/$(BIN):$$PATH" scripts/run_tests
.PHONY: demo compare test test-all test-portable check bench papers docs site clean

demo: $(VENV)/.runtime
	$(BIN)/polyrhythm train recipes/demo.yaml

compare: $(VENV)/.runtime
	$(BIN)/polyrhythm compare --cluster office --data digits --model mlp --workers 4 --seeds 3

# Compiled files are kept, for tests start hundreds of processes, and each would compile the package anew.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.development
	$(SUITE) --sample

test-all: $(VENV)/.development
	$(SUITE)

test-portable: $(VENV)/.development
	OMP_NUM_THREADS=1 $(BIN)/python scripts/run_portable_tests.py

check: $(VENV)/.development
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

bench: $(VENV)/.development
	$(BIN)/python benchmarks/short.py

# Pages of the founding papers in virtual time.
papers: $(VENV)/.development
	$(BIN)/python benchmarks/bsc-tables/throughput.py --seconds 1000 --out benchmarks/bsc-tables
	$(BIN)/python benchmarks/bsc-tables/convergence.py --out benchmarks/bsc-tables
	$(BIN)/python benchmarks/bsc-tables/by_verb.py --out benchmarks/bsc-tables
	$(BIN)/python benchmarks/bsc-tables/figures.py --out benchmarks/bsc-tables
	$(BIN)/python benchmarks/bsc-tables/rates.py --out benchmarks/bsc-tables
	$(BIN)/python benchmarks/ut-austin/measure.py --seeds 2 --out benchmarks/ut-austin
	$(BIN)/python benchmarks/ut-austin/prices.py --out benchmarks/ut-austin
	$(BIN)/python benchmarks/ut-austin/figure16.py --out benchmarks/ut-austin
	$(BIN)/python benchmarks/deep-image/scaling.py --readings --out benchmarks/deep-image

site: $(VENV)/.development
	$(BIN)/python scripts/build_site.py

docs: $(VENV)/.development
	$(BIN)/python scripts/generate_docs.py

$(VENV)/.runtime: pyproject.toml constraints.txt
	@echo 'installing into $(VENV)/; this may take some minutes'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[data,tensorboard]'
	touch $@

$(VENV)/.development: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist
