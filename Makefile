# `make demo` and `make test` need python3 (3.11 or newer) with venv and pip, and nothing else.
#
#   PYTHON=python3.12   another interpreter
#   TORCH_INDEX=URL     a package index to take torch from, where the default one would bring gigabytes for GPUs:
#                       https://download.pytorch.org/whl/cpu
#   PORT=8001           where the demo listens instead of 8000

PYTHON ?= python3
TORCH_INDEX ?=
PORT ?=
VENV := .venv
RUN := $(VENV)/bin/python -m

.PHONY: demo test lint bench clean

demo: $(VENV)/.service-installed
	$(RUN) app demo $(if $(PORT),--port $(PORT))

test: lint
	$(RUN) pytest

lint: $(VENV)/.tests-installed
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

bench: $(VENV)/.service-installed
	@for benchmark in benchmarks/[!_]*.py; do echo "== $$benchmark"; $(VENV)/bin/python "$$benchmark" || exit 1; done

clean:
	rm -rf $(VENV) build dist var .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch comes first and alone: its own index need not have the versions of everything else
$(VENV)/.service-installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(RUN) pip install --no-deps -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(RUN) pip install -c constraints.txt -e .
	@touch $@

$(VENV)/.tests-installed: $(VENV)/.service-installed
	$(RUN) pip install -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "lisarec needs Python 3.11 or newer; choose one with 'make PYTHON=python3.12 ...'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "$(PYTHON) has no venv; install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
