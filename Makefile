# Every goal sets up the virtual environment first where it is not there yet.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMMA := ,
# uv links files from its cache, in ten seconds; pip copies and compiles them in two minutes.
UV := $(BIN)/uv pip install -q --python $(BIN)/python
# What is installed: torch, what the demo runs, and all tools.
TORCH_IS_IN := $(VENV)/.torch
DEMO_IS_IN := $(VENV)/.demo
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
# Checkpoints are flushed to the disk, milliseconds each time: the tests' folders are in memory where that takes 4 GB and programs.
SHM_FREE := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4000000 { print "yes" }')
SHM_RUNS := $(shell grep -qs '^[^ ]* /dev/shm .*noexec' /proc/mounts || echo yes)
IN_MEMORY := $(if $(and $(SHM_FREE),$(SHM_RUNS)),PYTEST_DEBUG_TEMPROOT=/dev/shm)
PYTEST := $(IN_MEMORY) $(BIN)/python -m pytest -o tmp_path_retention_count=1
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
EXTRAS := dev$(if $(HAS_GPU),$(COMMA)cuda13)
WITH_CUDA := $(if $(HAS_GPU), and torch for CUDA of several GB)

.PHONY: help setup demo test kernels sharded compiled services processes programs pages whole quick lint layers types format docs site release libraries examples matrix installed

help: ## what can be made
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10

setup: $(STAMP) ## the virtual environment with torch, the package and its tools

# Order only: a new .torch is no reason to install everything else again.
$(STAMP): pyproject.toml constraints.txt | $(TORCH_IS_IN)
	@echo "installing fabricamp with the tools of its tests and pages$(WITH_CUDA): half a minute to two without another word"
	@$(UV) -e ".[$(EXTRAS)]" -c constraints.txt
	@touch $@

$(DEMO_IS_IN): pyproject.toml constraints.txt | $(TORCH_IS_IN)
	@test -e $(STAMP) || echo "installing fabricamp, scikit-learn for its handwritten digits$(WITH_CUDA): half a minute"
	@test -e $(STAMP) || $(UV) -e ".[examples]" -c constraints.txt
	@touch $@

$(TORCH_IS_IN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || echo "making the virtual environment $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install -q --disable-pip-version-check "uv>=0.8"
# Without a GPU: the CPU build by its full name, which never brings CUDA packages of several GB.
ifeq ($(HAS_GPU)$(shell uname -s),Linux)
	@$(BIN)/python -c 'import torch' 2>/dev/null || echo "installing torch $(TORCH) for the CPU, 200 MB: half a minute"
# uv does not ask pip's setting for folders with wheels.
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
		UV_FIND_LINKS="$$(echo $$PIP_FIND_LINKS | tr " " ,)" $(UV) "torch==$(TORCH)+cpu" 2>/dev/null || $(UV) --torch-backend cpu "torch==$(TORCH)"
endif
	@touch $@

demo: $(DEMO_IS_IN) ## trains the digits example; ends with a table of what came out, where it is, and a picture
	@$(BIN)/python examples/digits/train.py

# What forks processes cannot share one with what uses a GPU: tests marked gpu and gpu2 would each be skipped, for 10 ms.
# Three workers for two cores: for a fifth of its time a test waits.
SUITE = OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(PYTEST) -n 3 --dist worksteal -m "not slow and not gpu and not gpu2"
# Slow tests that depend on few files are in tests/parts.py; .ci/run makes those whose files have changed.
PART = $(SUITE) $$($(BIN)/python tests/parts.py $@)

PARTS = kernels sharded compiled services processes programs pages installed

# WITH="kernels pages": with these parts, in one session: what waits in one leaves the processor to others.
test: $(STAMP) ## the suite without its slow parts: kernels, sharded, compiled, services, processes, programs, pages
	@$(BIN)/python tests/parts.py say $(WITH)
	$(SUITE) $$($(BIN)/python tests/parts.py left-out $(WITH))
ifdef HAS_GPU
	$(PYTEST) -m "gpu or gpu2"
endif

kernels: $(STAMP) ## tests of kernels, compiled for every architecture and run on a CPU, and of the layers and optimizers on them
	$(PART)

sharded: $(STAMP) ## tests of parameters and optimizers in parts, on two ranks and four
	$(PART)

compiled: $(STAMP) ## tests of torch.compile and torch.export
	$(PART)

services: $(STAMP) ## tests of the clients of logging services and of Optuna
	$(PART)

processes: $(STAMP) ## tests of processes that are started from a shell, interrupted, killed and lost
	$(PART)

programs: $(STAMP) ## tests of programs for Lightning and apex, each in an interpreter of its own
	$(PART)

pages: $(STAMP) ## tests of README, docs, site and examples, which run in a short form
	$(PART)

whole: ## every test
	@$(MAKE) test WITH="$(PARTS)"

# BASE=main: what a branch has changed, commits too.  Ends by itself after a minute: `make test` has the rest.
BASE ?= HEAD
quick: $(STAMP) layers ## within a minute: lint, layers, types of changed files, the tests of changed parts
	@$(BIN)/ruff check -q
	@$(BIN)/ruff format -q --check
	@sources=$$($(BIN)/python tests/changed_parts.py --base $(BASE) --sources); test -z "$$sources" || $(BIN)/mypy $$sources fabricamp-stubs
	@tests=$$($(BIN)/python tests/changed_parts.py --base $(BASE)); test -z "$$tests" || OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= \
		$(PYTEST) -q -n 2 --no-header -r fE --session-timeout=45 $$tests || \
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

# LIBRARIES="darts rl4co": these alone.  Their environments stay in ~/.cache/fabricamp-libraries; to build all takes an hour on two cores.
libraries: $(STAMP) ## trains libraries of the package index under Lightning and under fabricamp, and compares them
	$(BIN)/python tests/libraries/run.py $(LIBRARIES)

# EXAMPLES="gan rl": these alone.  About eight minutes where nothing else runs.
examples: $(STAMP) ## runs every example whole, and prints a table of their seconds
	@$(BIN)/python tools/run_examples.py $(EXAMPLES)

installed: $(STAMP) ## tests of the wheel; builds both distributions, installs the wheel in an environment of its own, and tries it there
	$(PART)
	@$(BIN)/python tools/matrix.py here

# CELLS="3.11/2.11.0 3.13/newest": these alone.  Each torch is a download of up to 3 GB; UV_TORCH_BACKEND=cpu takes the CPU builds.
matrix: $(STAMP) ## the same at every Python and at the oldest and newest torch, with and without CuPy: benchmarks/results/matrix.md
	@$(BIN)/python tools/matrix.py $(CELLS)

docs: $(STAMP) ## writes docs/reference.md from the docstrings, commands.md, step.md, questions.md, and performance.md, measurements.md and pictures from benchmarks/results
	$(BIN)/python docs/render_reference.py
	$(BIN)/python docs/render_commands.py
	$(BIN)/python docs/render_step.py
	$(BIN)/python docs/render_questions.py
	$(BIN)/python benchmarks/render.py
	$(BIN)/python benchmarks/draw_losses.py
	$(BIN)/python benchmarks/draw_step.py
	$(BIN)/python benchmarks/draw_charts.py
	$(BIN)/python benchmarks/fp8_losses.py --draw benchmarks/results/fp8_losses-h100-3e-4.json benchmarks/results/fp8_losses-h100.json

# Sphinx reads the repository itself: pages link to examples, tests and the README.  -W: a warning is an error.
# What an interrupted build leaves is in build/site.unfinished alone, and the next one begins anew: parts of pages would be taken for whole ones.
site: $(STAMP) ## builds the documentation as pages with a search, build/site/index.html, without the network
	@echo "building the pages: a minute or some more without another word"
	@rm -rf build/site.unfinished
	@$(BIN)/sphinx-build -W --keep-going -q -b html -c docs -d build/site.unfinished/doctrees . build/site.unfinished/pages
	@rm -rf build/site && mv build/site.unfinished/pages build/site && rm -rf build/site.unfinished
	@echo "open build/site/index.html"

release: $(STAMP) ## sdist and wheel of the commit in dist/, with the addresses of pyproject.toml
	$(BIN)/python tools/release.py
