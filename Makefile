# Everything starts here: `make demo` shows Tandem at work, `make test` checks it. Both build .venv when it is missing or
# older than what it is made from; otherwise that takes no time.

VENV  := .venv
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check
# What our programs import, compiled, whatever the environment says of bytecode: a tenth of what is installed. pip would
# compile all of it, for a minute. The rest, Python compiles when it is imported.
COMPILE = PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import engine.model_loader.gguf, engine.running.worker, gateway.process, \
	router.process, tandem.cli.bench, tandem.cli.up, transformers as t, worker_service.command; \
	t.AutoModelForCausalLM, t.AutoTokenizer, t.LlamaForCausalLM'
# On a terminal pip shows its progress; elsewhere (-qq) only its errors.
QUIET := $(shell [ -t 2 ] || echo -qq)
SAY   := @printf 'tandem: %s\n'

# The first of these that is Python 3.11 or newer. PYTHON=/path/to/python3 overrides it.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	command -v "$$python"; break; fi; done)

.PHONY: help demo test lint docs protos install install-test clean
.DEFAULT_GOAL := help

help:
	@printf '%s\n' \
	  'make demo      start Redis, a router, a prefill and a decode worker; stream an answer; show what happened' \
	  'make test      lint, type check and run all tests' \
	  'make lint      ruff and mypy alone' \
	  'make docs      make docs/configuration.md anew, from the flags' \
	  'make protos    generate protos/*_pb2* anew' \
	  'make install   .venv with Tandem in it; then: .venv/bin/tandem --help' \
	  'make clean     remove .venv and caches of this folder (models stay in ~/.cache/tandem)'

demo: $(VENV)/installed
	@$(BIN)/tandem demo

# Lint and types first, so that pytest's summary is what one reads last. Meanwhile what most tests would begin by waiting
# for is made: the model, and the CPU kernels; where that fails, they say so themselves. Three files at a time
# (tests/conftest.py), the longest first: on two cores a third of the time of two went by idle. Each process computes with
# one thread, since others take the cores anyway (tests of what threads do say how many they are). Some two hundred
# processes are started: none should compile our modules anew, whatever the environment says.
test: $(VENV)/installed-test
	@{ $(BIN)/tandem fetch & $(BIN)/python -c 'import engine.kernels.build as b; b.load_cpu_kernels()' & wait; } \
	  >/dev/null 2>&1 & $(MAKE) --no-print-directory lint; is_clean=$$?; wait; exit $$is_clean
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# mypy's two workers may not find each other where there is much else to do (it then ends with 2): then without them.
lint: $(VENV)/installed-test
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy || { test $$? -ne 1 && $(BIN)/mypy --num-workers 0; }

docs: $(VENV)/installed
	@$(BIN)/python -m tandem.reference > docs/configuration.md

protos: $(VENV)/installed-test
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto

install: $(VENV)/installed

install-test: $(VENV)/installed-test

# A file that is newer than its ingredients says that the environment is up to date.
$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(SAY) 'installing Tandem and what it needs, torch above all (one to five minutes, once)'
	@$(PIP) install $(QUIET) --no-compile -c constraints.txt -e .
	@$(COMPILE)
	@touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(SAY) 'installing Tandem, what it needs, torch above all, and what its tests need (one to five minutes, once)'
	@$(PIP) install $(QUIET) --no-compile -c constraints.txt -e '.[test]'
	@if [ "$$(uname -s)" = Linux ]; then \
	  printf 'tandem: %s\n' 'installing the nixl transport (half a minute, once)'; \
	  cuda="$$($(BIN)/python -c 'import torch; print((torch.version.cuda or "12").split(".")[0])')" && \
  $(PIP) install $(QUIET) --no-compile --no-deps -c constraints.txt nixl "nixl-cu$$cuda"; fi & \
	nixl=$$!; $(COMPILE); is_compiled=$$?; wait $$nixl && exit $$is_compiled
	@touch $(VENV)/installed $@

# The pip that comes with Python 3.11 takes twice as long as this one for all that follows.
$(VENV)/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
	  printf 'tandem: %s\n' 'Python 3.11 or newer is needed, and none was found. Install one, or say: make PYTHON=/path/to/python3' >&2; \
	  exit 1; fi
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  printf 'tandem: %s\n' "Python 3.11 or newer is needed; $(PYTHON) is $$("$(PYTHON)" --version 2>&1)" >&2; exit 1; }
	$(SAY) 'creating $(VENV) with $(PYTHON) (seconds)'
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
	  printf 'tandem: %s\n' 'python3 could not create $(VENV); on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@$(PIP) install $(QUIET) --no-compile -c constraints.txt --upgrade pip

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
