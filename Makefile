# Every target sets up .venv by itself, from constraints.txt, with plain pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_DIR ?= demo-output
export OMP_NUM_THREADS ?= 2

.PHONY: demo test lint docs sweep fuzz bench clean

demo: $(READY)
	$(BIN)/modelexport demo $(DEMO_DIR)

test: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal -q

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python docs/make_api.py
	$(BIN)/python docs/make_map.py
	$(BIN)/python docs/make_schemas.py
	$(BIN)/python docs/make_strategies.py
	$(BIN)/python docs/make_bert_tiny.py

sweep: $(READY)
	$(BIN)/python -m sweep

fuzz: $(READY)
	$(BIN)/python -m fuzz --keep build/fuzz

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(DEMO_DIR) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV), once: a few minutes and about 2 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[hf,runtime,ray,dev]'
	touch $(READY)
