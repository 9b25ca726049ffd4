# `make install`, `make demo` and `make test` only need python3 (3.11 or newer) with venv and pip.
#
#   PYTHON=python3.12   another interpreter
#   TORCH_INDEX=URL     the package index for torch; this one has CPU builds, without gigabytes of GPU libraries:
#                       https://download.pytorch.org/whl/cpu
#   PORT=8001           the port of the demo; default: 8000
#   LISAREC_DATA=DIR    the folder of the data sets for `make bench`; `lisarec data ml-1m` downloads one to data/

PYTHON ?= python3
TORCH_INDEX ?=
PORT ?=
LISAREC_DATA ?= data
VENV := .venv
RUN := $(VENV)/bin/python -m
KERNELS := $(CURDIR)/var/kernels
KERNEL_SOURCES = $(shell grep -rl njit --include='*.py' app model storage)
TOOLS := var/tools
DIST := dist
CLIENTS_DIST := dist-clients

suite test-quick: export NUMBA_CACHE_DIR := $(KERNELS)

.PHONY: demo install test test-containers test-quick suite lint style types docs bench bench-containers bench-faults bench-machines \
	bench-redis bench-shop clean container-images dist dist-clients sbom

demo: $(VENV)/.service-installed
	$(RUN) app demo $(if $(PORT),--port $(PORT))

install: $(VENV)/.service-installed

# mypy runs in parallel with the compilation of the kernels and the suite, which waits a quarter of its time
test: style
	$(MAKE) -j 2 types suite

# four files at a time on two cores: two of them are in the lanes of tests/conftest.py, and mostly wait
suite: $(KERNELS)/.complete
	$(RUN) pytest -n 4 --dist loadfile --no-loadscope-reorder --ignore tests/containers --durations 15

# docker-compose.yml in a real engine. Needs root and Debian's docker.io, docker-compose, mmdebstrap and iptables. The
# tests are skipped if no engine starts. container-images builds the images into var/containers, at low
# priority
container-images: $(VENV)/.tests-installed
	$(RUN) pytest -x tests/containers/test_image.py --idle

test-containers: $(VENV)/.tests-installed
	$(RUN) pytest -x tests/containers

bench-containers: $(VENV)/.tests-installed
	$(RUN) pytest -x tests/containers --long

# the kernels that the image's build compiles, compiled once for all processes of the suite; the suite uses a copy, so that
# tests/docker/test_containers.py sees that a second run adds nothing. What tests alone have compiled stays there until a
# file of kernels changes; numba does not notice when a kernel in another file does
$(KERNELS)/.complete: docker/compile.py $(shell find app model storage -name '*.py') $(VENV)/.tests-installed
	$(if $(filter $(KERNEL_SOURCES),$?),rm -rf var/compiled $(KERNELS))
	NUMBA_CACHE_DIR=$(CURDIR)/var/compiled OMP_NUM_THREADS=1 $(VENV)/bin/python -P docker/compile.py
	mkdir -p $(KERNELS)
	cp -ru var/compiled/. $(KERNELS)
	@touch $@

# the tests that start no server, process or browser, for use during development
test-quick: $(VENV)/.tests-installed
	$(RUN) pytest -n 2 --dist loadfile -m "not slow"

lint: style types

style: $(VENV)/.tests-installed
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/rumdl check .
	$(RUN) website.prose

types: $(VENV)/.tests-installed
	$(RUN) mypy

# the documentation site, in var/site; regenerates the pages that come from the code
docs: $(VENV)/.tests-installed
	$(RUN) website
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

# the wheel and the source distribution, built with locked tools
dist: $(TOOLS)/.installed
	rm -f $(DIST)/*.whl $(DIST)/*.tar.gz
	$(TOOLS)/bin/python -m hatchling build -d $(DIST)

# the packages of the clients, for PyPI and for npm
dist-clients: $(TOOLS)/.installed
	rm -rf $(CLIENTS_DIST)
	mkdir -p $(CLIENTS_DIST)
	cd clients/lisarec_client && $(CURDIR)/$(TOOLS)/bin/python -m hatchling build -d $(CURDIR)/$(CLIENTS_DIST)
	cd clients/npm && npm ci --ignore-scripts && npm pack --pack-destination $(CURDIR)/$(CLIENTS_DIST)

# a CycloneDX bill of materials: every Python package of the image, with version and hashes
sbom: $(TOOLS)/.installed
	mkdir -p $(DIST)
	cat docker/requirements/requirements.txt docker/requirements/torch.txt | \
		$(TOOLS)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible -o $(DIST)/lisarec.cdx.json -

$(TOOLS)/.installed: docker/requirements/build.txt docker/requirements/sbom.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --no-deps --require-hashes -r docker/requirements/build.txt
	$(TOOLS)/bin/python -m pip install --no-deps --require-hashes -r docker/requirements/sbom.txt
	@touch $@

# `lisarec data` can't download online-retail; it is measured if LISAREC_DATA has it
bench: models/ml-1m/manifest.json $(if $(wildcard $(LISAREC_DATA)/online-retail),bench-shop)
	$(RUN) app evaluate --model models/ml-1m --data $(LISAREC_DATA)/ml-1m
	$(RUN) app evaluate --model models/ml-1m --data $(LISAREC_DATA)/ml-1m --protocol loo_sampled100
	$(RUN) benchmarks.quality.served_equals_offline --data $(LISAREC_DATA)/ml-1m --model models/ml-1m --exclude-seen all
	$(RUN) benchmarks.inference.constant_cost --model models/ml-1m
	$(RUN) benchmarks.inference.scan --items 1000000 --k 10 --rounds 15

# needs haproxy, redis-server, prometheus and wrk
bench-redis: models/ml-1m/manifest.json
	$(RUN) benchmarks.quality.served_equals_offline --data $(LISAREC_DATA)/ml-1m --model models/ml-1m --exclude-seen all \
		--replicas 3
	$(RUN) benchmarks.storage.exactly_once --model models/ml-1m
	$(RUN) benchmarks.rollout.scaling --model models/ml-1m
	$(RUN) benchmarks.rollout.retraining --shoppers 300 --epochs 2
	$(RUN) benchmarks.storage.redis_memory --model models/ml-1m
	$(RUN) benchmarks.service.closed_loop --model models/ml-1m --redis 2
	$(RUN) benchmarks.service.closed_loop --model models/ml-1m

# needs haproxy, redis-server and cc; takes about an hour. It also checks that it fails for a service without its safeguards
bench-faults: models/ml-1m/manifest.json
	for store in sqlite redis; do \
		faults="$(RUN) benchmarks.resilience.faults"; options="--model models/ml-1m --store $$store"; \
		$$faults cuts $$options && $$faults kills $$options && $$faults power $$options && \
		$$faults episodes $$options --outage-s 10 && \
		! $$faults cuts $$options --events 20000 --faults 200 --without-guard && \
		! $$faults power $$options --cuts 5 --everysec || exit 1; \
	done

# needs root or user namespaces, keepalived, haproxy and redis-server; half an hour
bench-machines: models/ml-1m/manifest.json
	$(RUN) benchmarks.machines.run --model models/ml-1m

bench-shop: models/online-retail/manifest.json
	$(RUN) app evaluate --model models/online-retail --data $(LISAREC_DATA)/online-retail
	$(RUN) benchmarks.quality.served_equals_offline --data $(LISAREC_DATA)/online-retail --model models/online-retail \
		--exclude-seen none

models/online-retail/manifest.json: | $(VENV)/.service-installed
	$(RUN) app train --protocol temporal --data $(LISAREC_DATA)/online-retail --out models/online-retail

models/%/manifest.json: | $(VENV)/.service-installed
	$(RUN) app train --data $(LISAREC_DATA)/$* --out models/$*

clean:
	rm -rf $(VENV) build dist dist-clients var .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch is installed first and separately, because its index may lack the pinned versions of other packages.
# Python compiles the modules that it imports; pip would compile all of them first
$(VENV)/.service-installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(RUN) pip install --no-compile --no-deps -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(RUN) pip install --no-compile -c constraints.txt -e .
	@touch $@

$(VENV)/.tests-installed: $(VENV)/.service-installed
	$(RUN) pip install -c constraints.txt -e '.[docs,kafka,mcp,test]'
	$(RUN) pip install -c constraints.txt --no-deps openapi-python-client
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "lisarec needs Python 3.11 or newer; choose one with 'make PYTHON=python3.12 ...'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "$(PYTHON) has no venv; install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
