# `make demo` makes and proves the demo's draft head; `make test` runs every test. Both set up first.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test check e2e browser bench-train bench-capture install format

demo: install
	$(BIN)/draftsmith run smollm2-chat

test: check e2e

# Format, lint, types, layers, unit tests: under two minutes.
check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --warnings
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not served"

# The real thing at a small budget: real target, real traffic, real vLLM.
e2e: install browser
	$(BIN)/pytest -m served -s

# The report is looked at in Debian's Chromium; elsewhere put one on PATH, or name it in CHROMIUM.
browser:
	@command -v "$${CHROMIUM:-chromium}" || command -v google-chrome || \
	  { S=$$([ "$$(id -u)" = 0 ] || echo sudo); $$S apt-get update -q && \
	    $$S env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium; }

install: .venv/installed

.venv/installed: requirements.txt requirements-nodeps.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -r requirements.txt
	# Their own needs are met above, or (torchvision, torchaudio, llama.cpp) not needed.
	$(BIN)/pip install --quiet --no-deps -r requirements-nodeps.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

# Speed on a GPU (tests/bench/): the trainer beside Speculators', capture beside the engine's own prefill.
bench-train: install
	$(BIN)/python -m tests.bench.exact
	$(BIN)/python -m tests.bench.train

# TARGET: a folder; OPTIONS: recipe overrides, e.g. "capture.command=[/path/to/sglang/python]"
bench-capture: install
	$(BIN)/python -m tests.bench.capture smollm2-chat $(TARGET) $(OPTIONS)

format:
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
