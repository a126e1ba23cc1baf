# The two commands of a new user are `make demo` and `make test`. Both make .venv on their own.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# For a PyTorch without CUDA: make demo TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.13.0

.PHONY: demo test test-minutes newest docs lint check format bench gpu families fuzz readers campaigns clean

demo: $(VENV)/installed
	$(BIN)/biphase demo

# pip compiles no bytecode: most modules are never imported, and the first import of the others writes theirs.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# A process more than there are cores, up to 8: some tests wait for processes of their own.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 7 ? cores + 1 : 8)))

# The tests write tens of thousands of small files. They write them into memory where there are 8 GB, because some disks
# take milliseconds for each.
MEMORY := $(shell test "$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 {print $$4}')" -gt 8000000 2>/dev/null && echo /dev/shm)
# Bytecode is written, whatever the environment says: the tests start a hundred processes.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(if $(MEMORY),PYTEST_DEBUG_TEMPROOT=$(MEMORY)) \
	$(BIN)/python -m pytest $(if $(MEMORY),-o tmp_path_retention_policy=failed)

test: $(VENV)/developer
	$(PYTEST) -n $(WORKERS) --dist worksteal --durations=10 -m "not minutes"

# What `make test` leaves out: the longest tests, and further cases of others (model types, kinds, variants).
test-minutes: $(VENV)/developer
	$(PYTEST) -n $(WORKERS) --dist worksteal --durations=10 -m minutes

# The tests that need no PyTorch, which is gigabytes, on the newest Python that pyproject.toml claims. pip
# compiles no bytecode, because few modules are imported; nor do the tests, whose full disks could leave half a file.
NEWEST ?= python3.13
NEEDED := import tomllib; needed = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]
NEEDED += ; print("\n".join(name for name in needed if not name.startswith("torch")))

newest:
	$(NEWEST) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -c '$(NEEDED)' > $(VENV)-newest/needed.txt
	$(VENV)-newest/bin/python -m pip install --no-compile --quiet --disable-pip-version-check \
		-r $(VENV)-newest/needed.txt pytest pytest-xdist
	PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=src $(VENV)-newest/bin/python \
		-m pytest -n 2 --dist worksteal -m "not slow" -p no:cacheprovider \
		tests/report tests/tasks tests/corpus $(addprefix --ignore=tests/, \
		tasks/test_foreign_files.py corpus/test_damage.py corpus/test_mixture.py)

# The site, into site/: pages of docs/ and what the code says of its own keys and commands (scripts/docs_site.py).
docs: $(VENV)/developer
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(VENV)/developer
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/measure_house.py --check

check: lint
	$(BIN)/python -m pytest -m "not slow"

format: $(VENV)/developer
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Text to tokenize in `make bench`; the bundled text is so small that starting up dominates.
TEXT ?= src/biphase/bundled/corpus

bench: $(VENV)/developer
	$(BIN)/biphase tokenizer train $(TEXT) --limit-mb 50 --out $(VENV)/bench-tokenizer
	$(BIN)/python benchmarks/tokenization.py $(TEXT) --tokenizer $(VENV)/bench-tokenizer
	$(BIN)/python benchmarks/pretraining.py
	$(BIN)/python benchmarks/grid.py

# What only a GPU can show: its tests, cells that share it, speed beside peers; one JSON. A call takes at most 9 minutes
# and begins with the most valuable parts; another one goes on; some parts: make gpu ONLY='tests 1b'. It takes the Python
# that is there, whose PyTorch knows the GPU: make gpu GPU_PYTHON=.venv/bin/python
GPU_PYTHON ?= python3

gpu:
	$(GPU_PYTHON) benchmarks/gpu.py $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT)/gpu.json) \
		$(if $(EARLIER),--earlier $(EARLIER))

# Broken and hostile input of every kind, through the real command: prints attempts, survived, lost.
COUNT ?= 2000
SEED ?= 0

fuzz: $(VENV)/developer
	$(BIN)/python tests/campaigns/fuzzing.py --count $(COUNT) --seed $(SEED)

# Kills, full disks, hostile models, lost processes and exchanged files too; figures for docs/LOG.md.
# Other programs that read our ONNX and GGUF files: fastembed, OpenVINO, llama.cpp (its converter and its runtime), and
# transformers.js under Node (475 MB of npm).
readers: $(VENV)/developer
	$(INSTALL) fastembed openvino --editable '.[gguf]'
	ONNXRUNTIME_NODE_INSTALL=skip npm install --silent --prefix $(VENV)/readers @huggingface/transformers
	BIPHASE_NODE_MODULES=$(CURDIR)/$(VENV)/readers $(BIN)/python -m pytest tests/deploying/test_onnx.py tests/deploying/test_gguf.py

campaigns: fuzz
	$(BIN)/python tests/campaigns/killing.py --count 100 --seed $(SEED)
	$(BIN)/python tests/campaigns/full_disk.py --count 10 --seed $(SEED)
	$(BIN)/python tests/campaigns/hostile.py
	$(BIN)/python tests/campaigns/distributed.py --count 30 --seed $(SEED)
	$(BIN)/python tests/campaigns/exchanging.py --count 20 --seed $(SEED)

# Every model type of transformers against plain transformers; writes docs/families.md and the sentence of docs/promises.md.
families: $(VENV)/developer
	$(BIN)/python -m pytest tests/encoder/test_families.py --update-golden

clean:
	rm -rf $(VENV) $(VENV)-newest .pytest_cache .ruff_cache .mypy_cache biphase-demo site

# PyTorch by exact version first: a range would fetch gigabytes of CUDA libraries where a CPU build would do.
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	$(INSTALL) --editable .
	touch $@

$(VENV)/developer: $(VENV)/installed
	$(INSTALL) --editable '.[dev]'
	touch $@
