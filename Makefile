# `make demo` makes and proves the demo's draft head; `make test` runs every test. Both set up first.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test check e2e controls install format

demo: install
	$(BIN)/draftsmith run smollm2-chat

test: check e2e

# Format, lint, types, layers, unit tests: under two minutes.
check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --warnings
	$(BIN)/lint-imports
	$(BIN)/pytest -m "not served"

# The real thing at a small budget: real target, real traffic, real vLLM.
e2e: install
	$(BIN)/pytest -m served -s

install: .venv/installed

.venv/installed: requirements.txt requirements-nodeps.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -r requirements.txt
	# Their own needs are met above, or (torchvision, torchaudio, llama.cpp) not needed.
	$(BIN)/pip install --quiet --no-deps -r requirements-nodeps.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

format:
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
