# make test   check everything         make demo    compress a sentence-embedding model
# make bench  time the layers          make clean   remove what was built; .venv stays
# make bench-accuracy   what compression costs in accuracy, beside other methods
# make test-integrations   with peft, diffusers, accelerate and sentence-transformers, which it installs
# make docs             the documentation as a site, build/site; links are checked
# make test-slow        what takes long: large models, many processes, thousands of graphs
# make gpu              on a machine with a GPU, with the torch that it has: its tests, then time the kernels
#
# The first run makes .venv and fills it; later runs start at once.
# Another Python:  make test PYTHON=python3.13 VENV=.venv313
# Another torch:   make test TORCH=torch==2.11.0

PYTHON ?= python3
VENV   ?= .venv
# Empty: keep a torch that is new enough, else install DEFAULT_TORCH.
TORCH  ?=
ARGS   ?=
# Processes that run the tests, one for each core; WORKERS=0 runs them in pytest itself.
WORKERS ?= auto

DEFAULT_TORCH := torch==2.13.0
OLDEST_TORCH  := 2.11

BIN := $(VENV)/bin
PY  := $(BIN)/python
# A test that hangs where Python cannot interrupt it ends its worker, which says where it was.
PYTEST := $(PY) -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
          -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
# Python compiles what it imports; pip would compile all of torch, transformers and sympy.
PIP := $(PY) -m pip install -qq --no-compile --disable-pip-version-check
# Each process of the tests would compile torch for itself: it is done while pip installs the rest.
COMPILE_TORCH := $(PY) -c 'import compileall, sysconfig; \
    compileall.compile_dir(sysconfig.get_path("platlib") + "/torch", quiet=2)'

TORCH_STAMP := $(VENV)/.torch-$(or $(subst =,-,$(subst +,-,$(TORCH))),default)
DEMO_STAMP  := $(VENV)/.installed-demo
TEST_STAMP  := $(VENV)/.installed-test
INTEGRATIONS_STAMP := $(VENV)/.installed-integrations
DOCS_STAMP  := $(VENV)/.installed-docs

.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
.PHONY: demo test fast-tests test-slow test-integrations docs gpu gpu-test gpu-bench lint bench bench-accuracy clean
MAKEFLAGS += --no-print-directory
# Hundreds of processes import torch and transformers: without bytecode each would compile them again.
unexport PYTHONDONTWRITEBYTECODE

demo: $(DEMO_STAMP)
	@$(PY) examples/compress_minilm.py $(ARGS)

# Lint and mypy run beside the tests, so that no core is idle.
test: $(TEST_STAMP)
	@$(MAKE) -j2 lint fast-tests

fast-tests: $(TEST_STAMP)
	@$(PYTEST) -m "not slow and not integrations" $(ARGS)

test-slow: $(TEST_STAMP)
	@$(PYTEST) -m slow $(ARGS)

test-integrations: $(INTEGRATIONS_STAMP)
	@$(PY) -m pytest -q tests/integrations $(ARGS)

# It reads the sources and imports nothing of them, so it needs no torch.
docs: $(DOCS_STAMP)
	@$(PY) -m mkdocs build --quiet --strict

# Nothing is installed: the machine may be there for minutes, and without a network.
gpu: build/gpu
	@PYTHONPATH="$(CURDIR)/build/gpu" PYTHONUNBUFFERED=1 $(PYTHON) benchmarks/kernel_protocol.py $(ARGS)

build/gpu:
	@mkdir -p build/gpu/panther_compile
	@ln -s "$(CURDIR)"/panther_compile/* "$(CURDIR)/passes" "$(CURDIR)/kernels" build/gpu/panther_compile

GPU_WORKERS = $(shell $(PYTHON) -c "import xdist; print('-n 8')" 2>/dev/null)

gpu-test: build/gpu
	@PYTHONPATH="$(CURDIR)/build/gpu" $(PYTHON) -P -m pytest -q $(GPU_WORKERS) tests/kernels
	@PYTHONPATH="$(CURDIR)/build/gpu" $(PYTHON) -P -m pytest -q $(GPU_WORKERS) -m gpu --ignore tests/kernels

gpu-bench: build/gpu
	@PYTHONPATH="$(CURDIR)/build/gpu" PYTHONUNBUFFERED=1 $(PYTHON) benchmarks/kernels.py $(ARGS)

# mypy reads the tree as it is installed: passes/ and kernels/ below panther_compile/.
lint: $(TEST_STAMP)
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --quiet --check . || { echo "run: $(BIN)/ruff format ."; exit 1; }
	@rm -rf build/typing && mkdir -p build/typing/panther_compile
	@ln -s "$(CURDIR)"/panther_compile/* "$(CURDIR)/passes" "$(CURDIR)/kernels" build/typing/panther_compile
	@MYPYPATH=build/typing $(BIN)/mypy --no-error-summary

bench: $(TEST_STAMP)
	@$(PY) benchmarks/layers.py $(ARGS)

bench-accuracy: $(TEST_STAMP)
	@$(PY) benchmarks/accuracy.py $(ARGS)

clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "panther_compile needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }

# torch first and alone: left to the resolver it is the newest build, with gigabytes of CUDA.
$(TORCH_STAMP): | $(PY)
ifeq ($(TORCH),)
	@$(PY) -c 'import sys, torch; v = torch.__version__.split("+")[0].split("."); \
	    sys.exit([int(n) for n in v[:2]] < [int(n) for n in "$(OLDEST_TORCH)".split(".")])' 2>/dev/null \
	    || { echo "installing $(DEFAULT_TORCH)"; $(PIP) "$(DEFAULT_TORCH)"; }
else
	@echo "installing $(TORCH)"
	@$(PIP) "$(TORCH)"
	@rm -f $(VENV)/.torch-*
endif
	@touch $@

$(DEMO_STAMP): pyproject.toml $(TORCH_STAMP)
	@echo "installing panther_compile and what the demo needs"
	@$(PIP) -e ".[demo]"
	@touch $@

$(TEST_STAMP): pyproject.toml $(TORCH_STAMP)
	@echo "installing panther_compile and what the tests need"
	@$(COMPILE_TORCH) & $(PIP) -e ".[test]" && wait
	@touch $@ $(DEMO_STAMP)

$(INTEGRATIONS_STAMP): $(TEST_STAMP)
	@echo "installing the libraries of the integrations"
	@$(PIP) -e ".[integrations]"
	@touch $@

$(DOCS_STAMP): pyproject.toml | $(PY)
	@echo "installing what builds the documentation"
	@$(PIP) $$($(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@
