# vlmdistill: every target is a line or two over the `vlmdistill` command.
# `make demo` and `make test` set everything up by themselves.

PYTHON  ?= python3
TORCH   ?= torch==2.13.0
MODEL   ?= demo
DRAFTER ?= sparrow
RUNS    ?= runs
SRC     ?= demo
VENV    := .venv
BIN     := $(VENV)/bin
VLM      = VLMDISTILL_RUNS=$(RUNS) $(BIN)/vlmdistill

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types pytest prompts responses features train eval report bench bench-store results video docs wheel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(VENV)/.ready  ## create .venv and install vlmdistill into it
$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: setup  ## the whole flow on the embedded target: two drafters trained and compared
	$(VLM) run --model demo --drafters sparrow,eagle2 --max-new-tokens 256 --batch-size 64 --workers 2

test: lint types pytest  ## lint, types, import contract and tests: what CI runs

lint: setup  ## ruff and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup  ## mypy --strict
	@mkdir -p build/types/vlmdistill
	@for p in stores drafters pipelines cli; do ln -sfn ../../../$$p build/types/vlmdistill/$$p; done
	$(BIN)/mypy

pytest: setup  ## the tests alone
	$(BIN)/python -m pytest

prompts: setup  ## import SRC="files..." into the workspace of MODEL
	$(VLM) prompts $(SRC) --model $(MODEL)

responses: setup  ## let MODEL answer its prompts
	$(VLM) responses --model $(MODEL)

features: setup  ## capture MODEL's hidden states into the store; asks the prompts of SRC if it has none yet
	$(VLM) features --model $(MODEL) --import $(SRC)

train: setup  ## train DRAFTER from the store of MODEL
	$(VLM) train $(DRAFTER) --model $(MODEL)

eval: setup  ## decode held-out prompts with DRAFTER and without
	$(VLM) eval $(DRAFTER) --model $(MODEL)

report: setup  ## the HTML page of all evaluations of MODEL
	$(VLM) report --model $(MODEL)

bench: setup  ## performance ratios with their floors
	$(BIN)/python -m benchmarks

results: setup  ## all methods on the demo target, three seeds each: docs/results.md
	$(BIN)/python -m benchmarks.methods

video: setup  ## five methods on longer and longer videos: docs/video.md
	$(BIN)/python -m benchmarks.video

bench-store: setup  ## the store against the disk and one file per sample
	$(BIN)/python -m benchmarks.store

docs: setup  ## check that the docs hold: commands, links, packages
	$(BIN)/python -m pytest tests/test_house.py

wheel: setup  ## build the wheel into dist/
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove the environment and build products, never runs/
	rm -rf $(VENV) build dist *.egg-info
