# `make help` lists the targets. Every step leaves a file behind, so a target that is done costs nothing to ask for again
# and one that was interrupted goes on where it stopped.

PYTHON ?= python3
VENV ?= .venv
DATA ?= data/default
VOCAB_SIZE ?= 8000
ARGS ?=
# Of `make chaos` and `make mutants`.
N ?= 200
SEED ?= 1
# Of `make soak`.
STEPS ?= 100000
# Of training: the cores, of which each may be several logical processors.
THREADS ?= $(shell $(PYTHON) -c 'import glob, os; cores = {open(f).read() for f in glob.glob("/sys/devices/system/cpu/cpu[0-9]*/topology/core_cpus_list")}; print(min(len(cores), len(os.sched_getaffinity(0))) if cores else ((os.cpu_count() or 1) + 1) // 2)')
# Test files of `make damage` and `make fuzz`.
DAMAGE := tests/unit/checkpoint/test_checkpoint_damage.py tests/unit/checkpoint/test_write_faults.py
FUZZ := tests/unit/test_hostile_input.py tests/unit/test_hostile_weights.py tests/unit/data/tokens/test_indexed_mutations.py
# Tests that run at once. A job of several processes runs alone among its like.
TEST_PROCESSES ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ENV := $(VENV)/.env-ready
ENV_FULL := $(VENV)/.env-full-ready
HOROVOD := $(VENV)/.horovod-ready
BUILD_HOROVOD := $(BIN)/python scripts/build_horovod.py

export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help env env-full horovod horovod-if-possible data data-bert data-finetune pretrain pretrain-bert finetune test test-cluster chaos soak damage fuzz oldest test-all mutants nightly lint coverage docs screenshots wheel bench bench-step bench-demo speedrun clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PYTHON=python3.12 chooses the interpreter, ARGS='...' is passed on to the script or to pytest."

env: $(ENV) ## .venv with what pre-training and fine-tuning need: 1.7 GB, minutes to download
env-full: $(ENV_FULL) ## .venv with everything: 4.5 GB more, TensorFlow, DeepSpeed, test tools
horovod: $(HOROVOD) ## build Horovod against the installed torch and check it: g++ 10, 2 to 5 minutes

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$(PYTHON) is not Python 3.10 or newer: name one, for example make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(ENV): requirements-pretrain.txt setup.py pyproject.toml | $(BIN)/python
	$(PIP) install -r requirements-pretrain.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(ENV_FULL): requirements.txt $(ENV)
	$(PIP) install -r requirements.txt
	@touch $@

$(HOROVOD): scripts/build_horovod.py $(ENV)
	$(BUILD_HOROVOD)
	@touch $@

# Everything but Horovod itself works without it, so a machine that cannot build it says why and goes on.
horovod-if-possible: $(ENV)
	@test $(HOROVOD) -nt $(ENV) || { $(BUILD_HOROVOD) && touch $(HOROVOD); } || echo "Going on without Horovod." >&2

data: $(DATA)/train.idx $(DATA)/valid.idx ## text, vocabulary and tokens made from this Python's documentation

# The corpus is two files of which train.jsonl is written last, a token file two of which the .idx is; either appears under
# its name only when it is whole.
$(DATA)/corpus/train.jsonl: | $(ENV)
	$(BIN)/lmtools corpus --output $(DATA)/corpus

$(DATA)/vocab.model: $(DATA)/corpus/train.jsonl
	$(BIN)/lmtools vocab --input $< --size $(VOCAB_SIZE) --output $@ --overwrite

$(DATA)/train.idx $(DATA)/valid.idx: $(DATA)/%.idx: $(DATA)/corpus/train.jsonl $(DATA)/vocab.model
	$(BIN)/lmtools tokenize --input $(DATA)/corpus/$*.jsonl --vocab $(DATA)/vocab.model --output $(DATA)/$* --overwrite

# What training starts from; a run that is continued does not read it. model.safetensors is written last.
$(DATA)/start/model.safetensors: $(DATA)/train.idx scripts/make_start.py
	$(BIN)/python scripts/make_start.py --data $(DATA)/train --vocab $(DATA)/vocab.model --output $(@D)

pretrain: env horovod-if-possible data $(DATA)/start/model.safetensors ## train a small T5 on this machine, about 5 minutes on 2 cores after env, horovod and data; again: continue
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python run_t5_pretraining.py --config examples/pretrain_cpu.yaml $(ARGS)

data-bert: $(DATA)/bert_train_text_sentence.idx $(DATA)/bert_valid_text_sentence.idx ## the same for BERT: WordPiece, sentences

$(DATA)/bert_vocab.txt: $(DATA)/corpus/train.jsonl
	$(BIN)/lmtools vocab --type wordpiece --input $< --size $(VOCAB_SIZE) --output $@ --overwrite

$(DATA)/bert_train_text_sentence.idx $(DATA)/bert_valid_text_sentence.idx: \
$(DATA)/bert_%_text_sentence.idx: $(DATA)/corpus/train.jsonl $(DATA)/bert_vocab.txt
	$(BIN)/python -m megatron.preprocess_data --input $(DATA)/corpus/$*.jsonl --output-prefix $(DATA)/bert_$* \
	  --split-sentences --tokenizer-type BertWordPieceLowerCase --vocab-file $(DATA)/bert_vocab.txt --workers $(THREADS)

pretrain-bert: env horovod-if-possible data-bert ## train a small BERT on this machine; again: continue
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python run_bert_pretraining.py --config examples/pretrain_bert_cpu.yaml $(ARGS)

data-finetune: $(DATA)/library/train.jsonl ## a text-to-text task made from the same documentation

# train.jsonl is written last.
$(DATA)/library/train.jsonl: $(DATA)/corpus/train.jsonl scripts/make_library_task.py
	$(BIN)/python scripts/make_library_task.py --corpus $(DATA)/corpus --output $(DATA)/library

# Only where there is no pre-trained model; it is not made again when its data is newer.
runs/pretrain_cpu/last:
	$(MAKE) pretrain ARGS=

finetune: env horovod-if-possible data-finetune | runs/pretrain_cpu/last ## fine-tune that T5 to name the library a paragraph is from, about 3 minutes (after pretrain, where there is none)
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python run_finetuning.py --config examples/finetune_cpu.yaml $(ARGS)

test: env-full horovod-if-possible ## the test suite, after env-full, without what takes minutes or needs a GPU
	@$(BIN)/python -m pytest -q -m "not slow and not gpu and not cluster" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-cluster: env-full horovod-if-possible ## jobs on two machines made of this one: root, openssh-server, iproute2, slurm-wlm, requirements-clusters.txt
	@$(BIN)/python -m pytest -q -m cluster tests/cluster $(ARGS)

# ARGS: --workers 1,2,3,4 --reproducible elastic, --run to repeat one run.
chaos: env-full horovod ## kill runs at random moments and compare them with one left alone: N=200 kills of SEED=1, 20 minutes or more
	@TF_CPP_MIN_LOG_LEVEL=3 TOKENIZERS_PARALLELISM=false $(BIN)/python -m tests.chaos.program --kills $(N) --seed $(SEED) $(ARGS)

# ARGS: --launcher torchrun, --launcher horovodrun, --folder to keep the run.
soak: env-full ## a run of very many steps in which memory, open files, threads and logs must not grow: STEPS=100000, 10 minutes on an idle core
	@$(BIN)/python -m tests.soak.program --steps $(STEPS) $(ARGS)

damage: env-full ## every kind of damaged checkpoint, and a fault at every call of a save: tables, about 15 minutes
	@$(BIN)/python -m pytest -q -s $(DAMAGE) $(ARGS)

fuzz: env-full ## thousands of edits of data, configurations and flags, and hostile files: about 5 minutes
	@$(BIN)/python -m pytest -q -s $(FUZZ) $(ARGS)

# Graphs are counted, and settings.py is generated, by the pinned torch and Python. uv does not read pip's variables.
oldest: export UV_EXTRA_INDEX_URL ?= $(PIP_EXTRA_INDEX_URL)
oldest: export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
oldest: ## tests of models and training with the lowest versions of setup.py: PYTHON=python3.10, 10 minutes
	$(PYTHON) -m venv --clear build/oldest
	build/oldest/bin/python -m pip install --quiet uv==0.13.9
	build/oldest/bin/uv pip install --quiet --python build/oldest/bin/python --resolution lowest-direct \
	  --index-strategy unsafe-best-match -e '.[accelerate,metrics,peft,plots]' 'hypothesis>=6.100' 'pytest>=8.3' 'pytest-timeout>=2.3'
	@build/oldest/bin/python -m pytest -q -m "not slow and not gpu and not cluster and not distributed" \
	  --deselect tests/unit/attention/test_attention_compiled.py::test_a_compiled_model_has_one_graph_for_a_shape_and_two_for_all_lengths \
	  --ignore tests/unit/recipes/test_settings.py \
	  $(addprefix tests/unit/,attention config modeling_bert modeling_t5 models modules optimizers recipes training) $(ARGS)

test-all: env-full horovod-if-possible ## the whole test suite
	@$(BIN)/python -m pytest -q $(ARGS)

lint: env-full ## ruff (style, format), import-linter (layers), pyrefly (types)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

coverage: env-full horovod-if-possible ## `make test`, and the share of the package's lines that it runs in its own processes
	@$(BIN)/python -m pytest -q -m "not slow and not gpu and not cluster" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
	  --cov --cov-context=test --cov-report= $(ARGS)
	@$(BIN)/coverage report --format=total

mutants: env-full horovod ## change the package in N=200 places, one at a time, and see which changes no test notices: an hour after `make coverage`
	@$(BIN)/python -m tests.mutants.program --count $(N) --seed $(SEED) $(if $(wildcard build/coverage),--coverage build/coverage) $(ARGS)

# tests/cluster needs root and two daemons; run it by `make test-cluster` where they are.
nightly: env-full horovod ## what takes hours: slow tests (300 kills among them), damaged checkpoints, fuzzing
	@$(BIN)/python -m pytest -q -m "slow and not gpu and not cluster" $(addprefix --ignore=,$(DAMAGE) $(FUZZ)) $(ARGS)
	@$(MAKE) -k damage fuzz bench-demo ARGS=

docs: env-full ## the documentation as a site in build/site; ARGS=serve: shown while pages are written
	$(BIN)/python scripts/build_site.py $(ARGS)

screenshots: docs ## pictures of six pages of the site, desktop and phone, dark and light; needs Chromium
	@$(BIN)/python scripts/screenshots.py $(ARGS)

wheel: env ## a wheel and a source distribution in dist/, checked by twine
	$(PIP) install --quiet build==1.6.1 twine==7.0.0
	$(BIN)/python -m build --no-isolation .
	$(BIN)/twine check --strict dist/*.whl dist/*.tar.gz

bench-step: env ## one training step of ours, transformers and (NANOT5=a checkout of it) nanoT5, about 40 minutes
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/step.py $(if $(NANOT5),--nanot5 $(NANOT5)) $(ARGS)

bench-demo: env $(DATA)/start/model.safetensors ## seconds a step of `make pretrain` and the optimizer's share, also as on a CPU without bfloat16
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python benchmarks/demo.py --data $(DATA) $(ARGS)

speedrun: env ## five minutes of training each, three rates and seeds: ours, HF Trainer and (NANOT5=a checkout of it) nanoT5, by bits per byte
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python benchmarks/speedrun.py $(if $(NANOT5),--nanot5 $(NANOT5)) $(ARGS)

bench: env-full data data-bert ## the benchmarks of this machine: the loop and the data path
	$(BIN)/python benchmarks/loop_overhead.py
	$(BIN)/python benchmarks/data.py --corpus $(DATA)/corpus/train.jsonl --vocab $(DATA)/vocab.model \
	  --bert_vocab $(DATA)/bert_vocab.txt

clean: ## remove build products and caches; .venv, data and runs stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
