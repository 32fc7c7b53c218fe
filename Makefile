# Every goal sets up the virtual environment first where it is not there yet.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMMA := ,
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
CPU_BUILDS := https://download.pytorch.org/whl/cpu
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
EXTRAS := dev$(if $(HAS_GPU),$(COMMA)cuda13)

.PHONY: help setup demo test quick lint layers types format docs

help: ## what can be made
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10

setup: $(STAMP) ## the virtual environment with torch, the package and its tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@echo "setting up $(VENV): takes about a minute where the packages are near"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
# Without a GPU: the CPU build by its full name, which never brings CUDA packages of several GB.
ifeq ($(HAS_GPU)$(shell uname -s),Linux)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q "torch==$(TORCH)+cpu" || \
		$(BIN)/python -m pip install -q "torch==$(TORCH)+cpu" --extra-index-url $(CPU_BUILDS)
endif
	$(BIN)/python -m pip install -q -e ".[$(EXTRAS)]" -c constraints.txt
	@touch $@

demo: $(STAMP) ## trains the digits example; ends with a table of what came out and where it is
	$(BIN)/python examples/digits/train.py

# What forks processes cannot share one with what uses a GPU.
test: $(STAMP) ## the whole suite
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n 2 --dist worksteal
ifdef HAS_GPU
	$(BIN)/python -m pytest -m "gpu or gpu2"
endif

# BASE=main: what a branch has changed, commits too.  Ends by itself after a minute: `make test` has the rest.
BASE ?= HEAD
quick: $(STAMP) layers ## within a minute: lint, layers, types of changed files, the tests of changed parts
	@$(BIN)/ruff check -q
	@$(BIN)/ruff format -q --check
	@sources=$$($(BIN)/python tests/changed_parts.py --base $(BASE) --sources); test -z "$$sources" || $(BIN)/mypy $$sources
	@tests=$$($(BIN)/python tests/changed_parts.py --base $(BASE)); test -z "$$tests" || OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= \
		$(BIN)/python -m pytest -q -n 2 --no-header -r fE --session-timeout=35 $$tests || \
		{ test $$? -eq 2 && echo "the time is up: make test has the rest"; }

lint: $(STAMP) layers ## ruff, its formatter, codespell, and the import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell

layers: $(STAMP) ## imports go one way
	$(BIN)/lint-imports

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

format: $(STAMP) ## formats, and corrects what ruff can correct
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(STAMP) ## writes docs/reference.md from the docstrings, and docs/performance.md from benchmarks/results
	$(BIN)/python docs/render_reference.py
	$(BIN)/python benchmarks/render.py
