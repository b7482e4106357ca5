# Every target makes what it needs in VENV; nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch is installed first and by version where a plain request would bring several GB of CUDA packages: TORCH=torch for those.
TORCH ?= torch==2.13.0
# Byte code is made at the first import, and kept: pip would make that of all modules, most of which nobody imports.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: demo test test-all test-ci test-oldest test-newest env env-oldest env-newest test-gpu fuzz mutants lint docs bench bench-latent bench-verify plots clean

$(VENV)/installed: pyproject.toml
	@echo "making $(VENV): PyTorch and transformers, about a minute"
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH) setuptools
	@$(PIP) -e ".[transformers]"
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@echo "adding what tests and checks need"
	@$(PIP) -e ".[test,dev]"
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	@echo "adding what the docs are built with"
	@$(PIP) -e ".[docs]"
	@touch $@

env: $(VENV)/installed-test

# Threads that spin while they wait take the cores from each other on a busy machine.
demo: export OMP_WAIT_POLICY := passive
demo: $(VENV)/installed
	$(BIN)/python examples/static_cache.py $(ARGS)

# Processes that run tests.
WORKERS ?= 2

# Each op, pass, cache and kernel in a few of its cases, in about 10 minutes on 2 cores. Tests marked `slow` are left out,
# and of those marked `drawn(n)` n run: each commit draws others. Plain `pytest` runs whatever it is pointed at.
test test-ci: SEED := $(or $(SEED),$(shell git rev-parse --short HEAD))
test: $(VENV)/installed-test
	@echo "SEED=$(SEED)"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=30 -m "not slow" --draw 1 --seed "$(SEED)" $(ARGS)

# All tests, with as many threads for each op as PyTorch would take. They sleep while they wait: two
# processes whose threads spin on two cores take three times as long.
test-all: $(VENV)/installed-test
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=30 $(ARGS)

# The tests of `make test`, with as many threads as those of `make test-all`, and a share of the slow tests.
test-ci: SHARE ?= 0.04
test-ci:
	@echo "SHARE=$(SHARE) SEED=$(SEED)"
	$(MAKE) test-all ARGS="--draw 1 --slow-share $(SHARE) --seed '$(SEED)' $(ARGS)"

# The oldest and the newest PyTorch that are tested, each with its Triton in an environment of its own: the tests that rest
# on private APIs, on generated code and on Triton's compiler. PIP_CONSTRAINT keeps a machine's own pins out.
OLDEST ?= torch==2.11.0 triton==3.6.0 transformers==5.17.0
NEWEST ?= torch==2.15.0 triton==3.9.0
# `echo` puts all names on one line: make would run each line of them as a command.
BY_VERSION = $$(echo $$(find tests -name test_private_api.py) $$(grep -rl compile_in_subprocess tests --include='test_*.py')) \
	tests/ops/inductor tests/tatten/test_moved_apis.py tests/tatten/test_backend.py tests/tatten/test_dtensor_sdpa.py tests/tatten/test_models.py

env-oldest env-newest test-oldest test-newest: export PIP_CONSTRAINT := /dev/null
env-oldest test-oldest: IN = VENV=.venv-oldest TORCH="$(OLDEST)"
env-newest test-newest: IN = VENV=.venv-newest TORCH="$(NEWEST)"

env-oldest env-newest:
	$(MAKE) env $(IN)

test-oldest test-newest:
	$(MAKE) test $(IN) ARGS="$(BY_VERSION) $(ARGS)"

# Every kernel, provider and mode, and the backend from end to end, on one GPU; about 6 minutes with 16 cores. PYTHON is that
# of an environment with a CUDA build of PyTorch and with `tatten[test]`.
test-gpu: N ?= 14
test-gpu:
	$(PYTHON) -m pytest -n $(N) --dist worksteal --durations=20 -m "gpu and not slow" $(ARGS)
	@for i in $$(seq 0 $$(($(N) - 1))); do $(PYTHON) tests/support/every_kernel.py $$i $(N) & all="$$all $$!"; done; \
		for one in $$all; do wait $$one || exit 1; done

# The property tests alone, with N times as many examples as `make test-all` draws, and others than it draws.
fuzz: SEED := $(shell date +%Y%m%d)
fuzz: N := 20
fuzz: $(VENV)/installed-test
	@echo "SEED=$(SEED) N=$(N)"
	TATTEN_FUZZ_SEED=$(SEED) TATTEN_FUZZ_N=$(N) $(BIN)/python -m pytest -n 2 $$(find tests -name 'test_*properties.py') $(ARGS)

# Small faults in the code, one at a time, each of which some test has to fail on; 200 take about an hour on 2 busy cores.
mutants: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/mutation_run.py --seed $(or $(SEED),0) --n $(or $(N),200) $(ARGS)

lint: $(VENV)/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/support/check_prose.py
	$(BIN)/mypy -p tatten

# The pages of docs/ and the API reference, into site/; a broken link or name is an error.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/installed
	$(BIN)/python benchmarks/static_cache.py $(ARGS)

bench-latent: $(VENV)/installed
	$(BIN)/python benchmarks/latent.py --section step $(ARGS)

# The pictures in docs/img and the tables of docs/benchmarks.md and docs/benchmarks/, from benchmarks/results.
plots: $(VENV)/installed-test
	$(BIN)/python benchmarks/plots.py

# Which claims of docs/benchmarks/ the JSON in the folder RUN does not support; ARGS="--machines one" for one GPU's.
bench-verify: RUN := benchmarks/results
bench-verify: $(VENV)/installed
	$(BIN)/python benchmarks/verify.py $(RUN) $(ARGS)

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build site *.egg-info
