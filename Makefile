# make demo    environment, Nextflow, a simulated screen through the whole workflow, report.html
# make test    linters and all tests that need no cluster
# make test-matrix    the package's tests under Python 3.11 to 3.13, with the lowest and the newest libraries (needs uv)
# make fuzz    damages 1,000 inputs and disturbs every command by 20 signals of each kind; prints what came of it
# make test-hpc    the tests on Slurm with Apptainer; as root on Debian it brings up a small cluster for them first
# make test-tools    installs CPA, STATE, CellFlow and Squidiff and trains each on a small store
# make docs    the documentation as a site, in site/
# make notebooks    runs the tutorials and keeps their outputs
# make sif     the Apptainer image
# make audit ADVISORIES=FILE    the locks against known weaknesses: a folder or zip of OSV records, as PyPI's are published
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: demo env env-dev nextflow lint test test-matrix fuzz audit test-hpc test-tools docs notebooks sif lock lock-tools clean

VENV := .venv
# Python keeps what it compiled: a start takes a third less
unexport PYTHONDONTWRITEBYTECODE
# published data sets, where a folder with them lies beside the checkout; tests that need others are skipped
export PERTURBDIFF_DATA ?= $(wildcard $(abspath ../shared/data))
RUN  := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

demo: env nextflow
	@mkdir -p demo
	@# 25.04 warns of settings that it knows: left out
	@set -o pipefail; $(RUN) NXF_SYNTAX_PARSER=v2 NXF_ANSI_LOG=false $$(bin/get-nextflow) -log demo/nextflow.log run main.nf \
	    -profile test -resume --outdir demo/results --ckpt_dir demo/checkpoints -work-dir demo/work \
	    | grep --line-buffered -v 'Unrecognized config option'
	@cat demo/results/report.txt
	@echo
	@echo "report: $(CURDIR)/demo/results/report.html"

env:
	@bin/make-env $(VENV) requirements.lock

env-dev:
	@bin/make-env $(VENV) requirements-dev.lock

nextflow:
	@bin/get-nextflow > /dev/null

lint: env-dev
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) pyright
	$(RUN) lint-imports
	$(RUN) codespell

test: lint
	@bin/get-nextflow > /dev/null || echo 'no Nextflow: the tests of the workflow are skipped'
	@$(RUN) bin/get-chromium > /dev/null || echo 'no Chromium: the tests of the report in a browser are skipped'
	@# files with long tests come first (tests/conftest.py), so that the processes end together
	$(RUN) pytest -m 'not hpc and not tools' -n auto --dist loadfile --no-loadscope-reorder

MATRIX ?= 3.11:lowest-direct 3.12:highest 3.13:highest

test-matrix:
	@for pair in $(MATRIX); do folder=.cache/matrix/$${pair/:/-}; echo "== Python $${pair%:*}, $${pair#*:} versions"; \
	    uv venv -q --clear --python $${pair%:*} $$folder && \
	    uv pip install -q -p $$folder/bin/python --resolution $${pair#*:} -e . --group dev && \
	    PATH="$(CURDIR)/$$folder/bin:$$PATH" python -m pytest -q -n auto --dist loadfile tests/unit || exit 1; done

fuzz: env-dev
	$(RUN) PYTHONPATH=tests python -m security.fuzz --runs $(or $(RUNS),1000) --seed $(or $(SEED),0) --kept < /dev/null
	$(RUN) PYTHONPATH=tests python -m fault.kills --each $(or $(EACH),20) < /dev/null

test-hpc: env-dev
	@tests/hpc/cluster up && tests/hpc/image || echo 'no cluster or no image: the tests that need them are skipped'
	$(RUN) pytest -m hpc -n 4 tests/hpc
	$(RUN) pytest -m hpc tests/hpc/test_overhead.py  # measures time: alone

test-tools: export PD_BASELINES := $(CURDIR)/.cache/baselines
test-tools: env-dev
	@for tool in cellflow cpa squidiff state; do $(RUN) perturbdiff baseline install $$tool || echo "no $$tool: its tests are skipped"; done
	$(RUN) OMP_NUM_THREADS=1 pytest -m tools tests/tools

docs: env-dev
	$(RUN) NO_MKDOCS_2_WARNING=1 mkdocs build --strict
	@echo "site: $(CURDIR)/site/index.html"

notebooks: env-dev
	$(RUN) python docs/hooks/notebooks.py

sif:
	bin/build-image perturbdiff.sif

lock:
	$(LOCK) pyproject.toml --extra embed --extra jobqueue -o requirements.lock
	$(LOCK) pyproject.toml --extra embed --extra hub --extra jobqueue --extra pseudobulk --group dev -c requirements.lock -o requirements-dev.lock
	@# what builds and installs; the first line of each file says what it is for
	for tool in 'build hatchling==1.33.0 editables' 'uv uv' 'jgo jgo[cli]'; do set -- $$tool; to=containers/$$1.lock; shift; \
	    head -n 1 $$to > $$to.new && printf '%s\n' "$$@" | $(LOCK) - | cat >> $$to.new && mv $$to.new $$to || exit 1; done

audit: env-dev
	@$(RUN) bin/audit $(ADVISORIES) requirements.lock requirements-dev.lock containers/build.lock containers/uv.lock \
	    containers/jgo.lock perturbdiff/baselines/external/tools/*.lock

LOCK_TOOL := uv pip compile -q --generate-hashes --no-emit-index-url --no-emit-find-links --no-header
LOCK := $(LOCK_TOOL) --universal --python-version 3.11

lock-tools:
	cd perturbdiff/baselines/external/tools && for tool in cellflow squidiff state; do \
	    $(LOCK_TOOL) --universal --python-version 3.11 $$tool.in -o $$tool.lock || exit 1; done
	@# one platform: a universal resolution loses torch 2.0's CUDA libraries, which its metadata name for Linux only
	cd perturbdiff/baselines/external/tools && $(LOCK_TOOL) --python-version 3.10 --python-platform x86_64-manylinux_2_28 cpa.in -o cpa.lock

clean:
	rm -rf demo site work .nextflow .nextflow.log* build dist .pytest_cache .ruff_cache .import_linter_cache
