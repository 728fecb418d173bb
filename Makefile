# Every target sets up .venv by itself, from constraints.txt, with plain pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NODE_READY := viewer/node_modules/.ready
DEMO_DIR ?= demo-output
TORCH ?= 2.15.0
COMPAT := build/compat-$(TORCH)
INSTALLED := build/installed
export OMP_NUM_THREADS ?= 2

.PHONY: demo quick test tools generation lint viewer docs docs-site pictures sweep fuzz bench compat dist dist-test clean

demo: $(READY)
	$(BIN)/modelexport demo $(DEMO_DIR)

quick: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal -q -m quick

test: $(READY) $(NODE_READY)
	$(BIN)/pytest -n 2 --dist worksteal -q

# The map after every optimiser, quantizer and converter, on every model with both exporters.
tools: $(READY)
	ALL_TOOLS=1 $(BIN)/pytest -n 2 --dist worksteal -q tests/retag

# Language models of every kind, exported in parts: 8 tokens as in PyTorch, the bytes of transformers.
generation: $(READY)
	ALL_GENERATION=1 $(BIN)/pytest -n 2 --dist worksteal -q tests/generation

# The script and the style of the page that `modelexport view` writes.
viewer: $(NODE_READY)
	cd viewer && npm run --silent check && npm run --silent build

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python docs/make_api.py
	$(BIN)/python docs/make_keywords.py
	$(BIN)/python docs/make_drawing.py
	$(BIN)/python docs/make_map.py
	$(BIN)/python docs/make_schemas.py
	$(BIN)/python docs/make_strategies.py
	$(BIN)/python docs/make_bert_tiny.py

# All pages as a site with a search, in build/site; open index.html there.
docs-site: $(READY)
	$(BIN)/python docs/build_site.py build/site

# The pictures of the page in the guides; needs Chromium.
pictures: $(READY) $(NODE_READY)
	$(BIN)/python docs/take_pictures.py

sweep: $(READY)
	$(BIN)/python -m sweep

fuzz: $(READY)
	$(BIN)/python -m fuzz --keep build/fuzz --page docs/fuzzing.md

bench: $(READY) $(NODE_READY)
	$(BIN)/python -m benchmarks

# The proof on another version of torch. Its wheels bring several GB of CUDA packages.
compat: $(COMPAT)/.ready
	@rm -f $(COMPAT)/result.xml
	@status=0; $(COMPAT)/bin/pytest -n 2 -q --junit-xml $(COMPAT)/result.xml \
		tests/test_value.py tests/test_architectures.py tests/capture || status=$$?; \
	$(COMPAT)/bin/python -m sweep.torch_versions $(COMPAT)/result.xml $(TORCH) || status=1; \
	exit $$status

$(COMPAT)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(COMPAT)
	# torch has bounds of its own for setuptools
	grep -v -e '^torch==' -e '^setuptools==' constraints.txt > $(COMPAT)/constraints.txt
	echo 'torch==$(TORCH)' >> $(COMPAT)/constraints.txt
	$(COMPAT)/bin/pip install --quiet --disable-pip-version-check \
		--constraint $(COMPAT)/constraints.txt --editable '.[hf,runtime,dev]'
	touch $@

# The source distribution, and the wheel, which is built from it.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# Installs the wheel as users do: the base package reads a file, and with extras the demo runs.
dist-test: dist
	rm -rf $(INSTALLED)
	$(PYTHON) -m venv $(INSTALLED)
	$(BIN)/modelexport demo $(INSTALLED)/source > /dev/null
	$(INSTALLED)/bin/pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt dist/*.whl
	! $(INSTALLED)/bin/python -c 'import torch' 2> /dev/null
	$(INSTALLED)/bin/modelexport --version
	$(INSTALLED)/bin/modelexport analyze $(INSTALLED)/source/bert-tiny.onnx
	$(INSTALLED)/bin/modelexport view $(INSTALLED)/source/bert-tiny.onnx $(INSTALLED)/page.html
	cmp $(INSTALLED)/source/bert-tiny.html $(INSTALLED)/page.html
	$(INSTALLED)/bin/pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt "$$(echo dist/*.whl)[hf,runtime]"
	$(INSTALLED)/bin/modelexport demo $(INSTALLED)/demo

clean:
	rm -rf $(VENV) viewer/node_modules $(DEMO_DIR) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV), once: a few minutes and about 2 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[hf,runtime,ray,docs,dev]'
	touch $(READY)

# Without Node.js, tests that need it are skipped, and say so.
$(NODE_READY): viewer/package-lock.json
	@if command -v npm > /dev/null; then \
		cd viewer && npm ci --silent --ignore-scripts && touch node_modules/.ready; \
	fi
