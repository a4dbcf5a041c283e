# make quickstart   text -> shards -> a trained, stopped and resumed Canon model -> scores -> a report
# make playground  the paper's directions on five synthetic tasks: 90 models, a page of results
# make playground-lm  a published ablation of Canon and RoPE on the quickstart's text, 14 models
# make test         unit, property and a few end-to-end tests
# make test-system  faults, ranks, browser and compilers
# make test-long    before a release: test-system's draws and simulations five times as many, more odd values
# make test-learning  small models of the playground, trained until they solve their task
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

# as in train_configs/quickstart.toml
RUN := outputs/quickstart
STEPS := 80
STOP_AT := 40
STAGES := 6
playground-lm: STAGES := 2

export PATH := $(CURDIR)/.venv/bin:$(PATH)

CONFIG := train_configs/quickstart.toml
# two ranks share the cores; torchrun would give each a single thread, and say so
THREADS := $(shell n=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); echo $$((n > 1 ? n / 2 : 1)))
# a single GPU cannot hold two ranks: the CPU then does
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | wc -l)
DEVICE := $(if $(filter 1,$(GPUS)),CUDA_VISIBLE_DEVICES= )
LAUNCH := $(DEVICE)OMP_NUM_THREADS=$(THREADS) torchrun --nproc-per-node 2 -m canon_pretrain.train --config $(CONFIG)
EVAL := $(DEVICE)python -m eval run --checkpoint $(RUN)/run/checkpoint/step-$(STEPS) \
	--suite validation,birth-year --limit 32 --max_length 384 --must_beat unigram
SAMPLE := $(DEVICE)canon sample $(RUN)/run --prompt "This module provides" --max_tokens 60 --seed 0
, := ,
INSTALLED := .venv/.installed
# two processes of one thread each, so that nothing waits for a core
PYTEST := OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal

# $(call stage,number and title,command): say it, run it, say how long it took
define stage
	@printf '\n== %s\n   %s\n\n' '$(1)' '$(2)'
	@start=$$SECONDS; $(2) && printf '   took %d s\n' $$((SECONDS - start))
endef

SHARDS := $(RUN)/data/validation/manifest.json
STOPPED := $(RUN)/run/checkpoint/step-$(STOP_AT)/manifest.json
DONE := $(RUN)/run/DONE

# make deletes the target of an interrupted recipe, which here would be a checkpoint's heart
.PRECIOUS: $(SHARDS) $(STOPPED) $(DONE)
.PHONY: quickstart playground playground-lm test test-system test-long test-learning test-slurm snapshots slurm-demo check constraints install clean-quickstart

quickstart: $(INSTALLED)
	@$(MAKE) --no-print-directory $(DONE)
	$(call stage,4/6 held-out loss beside count models$(,) and birth-year probes: 32 windows or items of each,$(EVAL))
	$(call stage,5/6 a page to look at,python -m eval report $(RUN)/run)
	$(call stage,6/6 a sample,$(SAMPLE))
	@printf '\nreport: $(RUN)/run/report/index.html\nnext:\n  source .venv/bin/activate\n'
	@printf '  %-37s # %s\n' 'canon sample $(RUN)/run' 'a prompt of your own' \
		'canon new mine --data FOLDER' 'a model of your own text' \
		'make playground' 'which architecture is better at what'

$(SHARDS): | $(INSTALLED)
	$(call stage,1/$(STAGES) text -> tokenizer -> shards,python -m data_prep build --source stdlib --tokenizer train:2048 --holdout 0.03 --out $(RUN)/data)

$(STOPPED): | $(SHARDS)
	$(call stage,2/6 train on two FSDP2 ranks and stop in the middle,$(LAUNCH) --run.stop_at $(STOP_AT))

$(DONE): | $(STOPPED)
	$(call stage,3/6 resume and finish,$(LAUNCH))

playground: $(INSTALLED)
	python -m canon_pretrain.playground run train_configs/playground/boards/laptop.toml

playground-lm: $(SHARDS)
	$(call stage,2/2 train the board,python -m canon_pretrain.playground run train_configs/playground/boards/lm.toml)

test: $(INSTALLED)
	$(PYTEST)

test-system: $(INSTALLED)
	$(PYTEST) -m "system and not long"

test-long: $(INSTALLED)
	$(PYTEST) -m long

test-learning: $(INSTALLED)
	$(PYTEST) -m learning

# a cluster per process: a test mostly waits for Slurm or for a program on one core
test-slurm: $(INSTALLED)
	python -m pytest tests/slurm -m slurm -n 2 --dist load --maxschedchunk 1

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
	rm -rf $(RUN)
