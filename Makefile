# Every target sets up .venv by itself. python3 (3.11 to 3.13) and make are the only requirements.
#
#   make run        the whole pipeline, small, offline          make check      lint, types and the fast tests
#   make up, down   Prefect server, deployments, dashboard      make test       every test that needs no large download
#   make lint       the linter alone                            make test-all   fetch what is missing, then types and every test
#   make types      the type checker, on every package
#   make audit      bill of materials, known advisories        make docs       the site, in build/site
PYTHON ?= python3
CONFIG ?= local
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
AHEAD := $(VENV)/ahead/.ready
HARNESS := $(VENV)/harness/.ready
TORCH := $(VENV)/torch/.ready
TRACKERS := $(VENV)/trackers/.ready
PEERS := $(VENV)/peers/.ready
AUDIT := $(VENV)/audit/.ready
SITE := $(VENV)/site/.ready
INSTALLER := uv setuptools
DOCUMENTATION := mkdocs-material 'mkdocstrings[python]' mkdocs-api-autonav
COMPILERS := 'libtpu==0.0.42.*' jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12
# lm-eval and what it needs beyond the project's own lock.
EVALUATION := lm-eval==0.4.13 evaluate sacrebleu rouge-score pytablewriter sqlitedict word2number more-itertools \
  dataproperty tabledata typepy mbstrdecoder tcolorpy pathvalidate portalocker lxml chardet tenacity aiohttp \
  aiohappyeyeballs aiosignal frozenlist multidict propcache yarl scikit-learn threadpoolctl

# What `make run` and the image have: every extra but the chips, gcs and wandb, and the packages of which a part is used.
LOCKED := --group stand-ins $(addprefix --extra ,pipeline serve uses edge ifeval local ray s3 tensorboard otel survey)

# W&B with what it needs beyond the project's own lock; the version is that of the extra.
TRACKING := wandb==0.31.0 cwevals==0.0.1b1 distro platformdirs

# One worker more than cores, because many tests wait for a process. A file stays in one worker, so that its tests share
# programs that JAX has compiled; the slowest files begin first (tests/conftest.py).
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

# Containers set this variable. Every process would then compile its imports: importing Prefect takes 3.0 s instead of 1.8.
unexport PYTHONDONTWRITEBYTECODE

# The imports of most processes, compiled once during setup by two processes at a time. Otherwise all the first processes of
# a run compile the same 6,000 files, with 20 s of processor time in each.
COMPILED := "jax, flax.nnx, optax, orbax.checkpoint, scipy.stats, sympy, faiss, datasets, streamlit.testing.v1" \
  "prefect.server.api.server, duckdb, openai, mistralai.client, hypothesis, moto.server, s3fs, playwright.sync_api"

.DEFAULT_GOAL := run
.PHONY: run up down check fast test test-all lint types quick-types audit docs ahead harness torch trackers peers lock clean
.DELETE_ON_ERROR:

run: $(READY)
	@$(BIN)/nautile run $(CONFIG)

# Prefect's server, the deployments and the dashboard; `make down` stops exactly those.
up: $(READY)
	@$(BIN)/nautile up $(CONFIG)

down: $(READY)
	@$(BIN)/nautile down

# Run this before each commit. Three workers on two cores, since some tests wait: 2:00 idle, 2:24 with two. The plug-in of
# schemathesis, which no fast test uses, takes each process 0.7 s. The linter and the type checker run beside the tests.
check: $(READY)
	@$(MAKE) --no-print-directory -j3 lint quick-types fast

fast: $(READY)
	@$(PYTEST) -m "not slow and not heavy" -p no:schemathesis

# Everything but the tests marked `heavy`: several hosts, browsers, services, whole commands of many seconds of processor
# time whose parts have tests of their own, and what needs the compilers
# for TPU and GPU, lm-eval, torch or W&B (2.9 GB).
test: $(READY)
	@$(PYTEST) -m "not heavy"

# Everything, and property tests with other examples in each run (tests/conftest.py).
test-all: export HYPOTHESIS_PROFILE := random
test-all: $(READY) $(AHEAD) $(HARNESS) $(TORCH) $(TRACKERS) $(SITE) types
	@$(PYTEST)

lint: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

# Every package (pyproject.toml). The first time mypy reads the sources of JAX, Prefect and pandas: a minute, then 4 s.
types: $(READY)
	@$(BIN)/mypy

# The strict packages, which import none of these: 6 s, so that the first `make check` of a clone takes no minute longer.
quick-types: $(READY)
	@$(BIN)/mypy -p nautile.common -p nautile.configs -p nautile.store

# The bill of materials of the locks and today's known advisories, in build/audit.
audit: $(READY) $(AUDIT)
	@$(BIN)/python bench/operation/audit.py build/audit $(VENV)/audit/bin/pip-audit

$(AUDIT): requirements/audit.lock $(READY)
	@echo "fetching pip-audit (once)"
	@test -x $(VENV)/audit/bin/python || $(BIN)/python -m venv --without-pip $(VENV)/audit
	@$(BIN)/uv pip install --quiet --python $(VENV)/audit/bin/python --no-deps --require-hashes -r requirements/audit.lock
	@touch $@

# The site of the documentation with the Python reference. Of MkDocs' lines only warnings are shown, any of which fails the
# build; with its option --quiet they are neither shown nor counted.
docs: $(SITE)
	@mkdir -p build
	@NO_MKDOCS_2_WARNING=1 $(VENV)/site/bin/mkdocs build >build/site.log 2>&1 || { grep -Ev '^INFO' build/site.log; exit 1; }
	@echo "build/site/index.html"

$(SITE): requirements/site.lock $(READY)
	@echo "fetching mkdocs (once)"
	@test -x $(VENV)/site/bin/python || $(BIN)/python -m venv --without-pip $(VENV)/site
	@$(BIN)/uv pip install --quiet --python $(VENV)/site/bin/python --no-deps --require-hashes -r $<
	@touch $@

# The compilers for TPU and GPU (1.3 GB), which `nautile plan` uses on a machine without such a chip. They have a separate
# folder: in .venv itself, JAX would search for those chips at each start.
ahead: $(AHEAD)

$(AHEAD): WHAT := the compilers for TPU and GPU

# EleutherAI's lm-eval (134 MB, no torch), which a test runs against `nautile serve`. Outside .venv, so that no part of
# the project can depend on it.
harness: $(HARNESS)

$(HARNESS): WHAT := lm-eval

# W&B (56 MB): a test sends metrics to its own code. Outside .venv, which every clone fetches.
trackers: $(TRACKERS)

$(TRACKERS): WHAT := wandb

# Install packages into a separate folder, pinned by digest.
$(AHEAD) $(HARNESS) $(TRACKERS): $(VENV)/%/.ready: requirements/%.lock $(READY)
	@echo "fetching $(WHAT) (once)"
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes --target $(VENV)/$* -r $<
	@touch $@

# torch, transformers, peft and lm-eval (1.4 GB with a CPU build of torch), for the tests of exports for them. A separate
# environment, which no part of the project uses. Installed by pip without digests: on Linux the default index has torch only
# for CUDA, with some 20 NVIDIA packages. A CPU build has another version (2.13.0+cpu), which `==2.13.0` allows pip to take
# from an index or folder that the machine configures, and other digests, which a lock would refuse.
torch: $(TORCH)

# `oldest` is a folder for PYTHONPATH, with the first version of transformers that exports promise to work with.
$(TORCH): requirements/torch.txt requirements/torch-oldest.txt $(READY)
	@echo "fetching torch, transformers, peft and lm-eval (once)"
	@test -x $(VENV)/torch/bin/python || $(BIN)/python -m venv $(VENV)/torch
	@$(VENV)/torch/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements/torch.txt
	@rm -rf $(VENV)/torch/oldest
	@$(VENV)/torch/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
	  --target $(VENV)/torch/oldest -r requirements/torch-oldest.txt
	@touch $@

# What bench/peers.py compares with: the environment above with TRL and datatrove (250 MB more).
peers: $(PEERS)

$(PEERS): requirements/peers.txt requirements/torch.txt $(READY)
	@echo "fetching torch, transformers, lm-eval, TRL and datatrove (once)"
	@test -x $(VENV)/peers/bin/python || $(BIN)/python -m venv $(VENV)/peers
	@$(VENV)/peers/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements/peers.txt
	@touch $@

# --universal: one lock for every Python and platform, distinguished by markers. It must contain no index address. The lock
# of production is that of development without its tools, with the same versions.
lock: $(READY)
	@$(BIN)/uv pip compile pyproject.toml $(LOCKED) --group dev --universal --python-version 3.11 --upgrade \
	  --no-emit-index-url --generate-hashes --no-header --quiet -o requirements/dev.lock
	@$(BIN)/uv pip compile pyproject.toml $(LOCKED) -c requirements/dev.lock --universal --python-version 3.11 --upgrade \
	  --no-emit-index-url --generate-hashes --no-header --no-annotate --quiet -o requirements/production.lock
	@printf '%s\n' $(COMPILERS) | $(BIN)/uv pip compile - --no-deps --universal --python-version 3.11 --upgrade \
	  --no-emit-index-url --generate-hashes --no-header --quiet -o requirements/ahead.lock
	@printf '%s\n' $(EVALUATION) | $(BIN)/uv pip compile - --no-deps -c requirements/dev.lock --universal --python-version 3.11 \
	  --upgrade --no-emit-index-url --generate-hashes --no-header --quiet -o requirements/harness.lock
	@printf '%s\n' $(TRACKING) | $(BIN)/uv pip compile - --no-deps --universal --python-version 3.11 \
	  --upgrade --no-emit-index-url --generate-hashes --no-header --quiet -o requirements/trackers.lock
	@printf '%s\n' $(INSTALLER) | $(BIN)/uv pip compile - --universal --python-version 3.11 --upgrade \
	  --no-emit-index-url --generate-hashes --no-header --quiet -o requirements/installer.lock
	@printf '%s\n' $(DOCUMENTATION) | $(BIN)/uv pip compile - --universal --python-version 3.11 --upgrade \
	  --no-emit-index-url --generate-hashes --no-header --quiet -o requirements/site.lock
	@echo pip-audit | $(BIN)/uv pip compile - --universal --python-version 3.11 --upgrade \
	  --no-emit-index-url --generate-hashes --no-header --quiet -o requirements/audit.lock
	@if grep -nE 'https?://' requirements/*.lock; then echo "a lock names an address" >&2; exit 1; fi

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis

# The installer and the build tools are pinned by digest too. --no-deps: the lock is complete, and leaves out unused
# requirements of the stand-ins that would be built from source (pyproject.toml).
$(READY): requirements/dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else "nautile needs python 3.11, 3.12 or 3.13, and $(PYTHON) is %d.%d: name another with `make PYTHON=python3.12`" % v)'
	@echo "setting up $(VENV) (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/installer.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements/dev.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@for packages in $(COMPILED); do PREFECT_HOME=$(VENV)/prefect $(BIN)/python -W ignore::SyntaxWarning -c "import $$packages" >/dev/null & done; wait
	@touch $@
