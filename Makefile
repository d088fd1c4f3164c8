# make demo    train tiny_neox here, kill it once, resume, compare with an unbroken run
# make test    all tests, on a real Slurm where one may be installed
# make test-all  the long tests too: samples of the chaos suite; then `make numerics`
# make numerics  the numerical tests under four CPU settings: SSE, AVX2, MKL compatible, AVX-512
# make check   ruff, mypy, shellcheck, the documentation
# make docs    the documentation as a site in build/site
# make dist    wheel and source archive in dist, checked by twine
# make audit   installed packages with known vulnerabilities, by pip-audit; needs its database
# make sbom    the installed packages as a CycloneDX list, build/sbom.json
# make fuzz    hostile files for every reader, for an hour
# make gpu     all that needs one GPU, in nine minutes; writes build/gpu.md
# make trackers  the tests against the packages of W&B and MLflow, which it installs
# make trainers  other projects' trainers, killed, resumed, compared; $(ONLY): some of them
# make chaos   the chaos suite: 200 runs that fail on 4 nodes, 20 on 128; 55 minutes of it a call
# make slurm-matrix  the Slurm tests on 22.05, 24.11 and the newest that Debian has; needs root
# make python-matrix  the tests without Slurm's on 3.11, 3.12 and 3.13 ($PYTHONS)
# make nxd NXD_SRC=…  the tests of the NxD backend, with neuronx-distributed's `src` folder
# make chaos-part  12 of them, in 20 minutes

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Each of the suite's thousands of processes would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python tools/run_tests.py
# --no-compile: Python compiles each module at its first import.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile \
  --constraint constraints.txt

.PHONY: demo test test-all numerics check docs dist audit sbom fuzz gpu trackers trainers chaos chaos-part slurm-matrix python-matrix nxd install dev slurm browser clean

demo: install
	$(BIN)/python tools/demo.py

test: dev slurm browser
	$(PYTEST) --durations 20

test-all: dev slurm browser
	SLURMLLM_TEST_ALL=1 $(PYTEST) --durations 40
	$(MAKE) --no-print-directory numerics

# Instructions of ATen, oneDNN and MKL, and threads. `$(PROCESSOR_sse)` is computed anywhere, the last
# only where the processor has the instructions: ATen uses them unasked.
PROCESSOR_sse := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 \
  MKL_ENABLE_INSTRUCTIONS=SSE4_2 OMP_NUM_THREADS=1
PROCESSOR_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
  MKL_ENABLE_INSTRUCTIONS=AVX2 OMP_NUM_THREADS=2
PROCESSOR_compatible := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
  MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=8
PROCESSOR_avx512 := ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE \
  MKL_ENABLE_INSTRUCTIONS=AVX512 OMP_NUM_THREADS=4
has = $(filter-out 0,$(shell grep -cm1 $(1) /proc/cpuinfo 2>/dev/null))
PROCESSORS := sse $(if $(call has,avx2),avx2 compatible) $(if $(call has,avx512vl),avx512)

numerics: $(PROCESSORS:%=numerics-%)

# MKL_DYNAMIC: or it lets torch have no more threads than there are cores. Each call has a compiler
# cache of its own: kernels that Inductor compiled for one processor are wrong on another.
numerics-%: dev
	env $(PROCESSOR_$*) SLURMLLM_TEST_ALL=0 MKL_DYNAMIC=FALSE OMP_WAIT_POLICY=passive \
	  $(PYTEST) -m numerics

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/house.py --check
	$(BIN)/shellcheck --shell=bash sbatch/*.sbatch .ci/run configs/parallelcluster/*.sh
	$(MAKE) --no-print-directory docs

# --strict: a link, an anchor or a page that leads nowhere fails. zensical reads mkdocs.yml.
docs: dev
	$(BIN)/python tools/docs_fields.py
	$(BIN)/zensical build --strict

# The wheel is built from the source archive.
dist: dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*

# Exit code 2 of tools/audit.py: not everything could be looked up.
audit: dev
	$(BIN)/python tools/audit.py

sbom: dev
	mkdir -p build
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --output-file build/sbom.json $(BIN)/python
	@echo "build/sbom.json: $$(grep -c '"bom-ref":' build/sbom.json) components"

fuzz: dev
	$(BIN)/python tools/fuzz --minutes 60

# Installs nothing: a machine with a GPU may have no network, and a torch of its own ($PYTHON).
# Exit code 1: a required part failed; 2: nothing was run, for example because there is no GPU.
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tools/benchmarks/gpu.py --out build/gpu.md

# mlflow's server is no part of the extra.
trackers: dev
	$(PIP) --editable '.[wandb,mlflow]' 'mlflow>=2.14'
	$(BIN)/python -m pytest -rs tests/analysis/track

# Each has an environment in build/trainers; $TORCH_INDEX: one more index of pip's, for CPU wheels.
trainers: dev
	$(BIN)/python tools/trainers.py $(ONLY)

chaos: dev slurm
	$(BIN)/python tools/chaos --suite full --minutes 55 --parallel 4 --results build/chaos

chaos-part: dev slurm
	$(BIN)/python tools/chaos --suite part --parallel 2 --results build/chaos

slurm-matrix: dev slurm
	$(BIN)/python tools/slurm_matrix.py

# An environment each, in build/python; without pip, which Debian's python3 cannot give it.
PYTHONS ?= python3.11 python3.12 python3.13
python-matrix:
	@failed=; for python in $(PYTHONS); do \
	  venv=build/python/$$($$python -c 'import platform; print(platform.python_version())') && \
	  $$python -m venv --without-pip $$venv && \
	  $(PYTHON) -m pip --python $$venv/bin/python install --quiet --no-compile \
	    --constraint constraints.txt --editable '.[dev]' && \
	  $$venv/bin/python tools/run_tests.py -m 'not slurm' || failed="$$failed $$python"; \
	done; [ -z "$$failed" ] || { echo "python-matrix failed on$$failed"; exit 1; }

# PyPI's torch for Linux brings 5 GB of CUDA packages along; of two, pip takes the `+cpu` of this index.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
nxd:
	@test -d '$(NXD_SRC)/neuronx_distributed' || { \
	  echo "make nxd NXD_SRC=FOLDER: the src folder of neuronx-distributed (docs/developing/development.md)"; exit 2; }
	@$(MAKE) --no-print-directory .nxd/.installed
	NXD_SRC='$(abspath $(NXD_SRC))' .nxd/bin/python -m pytest -rs tests/nxd

.nxd/.installed: pyproject.toml
	$(PYTHON) -m venv .nxd
	.nxd/bin/python -m pip install --quiet --extra-index-url $(TORCH_INDEX) --editable . \
	  torch==2.9.0 torch-xla==2.9.0 'transformers==4.57.*' lightning boto3 tenacity \
	  pytest pytest-timeout hypothesis
	touch $@

install: $(VENV)/.installed
dev: $(VENV)/.dev

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25'  # older ones take twice as long for these 220 packages
	$(PIP) --editable '.[dev]'
	touch $(VENV)/.installed $@

# A real Slurm for the tests, from Debian's packages; left alone where it is there already, and
# where it may not be installed (the tests that need it then say so and are skipped).
slurm:
	@if PATH="$$PATH:/usr/sbin" command -v slurmctld mariadbd munged slurmdbd >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
	    slurm-wlm slurmdbd mariadb-server munge >/dev/null; \
	else echo "no Slurm here and no right to install one: its tests will be skipped"; fi

# A headless browser for the tests of reports, likewise.
browser:
	@if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
	    chromium >/dev/null; \
	else echo "no Chromium here and no right to install one: its tests will be skipped"; fi

clean:
	rm -rf $(VENV) .demo runs build dist
