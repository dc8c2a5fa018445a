# Needs python3 (3.10 or newer) and make; everything else goes into environments beside this file.
#
#   make test    lint, types and all tests, with real DeepSpeed as the judge
#   make demo    a new environment, a real checkpoint converted and verified
#   make test-matrix   every stage and degree to every other, in real DeepSpeed
#   make test-crash    killed at hundreds of random moments, resumed, compared
#   make test-live    1,000 random transfers between running processes
#   make fuzz-geometry 100,000 random maps against dense index arrays
#   make attack  thousands of damaged and mixed folders: what comes of each, as a table
#   make docs    the documentation, as pages in site/, from a strict build
#   make bench   every figure of docs/, side by side with the tools of DeepSpeed and torch

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DOCS   := .venv-docs
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The judge needs the CPU only. Where pip would bring gigabytes of CUDA libraries:
#   make test TORCH_ARGS='--index-url https://download.pytorch.org/whl/cpu'
TORCH  := torch==2.13.0
TORCH_ARGS ?=
# Test processes: one for the DeepSpeed judge (which forks its own workers), one for the rest.
JOBS   ?= 2
PYTEST_ARGS ?=
# How large the checkpoints of `make bench` are: quick (about 3 GB a case, some 12 minutes of
# measuring), full (5), double (9), or tiny, only to see it run. docs/benchmarks.md has the time of each.
SIZE ?= quick

# Real checkpoints beyond those of tests/golden, when they are there.
export RESHARD_CHECKPOINTS ?= ../shared/checkpoints

ATTACK_ARGS ?= --count 3000 --seed 1
FUZZ_ARGS ?= --count 100000 --seed 1

.PHONY: test attack fuzz-geometry test-crash test-live test-matrix lint types unit docs demo bench bench-live golden clean help

test: lint types docs unit

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/mypy

unit: $(VENV)/ready
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(PYTEST_ARGS)

# An environment of its own, without torch. The build itself needs no network: fonts are the system's,
# and the API pages are read out of the source.
docs: $(DOCS)/ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# every cell of the matrices of native resumes, not only those that CI runs
test-matrix: $(VENV)/ready
	RESHARD_MATRIX=1 $(BIN)/python -m pytest $(addprefix tests/deepspeed_judge/test_native_, \
		resume.py matrix.py trainer.py experts.py expert_pipelines.py)

# many more moments to be killed at than CI has time for
test-crash: $(VENV)/ready
	RESHARD_CRASHES=400 $(BIN)/python -m pytest tests/execution/test_crash.py

# the live transfer between many more random maps than CI has time for
test-live: $(VENV)/ready
	RESHARD_LIVE_CASES=1000 $(BIN)/python -m pytest tests/live/test_random_maps.py

# folders damaged and mixed by chance, from the checkpoints that are there (scripts/attack)
attack: $(VENV)/ready
	$(BIN)/python -m scripts.attack $(ATTACK_ARGS)

# random maps, every operation against an oracle that shares no code (scripts/fuzz_geometry)
fuzz-geometry: $(VENV)/ready
	$(BIN)/python -m scripts.fuzz_geometry $(FUZZ_ARGS)

# torch first: DeepSpeed imports it to build itself, and a bare `torch` would be the CUDA build.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) scripts/check_python.py
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) $(TORCH_ARGS) $(TORCH) -c constraints.txt
	$(PIP) -c constraints.txt setuptools wheel hatchling editables ninja py-cpuinfo
	DS_BUILD_OPS=0 $(PIP) -c constraints.txt --no-build-isolation deepspeed transformers accelerate
	$(PIP) -c constraints.txt --no-build-isolation --editable '.[test]'
	touch $@

$(DOCS)/ready: pyproject.toml constraints.txt
	$(PYTHON) scripts/check_python.py
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[docs]'
	touch $@

demo:
	@$(PYTHON) scripts/check_python.py
	@sh scripts/demo.sh $(PYTHON)

bench: $(VENV)/ready
	$(BIN)/python benchmarks/bench_convert.py --size $(SIZE)
	$(BIN)/python benchmarks/bench_convert.py --size $(SIZE) --case z1dp2 --native 3,3
	$(BIN)/python benchmarks/bench_export.py --size $(SIZE)
	$(BIN)/python -m benchmarks.bench_dcp --size $(SIZE)
	$(BIN)/python -m benchmarks.bench_geometry
	$(BIN)/python -m benchmarks.bench_live --tensors 48

# the live transfer beside a raw exchange, DTensor.redistribute and DCP
bench-live: $(VENV)/ready
	$(BIN)/python -m benchmarks.bench_live --tensors 48

# Trains the checkpoints of tests/golden and examples anew. They are in the repository: rarely needed.
golden: $(VENV)/ready
	$(BIN)/python -m scripts.make_golden

clean:
	rm -rf $(VENV) $(DOCS) site .demo .bench build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:
	@sed -n 's/^#   //p' Makefile
