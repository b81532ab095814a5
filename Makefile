# The project's verbs; `make help` lists them.
#   make demo                              one command from a fresh clone
#   make demo ARGS="--requests 40"         any option of `paged-attn demo`
#   make demo TORCH="torch==2.13.0"        which torch the environment gets
#   make test ARGS="-k window"             any option of pytest
#   make simulate ARGS="-m hopper"         all there is to simulate: an hour
#   make fuzz ARGS="--seconds 600"         any option of `python -m tests.fuzz`
PYTHON ?= python3
TORCH  ?= torch==2.13.0
ARGS   ?=

# Python keeps what it makes of the tests' sources: a session that makes it anew begins ten seconds later.
unexport PYTHONDONTWRITEBYTECODE

VENV  := .venv
VPY   := $(VENV)/bin/python
STAMP := $(VENV)/installed
PIP   := PIP_DISABLE_PIP_VERSION_CHECK=1 $(VPY) -m pip install --quiet

# A Python whose torch already sees a GPU is used as it is: no environment, no network.
ifneq ($(filter demo test-gpu test-gpus test-suites fuzz bench,$(MAKECMDGOALS)),)
HAS_GPU := $(shell $(PYTHON) -c 'import torch; assert torch.cuda.is_available()' >/dev/null 2>&1 && echo yes)
endif
RUN   := $(if $(HAS_GPU),$(PYTHON),$(VPY))
READY := $(if $(HAS_GPU),,$(STAMP))
# Kernels are compiled on the host: several at once, where that Python can.
BESIDE = $(shell $(RUN) -c 'import xdist, os; print("-n", min(12, os.cpu_count()), "--dist worksteal")' 2>/dev/null)
SIMULATE := SIMULATE=1 $(VPY) -m pytest tests -n 2 --dist worksteal

# What tests the public functions, in whatever dialect.
PUBLIC := $(addprefix tests/,arguments calls checks compiled distributed features reference steps)
IN_TORCH := PAGED_ATTN_DIALECT=torch $(VPY) -m pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test thorough simulate test-gpu test-gpus test-suites fuzz bench without-triton tritons newest hosts test-hosts wheel check docs format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{ printf "  make %-10s %s\n", $$1, $$2 }'

demo: $(READY)  ## serve a traffic mix over a paged cache, every step checked
	$(RUN) -m paged_attn demo $(ARGS)

test: $(STAMP)  ## the CPU suite: Triton's interpreter, plain torch, and small batches for Hopper kernels, simulated
	$(VPY) -m pytest tests -n 2 --dist worksteal $(ARGS)
	$(if $(ARGS),,$(IN_TORCH) $(PUBLIC))
	$(if $(ARGS),,$(SIMULATE) -m "quick and not thorough")

thorough: $(STAMP)  ## what `make test` leaves out: most machine code and simulated batches, half of large matrices of cases
	$(VPY) -m pytest tests -m thorough -n 2 --dist worksteal $(ARGS)
	$(if $(ARGS),,$(IN_TORCH) $(PUBLIC) -m thorough)
	$(if $(ARGS),,$(SIMULATE) -m "quick and thorough")

simulate: $(STAMP)  ## Hopper kernels without a Hopper GPU
	$(SIMULATE) $(or $(ARGS),-m quick)

test-gpu: $(READY)  ## the suite on this machine's GPU; ARGS="-m smoke" for a part, -m "thorough or not thorough" for every case
	$(RUN) -m pytest tests $(BESIDE) --durations 20 --junitxml build/test-gpu.xml $(ARGS)

test-gpus: $(READY)  ## ranks that are GPUs, on a machine with several
	$(RUN) -m pytest tests/distributed -m gpus $(ARGS)

SUITE ?= build/suites/flash-attention
test-suites: $(READY)  ## FlashAttention's own tests, a sample, from a checkout of its repository: SUITE=path SAMPLE=500 SEED=1
	@$(RUN) -c 'import einops' 2>/dev/null || test -e build/suites/needs || \
	    $(PIP) --no-deps --target build/suites/needs einops==0.8.2
	SUITE=$(abspath $(SUITE)) PYTHONPATH=$(CURDIR)/build/suites/needs $(RUN) -m pytest tests/suites/test_*.py $(BESIDE) $(ARGS)

fuzz: $(READY)  ## random calls of everything against the reference: a minute, or ARGS="--seconds 600"
	$(RUN) -m tests.fuzz $(ARGS)

bench: $(READY)  ## every suite against every peer installed, on this machine's GPU
	$(RUN) -m benchmarks $(ARGS)

# The environment's packages but Triton, by links: what a Mac or Windows has.
without-triton: $(STAMP)  ## importing, the command, the demo and a reduced suite without Triton, in plain torch
	$(VPY) -m tests.without_triton

# Triton alone, in folders that are looked into before the environment's own; torch stays as it is.
tritons: $(STAMP)  ## a reduced suite under every other known Triton, listed in tests/tritons.py
	$(VPY) -m tests.tritons

newest: $(STAMP)  ## the same under the newest Triton on the index: reported, not required
	$(VPY) -m tests.tritons --newest

hosts: $(STAMP)  ## the programs that the adapters are for, under build/hosts; tests/hosts.py lists them
	$(VPY) -m tests.hosts

test-hosts: $(STAMP)  ## the adapters against their real hosts, on the CPU
	$(VPY) -m tests.hosts test $(ARGS)

wheel: $(STAMP)  ## the package as a wheel, in dist/; `make thorough` installs one and tries every verb
	$(VPY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

check: $(STAMP)  ## format, lint, types, that imports run one way, and how docstrings open
	$(VPY) -m ruff format --check .
	$(VPY) -m ruff check .
	$(VPY) -m mypy
	$(VENV)/bin/lint-imports --no-cache
	$(VPY) -m tools.openings

docs: $(STAMP)  ## the pages under docs/ as a site, in site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(VPY) -m mkdocs build --strict --quiet --site-dir site

format: $(STAMP)  ## rewrite the sources as `check` wants them
	$(VPY) -m ruff format .
	$(VPY) -m ruff check --fix .

clean:  ## remove the environment, caches and outputs
	rm -rf $(VENV) outputs build dist site .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and alone, pinned, for without a pin it is a CUDA build of gigabytes; then pinned as installed with all
# that it came with, its own Triton above all, so that no later step replaces them.
$(STAMP): pyproject.toml constraints.txt
	@echo "Making $(VENV), once: about three minutes, and nothing outside of it is touched."
	@echo "1 of 3: $(TORCH), the largest part.  Without a GPU its CPU build is smaller by gigabytes:"
	@echo "        make TORCH=\"$(firstword $(TORCH)) --index-url https://download.pytorch.org/whl/cpu\" ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH)
	@echo "2 of 3: Triton, where torch did not bring its own"
	@$(VPY) -c 'import triton' 2>/dev/null || $(PIP) triton -c constraints.txt
	@$(VPY) -m pip freeze | grep -E '^(torch|triton|numpy)==' > $(VENV)/pins.txt
	@echo "3 of 3: paged-attn, and what its command, tests and pages need"
	@$(PIP) -c $(VENV)/pins.txt -e '.[dev]'
	@touch $@
