# make bench, make test: everything they need is set up in .venv, once.
# On a machine that brings its own PyTorch (and cannot install): make test PY=python3
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Bytecode is kept as it is first imported, not compiled of all packages ahead: setting up takes 50 s instead of 100.
unexport PYTHONDONTWRITEBYTECODE

ifdef PY
RUN := PYTHONPATH=$(CURDIR)/src $(PY)
SETUP :=
else
RUN := $(VENV)/bin/python
SETUP := $(READY)
endif

.PHONY: bench test lint examples readme clean
.DEFAULT_GOAL := bench

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(f"upconv needs Python 3.10 or later, got {sys.version.split()[0]}; set PYTHON=" if sys.version_info < (3, 10) else 0)'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (once; PyTorch is a large download) ..."
	@$(VENV)/bin/python -m pip install -q --no-compile -c constraints.txt torch hatchling editables
	@$(VENV)/bin/python -m pip install -q --no-compile -c constraints.txt --no-build-isolation -e '.[plot,examples,test,lint]'
	@touch $@

bench: $(SETUP)  ## our speed against PyTorch's on this machine: a table, out/bench.json and out/bench.png
	@mkdir -p out
	@$(RUN) -m upconv bench --json out/bench.json --plot out/bench.png

test: $(SETUP)  ## the whole test suite; what needs a GPU is skipped without one
	@$(RUN) -m pytest -q -n auto --dist worksteal

lint: $(SETUP)
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy
	@$(RUN) -m mypy --config-file tests/mypy.ini tests

examples: $(SETUP)  ## the example programs in their full form: about six minutes
	$(RUN) examples/upscale_photo.py
	$(RUN) examples/autoencoder_digits.py
	$(RUN) examples/train_dcgan.py
	$(RUN) examples/train_unet.py

readme: $(SETUP)  ## the tables and pictures of README and docs from benchmarks/results
	@$(RUN) benchmarks/readme.py

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
