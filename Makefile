# make demo   sets everything up and runs asynchronous RL on this machine
# make test   sets everything up and checks everything
# make test-engines   follows runs with vLLM, for every family of models, on one rank and on two
# make fuzz   fuzzes the native kernels, each target for SECONDS=600
BIN := .venv/bin
NATIVE := CMakeLists.txt $(wildcard native/*.?pp)

.PHONY: setup demo test test-engines engines lint format bench fuzz clean

setup: .venv/.ready

.venv/.ready: pyproject.toml scripts/setup.sh $(NATIVE)
	@sh scripts/setup.sh

demo: setup
	@$(BIN)/deltawire run examples/demo.toml --out runs/demo

test: lint
	$(BIN)/python -m pytest

# vLLM's CPU build in an environment of its own; `make test` builds it on first use too.
engines:
	@sh scripts/setup-vllm.sh

test-engines: setup engines
	DELTAWIRE_ENGINES=1 $(BIN)/python -m pytest tests/engines/test_vllm.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/deltawire bench loop

fuzz:
	@$(MAKE) -C native/fuzz -j2 run SECONDS=$(or $(SECONDS),600)

clean:
	rm -rf .venv .venv-vllm build runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
