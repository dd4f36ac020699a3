# make demo: a model generating text through the chosen backend. make test: the whole suite.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without an NVIDIA driver a CPU build of torch is enough; an unpinned torch would fetch a CUDA
# build of several gigabytes.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.9' || echo 'torch==2.13.0 triton==3.9.0')
CONSTRAINTS ?= tests/constraints.txt
JOBS ?= 2
# The moment of the last commit: a wheel then depends on its sources alone.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
export SOURCE_DATE_EPOCH

.PHONY: demo test lint docs wheel clean

$(VENV)/.installed: pyproject.toml Makefile $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(foreach name,$(TORCH),'$(name)')
	$(BIN)/python -m pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) \
		--editable '.[cli,cuda,transformers,bench,test,docs,dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/attn-backends list
	$(BIN)/attn-backends generate 'What is attention, in one sentence?' --max-new-tokens 32

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p attn_backends

docs: $(VENV)/.installed
	$(BIN)/python -m attn_backends.bench.gallery docs/gallery --check
	$(BIN)/python -m sphinx -E -W --keep-going -q docs build/docs

wheel: $(VENV)/.installed
	umask 022 && $(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) build dist *.egg-info
