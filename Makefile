# Two commands set everything up on a fresh machine: `make search` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: search test check clean

search: .venv/installed  ## install, then the main job on the bundled pair: writes profile.json
	$(BIN)/autotune search

# numba renews the compiled code of a file that changed, not of the files that call it: replay would keep an old policy.
check: .venv/installed  ## lint, types and the fast tests
	find autotune \( -name '*.nbi' -o -name '*.nbc' \) -delete
	$(BIN)/ruff check autotune tests benchmarks
	$(BIN)/ruff format --check autotune tests benchmarks
	$(BIN)/mypy
	$(BIN)/pytest -n auto -m "not slow and not gpu"

test: check  ## everything that needs no accelerator
	$(BIN)/pytest -n auto --dist worksteal -m "slow and not gpu"

clean:
	rm -rf .venv .autotune profile.json

# Debian's python3 may come without venv; root installs it.
.venv/bin/python:
	$(PYTHON) -m venv .venv || { rm -rf .venv; apt-get update && apt-get install -y python3-venv && $(PYTHON) -m venv .venv; }

# torch before everything that depends on it, so that its exact version is the one that is found.
.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .[dev]
	touch $@
