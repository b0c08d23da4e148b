# IsoExec. `make help` lists the verbs.
#
# BACKEND=auto|cpu|cuda   auto: cuda if an NVIDIA GPU is visible, else cpu
# ISOEXEC_ARCHIVES=DIR    take archives and wheels from DIR (see `make bundle`)
# ISOEXEC_PYTHON=PATH     the Python 3.12 to use, if it is not found

BACKEND ?= auto
export BACKEND
SHELL := /bin/bash
.DEFAULT_GOAL := help

chosen = $(shell scripts/build --backend $(BACKEND) --which)
bin = build/$(chosen)/venv/bin

.PHONY: help build test verify-logprobs train-dapo bench patches-check lock bundle clean distclean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2} /^# [A-Z_]+=/ {print "  " substr($$0, 3)}' Makefile

build: ## trees, patches and environment in build/<backend>/ (again: only what changed)
	@scripts/build --backend $(BACKEND)

test: build patches-check ## the test suite, in the built environment (ARGS= goes to pytest, WORKERS=2 processes)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(bin)/python -m pytest -n $(or $(WORKERS),2) --dist loadfile $(ARGS)

verify-logprobs: build ## both runtimes on the same tokens: logprobs must be equal, bit for bit (MODEL=, FULL=1, ARGS=)
	@$(bin)/isoexec verify $(if $(MODEL),--model "$(MODEL)") $(if $(filter-out 0 false no,$(FULL)),--full) $(ARGS)

train-dapo: build ## a DAPO run in which the importance ratio is 1 (ARM=native, COMPARE=1 for both arms, ARGS="RECIPE KEY=VALUE ...")
	@$(bin)/isoexec train $(if $(filter-out 0 false no,$(COMPARE)),--compare) $(if $(ARM),--arm $(ARM)) $(ARGS)

bench: build ## times against native kernels, on a GPU host: bench/results.csv and results.png (ARGS="--native DIR")
	@$(bin)/python -m bench $(ARGS)

patches-check: ## prove from the archives that the patch series, their export and the built trees agree
	@scripts/patches check --backend $(chosen)

lock: ## write requirements/*.txt anew from requirements/*.in (ARGS=--upgrade)
	@scripts/lock $(ARGS)

bundle: ## all downloads in one folder, for a machine without an index (ARGS=DIR, default out/bundle)
	@scripts/bundle $(ARGS)

clean: ## remove build/ (refused while a build tree holds work that is not exported)
	@scripts/build --clean

distclean: clean ## also remove downloads and the filled third_party folders
	@scripts/vendor empty && rm -rf .cache
