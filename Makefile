# The commands of this project; `make help` lists them.
#
#   PYTHON       which Python makes the environment        make train PYTHON=python3.12
#   TORCH        what to install as torch, beforehand; nothing: what pip chooses
#                                                          make train TORCH="torch==2.13.0"
#   ARGS         passed on to the training script          make train ARGS="--epochs 3"
#   PYTEST_ARGS  passed on to pytest                       make test PYTEST_ARGS="-k scatter"
#   VERSIONS     passed on to tests/versions.py            make versions VERSIONS="--torch 2.13.0"
#   PROGRAMS     how many random programs run                make random PROGRAMS=5000
#   DEVICES      where `make gpu` runs                     make gpu DEVICES=virtual:0,virtual:1
#   FULL         let `make gpu` run all within 40 minutes  make gpu FULL=1

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
ARGS ?=
PYTEST_ARGS ?=
VERSIONS ?=
DEVICES ?=
FULL ?=
PROGRAMS ?= 500

# Threads that spin while they wait slow each other down as soon as something else needs the cores.
export OMP_WAIT_POLICY ?= passive

SOURCES := dataparallel kernels tools benchmarks tests examples docs/_site
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help train test all-cases versions random gpu browser images soak check docs format build release clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

train: $(RUN_STAMP) ## train on handwritten digits, on all accelerators or else two CPU replicas
	@$(VENV)/bin/python examples/train_digits.py $(ARGS)

# One process more than a small machine has cores, since many tests wait for processes.
test: $(DEV_STAMP) ## run the tests
	@$(VENV)/bin/python -m pytest -q -n 3 $(PYTEST_ARGS)

all-cases: $(DEV_STAMP) ## run every case of the tests in which otherwise any two values meet
	@$(VENV)/bin/python -m pytest -q -n 3 -m in_pairs --all-cases $(PYTEST_ARGS)

versions: $(DEV_STAMP) ## run some tests with the oldest and the newest torch, on each Python there is
	@$(VENV)/bin/python -m tests.versions $(VERSIONS)

random: $(DEV_STAMP) ## compare random programs, other ones each time, with the bare module
	@$(VENV)/bin/python -m tests.random_programs --programs $(PROGRAMS) $(ARGS)

gpu: ## run what only NVIDIA GPUs can show, one or several; installs nothing, needs no network
	@$(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON)) -m tests.gpu.report \
	  $(if $(DEVICES),--devices $(DEVICES)) $(if $(FULL),--full) $(ARGS)

check: $(DEV_STAMP) ## check format, lint, types and spelling
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell $(SOURCES) docs *.md

docs: $(DEV_STAMP) ## build the documentation and the API reference in site/
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
	@echo "See site/index.html; $(VENV)/bin/python -m mkdocs serve shows changes while you write"

browser: $(DEV_STAMP) ## test the monitor's page in Chromium
	@$(PIP) "playwright>=1.49"
	@$(VENV)/bin/python -m pytest -q tests/monitor/page_in_browser.py $(PYTEST_ARGS)

images: browser ## make the images of docs/images, in Chromium
	@$(VENV)/bin/python -m docs._site.make_images

soak: $(DEV_STAMP) ## train for half an hour while processes are killed and stopped
	@$(VENV)/bin/python -m tests.faults.soak --minutes 30 --write docs/measurements/soak.md

format: $(DEV_STAMP) ## format the code
	$(VENV)/bin/ruff format $(SOURCES)
	$(VENV)/bin/ruff check --fix $(SOURCES)

build: $(DEV_STAMP) ## make the wheel and the source archive in dist/
	@$(VENV)/bin/python -m build --quiet --outdir dist
	@ls -l dist

release: $(DEV_STAMP) ## make both archives, and try them as a stranger would; signs and uploads nothing
	@rm -rf dist
	@$(MAKE) --no-print-directory build
	@$(PIP) "twine>=6"
	@$(VENV)/bin/python -m twine check --strict dist/*
	@$(VENV)/bin/python -m tests.release

clean: ## remove what the commands made, but not the environment
	rm -rf build dist out site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -exec rm -rf {} +

# --- the environment ---------------------------------------------------------------------------

# $(call install,EXTRAS,STAMP): install the package in place with its extras, and say how long it took
define install
	@begin=$$(date +%s); \
	if [ ! -x $(VENV)/bin/python ]; then \
	  echo "Making the environment $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv $(VENV); \
	fi; \
	if [ -n "$(TORCH)" ]; then echo "Installing $(TORCH)"; $(PIP) $(TORCH) || exit 1; fi; \
	echo "Installing dataparallel[$(1)]; a torch with CUDA takes minutes: 3 GB, on disk 6 GB"; \
	$(PIP) --editable ".[$(1)]" || exit 1; \
	touch $(2); \
	echo "The environment was ready after $$(($$(date +%s) - begin)) s"
endef

$(RUN_STAMP): pyproject.toml
	$(call install,examples$(comma)tools,$@)

# Some of `dev` has no wheels for Python without the interpreter's lock.
$(DEV_STAMP): pyproject.toml
	$(call install,dev$(shell $(PYTHON) -c "import sysconfig as s; print('-free-threaded' * bool(s.get_config_var('Py_GIL_DISABLED')))"),$@)

comma := ,
