# Thin: each target is a line or two over tools/ and the CMake presets.
PREFIX ?= /usr/local
DATA ?=
MNIST ?=
NPROC ?= 2
JOBS ?= $(shell nproc)
SEEDS ?= 2000
RANKS ?= 16
MINUTES ?=
COUNT ?= 100
SINCE ?=
STEPS ?= 100
SEED ?=
TORCH ?= 2.12.1

.PHONY: help run test build cookbook conformance equality mutants compat bench asan tsan fuzz chaos seeds scale schedulers torchrun parity-mnist tidy docs install fresh clean

help:  ## what can be typed
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

run:  ## train a small GPT on real text with two processes (DATA=path for your own text)
	@tools/setup run
	@tools/build --programs-only dev cadre_command cadre_train
	build/bin/cadre train examples/gpt.toml $(if $(DATA),data.path=$(DATA)) --nproc-per-node $(NPROC)

test:  ## build everything and run every test
	@tools/setup test
	@tools/build dev
	ctest --preset dev --output-on-failure

build:  ## build everything
	@tools/setup test
	@tools/build dev

cookbook:  ## one decoder under every form of parallelism: a table and a plot (DATA=path: your text, STEPS=n)
	@tools/setup test
	@tools/build dev
	tools/cookbook --bin build/bin --steps $(STEPS) --text $(or $(DATA),docs) --plot cookbook.svg

conformance:  ## every collective x dtype x operation x ranks x count, on every engine; a tenth on the late device
	@tools/setup test
	@tools/build dev cadre_conformance cadre_device_conformance
	build/bin/cadre_conformance
	build/bin/cadre_device_conformance --one-in 10

equality:  ## every wrapper against one process and the trainer against PyTorch, in every case (DATA=folder: real data, too)
	@tools/setup test
	@tools/build dev cadre_command cadre_train cadre_layers_test cadre_pipeline_parallel_test cadre_pipeline_parity cadre_wrapper_parity cadre_tests_training cadre_train_test cadre_tests_devices
	build/bin/cadre_layers_test --gtest_filter='*Equality*'
	build/bin/cadre_pipeline_parallel_test --gtest_filter='*Equality*'
	build/bin/cadre_tests_training --gtest_filter='*Sharded*:*Axes*'
	build/bin/cadre_train_test --gtest_filter='*Equality*'
	build/bin/cadre_tests_devices
	$(or $(CADRE_TORCH),$(wildcard .venv/bin/python),python3) tests/parity/parity_test.py build/bin/cadre
	$(or $(CADRE_TORCH),$(wildcard .venv/bin/python),python3) tests/parity/pipeline_parity_test.py build/bin/cadre build/bin/cadre_pipeline_parity
	$(or $(CADRE_TORCH),$(wildcard .venv/bin/python),python3) tests/parity/wrapper_parity_test.py build/bin/cadre build/bin/cadre_wrapper_parity
	$(if $(DATA),python3 tests/parity/same_loss.py build/bin/cadre $(DATA))

mutants:  ## COUNT=100 changes of the code at random places: lists those that no test notices; FOLDERS=, SINCE=commit
	@tools/setup test
	tools/mutants --count $(COUNT) $(if $(SEED),--seed $(SEED)) $(if $(SINCE),--since $(SINCE)) $(FOLDERS)

compat:  ## TORCH=2.12.1: build against another supported torch and run the tests that meet it
	@tools/setup test
	tools/compat $(TORCH)

bench:  ## compare with OpenMPI and PyTorch, side by side (quiet machine; writes bench/reports)
	@tools/setup check
	@tools/build dev
	bench/run

asan:  ## the core, the fuzz targets and the tensor side under AddressSanitizer and UndefinedBehaviorSanitizer
	@tools/setup check
	@tools/build asan
	ctest --preset asan --output-on-failure

tsan:  ## the threads of the core under ThreadSanitizer
	@tools/setup check
	@tools/build tsan
	ctest --preset tsan --output-on-failure

fuzz:  ## every parser of outside bytes, 60 s each, with its coverage
	@tools/setup check
	tools/fuzz

chaos:  ## random operations under random kill -9 and SIGSTOP: 10,000 rounds, or MINUTES=60; SEED=n
	@tools/setup test
	@tools/build dev cadre_tests_process
	tools/chaos $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

parity-mnist:  ## accuracy on real images against PyTorch (MNIST=folder of the idx files)
	@tools/setup test
	@tools/build dev cadre_command cadre_train
	$(or $(CADRE_TORCH),$(wildcard .venv/bin/python),python3) tests/parity/parity_mnist.py build/bin/cadre $(MNIST)

seeds:  ## SEEDS=2000 simulated jobs of up to RANKS=16 ranks for each kind of fault, with the time
	@tools/setup test
	@tools/build dev cadre_tests_sim
	CADRE_SIM_SEEDS=$(SEEDS) CADRE_SIM_MAX_RANKS=$(RANKS) build/bin/cadre_tests_sim

scale:  ## a job of 1,024 ranks on 128 hosts in the simulator (minutes and 12 GB), what each phase costs
	@tools/setup test
	@tools/build dev cadre_fabric_scale
	build/bin/cadre_fabric_scale 128 8

schedulers:  ## jobs under a Slurm of two nodes, Open MPI and MPICH, which it installs (root)
	@tools/setup schedulers
	@tools/build dev cadre_command cadre_cli_test
	python3 tests/schedulers/schedulers_test.py build/bin/cadre build/bin/cadre_cli_test

torchrun:  ## every feature of torchrun 2.13 beside cadre run, and unmodified PyTorch programs under both (5 minutes, quiet machine)
	@tools/setup test
	@tools/build dev cadre_command
	$(or $(CADRE_TORCH),$(wildcard .venv/bin/python),python3) tests/torchrun/table_test.py build/bin/cadre --check docs/guide/running/torchrun.md
	$(or $(CADRE_TORCH),$(wildcard .venv/bin/python),python3) tests/torchrun/programs_test.py build/bin/cadre

tidy:  ## the rules, formatting, clang-tidy, and every source and header alone (after make build)
	@tools/setup check
	@tools/tidy --clang-tidy
	@tools/alone --all

docs:  ## the guide and a reference of the public headers as a site with search: build/docs/index.html
	@tools/setup docs
	@tools/docs

install:  ## into PREFIX (default /usr/local)
	@tools/setup run
	@tools/build --programs-only release cadre_command cadre_train
	cmake --install build-release --prefix $(PREFIX)

fresh:  ## make run and make test in a new Debian 12 made by debootstrap (root)
	tools/fresh_machine

clean:  ## forget what was built
	rm -rf build build-*
