# Paceline's commands for users and developers; plain `make` lists them.
# Everything lands in .venv/; stamp files there let a second run skip what has not changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# The folder itself stands for files that were added or removed.
NATIVE := CMakeLists.txt pyproject.toml paceline/native $(wildcard paceline/native/*)
TYPED := paceline benchmarks tests/golden

define fail
{ echo "error: $(1)" >&2; exit 1; }
endef

##@ Using it
.PHONY: setup demo model
setup: $(STAMPS)/native ## create .venv, install pinned dependencies, build the native extension
	@:

demo: setup model ## answer a real prompt plain and speculatively, and compare
	@$(BIN)/paceline demo

model: setup ## fetch the demo's model (98 MB, once)
	@$(BIN)/paceline pull smollm2-135m

##@ Developing it
.PHONY: test test-full lint format wheel clean
# Quick tests run in two processes, whole files each: most engines in them have one thread. Files keep their order, so
# that both are in the same folder, whose fixtures are expensive.
QUICK := -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

test: setup $(STAMPS)/test ## run the tests (under 10 minutes)
	$(BIN)/python -m pytest $(QUICK)

# Kernel tests run every path by themselves; these show the whole engine on each. The default path runs every test.
PATHS := portable avx2 avx512 avx512_bf16
PATH_TESTS := tests/golden tests/sampling $(patsubst %,tests/engine/test_%.py,dflash drafters families hybrid \
  int8_cache lossless mtp quantised recurrent trees)

test-full: setup $(STAMPS)/full ## run every test: references, fuzzing, each instruction set (under 45 minutes)
	@for isa in $(PATHS); do \
	  export PACELINE_ISA=$$isa; \
	  $(BIN)/python -c 'from paceline.runtime import choose_isa; choose_isa("")' 2>/dev/null \
	    || { echo "$$isa: not on this processor, skipped"; continue; }; \
	  [ "$$($(BIN)/python -c 'from paceline import _native; print(_native.default_isa())')" != "$$isa" ] || continue; \
	  echo "$$isa:"; $(BIN)/python -m pytest -q $(QUICK) $(PATH_TESTS); \
	done
	$(BIN)/python -m pytest $(QUICK)
	$(BIN)/python -m pytest -m slow

lint: $(STAMPS)/test ## check style, types and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/clang-format --dry-run -Werror $(filter %.cpp %.h %.inl,$(NATIVE))

format: $(STAMPS)/test ## apply the formatting that lint checks
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(filter %.cpp %.h %.inl,$(NATIVE))

wheel: $(STAMPS)/build ## build a wheel into dist/
	$(PIP) wheel . --no-build-isolation --no-deps --wheel-dir dist
	@ls dist/*.whl

clean: ## remove what the other commands made here (not the models in ~/.cache/paceline)
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help
help: ## show this list
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo

# Each stamp is a step that is done; what it depends on is what makes it due again.

$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || $(call fail,$(PYTHON) was not found. Install Python 3.11 or newer \
	  (Debian: apt-get install python3 python3-venv python3-dev) or name one: make PYTHON=/path/to/python3)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || $(call fail,$(PYTHON) is \
	  $$($(PYTHON) -V). Paceline needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11)
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call fail,$(PYTHON) cannot create virtual \
	  environments. Install its venv module (Debian: apt-get install python3-venv))
	@for tool in $${CXX:-c++ g++ clang++}; do command -v $$tool >/dev/null && exit 0; done; \
	  $(call fail,no C++ compiler was found. Install one (Debian: apt-get install g++) or name one: make CXX=/path/to/c++)
	@header=$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h; \
	  test -e "$$header" || $(call fail,$$header was not found. Install the headers of Python (Debian: apt-get install \
	  python3-dev))
	@echo "Creating $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build: requirements/build.txt $(STAMPS)/venv
	@echo "Installing build tools ($<)"
	@$(PIP) install -r $<
	@touch $@

$(STAMPS)/runtime: requirements/runtime.txt $(STAMPS)/venv
	@echo "Installing dependencies ($<)"
	@$(PIP) install -r $<
	@touch $@

$(STAMPS)/native: $(NATIVE) $(STAMPS)/build $(STAMPS)/runtime
	@echo "Building the native extension"
	@$(PIP) install --editable . --no-build-isolation --no-deps
	@touch $@

$(STAMPS)/test: requirements/test.txt $(STAMPS)/venv
	@echo "Installing test tools ($<)"
	@$(PIP) install -r $<
	@touch $@

$(STAMPS)/full: requirements/full.txt $(STAMPS)/test
	@echo "Installing reference implementations ($<): the largest, PyTorch, takes a few minutes"
	@$(PIP) install -r $<
	@touch $@
