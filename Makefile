# make quickstart   text -> shards -> a trained, stopped and resumed model -> scores -> a page; what Canon does
# make playground  the paper's directions on five synthetic tasks: 90 models, a page of results
# make playground-lm  a published ablation of Canon and RoPE on the standard library's text, 18 models
# make test         unit, property and a few end-to-end tests
# make test-system  faults, ranks, browser and compilers
# make test-long    before a release: test-system's draws and simulations five times as many, more odd values
# make test-fake-gpu  the trainer on fake GPUs, and planted faults that it must find
# make test-learning  small models of the playground, trained until they solve their task
# make test-release  synthetic tasks and linear models beside the author's: CLONE=PATH of PhysicsLM4, TOKENIZER=gpt2/tokenizer.json
# make test-slurm   the Slurm scripts on a real Slurm of two nodes (root; Debian's slurm packages)
# make slurm-demo   text to report by Slurm jobs, command by command
# make snapshots    renew the snapshots that hold the wording of help, tables and messages
# make check        ruff, mypy, the contracts on imports, and counts of tests/weight.py
# make constraints  write the versions in .venv to constraints.txt, after CI has passed with them
#
# Each makes .venv and installs into it once; a second call installs nothing.
# PYTHON=python3.12 chooses the interpreter, TORCH=... what pip installs as torch before the rest,
# CONSTRAINTS= (empty) the newest versions that pyproject.toml allows.

SHELL := /bin/bash
PYTHON ?= python3
# the version that this is tested with; a range would take a newer one, with another CUDA
TORCH ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt

export PATH := $(CURDIR)/.venv/bin:$(PATH)

INSTALLED := .venv/.installed
# processes of one thread each, so that nothing waits for a core, and clusters of the Slurm tests
WORKERS ?= 2
CLUSTERS ?= 2
PYTEST = OMP_NUM_THREADS=1 python -m pytest -n $(WORKERS) --dist worksteal

LM := outputs/boards/lm-data

# make deletes the target of an interrupted recipe, which here would be a manifest of shards
.PRECIOUS: $(LM)/validation/manifest.json
.PHONY: quickstart playground playground-lm test test-system test-long test-fake-gpu test-learning test-release test-slurm snapshots slurm-demo check constraints install clean-quickstart

quickstart: $(INSTALLED)
	python -m canon_pretrain.quickstart

playground: $(INSTALLED)
	canon playground run train_configs/playground/boards/laptop.toml

playground-lm: $(LM)/validation/manifest.json
	canon playground run train_configs/playground/boards/lm.toml

$(LM)/validation/manifest.json: | $(INSTALLED)
	canon data build --source stdlib --tokenizer train:2048 --holdout 0.03 --out $(LM)

test: $(INSTALLED)
	$(PYTEST)

test-system: $(INSTALLED)
	$(PYTEST) -m "system and not long"

test-long: $(INSTALLED)
	$(PYTEST) -m long

test-fake-gpu: $(INSTALLED)
	$(PYTEST) tests/fake_gpu -m "not long"

test-learning: $(INSTALLED)
	$(PYTEST) -m learning

# without CLONE they are skipped, without TOKENIZER a small tokenizer replaces GPT-2's
CLONE ?=
TOKENIZER ?=
test-release: $(INSTALLED)
	CLONE="$(abspath $(CLONE))" TOKENIZER="$(abspath $(TOKENIZER))" $(PYTEST) -m release tests/synthetic/test_release.py tests/hf/test_released.py

# a cluster per process: a test mostly waits for Slurm or for a program on one core
test-slurm: $(INSTALLED)
	python -m pytest tests/slurm -m slurm -n $(CLUSTERS) --dist load --maxschedchunk 1

snapshots: $(INSTALLED)
	python -m pytest tests/snapshots --snapshot-update

slurm-demo: $(INSTALLED)
	python -m tests.slurm_demo

check: $(INSTALLED)
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	python -m tests.weight --check

constraints: $(INSTALLED)
	@{ grep '^#' constraints.txt; python -m pip freeze --exclude-editable --exclude torch \
		--exclude triton | grep -Ev '^(nvidia|cuda)-'; } > .venv/constraints.txt
	mv .venv/constraints.txt constraints.txt

install: $(INSTALLED)

# $(call step,title,command): a line; the command's output is in the log, whose end a failure shows
LOG := .venv/install.log
define step
	@printf 'install: %s ... ' '$(1)'; start=$$SECONDS; if $(2) >> $(LOG) 2>&1; \
	then printf '%d s\n' $$((SECONDS - start)); \
	else printf 'failed\n\n'; tail -n 20 $(LOG); printf '\n%s\n' '$(HELP)'; exit 1; fi
endef
HELP := install: all output is in $(LOG). After a repair, the same command continues. CONSTRAINTS= \
takes other versions than constraints.txt, TORCH= another torch, PYTHON= another interpreter (README.md)
PIP := python -m pip install --progress-bar off $(CONSTRAINTS:%=--constraint %)

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and f"Python 3.11, 3.12 or 3.13 is needed; {sys.executable} is {sys.version.split()[0]}; choose one with PYTHON=")'
	@mkdir -p .venv && : > $(LOG)
	$(call step,.venv of $(PYTHON),$(PYTHON) -m venv .venv)
	$(call step,$(TORCH),$(PIP) "$(TORCH)")
	$(call step,canon_pretrain and its dependencies,$(PIP) --editable '.[dev]')
	@touch $@

clean-quickstart:
	rm -rf outputs/quickstart
