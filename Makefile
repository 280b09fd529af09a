# `make` lists the targets. Everything works with PYTHON=python3 and no virtual environment, too.
VENV := .venv
PYTHON ?= $(VENV)/bin/python
JOBS ?= auto
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

CLANG_FORMAT = $(PYTHON) -c 'import clang_format; clang_format.clang_format()'

# A notebook is one unit of work (loadfile), run by the Python that runs the tests. The last take longest, so
# they come first.
NOTEBOOKS = $(shell ls -r notebooks/*.ipynb)
NBVAL = --nbval --nbval-current-env --nbval-cell-timeout=300 -p no:cacheprovider

# With a Python of your own nothing is installed.
ifeq ($(PYTHON),$(VENV)/bin/python)
READY := $(VENV)/.ready
endif

.DEFAULT_GOAL := help
.PHONY: help setup run notebooks lab test test-slow test-all bench train sanitize check experiments counters counters-page profile readme resources sass diff new-chapter assignment grade lint format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo
	@echo "Options: PYTHON=python3 (your own Python), TORCH_INDEX=URL (where setup takes torch from),"
	@echo "         ARGS='--causal --seqlens 256' (for run), JOBS=2 (test processes)"

setup: $(VENV)/.ready ## make .venv and install everything into it

$(VENV)/.ready: pyproject.toml constraints.txt
	@python3 -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, python3 is {v[0]}.{v[1]}")'
	@echo "Setting up $(VENV): PyTorch, Jupyter and the test tools; a few minutes the first time"
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

run: $(READY) ## the ladder: build, run, check and time every chapter
	@$(PYTHON) -m common.ladder $(ARGS)

notebooks: $(READY) ## execute all notebooks and store their outputs: make notebooks DEVICE=cuda ARGS=02
	$(PYTHON) -m common.execute $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

lab: $(READY) ## JupyterLab in notebooks/
	$(PYTHON) -m jupyterlab --notebook-dir=notebooks $(ARGS)

test: $(READY) ## the tests, without the slow ones, and every notebook against its stored outputs
	$(PYTHON) -m pytest -n $(JOBS) --dist loadgroup -m "not slow" $(ARGS)
	$(PYTHON) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(NBVAL) $(NOTEBOOKS)

test-slow: $(READY) ## only the slow tests
	$(PYTHON) -m pytest -n $(JOBS) --dist loadgroup -m slow $(ARGS)

test-all: test test-slow ## every test

bench: $(READY) ## measure on this machine's GPU into notebooks/measurements/
	$(PYTHON) -m common.bench $(ARGS)

train: $(READY) ## a small character model, with flash_attention and with PyTorch's attention
	$(PYTHON) -m common.train $(ARGS)

sanitize: $(READY) ## compute-sanitizer over every chapter, on a GPU
	$(PYTHON) -m common.sanitize $(ARGS)

check: $(READY) ## traffic and mistakes of a chapter, without a GPU: make check CHAPTER=05
	@$(PYTHON) -m common.check $(CHAPTER) $(ARGS)

experiments: $(READY) ## memory, bandwidth, atomics, forward against backward, on a GPU, for the notebooks
	$(PYTHON) -m common.experiments $(ARGS)

counters: $(READY) ## Nsight Compute's counters of three chapters, on a GPU, into notebooks/measurements/
	$(PYTHON) -m common.counters $(ARGS)

counters-page: $(READY) ## compare stored counters with what the checker counts
	$(PYTHON) -m common.counters --page

profile: $(READY) ## where the time of 09 and later goes, by Nsight Compute, on a GPU, for the notebooks
	$(PYTHON) -m common.profiling $(ARGS)

readme: $(READY) ## regenerate the tables and pictures of the front pages
	$(PYTHON) -m common.readme

resources: $(READY) ## registers, shared memory and spills of every kernel into chapters/README.md
	$(PYTHON) -m common.resources

sass: $(READY) ## the atomic instructions of chapters 04 and 05 into notebooks/measurements/
	$(PYTHON) -m common.sass

diff: $(READY) ## what changes between two chapters: make diff A=01 B=02
	@$(PYTHON) -m common.diff $(A) $(B)

new-chapter: $(READY) ## start a chapter from another: make new-chapter NAME=13_idea FROM=02
	@$(PYTHON) -m common.new_chapter $(NAME) $(FROM)

assignment: $(READY) ## exercises to hand out, into out/assignment: make assignment STUDENTS=roster.csv SOLUTIONS=folder
	@$(PYTHON) -m common.grade.release $(if $(STUDENTS),--students $(STUDENTS)) $(if $(SOLUTIONS),--solutions $(SOLUTIONS)) $(ARGS)

grade: $(READY) ## grade a folder of submissions, without a GPU, into out/grades: make grade SUBMISSIONS=folder
	@$(PYTHON) -m common.grade.submissions $(or $(SUBMISSIONS),$(error say SUBMISSIONS=folder, with one folder a student)) $(ARGS)

lint: $(READY) ## ruff and clang-format, changing nothing
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	@git ls-files '*.cu' '*.h' '*.cpp' | xargs $(CLANG_FORMAT) --dry-run --Werror

format: $(READY) ## let ruff and clang-format rewrite the sources
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	@git ls-files '*.cu' '*.h' '*.cpp' | xargs $(CLANG_FORMAT) -i

clean: ## remove builds and pictures
	rm -rf build out
