# Everything runs in .venv, which the first target that needs it sets up. Stamp files in it remember what was done, so
# that only what changed is done again.

PYTHON ?= python3
BIN := .venv/bin
STAMPS := .venv/stamps

NATIVE_SOURCES := $(wildcard native/*) setup.py pyproject.toml
VIRTUAL_SOURCES := $(shell find virtual -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.py' -o -name '*.toml' \) \
	-not -path 'virtual/tests/*' -not -path 'virtual/build/*')

.PHONY: help test test-all lint format bench train clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# DEVICE: the devices that tests/ runs on, such as `make test DEVICE=cuda` or DEVICE="cpu cuda". With another accelerator
# than the virtual one, its own tests and the tests that need its controls are left out: they need no GPU, and the
# summary names each of them.
DEVICE ?= cpu virtual
PYTEST := $(BIN)/python -m pytest -rs
ON_DEVICES := $(foreach device,$(DEVICE),--device $(device))

# The device's own tests measure its link, so nothing runs beside them. The others run three at a time on two cores, since
# many wait, for a throttled link or a process that starts; the slow ones start many processes themselves.
test: $(STAMPS)/native $(STAMPS)/virtual ## run the tests, except the slow ones (DEVICE=cuda: on a GPU)
	$(if $(filter virtual,$(DEVICE)),$(PYTEST) -m "not slow" virtual/tests)
	$(PYTEST) -m "not slow" -n 3 --dist worksteal $(ON_DEVICES) tests

test-all: $(STAMPS)/native $(STAMPS)/virtual ## run all tests (DEVICE=cuda: on a GPU)
	$(if $(filter virtual,$(DEVICE)),$(PYTEST) virtual/tests)
	$(PYTEST) -n 3 --dist worksteal --copy-delay 0.05 --trials all --timeout 1800 $(ON_DEVICES) tests

lint: $(STAMPS)/requirements ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMPS)/requirements ## put the code into the common format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMPS)/native $(STAMPS)/virtual ## run every benchmark
	@set -e; for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script; done

train: $(STAMPS)/native $(STAMPS)/virtual ## train a model on a device that cannot hold it: plain PyTorch, then Ferryman
	$(BIN)/python examples/demo.py

clean: ## remove the environment and all that was built
	rm -rf .venv build dist virtual/build src/*.egg-info virtual/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find src virtual -name '*.so' -delete

# torch first and by itself: asked for together with others, it may come with gigabytes of CUDA packages.
$(STAMPS)/requirements: requirements-dev.txt
	$(PYTHON) -m venv .venv
	mkdir -p $(STAMPS)
	$(BIN)/pip install --quiet "$$(grep '^torch==' requirements-dev.txt)"
	$(BIN)/pip install --quiet --requirement requirements-dev.txt
	touch $@

$(STAMPS)/native: $(STAMPS)/requirements $(NATIVE_SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

$(STAMPS)/virtual: $(STAMPS)/requirements $(VIRTUAL_SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation --no-deps ./virtual
	touch $@
