# Everything a newcomer or CI runs. `make help` lists the targets.

# The job shown by `make demo`: plan a mechanism for clients that come back after a quarter of the
# rounds, train with it, and with the baselines at the same privacy, and report what happened.
DEMO_ROUNDS ?= 128
DEMO_STRATEGY ?= banded
DEMO_OUTPUT ?= demo
DEMO_MIN_SEPARATION = $(shell expr $(DEMO_ROUNDS) / 4)

# Workers for `make test`; BLAS must not start threads of its own beside them.
TEST_WORKERS ?= 2
TEST_FLAGS ?=
MATH_TESTS = factorization accounting mechanisms planning
TREES_TEST = tests/factorization/trees_test.py

# Without a Python 3.11, tests and demo are those of the modern stack, which has no TFF.
STACK ?= $(shell tools/build/find_python.sh >/dev/null 2>&1 && echo federated || echo modern)
NO_FEDERATED = The federated part was left out: TensorFlow Federated 0.87 needs CPython 3.11 \
  (for example by pyenv install 3.11), which was not found.
export OMP_NUM_THREADS ?= 1
export TF_CPP_MIN_LOG_LEVEL ?= 3

.DEFAULT_GOAL := help
.PHONY: help demo demo-federated demo-modern test test-federated test-modern test-math docs setup \
  beam-setup lock lint format types bazel-test clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: ## Set up, plan a mechanism, train a model with it and report its privacy, in demo/.
	@$(MAKE) --no-print-directory demo-$(STACK)

demo-federated:
	@tools/build/setup_environment.sh
	.venv/bin/python -m tools.plan_mechanism --num_rounds=$(DEMO_ROUNDS) \
	  --strategy=$(DEMO_STRATEGY) --min_separation=$(DEMO_MIN_SEPARATION) --max_participations=4 \
	  --epsilon=8 --delta=1e-6 --l2_norm_clip=0.3 --output=$(DEMO_OUTPUT)
	@rm -rf $(DEMO_OUTPUT)/run $(DEMO_OUTPUT)/comparison
	.venv/bin/python -m production.demo --mechanism=$(DEMO_OUTPUT)/mechanism.bandmf \
	  --output=$(DEMO_OUTPUT)/run
	.venv/bin/python -m tools.privacy_report --run=$(DEMO_OUTPUT)/run --output=$(DEMO_OUTPUT)/report
	@printf '\nFor reading, in %s: plan.html, comparison/accuracy.png, report/report.html.\n' \
	  '$(DEMO_OUTPUT)'

demo-modern: ## The same with Keras alone, on handwritten digits, with the newest Python found.
	@tools/build/setup_environment.sh --modern
	@rm -rf $(DEMO_OUTPUT)/digits
	.venv-modern/bin/python -m examples.keras_images --epsilons=8 --runs=2 \
	  --output=$(DEMO_OUTPUT)/digits
	.venv-modern/bin/python -m tools.privacy_report --run=$(DEMO_OUTPUT)/digits/runs/bandmf_epsilon_8 \
	  --output=$(DEMO_OUTPUT)/report
	@printf '\nFor reading, in %s: digits/accuracy.png, report/report.html.\n' '$(DEMO_OUTPUT)'
	@test $(STACK) = federated || echo '$(NO_FEDERATED)'

test: ## Set up and run all tests; without a Python 3.11, those of the modern stack.
	@$(MAKE) --no-print-directory test-$(STACK)

test-federated: setup
	BANDMF_STACK=federated \
	  .venv/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(TEST_FLAGS)

test-modern: ## Run the tests that need no TFF, with the newest Python found, TensorFlow and Keras.
	@tools/build/setup_environment.sh --modern
	.venv-modern/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(TEST_FLAGS)
	@test $(STACK) = federated || echo '$(NO_FEDERATED)'

test-math: setup ## Run the tests of the mathematics, with their first parameters alone, in a minute.
	.venv/bin/python -m pytest -n $(TEST_WORKERS) --first-cases $(TEST_FLAGS) \
	  $(MATH_TESTS:%=tests/%) --deselect=$(TREES_TEST)::test_sensitivity_agrees_with_tensorflow_privacy \
	  --ignore=tests/mechanisms/google_matrices_test.py

docs: setup ## Write the documents and the API reference as a site, in site/.
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build -f tools/site/mkdocs.yml
	@printf 'For reading: site/index.html; with search: python3 -m http.server -d site\n'

setup: ## Make .venv from the locks; does nothing when it is up to date.
	@tools/build/setup_environment.sh --dev

beam-setup: ## Make .venv-beam, in which tools/participation_beam.py runs (Apache Beam).
	@test -e .venv-beam/installed && cmp -s requirements/beam.lock .venv-beam/installed || { \
	  "$$(tools/build/find_python.sh)" -m venv --clear .venv-beam && \
	  .venv-beam/bin/python -m pip install -qq --no-deps --only-binary :all: --require-hashes \
	    -r requirements/beam.lock && cp requirements/beam.lock .venv-beam/installed; }

lock: ## Regenerate all locks (LOCK_FLAGS=--upgrade for newer versions).
	tools/build/lock.sh $(LOCK_FLAGS)

format: setup ## Format all Python files.
	.venv/bin/ruff format
	.venv/bin/ruff check --fix

lint: setup ## Check formatting, lint rules, and which folder imports which.
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/lint-imports --no-cache --no-logo

types: setup ## Check the types of the library.
	.venv/bin/mypy

bazel-test: setup ## Run all tests through Bazel (Debian package bazel-bootstrap).
	@command -v bazel >/dev/null || \
	  { echo "bazel is missing: apt-get install bazel-bootstrap (Debian)." >&2; exit 1; }
	bazel test //...

clean: ## Remove everything that this Makefile made.
	rm -rf .venv .venv-beam .venv-core .venv-lock .venv-modern .venv*.lock demo site build ./*.egg-info .pytest_cache .mypy_cache \
	  .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
