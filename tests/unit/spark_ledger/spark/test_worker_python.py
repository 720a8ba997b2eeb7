"""The interpreter of Spark's workers: the launcher takes away what holds a process up, no more."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from spark_ledger import worker_python
from spark_ledger.spark import worker as module

LAUNCHER = Path(module.__file__).parent / module.LAUNCHER
HOME = Path(pyspark.__file__).parent
PATH = "import os, sys; print(os.environ.get('PYTHONPATH')); print(*sys.argv[1:], sep='|')"


def archives(home: Path) -> list[str]:
    """What Spark puts before all else on the path of a worker, for Spark in this folder."""
    found = [*home.glob("python/lib/pyspark.zip"), *home.glob("python/lib/py4j-*.zip")]
    found += home.glob("jars/spark-core_*.jar")
    assert len(found) == 3
    return [str(path) for path in found]


def run(launcher: Path | str, path: list[str], code: str = PATH, *arguments: str) -> list[str]:
    done = subprocess.run(
        [str(launcher), "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The launcher beside an interpreter that pip put no PySpark to."""
    scripts = tmp_path / "bin"
    scripts.mkdir()
    shutil.copy(LAUNCHER, scripts)
    (scripts / "python3").symlink_to(sys.executable)
    return scripts / LAUNCHER.name


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """Spark as it is downloaded: PySpark lies beside its archive, too."""
    home = tmp_path / "spark"
    for name in ("python/lib/pyspark.zip", "python/lib/py4j-1-src.zip", "jars/spark-core_2.jar"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    return home


def test_the_worker_python_of_this_environment_is_the_launcher_that_pip_installed():
    assert worker_python() == str(Path(sys.executable).parent / module.LAUNCHER)
    assert Path(worker_python()).read_text() == LAUNCHER.read_text()


def test_the_worker_python_is_the_interpreter_where_no_launcher_was_installed(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    assert worker_python() == str(tmp_path / "python3")


def test_pyspark_is_loaded_from_where_pip_unpacked_it_by_the_same_interpreter():
    code = "import sys, py4j, pyspark; print(pyspark.__file__); print(py4j.__file__, sys.prefix)"
    from_pyspark, rest = run(worker_python(), archives(HOME), code)
    assert from_pyspark == str(HOME / "__init__.py")
    assert ".zip" not in rest
    assert rest.endswith(f" {sys.prefix}")


def test_the_rest_of_the_path_stays_as_it_was_and_in_its_order():
    others = ["/with a space", "/a*", "/python/lib/other.zip", "/jars/mine.jar"]
    first, *archived = archives(HOME)
    path, arguments = run(
        worker_python(), [others[0], first, *others[1:3], *archived, others[3]], PATH, "a b", "*"
    )
    assert path == os.pathsep.join(others)
    assert arguments == "a b|*"


def test_a_path_of_nothing_but_the_archives_becomes_empty():
    assert run(worker_python(), archives(HOME))[0] == ""


def test_downloaded_spark_is_loaded_from_the_folder_beside_its_archive(installed, downloaded):
    unpacked = downloaded / "python" / "pyspark"
    unpacked.mkdir()
    (unpacked / "__init__.py").touch()
    pyspark_zip, py4j_zip, _ = archives(downloaded)
    path, _ = run(installed, ["/mine", *archives(downloaded)])
    assert path == os.pathsep.join(["/mine", str(downloaded / "python"), py4j_zip])
    assert pyspark_zip not in path


def test_an_archive_that_stands_nowhere_unpacked_stays_on_the_path(installed, downloaded):
    *zips, _ = archives(downloaded)
    assert run(installed, archives(downloaded))[0] == os.pathsep.join(zips)


def test_another_pyspark_than_the_interpreters_own_stays_on_the_path(downloaded):
    *zips, _ = archives(downloaded)
    assert run(worker_python(), archives(downloaded))[0] == os.pathsep.join(zips)


def test_an_archive_stays_where_two_interpreters_beside_the_launcher_have_pyspark(
    installed, downloaded
):
    home = installed.parents[1] / "lib" / "python3.11" / "site-packages" / "pyspark"
    shutil.copytree(downloaded, home)
    (home / "__init__.py").touch()
    (home.parent / "py4j").mkdir()
    assert run(installed, archives(home))[0] == ""
    other = installed.parents[1] / "lib" / "python3.12" / "site-packages" / "pyspark"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    *zips, _ = archives(home)
    assert run(installed, archives(home))[0] == os.pathsep.join(zips)


def test_without_an_interpreter_beside_it_the_one_on_the_path_runs(installed, monkeypatch):
    (installed.parent / "python3").unlink()
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (prefix,) = run(installed, [], "import sys; print(sys.prefix)")
    assert prefix == sys.prefix


@pytest.mark.parametrize(
    ("given", "run"),
    [
        ("-m pyspark.daemon pyspark.worker", "-m spark_ledger.spark.daemon pyspark.worker"),
        ("-m pyspark.daemon", "-m spark_ledger.spark.daemon"),
        ("-m pyspark.worker", "-m pyspark.worker"),
        ("-m pyspark.sql.streaming.python_streaming_source_runner",) * 2,
        ("-m my.daemon pyspark.worker", "-m my.daemon pyspark.worker"),
        ("-c 1 -m pyspark.daemon", "-c 1 -m pyspark.daemon"),
    ],
)
def test_pysparks_daemon_is_the_one_that_loads_what_its_workers_need(installed, given, run):
    interpreter = installed.parent / "python3"
    interpreter.unlink()
    interpreter.write_text('#!/bin/sh\necho "$@"\n')
    interpreter.chmod(0o755)
    done = subprocess.run(
        [installed, *given.split()], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == f"{run}\n"


def test_a_process_that_was_given_no_path_is_given_none():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import os; print('PYTHONPATH' in os.environ)"
    command = [worker_python(), "-c", code]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_launcher_runs_its_own_python_through_links_to_it(installed, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "bin"
    elsewhere.mkdir(parents=True)
    (elsewhere / "absolute").symlink_to(installed)
    (elsewhere / "relative").symlink_to("absolute")
    (elsewhere / "python3").write_text("#!/bin/sh\necho 'not this one'\n")
    (elsewhere / "python3").chmod(0o755)

    said = run(elsewhere / "relative", [], "print('this one')")

    assert said == ["this one"]
