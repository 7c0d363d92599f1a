# `make run` and `make test` set up all that they need. Everything else builds on the same .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
ifeq ($(UV_DEFAULT_INDEX),)
unexport UV_DEFAULT_INDEX
endif

.PHONY: help setup run test test-unit test-local test-apiserver test-cluster lint generate \
        requirements lab-up lab-down bench-start clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(STAMP): requirements/dev.txt requirements/bootstrap.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; install Python 3.11 or newer, or set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make virtual environments; install its venv package (Debian: python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/dev.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

setup: $(STAMP) ## Make the virtual environment

run: $(STAMP) ## Train the quickstart example on this machine, without Kubernetes
	$(BIN)/trainingjob run examples/quickstart.yaml

test: $(STAMP) ## Run every test tier that this machine can run
	$(BIN)/python -m tests

test-unit test-local test-apiserver test-cluster: test-%: $(STAMP)
	$(BIN)/python -m tests $*

lint: $(STAMP) ## Format check, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

generate: $(STAMP) ## Write the CRD from the types
	$(BIN)/python -m trainingjob.api.crd > crds/trainingjobs.yaml
	cp crds/trainingjobs.yaml charts/trainingjob-operator/files/trainingjobs.yaml

PINNED = $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes \
         --no-emit-index-url --no-annotate --no-header -c requirements/constraints.in
requirements: ## Pin the dependencies anew
	$(PINNED) pyproject.toml --extra operator -o requirements/operator.txt
	$(PINNED) pyproject.toml --extra trainer -o requirements/trainer.txt
	$(PINNED) pyproject.toml --extra operator --extra trainer --extra dev -o requirements/dev.txt
	echo uv | $(PINNED) - -o requirements/bootstrap.txt

lab-up: $(STAMP) ## Bring up a real Kubernetes with KubeRay on this machine (root)
	$(BIN)/python -m tests.lab up

lab-down: $(STAMP) ## End it
	$(BIN)/python -m tests.lab down

bench-start: $(STAMP) ## Time from apply to the entrypoint's first line, beside RayJob
	$(BIN)/python -m bench.start

clean: ## Remove the virtual environment
	rm -rf $(VENV)
