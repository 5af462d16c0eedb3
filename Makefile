PYTHON ?= python3
# The active environment, a virtual one or conda's (but not conda's base), or else .venv.
ENVIRONMENT := $(or $(VIRTUAL_ENV),$(if $(filter-out base,$(CONDA_DEFAULT_ENV)),$(CONDA_PREFIX)),.venv)
BIN := $(ENVIRONMENT)/bin
# Compiled modules are kept whatever the caller's environment says: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo test test-long test-browser test-all lint format bench gpu-check constraints data bundled-model evaluate

install: $(ENVIRONMENT)/installed

$(ENVIRONMENT)/installed: pyproject.toml constraints.txt
	test -e $(BIN)/python || $(PYTHON) -m venv $(ENVIRONMENT)
	$(BIN)/python -m pip install --quiet -c constraints.txt uv
	@echo "installing some 7 GB of packages, most of it torch with CUDA: a minute or two of compiling after the download"
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[all]'
	@echo "compiling what draws on a CPU"
	$(BIN)/python -c 'import torch; from inference.sampling.load_kernels import kernels; [kernels(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8)]'
	touch $@

demo: install
	$(BIN)/dalle-lean demo

# As many workers as cores, four at most; each computes with one thread.
test: install
	$(BIN)/pytest -n logical --maxprocesses 4

test-long: install
	$(BIN)/pytest -m 'long and not slow' -n logical --maxprocesses 4

test-browser: install
	$(BIN)/pytest -m browser -rs -n logical --maxprocesses 2

test-all: install
	$(BIN)/pytest -m 'not gpu' -n logical --maxprocesses 4

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m benchmarks.speed

# On a machine with a GPU, without a network: does everything work there, and how fast?
gpu-check:
	$(BIN)/python -m benchmarks.gpu_check

# Pins every package again, for all systems and Python versions. numpy 2.4 breaks hivemind's 8-bit compression.
constraints: install
	echo uv | $(BIN)/uv pip compile pyproject.toml - --all-extras --universal --python-version 3.11 \
		--no-emit-package dalle-lean --no-annotate --no-header --quiet --upgrade --output-file constraints.txt

# Pictures to learn from: the drawings of Fluent Emoji Flat, the names of icons from four more sets, and emojibase's
# words, pinned. Another size: make data SIDE=64 DATA=data/emoji64. FILLERS: the share of captions with words that the
# picture does not show.
DATA := data/emoji
SIDE := 128
FILLERS := 0
EMOJI_PACKAGES := @iconify-json/noto@1.2.9 @iconify-json/noto-v1@1.2.5 @iconify-json/twemoji@1.2.5 \
	@iconify-json/fluent-emoji@1.2.7 @iconify-json/fluent-emoji-flat@1.2.6 emojibase-data@17.0.0

data: install
	npm install --prefix data/npm --ignore-scripts --no-audit --no-fund --no-save $(EMOJI_PACKAGES)
	$(BIN)/python -m preprocessing.emoji $(DATA) --packages data/npm/node_modules --side $(SIDE) --fillers $(FILLERS)

# What judges the drawings: classifiers that learn from other scenes of the same set, drawn with another seed, and from
# four other sets, and a CLIP of the latter. They are not shipped; two of the sets are share-alike.
JUDGE_SETS := emojione,emojione-v1,fxemoji,openmoji
JUDGE_PACKAGES := @iconify-json/emojione@1.2.3 @iconify-json/emojione-v1@1.2.3 @iconify-json/fxemoji@1.2.2 \
	@iconify-json/openmoji@1.2.29

data/emoji-same-set/heldout.json: | install
	test -d data/npm/node_modules || $(MAKE) data
	$(BIN)/python -m preprocessing.emoji data/emoji-same-set --packages data/npm/node_modules --side $(SIDE) \
		--seed 7 --only-pairs-held-out

data/emoji-other-sets/heldout.json: | install
	npm install --prefix data/npm --ignore-scripts --no-audit --no-fund --no-save $(EMOJI_PACKAGES) $(JUDGE_PACKAGES)
	$(BIN)/python -m preprocessing.emoji data/emoji-other-sets --packages data/npm/node_modules --side $(SIDE) \
		--sets $(JUDGE_SETS) --only-pairs-held-out

# models/emoji from nothing. Every step continues where it was stopped. The VQGAN learns crops first, then its decoder whole
# pictures, in the end mostly by their squared error; the transformer goes on with other pictures, then with captions as
# people type them, then with painted things in pairs and counted, at last with all kinds and what is white or grey.
# `make evaluate` draws the card's pictures.
RUN := runs/emoji
TRAIN_VQGAN := $(BIN)/dalle-lean train-vqgan --heldout data/emoji/heldout --discriminator-start 1 --save-dtype bfloat16
PREPROCESS := $(BIN)/dalle-lean preprocess --vqgan $(RUN)/vqgan --bf16
TRAIN := $(BIN)/dalle-lean train --heldout $(RUN)/shards/heldout --vqgan $(RUN)/vqgan
bundled-model: install
	@echo "some 16 hours on two CPU cores with fast bfloat16: VQGAN 4 1/2, drawing and codes 1, transformer 10, CLIP 1"
	test -e data/emoji/heldout.json || $(MAKE) data
	test -e data/emoji-more/heldout.json || $(BIN)/python -m preprocessing.emoji data/emoji-more \
		--packages data/npm/node_modules --side $(SIDE) --seed 1 --copies plain=20,scene=80,painted=36,pair=28,count=18
	test -e data/emoji-painted/heldout.json || $(BIN)/python -m preprocessing.emoji data/emoji-painted \
		--packages data/npm/node_modules --side $(SIDE) --seed 2 --copies plain=10,scene=40,painted=72,pair=14,count=9
	test -e data/emoji-typed/heldout.json || $(BIN)/python -m preprocessing.emoji data/emoji-typed --fillers 0.4 \
		--packages data/npm/node_modules --side $(SIDE) --seed 3 --copies plain=8,scene=22,painted=22,pair=34,count=5
	test -e data/emoji-composed/heldout.json || $(BIN)/python -m preprocessing.emoji data/emoji-composed --fillers 0.3 \
		--packages data/npm/node_modules --side $(SIDE) --seed 4 \
		--copies plain=6,scene=20,painted=24,pair=12,count=5,painted-pair=26,painted-count=14
	test -e data/emoji-all/heldout.json || $(BIN)/python -m preprocessing.emoji data/emoji-all --fillers 0.35 \
		--packages data/npm/node_modules --side $(SIDE) --seed 5 \
		--copies plain=8,scene=20,painted=22,pair=18,count=6,painted-pair=22,painted-count=14
	test -e data/emoji-words/heldout.json || $(BIN)/python -m preprocessing.emoji data/emoji-words --fillers 0.5 \
		--packages data/npm/node_modules --side $(SIDE) --seed 6 \
		--copies plain=14,scene=22,painted=14,pair=26,count=8,painted-pair=6,painted-count=4
	test -e data/emoji-white/heldout.json || $(BIN)/python -m preprocessing.emoji data/emoji-white --fillers 0.4 \
		--packages data/npm/node_modules --side $(SIDE) --seed 8 --copies \
		plain=16,scene=16,painted=16,painted-white-or-grey=20,pair=22,count=6,painted-pair=12,painted-count=8
	$(TRAIN_VQGAN) data/emoji/train $(RUN)/vqgan-crops --picture-side 64 --crop-from 128 --codebook-size 4096 \
		--encoder-window 8 --batch-size 32 --steps 6000
	$(TRAIN_VQGAN) data/emoji/train $(RUN)/vqgan-decoder --picture-side 128 --init-from $(RUN)/vqgan-crops \
		--decoder-only --batch-size 8 --lr 5e-4 --steps 3000
	$(TRAIN_VQGAN) data/emoji/train $(RUN)/vqgan-squared --picture-side 128 --init-from $(RUN)/vqgan-decoder \
		--decoder-only --batch-size 8 --lr 2e-4 --squared-weight 20 --steps 1600
	$(TRAIN_VQGAN) data/emoji/train $(RUN)/vqgan --picture-side 128 --init-from $(RUN)/vqgan-squared --decoder-only \
		--batch-size 8 --lr 5e-4 --squared-weight 20 --steps 6000
	$(PREPROCESS) data/emoji/heldout $(RUN)/shards/heldout
	$(PREPROCESS) data/emoji/train $(RUN)/shards/train
	$(PREPROCESS) data/emoji-more/train $(RUN)/shards/more
	$(PREPROCESS) data/emoji-painted/train $(RUN)/shards/painted
	$(PREPROCESS) data/emoji-typed/train $(RUN)/shards/typed
	$(PREPROCESS) data/emoji-composed/train $(RUN)/shards/composed
	$(PREPROCESS) data/emoji-all/train $(RUN)/shards/all
	$(PREPROCESS) data/emoji-words/train $(RUN)/shards/words
	$(PREPROCESS) data/emoji-white/train $(RUN)/shards/white
	test -e $(RUN)/shards/mixed || $(BIN)/dalle-lean shards mix $(RUN)/shards/mixed $(RUN)/shards/all $(RUN)/shards/words
	$(TRAIN) $(RUN)/shards/train $(RUN)/dalle-first --config emoji128
	$(TRAIN) $(RUN)/shards/more $(RUN)/dalle-more --config emoji128-more --init $(RUN)/dalle-first/model --seed 1
	$(TRAIN) $(RUN)/shards/painted $(RUN)/dalle-painted --config emoji128-more --init $(RUN)/dalle-more/model --seed 2
	$(TRAIN) $(RUN)/shards/typed $(RUN)/dalle-typed --config emoji128-more --init $(RUN)/dalle-painted/model --seed 3
	$(TRAIN) $(RUN)/shards/composed $(RUN)/dalle-composed --config emoji128-more --init $(RUN)/dalle-typed/model \
		--seed 4 --lr 1.5e-3 --steps 1600
	$(BIN)/dalle-lean pack $(RUN)/dalle-composed/model $(RUN)/dalle-mean --average $(RUN)/dalle-typed/model
	$(TRAIN) $(RUN)/shards/mixed $(RUN)/dalle-mixed --config emoji128-more --init $(RUN)/dalle-mean --seed 7 \
		--lr 2e-3 --steps 2200
	$(TRAIN) $(RUN)/shards/white $(RUN)/dalle --config emoji128-more --init $(RUN)/dalle-mixed/model --seed 8 \
		--lr 2e-3 --steps 1300
	$(BIN)/dalle-lean train-clip data/emoji/train $(RUN)/clip-first --heldout data/emoji/heldout --vqgan $(RUN)/vqgan
	test -e data/emoji-rank/heldout.json || $(BIN)/python -m preprocessing.emoji data/emoji-rank --fillers 0.4 \
		--packages data/npm/node_modules --side $(SIDE) --seed 9 --copies \
		plain=4,scene=4,painted=4,painted-white-or-grey=6,pair=4,count=2,painted-pair=3,painted-count=2
	$(BIN)/dalle-lean train-clip data/emoji-rank/train $(RUN)/clip --heldout data/emoji/heldout --vqgan $(RUN)/vqgan \
		--init $(RUN)/clip-first/clip --average --steps 450 --lr 5e-4 --save-dtype bfloat16
	$(BIN)/dalle-lean pack $(RUN)/dalle/model models/emoji --average $(RUN)/dalle-mixed/model \
		--clip $(RUN)/clip/clip --card models/emoji/README.md --guidance 2 --dtype bfloat16

# The card's table and pictures: what the bundled model can do, and how sure that is.
evaluate: install data/emoji-same-set/heldout.json data/emoji-other-sets/heldout.json
	test -e data/emoji/heldout.json || $(MAKE) data
	$(BIN)/dalle-lean train-clip data/emoji-other-sets/train $(RUN)/judge --heldout data/emoji/heldout \
		--vqgan models/emoji/vqgan --steps 1800
	$(BIN)/dalle-lean train-things data/emoji-same-set/train $(RUN)/same-set --heldout data/emoji/heldout --steps 2500
	$(BIN)/dalle-lean train-things data/emoji-other-sets/train $(RUN)/other-sets --heldout data/emoji/heldout
	$(BIN)/dalle-lean evaluate --data data/emoji --judge $(RUN)/judge/clip \
		--classifier $(RUN)/same-set/classifier --classifier $(RUN)/other-sets/classifier --out $(RUN)/report
	cp $(RUN)/report/pictures.png models/emoji/pictures.png
