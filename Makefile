# Two commands do all set-up on a machine with Python 3.11 or newer: `make demo` and `make test`.
# A C++ compiler and CMake make the native decode kernel; without them everything else works.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The CPU build of PyTorch. With a CUDA GPU:  make install TORCH="torch==2.13.*" TORCH_INDEX=https://download.pytorch.org/whl/cu130
TORCH       ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Where the CPU index cannot be reached, pip's own index serves the same release.
INSTALL_TORCH = $(BIN)/pip install --quiet --retries 1 --index-url $(TORCH_INDEX) --extra-index-url https://pypi.org/simple "$(TORCH)"

.PHONY: help install demo test test-all reliability lint docs dist notebook clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

install: $(BIN)/.installed  ## create .venv and install the package with all its extras

$(BIN)/.installed: pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -c "import torch" 2>/dev/null || $(INSTALL_TORCH)
	$(BIN)/pip install --quiet -e ".[demo,peft,cluster,gguf,notebook,docs,release,test,dev]"
	@touch $@

demo: install  ## train and compare four variants on embedded text, in about five minutes
	$(BIN)/qvattn demo

test: install lint  ## the whole test suite but the slow tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not slow"

test-all: install lint  ## with the slow tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup

reliability: install  ## docs/reliability.md again: kills, faults, hostile files, soak (under an hour)
	$(BIN)/python benchmarks/reliability.py

lint: install  ## ruff and mypy
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/ruff format --check src tests benchmarks docs
	$(BIN)/mypy

docs: install  ## the documentation site, in site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html, or: $(BIN)/mkdocs serve"

notebook: install  ## run notebooks/tour.ipynb from top to bottom
	$(BIN)/python -m pytest -q tests/docs/test_notebook.py

# OpenMP stays PyTorch's own: see docs/release.md
dist: install  ## source archive and manylinux wheel in dist/, each tried in an empty environment
	rm -rf dist build/wheel
	$(BIN)/python -m build --outdir build/wheel
	mkdir -p dist && mv build/wheel/*.tar.gz dist/
	case "$$(echo build/wheel/*.whl)" in *linux*) PATH="$(abspath $(BIN)):$$PATH" \
		$(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl;; esac
	QVATTN_DIST=dist $(BIN)/python -m pytest -q tests/release
	@ls -l dist

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist runs site .pytest_cache .mypy_cache .ruff_cache
