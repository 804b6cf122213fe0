# make run     find the symmetries of the embedded digits
# make test    run the fast tests
# make help    list all targets
#
# Every target sets up what it needs; python3 (3.11 or newer), pip and make are enough.
# PYTHON=/path/to/python3 chooses the interpreter. ARGS="..." is passed to the command.

PYTHON ?= python3
TORCH  := $(shell sed -n 's/^torch==//p' constraints.txt)
JOBS   ?= 2
ARGS   ?=

BIN         := .venv/bin
PEERS_BIN   := .venv-peers/bin
LOWEST_BIN  := .venv-lowest/bin
RUN_READY   := .venv/.ready-run
DEV_READY   := .venv/.ready
DOCS_READY  := .venv/.ready-docs
PEERS_READY := .venv-peers/.ready
LOWEST_READY := .venv-lowest/.ready
SOURCES     := src tests benchmarks tools docs/conf.py docs/_ext
TYPED       := src benchmarks tools
# Tests of what a user's machine has; the others need packages of the group "dev".
LOWEST_TESTS := tests/core tests/data tests/runs tests/cli tests/report tests/symmetry tests/inference
# One thread per worker: JOBS workers with a thread pool each would compete for the cores.
PYTEST      := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test test-all test-lowest faults lock audit bench bench-evidence bench-layers bench-fit bench-augment bench-peers benchmarks docs lint format clean distclean help

run: $(RUN_READY) ## find the symmetries of the embedded digits
	$(BIN)/symrazor discover $(ARGS)

test: $(DEV_READY) ## run the fast tests
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(DEV_READY) ## run all tests, including the slow ones
	$(PYTEST) --timeout 1800 $(ARGS)

test-lowest: $(LOWEST_READY) ## run the fast tests with the lowest versions that pyproject.toml admits
	OMP_NUM_THREADS=1 $(LOWEST_BIN)/python -m pytest -q -n $(JOBS) -m "not slow" \
	  -W ignore::DeprecationWarning $(LOWEST_TESTS) $(ARGS)  # old packages with new dependencies

faults: $(DEV_READY) ## attack with damaged files, hostile input and interruptions (hours); ARGS="--help" lists the options
	cd tests/faults && OMP_NUM_THREADS=1 PYTHONPATH=. ../../$(BIN)/python -m harness \
	  --json ../../benchmarks/results/faults.json $(ARGS)

lock: $(DEV_READY) ## write requirements-dev.lock: versions and hashes of the development environment
	$(BIN)/python -m pip install uv
	echo "torch; python_version < '3'" > .venv/no-torch.txt  # torch is pinned in constraints.txt
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-annotate --no-emit-index-url --extra dev --extra docs -c constraints.txt \
	  --override .venv/no-torch.txt pyproject.toml -o requirements-dev.lock

audit: $(DEV_READY) ## look for known vulnerabilities of the locked packages; needs access to pypi.org
	$(BIN)/python -m pip install pip-audit
	$(BIN)/python tools/audit.py $(ARGS)

bench: bench-evidence bench-layers bench-fit bench-augment ## run the next four: evidence, layers, fit, augment

bench-evidence: $(DEV_READY) ## time and memory of one evidence estimate
	$(BIN)/python benchmarks/evidence.py $(ARGS)

bench-layers: $(DEV_READY) ## time and memory of layers and relaxed networks
	$(BIN)/python benchmarks/layers.py $(ARGS)

bench-fit: $(DEV_READY) ## time and memory of fit against plain training; two processes against one
	$(BIN)/python benchmarks/fit.py $(ARGS)

bench-augment: $(DEV_READY) ## time and memory of the evidence gradient in learned augmentation ranges
	$(BIN)/python benchmarks/augment.py $(ARGS)

bench-peers: $(PEERS_READY) ## compare with laplace-torch and its backends, in .venv-peers
	$(PEERS_BIN)/python benchmarks/peers.py $(ARGS)
	$(PEERS_BIN)/python benchmarks/peers_groups.py

benchmarks: ## render README.md, SECURITY.md and the benchmark pages from benchmarks/results/
	$(PYTHON) tools/render_benchmarks.py $(ARGS)

docs: $(DOCS_READY) ## build the documentation into site/
	$(BIN)/sphinx-build -W --keep-going -q docs site $(ARGS)

lint: $(DEV_READY) ## run ruff, the import contracts and mypy --strict
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/mypy --strict $(TYPED)

format: $(DEV_READY) ## format the code and fix what ruff can fix
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean: ## remove caches and build products
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove all virtual environments
	rm -rf .venv .venv-peers .venv-lowest

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

# Each stamp file is removed before an installation starts and written after its check passed, so that
# an interrupted installation is repeated. The pinned torch is installed first, on its own: a range
# would let pip replace it by a much larger build.

define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "symrazor needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
       "Run: make $(or $(MAKECMDGOALS),run) PYTHON=/path/to/python3.11" >&2; exit 1; }
@$(1)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(patsubst %/bin,%,$(1))
$(1)/python -m pip install -c constraints.txt torch==$(TORCH)
endef

define check_torch
@$(1)/python -c 'import torch; v = torch.__version__; v.startswith("$(TORCH)") or exit( \
  f"torch $(TORCH) in $(patsubst %/bin,%,$(1)) was replaced by {v}. Run: make distclean")'
endef

$(RUN_READY): pyproject.toml constraints.txt
	@rm -f $@
	$(call make_venv,$(BIN))
	$(BIN)/python -m pip install -c constraints.txt -e .
	$(call check_torch,$(BIN))
	@touch $@

$(DEV_READY): $(RUN_READY)
	@rm -f $@
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	$(call check_torch,$(BIN))
	@touch $@

$(LOWEST_READY): pyproject.toml constraints.txt
	@rm -f $@
	$(call make_venv,$(LOWEST_BIN))
	$(LOWEST_BIN)/python tools/lowest_versions.py > .venv-lowest/lowest.txt
	cat constraints.txt >> .venv-lowest/lowest.txt
	$(LOWEST_BIN)/python -m pip install -c .venv-lowest/lowest.txt -e . \
	  pytest pytest-xdist pytest-timeout hypothesis scipy mpmath
	$(call check_torch,$(LOWEST_BIN))
	@touch $@

$(DOCS_READY): $(RUN_READY)
	@rm -f $@
	$(BIN)/python -m pip install -c constraints.txt -e ".[docs,sklearn,lightning]"
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
