# make demo   sets everything up and runs asynchronous RL on this machine
# make test   sets everything up and checks everything
# make fuzz   fuzzes the native kernels, each target for SECONDS=600
BIN := .venv/bin
NATIVE := CMakeLists.txt $(wildcard native/*.?pp)

.PHONY: setup demo test lint format bench fuzz clean

setup: .venv/.ready

.venv/.ready: pyproject.toml scripts/setup.sh $(NATIVE)
	@sh scripts/setup.sh

demo: setup
	@$(BIN)/deltawire run examples/demo.toml --out runs/demo

test: lint
	$(BIN)/python -m pytest

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
	rm -rf .venv build runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
