# `make demo` and `make test` work from a fresh clone; everything else is the `oxrl` command.
# `make check` is for every change: lint, types, and the tests that start no engine and train no complete run.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Versions of constraints.txt; for what is in no lock file.
INSTALL := $(PIP) install --no-compile --constraint constraints.txt
# Exactly what the lock files name, each artifact with a hash that they have: `make lock` writes them.
LOCKED := --no-deps --require-hashes --requirement
INSTALL_LOCKED := $(PIP) install --no-compile $(LOCKED)
INSTALL_OXRL := $(PIP) install --no-compile --no-deps --no-build-isolation --editable .
# One more than there are cores: a test that waits leaves its core to another one.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(6, (os.cpu_count() or 1) + 1))")
TORCH  := $(shell sed -n 's/^torch==//p' constraints.txt)

.PHONY: demo test tests check quick gpu lint bench docs mutants lock clean

export OMP_WAIT_POLICY ?= PASSIVE
# Packages are installed uncompiled, and the few modules that are used are compiled when they are first imported. Where
# Python must not keep the result, every process would compile them again.
export PYTHONDONTWRITEBYTECODE :=

demo: $(VENV)/.core
	$(BIN)/python examples/demo.py

test: $(VENV)/.engines $(VENV)/.model
	$(MAKE) --jobs=2 lint tests

tests: $(VENV)/.engines $(VENV)/.model
	OXRL_REQUIRE_ENGINES=1 $(BIN)/python -m pytest -n $(WORKERS)

check: $(VENV)/.model
	$(MAKE) --jobs=2 lint quick

quick: $(VENV)/.model
	$(BIN)/python -m pytest -n $(WORKERS) -m "not engine and not trains"

# What needs a GPU; all other tests run on the CPU, also on a machine that has one.
gpu: $(VENV)/.dev
	CUDA_VISIBLE_DEVICES=0 $(BIN)/python -m pytest -n 0 tests/backends/test_compiled_gpu.py tests/generators/test_captured_gpu.py
	CUDA_VISIBLE_DEVICES=0 $(BIN)/python -m pytest -n 0 tests/backends/test_forward.py -k kernel

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/projection.py
	$(BIN)/python benchmarks/sft.py
	$(BIN)/python benchmarks/parity.py

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Without a GPU the CPU build of torch is asked for by name; where no index offers it, the plain one does. The libraries
# that the plain one needs for GPUs are those that it names itself, without hashes.
$(VENV)/.torch: locks/torch.txt locks/torch-cpu.txt | $(VENV)/bin/python
	@echo "installing torch $(TORCH)"
	@if command -v nvidia-smi >/dev/null 2>&1 || ! $(INSTALL_LOCKED) locks/torch-cpu.txt 2>$(VENV)/torch.log; then \
	if grep -qs "DO NOT MATCH THE HASHES" $(VENV)/torch.log; then cat $(VENV)/torch.log; exit 1; fi; \
	$(INSTALL_LOCKED) locks/torch.txt && $(INSTALL) torch==$(TORCH); fi
	@touch $@

$(VENV)/.core: pyproject.toml locks/core.txt $(VENV)/.torch
	@echo "installing oxrl"
	@$(INSTALL_LOCKED) locks/core.txt
	@$(INSTALL_OXRL)
	@touch $@

$(VENV)/.dev: locks/dev.txt locks/dev-sources.txt $(VENV)/.core
	@echo "installing what the tests need"
	@$(INSTALL_LOCKED) locks/dev.txt
	$(call build_locked,dev-sources)
	@touch $@

# Sources are built with nothing but the locked setuptools: DeepSpeed's would look for compilers if they found torch.
define build_locked
	@$(BIN)/python -m venv --without-pip --clear $(VENV)/build
	@$(PIP) --python $(VENV)/build install $(LOCKED) locks/build.txt
	@$(PIP) --python $(VENV)/build wheel --no-build-isolation --wheel-dir $(VENV)/build/wheels $(LOCKED) locks/$(1).txt
	@$(PIP) install --no-compile --no-deps --no-index $(VENV)/build/wheels/*.whl
endef

# Not inside of a test, which would wait for the network.
$(VENV)/.model: $(VENV)/.dev
	@echo "fetching the small chat model that some tests use"
	@$(BIN)/python -c "from oxrl.models.builtin import prepare_builtin; prepare_builtin('smollm2-135m')"
	@touch $@

# Real engines, so that nothing is skipped. The lock has vLLM's build for processors; that for GPUs brings its own torch.
$(VENV)/.engines: locks/engines.txt locks/engines-sources.txt locks/vllm.txt $(VENV)/.dev
	@echo "installing DeepSpeed, Ray and vLLM"
	@$(INSTALL_LOCKED) locks/engines.txt
	$(call build_locked,engines-sources)
	@if command -v nvidia-smi >/dev/null 2>&1; then $(INSTALL) --editable ".[vllm]"; \
	else $(INSTALL_LOCKED) locks/vllm.txt; fi
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@echo "installing what the benchmarks compare with"
	@$(INSTALL) --editable ".[trl]"
	@touch $@

$(VENV)/.docs: constraints.txt | $(VENV)/bin/python
	@echo "installing what the site is built with"
	@$(INSTALL) mkdocs
	@touch $@

# After a change of constraints.txt or of the dependencies.
lock: | $(VENV)/.engines
	$(BIN)/python locks/lock.py

mutants: $(VENV)/.dev
	$(BIN)/python benchmarks/mutants.py

clean:
	rm -rf $(VENV) build dist site *.egg-info
