# Everything that setting up, trying and testing takes. `make help` lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := $(VENV)/.demo
ALL    := $(VENV)/.installed
SETUP  := pyproject.toml lab/pyproject.toml constraints.txt
PIP     = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO)  ## set up, then train three networks side by side (two minutes on two cores)
	$(BIN)/sliceout-lab demo

test: lint  ## set up, then check style, types and imports, and run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(ALL)  ## check style, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src lab tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +

# What the demo needs: torch, the library with its command line, the lab. torch comes first and by its exact version:
# asked for in any other way, pip may fetch another build of it.
$(DEMO): $(SETUP)
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(v if sys.version_info < (3, 11) else 0)' \
		|| { echo "$(PYTHON) is too old or missing: Python 3.11 or newer is needed (make PYTHON=python3.12 ...)"; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version): a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -e ".[cli]" -e lab
	@touch $@

$(ALL): $(DEMO)
	@echo "Adding what the tests need"
	$(PIP) -e ".[cli,test]" -e "lab[test]"
	@touch $@
