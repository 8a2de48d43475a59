# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint

# Which build of torch: the one for CUDA where there is a GPU (and on macOS, where there is only one),
# else the one for CPUs, so that no gigabytes of CUDA packages arrive on a machine that cannot use them.
PINNED := $(shell grep '^torch==' constraints.txt)
BUILD ?= $(if $(or $(shell command -v nvidia-smi),$(filter Darwin,$(shell uname))),$(PINNED),$(PINNED)+cpu)

# TORCH=2.15.0: another version of torch, in an environment of its own. (Most have no build for CPUs: 5 GB each.)
VENV := $(if $(TORCH),.venvs/torch-$(TORCH),.venv)
BIN := $(VENV)/bin

.PHONY: train test durations accelerate quick check format docs docs-serve venv bench stories chaos fuzz clean

# Threads that wait for each other sleep soon: on a busy machine, waiting in a loop made it 17 times as slow.
train: venv  ## a small language model, in two minutes, on the Python standard library
	GOMP_SPINCOUNT=10000 $(BIN)/macrobatch train

IN_PARALLEL = --numprocesses 2 --dist loadfile --no-loadscope-reorder
test: venv  ## every test, doctests and the README's own code included; TORCH=2.15.0 keeps the counts in results/torch.json
ifdef TORCH
	$(BIN)/python tests/versions.py $(FOLDERS)
else
	$(BIN)/python -m pytest $(IN_PARALLEL)
endif

durations: venv  ## every test, and tests/durations.json anew: the order of files, and what `make quick` leaves out
	$(BIN)/python -m pytest --write-durations $(IN_PARALLEL)

# Pure Python, so each version of Accelerate goes into a folder before the one that is installed.
ACCELERATE ?= 1.10.0 1.11.0 1.12.0 1.13.0 1.14.0 1.15.0
ON_ACCELERATE = tests/contract/test_accelerate.py tests/unit/test_accelerate.py tests/ranks/test_accelerate.py
accelerate: $(ACCELERATE:%=.venvs/accelerate-%/.complete)  ## the tests of macrobatch.accelerate on each version of Accelerate
	for version in $(ACCELERATE); do \
	  PYTHONPATH=.venvs/accelerate-$$version $(BIN)/python tests/versions.py --library accelerate $(ON_ACCELERATE) || exit 1; \
	done

quick: venv  ## the tests to run while editing: under 45 seconds
	$(BIN)/python -m pytest tests --quick $(IN_PARALLEL)

check: venv  ## lint, format and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: venv  ## the documentation, as a site in site/: warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: venv  ## the same, built again whenever a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

bench: venv  ## every benchmark that can run here, beside the peers; BENCHMARKS="overhead gpu" for some
	$(BIN)/macrobatch bench $(BENCHMARKS)

stories: venv  ## the pages of docs/stories, from the scripts of examples/stories and what they print
	cd tests && ../$(BIN)/python -m harness.stories

KILLS ?= 1000
chaos: venv  ## the trainer killed KILLS times; every run that ends must be bitwise the undisturbed one
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos.py --kills $(KILLS) --out results/chaos.json

FIRST ?= 0
PROGRAMS ?= 2000
RANK_PROGRAMS ?= 100
PROCESSES ?= 1
fuzz: venv  ## random programs against plain torch, e.g. PROGRAMS=100000 RANK_PROGRAMS=1000 FIRST=5000000 (the first seed)
	cd tests && ../$(BIN)/python -m fuzzing --programs $(PROGRAMS) --rank-programs $(RANK_PROGRAMS) --first $(FIRST) --processes $(PROCESSES) \
	  --out ../results/fuzz.json

checkout = $(addprefix $(1)=,$(abspath $(2)))
CHECKOUTS = $(call checkout,transformers,$(TRANSFORMERS)) $(call checkout,trl,$(TRL)) $(call checkout,lightning,$(LIGHTNING)) \
  $(if $(filter command,$(origin ACCELERATE)),$(call checkout,accelerate,$(ACCELERATE)))
peers: venv  ## the test suites of other libraries, with our classes in place of theirs: TRL=FOLDER LIGHTNING=FOLDER ...
	cd tests && ../$(BIN)/python -m peers $(CHECKOUTS) $(addprefix --file ,$(FILES)) \
	  $(addprefix --notes ,$(abspath $(NOTES))) --out ../results/peers.json

.PHONY: models tables wheel coverage peers
models: venv  ## every model of transformers that computes a loss, made tiny: exact, without being told? NAMES="..." for some
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/every_model.py $(NAMES)

tables: venv  ## the tables of README.md and docs/, again from results/*.json
	$(BIN)/python benchmarks/tables.py --write

wheel: venv  ## the wheel and the source archive in dist/, after the tests of what is in the wheel
	$(BIN)/python -m pytest tests/unit/test_wheel.py
	rm -rf dist
	$(BIN)/python -m hatchling build

COVERED = tests/unit tests/contract tests/gpu tests/ranks src
coverage: venv  ## branches of src/macrobatch that the tests in COVERED reach; fails below `fail_under` of pyproject.toml
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest $(COVERED) $(IN_PARALLEL)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

venv: $(VENV)/.complete  ## a .venv with all extras

.venv/.complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@$(PIP) constraints.txt '$(BUILD)' || { echo; \
	  echo "No build '$(BUILD)' was found. Point pip at PyTorch's index for CPU builds (PIP_EXTRA_INDEX_URL, see"; \
	  echo "'Start locally' on PyTorch's site), or take the large build for CUDA: make venv BUILD='$(PINNED)'"; exit 1; }
	$(PIP) constraints.txt --editable '.[train,data,accelerate,transformers,lightning,bench,dev,docs]'
	@touch $@

.venvs/torch-%/.complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	@sed 's/^torch==.*/torch==$*/' constraints.txt > $(@D)/constraints.txt
	$(PIP) $(@D)/constraints.txt --editable '.[train,data,accelerate,transformers,lightning,bench,dev,docs]'
	@touch $@

.venvs/accelerate-%/.complete: venv
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target $(@D) 'accelerate==$*'
	@touch $@

clean:
	rm -rf site .venv .venvs .pytest_cache .mypy_cache .ruff_cache .hypothesis
