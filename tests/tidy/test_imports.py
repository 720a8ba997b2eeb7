"""What packages of the product, of tests and of others import of each other, and the one place of
every dependency. The rooms within packages: test_house.py."""

import re
import subprocess
import sys

import pytest

from tests.tidy.sources import OTHERS, PACKAGES, ROOT, below, sources

ONE_PLACE = {
    "kazoo": ("spark_ledger/metadata/zookeeper.py",),
    "grpc": ("bookie_server/serve/gateway.py",),
    "grpc_reflection": ("bookie_server/serve/gateway.py",),
    "aiohttp": ("spark_ledger/http.py",),
    "rocksdict": ("bookie_server/logs/rocks_index.py",),
    "avro": ("spark_ledger/topic/schema/",),
    "pyspark": ("spark_ledger/spark/", "pyspark_ledger/", "spark_ledger_demo/"),
    "delta": ("spark_ledger_demo/",),
    "matplotlib": ("spark_ledger_demo/",),
    "typer": ("spark_ledger/cli/", "spark_ledger_demo/notebook/commands.py"),
    "IPython": ("spark_ledger_demo/notebook/outputs.py",),
    "markdown_it": ("spark_ledger_demo/notebook/run.py",),
    "pygments": ("spark_ledger_demo/notebook/run.py",),
}
MEASURES_THE_ENGINE = "benchmarks/replay.py"  # alone, without a bookie around it


def test_others_know_of_the_storage_node_only_its_api():
    found = [
        f"{source.path}:{line} imports {module}"
        for source in sources(*PACKAGES[1:], "benchmarks", "scripts")
        for module, line in source.imports
        if below(module, "bookie_server")
        and not below(module, "bookie_server.api")
        and module != "bookie_server"
        and source.path != MEASURES_THE_ENGINE
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dependency", ONE_PLACE)
def test_a_dependency_is_imported_in_its_one_place_only(dependency):
    found = [
        f"{source.path}:{line} imports {module}"
        for source in sources(*PACKAGES)
        for module, line in source.imports
        if below(module, dependency) and not source.path.startswith(ONE_PLACE[dependency])
    ]
    assert not found, "\n".join(found)


def test_product_code_does_not_import_tests_or_benchmarks():
    found = [
        f"{source.path}:{line} imports {module}"
        for source in sources(*PACKAGES)
        for module, line in source.imports
        if any(below(module, other) for other in OTHERS)
    ]
    assert not found, "\n".join(found)


def test_only_the_command_line_and_the_names_for_notebooks_import_the_demo():
    users = ("spark_ledger/cli/main.py", "spark_ledger/notebook/")
    found = [
        f"{source.path}:{line} imports {module}"
        for source in sources("bookie_server", "spark_ledger", "pyspark_ledger")
        for module, line in source.imports
        if below(module, "spark_ledger_demo") and not source.path.startswith(users)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", ["spark_ledger", "pyspark_ledger"])
def test_importing_a_package_loads_neither_pyspark_nor_grpc(package):
    heavy = ("pyspark", "grpc", "kazoo", "pyarrow", "numpy", "rocksdict")
    code = f"import sys, {package}; print([m for m in {heavy} if m in sys.modules])"
    if package == "pyspark_ledger":  # Spark itself imports it, so pyspark may be there
        code = code.replace("'pyspark', ", "")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_tests_import_no_test_modules_not_even_in_scripts_that_they_run():
    """What tests share is in tests/kit, or in a file beside them that has no tests of its own."""
    of_a_test_module = re.compile(
        r"\s*(?:from|import) tests(?:\.\w+)*\.test_|\s*from tests[\w.]* import.*\btest_"
    )
    found = [
        f"{source.path}:{number} {line.strip()}"
        for source in sources("tests", "benchmarks", "scripts")
        for number, line in enumerate(source.text.split("\n"), 1)
        if "import" in line and of_a_test_module.match(line)
    ]
    assert not found, "\n".join(found)
