# Everything starts here: `make train` needs Python 3.11 or newer, make and a package index, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# $(call requirement,NAME): NAME with its version range, as pyproject.toml states it
define requirement
"$$($(BIN)/python -c 'import re, sys, tomllib; \
	stated = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]; \
	print(next(r for r in stated if re.match(r"[\w-]+", r)[0] == sys.argv[1]))' $(1))"
endef

.DEFAULT_GOAL := help
.PHONY: help train install install-dev lint test prove clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

train: install  ## install into .venv and train configs/quickstart.toml
	$(BIN)/lwray train configs/quickstart.toml

install: $(VENV)/.installed  ## install lwray into .venv; done again only when pyproject.toml changes

install-dev: $(VENV)/.installed-dev  ## install, and the tools for tests and checks

# torch goes first and deepspeed is built against it in place: an isolated build would fetch a torch of its own.
# No op is compiled in advance, and the build looks at no GPU: on a machine with a GPU but without nvcc it would stop.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("lwray needs Python 3.11 or newer, and %s is %d.%d; \
	name another one: make PYTHON=python3.12 ..." % ((sys.executable,) + sys.version_info[:2]))'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install "setuptools>=77" wheel $(call requirement,torch)
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/pip install --no-build-isolation --no-deps $(call requirement,deepspeed)
	$(BIN)/pip install -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -e ".[dev]"
	touch $@

lint: install-dev  ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: lint  ## lint, and every test that takes less than a minute
	$(BIN)/pytest -m "not slow and not gpu"

prove: install-dev  ## the tests that take minutes
	$(BIN)/pytest -m "slow and not gpu"

clean:  ## remove build outputs and caches; leaves .venv and runs/ alone
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find lwray tests -name __pycache__ -type d -prune -exec rm -rf {} +
