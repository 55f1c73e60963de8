# Everything is installed into .venv, in this folder, on first use. Variables, all optional:
#   PYTHON=python3.12   the interpreter that makes .venv
#   ARGS="..."          more arguments for isopos compare (run) or pytest (test, test-all, fuzz); pairs as 3.12=2.13 (test-versions)
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu   on Linux: PyTorch's own index of CPU builds, without CUDA

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help run test test-all test-gpu test-versions docs wheel fuzz lint format clean
.NOTPARALLEL:

help:      ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

run: .venv/.installed-run       ## compare encodings: isopos compare ARGS
	@$(BIN)/isopos compare $(ARGS)

test: .venv/.installed-dev      ## the tests without the slow ones, on two processes
	@$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not oracles and not triton" $(ARGS)

test-all: .venv/.installed-peers  ## the slow tests, and agreement with other libraries
	@$(BIN)/pytest -n 2 --dist worksteal -m "slow or oracles" -rs $(ARGS)
	@TRITON_INTERPRET=1 ISOPOS_TRITON=1 $(BIN)/pytest -n 2 --dist worksteal -m triton -rs $(ARGS) tests/test_triton*.py

# Tests of Triton's kernels for each generation of GPUs, compiled without one, are part of test-all.
GPU_TESTS := $(addprefix tests/test_,triton_step.py triton_rotate.py gpu.py triton_flex.py triton_bench.py)
test-gpu: .venv/.installed-dev  ## on a GPU: two minutes of isopos gpu-check, then every scheme; TORCH_INDEX of a CUDA build, once
	@rm -rf build/gpu-check
	@$(BIN)/python -m isopos gpu-check --out build/gpu-check --minutes 2
	@ISOPOS_TRITON=any $(BIN)/pytest -rs -m "triton or not triton" $(ARGS) $(GPU_TESTS)

test-versions: .venv/.installed-dev  ## the tests on the lowest and the newest Python and PyTorch: gigabytes, half an hour
	@TORCH_INDEX="$(TORCH_INDEX)" VERSIONS="$(ARGS)" $(BIN)/nox

docs: .venv/.installed-docs     ## the site in site/: runs the tutorials, builds the pages, follows every link
	@$(BIN)/python -m tools.site

wheel: .venv/.installed-dev     ## wheels in dist/ that need no compiler: of x86-64, and of ARM where there is aarch64-linux-gnu-gcc
	@$(BIN)/python -m tools.wheels

fuzz: .venv/.installed-dev      ## random calls, commands and damaged folders, EXAMPLES=1000 of each
	@$(BIN)/pytest --hypothesis-profile=fuzz -m "not slow" $(ARGS) tests/test_fuzz.py || { echo "last case: build/fuzz.txt"; exit 1; }

lint: .venv/.installed-dev      ## check style, format, spelling, words and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/codespell isopos tools benchmarks docs README.md CONTRIBUTING.md SECURITY.md RELEASING.md
	@$(BIN)/basedpyright --pythonpath $(BIN)/python

format: .venv/.installed-dev    ## format the code and repair what ruff can
	@$(BIN)/ruff check --fix --exit-zero
	@$(BIN)/ruff format

clean:     ## remove .venv, caches and build files; runs/ stays
	@rm -rf .venv .versions build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis mutants
	@find isopos -name '*.so' -delete
	@find isopos tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} +

# A stamp is written last, so an interrupted installation leaves none. Each installation includes those before it.
STAMPS := .venv/.installed-run .venv/.installed-dev .venv/.installed-docs .venv/.installed-peers
.venv/.installed-run: EXTRAS := lab
.venv/.installed-dev: EXTRAS := lab,dev,hf
.venv/.installed-docs: EXTRAS := lab,dev,hf,docs
.venv/.installed-peers: EXTRAS := lab,dev,peers,hf,docs,gpu-test,cluster,onnx
$(STAMPS): pyproject.toml setup.py constraints.txt $(wildcard isopos/ops/linear/cpu/*.[ch]) $(BIN)/python
	@if $(HALF) || ! $(PIP) --version >/dev/null 2>&1; then $(NEW_VENV); fi
	@touch .venv/.installing
	@echo "isopos: installing into .venv; PyTorch is large, so this takes a minute or more"
	@$(PIP) install --quiet -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") -e ".[$(EXTRAS)]"
	@rm .venv/.installing
	@touch .venv/.installed-run $(if $(findstring dev,$(EXTRAS)),.venv/.installed-dev) \
		$(if $(findstring docs,$(EXTRAS)),.venv/.installed-docs) $@

# Absent, or a link to a Python that is gone: the stamps above are stale.
$(BIN)/python: ;

# An installation that was interrupted when it had begun to write: packages may lack files, which pip does not see.
HALF = [ -n "$$(find .venv/lib/python*/site-packages -prune -newer .venv/.installing 2>/dev/null)" ]

FAIL = { echo "isopos: $(1)" >&2; exit 1; }
define NEW_VENV
"$(PYTHON)" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null \
|| $(call FAIL,Python 3.11 or newer is needed and $(PYTHON) is $$("$(PYTHON)" -V 2>/dev/null || echo absent); \
name another: make PYTHON=python3.12 ...); \
"$(PYTHON)" -c "import ensurepip, venv" 2>/dev/null \
|| $(call FAIL,$(PYTHON) lacks venv or ensurepip; on Debian and Ubuntu: apt install python3-venv); \
rm -rf .venv && mkdir .venv && touch .venv/.installing && "$(PYTHON)" -m venv .venv
endef
