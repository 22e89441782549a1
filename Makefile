# Every target sets up what it needs: a bare machine with python3 (>= 3.10) is enough.
# Stamp files in the environments make a second run start at once.

PYTHON ?= python3
VENV := .venv
VISION := .venv-vision
# More words for pytest: make test PYTEST_ARGS="-k ledger -x"
PYTEST_ARGS ?=
# Processes that share the tests, a file at a time: as many as there are cores. In the files' own
# order: the largest number of tests first would leave the few that take minutes for the end.
WORKERS ?= auto

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two targets that install into one environment must not run side by side.
.NOTPARALLEL:

# Python keeps what it makes of a module when it first imports it, whatever the shell says: many tests
# start the tool anew. Hence pip's --no-compile: most of torch's modules are never imported.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := -m pip install --quiet --no-compile

.PHONY: help
help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.installed-run ## Install into .venv and profile the bundled example (no GPU needed)
	$(VENV)/bin/fa-advisor profile --no-tui

# The Tritons beside that of constraints.txt that Hopper's kernels are compiled with.
TRITONS ?= 3.6.0 3.9.0

.PHONY: test
test: $(VENV)/.installed-test $(addprefix .triton/,$(TRITONS)) ## Install into .venv and run the tests that need no GPU
	$(VENV)/bin/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		-m "not gpu and not vision" $(PYTEST_ARGS)

# The Triton that compile-tiles compiles with, if not the one of constraints.txt.
TRITON ?=
OTHER_TRITON := $(if $(TRITON),.triton/$(TRITON))

.PHONY: compile-tiles
compile-tiles: $(VENV)/.installed-test $(OTHER_TRITON) ## Compile every tile for every GPU of the table (TRITON=3.9.0: with that one)
	FA_ADVISOR_COMPILE_ALL=1 $(if $(TRITON),FA_ADVISOR_TRITON_PATH=$(OTHER_TRITON)) \
		$(VENV)/bin/pytest -s -o faulthandler_timeout=0 tests/kernels/test_compile.py $(PYTEST_ARGS)

# Alone and apart: torch holds the environment to the Triton that it was built for.
.triton/%: | $(VENV)/.installed-test
	@rm -rf $@.partial
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps --target $@.partial triton==$*
	mv $@.partial $@

.PHONY: test-gpu
test-gpu: $(VENV)/.installed-test ## The tests that need a CUDA device
	$(VENV)/bin/pytest -m gpu $(PYTEST_ARGS)

.PHONY: test-vision
test-vision: $(VISION)/.installed-test ## The tests on timm's models, in an environment of their own
	$(VISION)/bin/pytest -m vision $(PYTEST_ARGS)

.PHONY: check
check: lint types contracts test ## All that must be green before a change goes in

.PHONY: lint
lint: $(VENV)/.installed-dev ## ruff: faults and format
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

.PHONY: format
format: $(VENV)/.installed-dev ## ruff: mend what it can
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

# mypy and import-linter read files, not the installed mapping (docs/adr/0001), so both look at a
# tree of links that is laid out as the wheel is.
.PHONY: types
types: $(VENV)/.installed-dev typing-tree ## mypy --strict over fa_advisor, kernels and probes
	cd .typing && ../$(VENV)/bin/mypy --cache-dir ../.mypy_cache -p fa_advisor

.PHONY: contracts
contracts: $(VENV)/.installed-dev typing-tree ## import-linter: who may import whom
	cd .typing && ../$(VENV)/bin/lint-imports --no-cache

.PHONY: typing-tree
typing-tree:
	@rm -rf .typing && mkdir -p .typing/fa_advisor
	@ln -s $(CURDIR)/fa_advisor/* $(CURDIR)/kernels $(CURDIR)/probes .typing/fa_advisor/
	@ln -s $(CURDIR)/pyproject.toml .typing/

.PHONY: schema
schema: $(VENV)/.installed-run ## Write fa_advisor/report.schema.json anew from the records
	$(VENV)/bin/python -c "from fa_advisor.report import json_schema_text; print(json_schema_text(), end='')" > fa_advisor/report.schema.json.new
	mv fa_advisor/report.schema.json.new fa_advisor/report.schema.json

.PHONY: bench-startup
bench-startup: $(VENV)/.installed-run ## Time `fa-advisor --help` against `python -c pass`
	$(VENV)/bin/python benchmarks/startup.py

.PHONY: build
build: $(VENV)/.installed-test ## Build the sdist and the wheel into dist/
	$(VENV)/bin/python -m build

.PHONY: clean
clean: ## Remove the environments, caches and build outputs
	rm -rf $(VENV) $(VISION) .triton .typing .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fa-advisor needs Python 3.10 or later; this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "No environment was made. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(VENV)/.installed-run: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing fa-advisor into $(VENV): the first time, torch takes a few minutes."
	$(VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing fa-advisor and its tests into $(VENV): the first time, torch takes a few minutes."
	$(VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[test]'
	@touch $@ $(VENV)/.installed-run

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.installed-run $(VENV)/.installed-test

# torchvision is built against one torch, and that one is not the one that the other tests hold to.
$(VISION)/.installed-test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VISION)
	grep -Ev '^(torch|triton)==' constraints.txt > $(VISION)/constraints.txt
	$(VISION)/bin/python $(PIP_INSTALL) --constraint $(VISION)/constraints.txt \
		--editable '.[test,vision]' torch==2.14.1 torchvision==0.29.1
	@touch $@
