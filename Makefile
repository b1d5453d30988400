# make demo   plan Llama-3.1-70B on 24 mixed GPUs, from a real config.json
# make test   lint, types, all tests, docs
# make test-vllm  what needs real vLLM: finds or makes its environment in ~/.cache/hetplan
# make soak   twenty kills of real vLLM and the router under forty streams, thirty of every part of `hetplan serve`:
#             no token lost, doubled or changed; an interruption beside its prediction; what two engines on one tensor
#             store take
# make bench  speed, growth and the figures quoted in docs
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# By `make soak` only. NIXL keeps a core busy in each engine: with two cores its tests take longer than all others. A
# cluster of Ray nodes beside engines takes minutes more.
LONG := tests/vllm/test_kv_transfer_nixl.py tests/vllm/test_controller_cluster.py

.PHONY: demo test test-vllm lint compiled docs bench soak clean

$(BIN)/hetplan: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	$(BIN)/python -m hetplan.precompile

$(VENV)/dev: pyproject.toml $(BIN)/hetplan
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(BIN)/hetplan
	$(BIN)/hetplan optimize examples/llama-70b-24-gpus.yaml

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

compiled: $(BIN)/hetplan
	$(BIN)/python -m hetplan.precompile

# Lint and types on one core, what is compiled on the other.
test: $(VENV)/dev
	$(MAKE) --no-print-directory -j 2 lint compiled
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-vllm: $(VENV)/dev
	$(BIN)/python -m pytest -o addopts= -ra $(LONG:%=--ignore=%) tests/vllm

docs: $(VENV)/dev
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html

bench: $(VENV)/dev
	$(BIN)/python -m benchmarks

soak: $(VENV)/dev
	$(BIN)/python -m benchmarks soak store interruptions kills
	$(BIN)/python -m pytest -o addopts= -ra $(LONG)

clean:
	rm -rf $(VENV) docs/_build build dist
