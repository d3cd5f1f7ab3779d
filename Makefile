# make demo | test | test-all | lint | types | format | peers | lock | clean | distclean
# PYTHON=/path/to/python3.13 names the interpreter; WORKERS=2 sets the number of test processes;
# PYTEST_ARGS="-k name" goes to pytest.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

WORKERS ?= 2
PYTEST_ARGS ?=
BIN := .venv/bin
UV_VERSION := 0.13.9

# What is installed is keyed by content, not by time: a checkout or a new clone date reinstalls nothing.
key = $(firstword $(shell cat $(1) | cksum))
RUNTIME_STAMP = .venv/.installed-runtime-$(call key,requirements/runtime.lock pyproject.toml)
DEV_STAMP = .venv/.installed-dev-$(call key,requirements/dev.lock)
AOT_STAMP = .venv/aot/.installed-$(call key,requirements/aot.lock)

# pip shows its progress on a terminal and keeps quiet in a log.
PIP_FLAGS := --disable-pip-version-check --no-input $(shell [ -t 2 ] || echo --quiet)
PIP = $(BIN)/python -m pip install $(PIP_FLAGS)
say = @printf '==> %s\n'

.PHONY: help demo model test test-all lint format types pytest pytest-all install install-dev install-aot \
        venv resources gpu-check gpu-check-dry peers peer-hf peer-llama peer-zipnn lock clean distclean

help:
	@echo "make demo      environment, a small real model, the main job"
	@echo "make test      environment, lint, types, tests (what CI runs)"
	@echo "make test-all  the same with the tests that take minutes"
	@echo "make format    formats and fixes the code"
	@echo "make resources registers and shared memory of every GPU kernel, compiled without a GPU"
	@echo "make gpu-check the kernels on this machine's GPU: right, and how fast (PYTHON=python3)"
	@echo "make peers     Hugging Face, llama.cpp and ZipNN in environments of their own, to compare with"
	@echo "make lock      resolves requirements/*.lock again"
	@echo "make clean     removes the environment and caches (distclean: the peers too)"

demo: model
	$(say) "running prefill and decode on separate meshes"
	@$(BIN)/python -m jinfire demo

# The small real model, downloaded once per user and checked by hash.
model: install
	$(say) "SmolLM2-135M-Instruct"
	@$(BIN)/python -m jinfire fetch smollm2

test: lint types pytest

test-all: lint types pytest-all

lint: install-dev
	$(say) "lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: install-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: install-dev
	$(say) "types"
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

pytest: install-dev install-aot model
	$(say) "tests ($(WORKERS) processes)"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

pytest-all: install-dev install-aot model
	$(say) "all tests ($(WORKERS) processes)"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --long $(PYTEST_ARGS)

# An environment whose interpreter is gone, or never was finished, is made anew.
venv:
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    python=$$(.ci/find-python 13 12 14); \
	    echo "==> making .venv with $$($$python --version)"; \
	    rm -rf .venv; \
	    "$$python" -m venv .venv; \
	fi

install: venv
	@if [ ! -e $(RUNTIME_STAMP) ]; then \
	    echo "==> installing jinfire (requirements/runtime.lock, about 0.6 GB)"; \
	    $(PIP) --require-hashes -r requirements/runtime.lock; \
	    $(PIP) --no-deps --no-build-isolation -e .; \
	    rm -f .venv/.installed-runtime-*; \
	    touch $(RUNTIME_STAMP); \
	fi

install-dev: install
	@if [ ! -e $(DEV_STAMP) ]; then \
	    echo "==> installing the test tools (requirements/dev.lock)"; \
	    $(PIP) --require-hashes -r requirements/dev.lock; \
	    rm -f .venv/.installed-dev-*; \
	    touch $(DEV_STAMP); \
	fi

# The compiler for GPUs, beside the environment and not in it: JAX would look for a GPU at every start.
install-aot: install
	@if [ "$$(uname -s)" = Linux ] && [ ! -e $(AOT_STAMP) ]; then \
	    echo "==> installing the GPU compiler in .venv/aot (requirements/aot.lock, about 0.25 GB)"; \
	    rm -rf .venv/aot; \
	    $(PIP) --no-deps --require-hashes --target .venv/aot -r requirements/aot.lock; \
	    touch $(AOT_STAMP); \
	fi

# Registers, shared memory and spills of every kernel, and the memory of whole steps with them inside,
# compiled for GPUs that are not here.
resources: install-aot
	@$(BIN)/python -m pallas_kernels.aot --update
	@$(BIN)/python tests/gpu_steps.py

# On a machine with a GPU: right, how fast, and how fast others. PYTHON names its interpreter, RESULTS the
# folder of the rows; COMMIT is `git describe --always --abbrev=40 --dirty` of a copy without .git.
RESULTS ?=
COMMIT ?=

gpu-check:
	@$${PYTHON:-python3} -m experiments.kernels $(if $(RESULTS),--results "$(RESULTS)") $(if $(COMMIT),--commit "$(COMMIT)")

gpu-check-dry: install
	@$(BIN)/python -m experiments.kernels --interpret --smoke

peers: peer-hf peer-llama peer-zipnn

# make peers PEER_PYTHON=/path/to/python3.11
PEER_PYTHON ?=

peer-hf:
	@if [ ! -e .peers/hf/.installed ]; then \
	    python=$$(PYTHON="$(PEER_PYTHON)" .ci/find-python 11); \
	    echo "==> Hugging Face transformers in .peers/hf"; \
	    rm -rf .peers/hf; \
	    "$$python" -m venv .peers/hf; \
	    .peers/hf/bin/python -m pip install $(PIP_FLAGS) torch==2.13.0 transformers==5.24.0 gguf; \
	    touch .peers/hf/.installed; \
	fi

peer-llama:
	@if [ ! -e .peers/llama/.installed ]; then \
	    python=$$(PYTHON="$(PEER_PYTHON)" .ci/find-python 11); \
	    echo "==> llama.cpp in .peers/llama (compiles for some minutes)"; \
	    rm -rf .peers/llama; \
	    "$$python" -m venv .peers/llama; \
	    .peers/llama/bin/python -m pip install $(PIP_FLAGS) llama-cpp-python==0.3.36 gguf; \
	    touch .peers/llama/.installed; \
	fi

peer-zipnn:
	@if [ ! -e .peers/zipnn/.installed ]; then \
	    python=$$(PYTHON="$(PEER_PYTHON)" .ci/find-python 11); \
	    echo "==> ZipNN and zstd in .peers/zipnn"; \
	    rm -rf .peers/zipnn; \
	    "$$python" -m venv .peers/zipnn; \
	    .peers/zipnn/bin/python -m pip install $(PIP_FLAGS) torch==2.13.0 zipnn==0.5.4 zstandard==0.25.0; \
	    touch .peers/zipnn/.installed; \
	fi

# The newest versions that pyproject.toml allows, for every supported Python, with the hashes of all their files.
lock: venv
	@if ! .cache/lock/bin/uv --version 2>/dev/null | grep -q "^uv $(UV_VERSION) "; then \
	    echo "==> making .cache/lock"; \
	    $(BIN)/python -m venv .cache/lock; \
	    .cache/lock/bin/python -m pip install $(PIP_FLAGS) uv==$(UV_VERSION); \
	fi
	$(say) "resolving requirements/runtime.lock, dev.lock and aot.lock"
	@resolve=".cache/lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.12 --generate-hashes \
	    --no-emit-index-url --no-emit-find-links --cache-dir .cache/uv"; \
	export UV_CUSTOM_COMPILE_COMMAND="make lock"; \
	$$resolve --group build -o requirements/runtime.lock pyproject.toml; \
	$$resolve --extra dev -c requirements/runtime.lock -o requirements/dev.lock pyproject.toml; \
	$$resolve --no-deps --group aot -o requirements/aot.lock

clean:
	rm -rf .venv .cache .hypothesis .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -not -path './.peers/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .peers
