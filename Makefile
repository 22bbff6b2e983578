# `make demo` trains a real classifier, `make compare` compares strategies, `make test` runs the whole suite. All set everything up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Compiled files are kept, for tests start hundreds of processes, and each would compile the package anew. A file of tests is
# run by one process, so that what its tests share is made once.
# Tests of real processes wait more than they compute, so two files at a time share the cores. A stall of the machine can fail
# one, and a compiled library can end a test process: what failed is run once more, alone. Both outcomes are shown.
AGAIN := --last-failed --last-failed-no-failures none
COMPUTING := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore tests/on_processes
WAITING := $(BIN)/python -m pytest tests/on_processes

.PHONY: demo compare test check bench docs site clean

demo: $(VENV)/.runtime
	$(BIN)/polyrhythm train recipes/demo.yaml

compare: $(VENV)/.runtime
	$(BIN)/polyrhythm compare --cluster office --data digits --model mlp --workers 4 --seeds 3

test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.development
	$(COMPUTING) --numprocesses auto --dist loadfile || $(COMPUTING) $(AGAIN)
	$(WAITING) --numprocesses 2 --dist loadfile || $(WAITING) $(AGAIN)

check: $(VENV)/.development
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

bench: $(VENV)/.development
	$(BIN)/python benchmarks/short.py

site: $(VENV)/.development
	$(BIN)/python scripts/build_site.py

docs: $(VENV)/.development
	$(BIN)/python scripts/generate_docs.py

$(VENV)/.runtime: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[data,tensorboard]'
	touch $@

$(VENV)/.development: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist
