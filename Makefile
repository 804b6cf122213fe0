# make run     find the symmetries of the embedded digits
# make test    the fast tests
# make help    everything else
#
# Each target builds what it needs from nothing but python3 (3.11 or newer), pip and make.
# PYTHON=/path/to/python3 picks the interpreter; ARGS="..." is passed on to the command that runs.

PYTHON ?= python3
TORCH  := $(shell sed -n 's/^torch==//p' constraints.txt)
JOBS   ?= 2
ARGS   ?=

BIN        := .venv/bin
PEERS_BIN  := .venv-peers/bin
READY      := .venv/.ready
DOCS_READY := .venv/.ready-docs
PEERS_READY := .venv-peers/.ready
SOURCES    := $(wildcard src tests tools benchmarks tools)
TYPED      := $(wildcard src benchmarks tools)
# One thread per worker: JOBS workers with a thread pool each would fight over the cores.
PYTEST     := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test test-all bench bench-evidence bench-layers bench-fit bench-augment bench-peers benchmarks docs lint format clean distclean help

run: $(READY) ## what the evidence says about the embedded digits
	$(BIN)/symrazor discover $(ARGS)

test: $(READY) ## the fast tests
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(READY) ## every test, the slow ones too
	$(PYTEST) --timeout 1800 $(ARGS)

bench: bench-evidence bench-layers bench-fit bench-augment ## the next four

bench-evidence: $(READY) ## time and memory of one evidence estimate
	$(BIN)/python benchmarks/evidence.py $(ARGS)

bench-layers: $(READY) ## the same of the paths and of relaxed networks
	$(BIN)/python benchmarks/layers.py $(ARGS)

bench-fit: $(READY) ## time and memory of fit against plain training; two processes against one
	$(BIN)/python benchmarks/fit.py $(ARGS)

bench-augment: $(READY) ## time and memory of an estimate with its gradient in learned widths
	$(BIN)/python benchmarks/augment.py $(ARGS)

bench-peers: $(PEERS_READY) ## the same for laplace-torch and its backends, in .venv-peers
	$(PEERS_BIN)/python benchmarks/peers.py $(ARGS)
	$(PEERS_BIN)/python benchmarks/peers_groups.py

benchmarks: ## render docs/benchmarks.md and docs/benchmarks-all.md from benchmarks/results/
	$(PYTHON) tools/render_benchmarks.py $(ARGS)

docs: $(DOCS_READY) ## build the documentation into site/
	$(BIN)/sphinx-build -W --keep-going -q docs site $(ARGS)

lint: $(READY) ## ruff, import contracts and mypy --strict
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/mypy --strict $(TYPED)

format: $(READY) ## let ruff format and fix what it can
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean: ## remove caches and build products
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove both virtual environments
	rm -rf .venv .venv-peers

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

# A stamp is removed before an install begins and written after its check has passed, so that an
# interrupted install is taken up again. The pinned torch goes in first, and alone.

define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "expected Python 3.11 or newer, got: $$($(PYTHON) --version 2>&1);" \
       "do: make $(or $(MAKECMDGOALS),run) PYTHON=/path/to/python3.11" >&2; exit 1; }
@$(1)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(patsubst %/bin,%,$(1))
$(1)/python -m pip install -c constraints.txt torch==$(TORCH)
endef

define check_torch
@$(1)/python -c 'import torch; v = torch.__version__; v.startswith("$(TORCH)") or exit( \
  f"expected torch $(TORCH) in $(patsubst %/bin,%,$(1)), got {v}: an install replaced it; do: make distclean")'
endef

$(READY): pyproject.toml constraints.txt
	@rm -f $@ $(DOCS_READY)
	$(call make_venv,$(BIN))
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	$(call check_torch,$(BIN))
	@touch $@

$(DOCS_READY): $(READY)
	@rm -f $@
	$(BIN)/python -m pip install -c constraints.txt -e ".[docs]"
	$(call check_torch,$(BIN))
	@touch $@

# laplace-torch pulls in torchvision, whose wheel is built for CUDA: with it `import laplace` fails on
# a CPU torch, and nothing here needs it. asdfghjkl is the distribution, `import asdl` its package.
$(PEERS_READY): constraints.txt
	@rm -f $@
	$(call make_venv,$(PEERS_BIN))
	$(PEERS_BIN)/python -m pip install -c constraints.txt laplace-torch asdfghjkl \
	  curvlinops-for-pytorch jaxtyping rich safetensors
	$(PEERS_BIN)/python -m pip uninstall -y torchvision
	$(call check_torch,$(PEERS_BIN))
	$(PEERS_BIN)/python -c 'import laplace'
	@touch $@
