# Both of these work as the first command in a fresh clone:
#   make demo     the main job: real flights through a replicated ledger, by Spark, exactly once
#   make test     every check of the project in order, with the time of each step; of the tests all
#                 but those that are marked `slow`
#   make notebooks the lessons in notebooks/, in full, each to a page with its pictures
#   make spark41  what works with Spark 4.1, on Spark 4.1.1
# And when there is time:
#   make test-all the same with every test
#   make simulate SEEDS=20000 START=0    so many seeds of the simulation, on every core; every point at
#                                        which a verb of the topic layer or an operation of a bookie
#                                        may be cut short; every interleaving of the topic layer's
#                                        small scopes
PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
HAVE_PYTHON = @command -v $(PYTHON) >/dev/null || { echo "setup: Python 3.11 or newer is needed; no '$(PYTHON)' was found on PATH" >&2; exit 1; }

.PHONY: demo notebooks test test-all simulate spark41 chaos bench lint clean setup

demo: ; $(HAVE_PYTHON)
	@$(PYTHON) scripts/setup.py demo
	@$(VENV_PYTHON) -m spark_ledger.cli.main demo $(ARGS)

notebooks: ; $(HAVE_PYTHON)
	@$(PYTHON) scripts/setup.py demo
	@set -e; for notebook in notebooks/*.py; do $(VENV_PYTHON) -m spark_ledger.notebook run $$notebook; done

test: ; $(HAVE_PYTHON)
	@$(PYTHON) scripts/setup.py dev demo
	@$(VENV_PYTHON) scripts/check.py $(ARGS)

test-all: ; $(HAVE_PYTHON)
	@$(PYTHON) scripts/setup.py dev demo
	@$(VENV_PYTHON) scripts/check.py --all $(ARGS)

SEEDS ?= 20000
START ?= 0
simulate: ; $(HAVE_PYTHON)
	@$(PYTHON) scripts/setup.py dev
	@$(VENV_PYTHON) -m tests.simulation --seeds $(SEEDS) --start $(START) --jobs 0 $(ARGS)
	@$(VENV_PYTHON) -m tests.simulation points --jobs 0 --keep-going
	@STORAGE_POINTS=all $(VENV_PYTHON) -m pytest -q -n auto tests/storage/test_points.py
	@$(VENV_PYTHON) -m tests.simulation.exhaustive commits cleaning live runs

# What works with Spark 4.1, on it, in an environment of its own.
SPARK41_TESTS := tests/spark41 $(addprefix tests/spark/test_,batch.py sink.py sink_stream.py replays.py stream.py source_stream.py typed_values.py sql.py listings.py)
spark41: ; $(HAVE_PYTHON)
	@$(PYTHON) scripts/setup.py spark41 dev
	@PYTHONPATH=. .venv-spark41/bin/python -m pytest -q -n 2 --dist loadfile -m "not spark42" $(SPARK41_TESTS) $(ARGS)

chaos: ; $(HAVE_PYTHON)
	@$(PYTHON) scripts/setup.py dev demo
	@$(VENV_PYTHON) -m tests.crash.bookies --kills 50 $(ARGS)
	@$(VENV_PYTHON) -m tests.crash.chaos --kills 50 $(ARGS)
	@$(VENV_PYTHON) -m tests.crash.sharing_kills --seconds 120
	@$(VENV_PYTHON) -m tests.spark.exactly_once --rounds 20
	@$(VENV_PYTHON) -m pytest -q -m slow tests/crash/test_destroyed.py tests/crash/test_outages.py
	@$(MAKE) spark41 ARGS=

bench: ; $(HAVE_PYTHON)
	@$(PYTHON) scripts/setup.py bench demo
	@$(VENV_PYTHON) benchmarks/bookie.py $(BOOKIE_ARGS)
	@$(VENV_PYTHON) benchmarks/topic_log.py
	@$(VENV_PYTHON) benchmarks/scaling.py
	@$(VENV_PYTHON) benchmarks/partitions.py
	@$(VENV_PYTHON) benchmarks/many_topics.py
	@$(VENV_PYTHON) benchmarks/port.py
	@$(VENV_PYTHON) benchmarks/spark.py $(ARGS)

lint: ; $(HAVE_PYTHON)
	@$(PYTHON) scripts/setup.py dev demo
	@$(VENV_PYTHON) scripts/check.py lint format types tidy

setup: ; $(HAVE_PYTHON)
	@$(PYTHON) scripts/setup.py dev demo

clean:
	rm -rf .venv .venv-spark41 .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist artifacts demo-output notebook-output
	rm -rf spark-warehouse metastore_db derby.log *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
