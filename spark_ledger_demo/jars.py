"""Jars that Ivy, which is among pyspark's jars, fetches once: Delta Lake's jars, and others on
request.

    python -m spark_ledger_demo.jars        fetches Delta's jars; an error is one line

Always true: a folder exists under its final name only when every jar is in it; later runs need no
network. Jars that pyspark has itself are not fetched: an older twin of a Spark jar on the class
path does harm.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from spark_ledger.errors import LedgerError
from spark_ledger.local.embedded_zookeeper import find_java

MIRROR = "DEFAULT_ARTIFACT_REPOSITORY"  # Spark's own variable
FETCH_TIMEOUT_S = 300
NETWORK_SIGNS = ("not found. url", "Server access error", "timed out", "refused", "unreachable")
# Groups of jars that are in Spark's folder of jars, newer than Delta needs.
IN_SPARK = (
    "com.fasterxml.jackson.*",
    "org.apache.*",
    "org.scala-lang",
    "org.slf4j",
    "com.github.luben",
    "org.xerial.snappy",
    "org.roaringbitmap",
    "org.locationtech.jts",
    "io.airlift",
    "commons-*",
)


class JarsMissing(RuntimeError):
    """The jars are missing and could not be fetched; the text is the reason, in one line."""


@dataclass(frozen=True)
class Library:
    """A library that is fetched with all its dependencies, except the `excluded` groups, which are
    present already. `name` is the name of its folder."""

    name: str
    group: str
    artifact: str
    version: str
    excluded: tuple[str, ...] = ()

    @property
    def coordinate(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"

    @property
    def folder(self) -> Path:
        """A folder in the environment that uses the jars, so that both are removed together."""
        base = Path(sys.prefix) / "share"
        if not os.access(sys.prefix, os.W_OK):
            base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        return base / "spark-ledger" / "jars" / f"{self.name}-{self.version}"


DELTA = Library("delta", "io.delta", "delta-spark_4.2_2.13", "4.4.0", IN_SPARK)


def spark_jars() -> Path:
    """The folder of jars inside the installed pyspark, found without importing it."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise JarsMissing("pyspark is not installed here: pip install 'spark-ledger[demo]'")
    return Path(spec.origin).parent / "jars"


def delta_jars() -> list[Path]:
    """The jars of Delta for Spark's class path; raises as `jars_of`."""
    return jars_of(DELTA)


def jars_of(library: Library) -> list[Path]:
    """The library's jars, fetched first if they are missing. Raises JarsMissing; errors.BadConfig
    without a Java to fetch them."""
    if not library.folder.is_dir():
        _fetch(library)
    return sorted(library.folder.glob("*.jar"))


def _fetch(library: Library) -> None:
    folder = library.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetching-") as scratch:
        work = Path(scratch)
        (work / "ivy.xml").write_text(_module(library))
        (work / "settings.xml").write_text(_settings())
        _run_ivy(work, library)
        if not folder.is_dir():  # another process may have been quicker
            (work / "jars").rename(folder)


def _run_ivy(work: Path, library: Library) -> None:
    command = [find_java(), "-cp", f"{spark_jars()}/*", "org.apache.ivy.Main", "-warn"]
    command += ["-settings", str(work / "settings.xml"), "-ivy", str(work / "ivy.xml")]
    command += ["-cache", str(work / "cache"), "-types", "jar", "bundle"]
    command += ["-retrieve", str(work / "jars" / "[artifact]-[revision].[ext]")]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise JarsMissing(
            f"no network: {library.coordinate} not fetched in {FETCH_TIMEOUT_S} s"
        ) from None
    if done.returncode or not any((work / "jars").glob(f"{library.artifact}*.jar")):
        raise JarsMissing(_reason_of(done.stdout + done.stderr, library.coordinate))


def _reason_of(output: str, coordinate: str) -> str:
    """The reason for which Ivy failed, by its output, in one line."""
    if "No space left" in output:
        return f"the disk is full: {coordinate} could not be stored"
    if any(sign in output for sign in NETWORK_SIGNS):
        source = os.environ.get(MIRROR, "Maven Central")
        return f"no network: {coordinate} could not be fetched from {source}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"{coordinate} could not be fetched: {lines[-1] if lines else 'Ivy printed nothing'}"


def _settings() -> str:
    """The resolver's settings, for a mirror or for Maven Central."""
    root = f' root="{os.environ[MIRROR]}"' if MIRROR in os.environ else ""
    return (
        '<ivysettings><settings defaultResolver="central"/><resolvers>'
        f'<ibiblio name="central" m2compatible="true"{root}/>'
        "</resolvers></ivysettings>"
    )


def _module(library: Library) -> str:
    excludes = "".join(f'<exclude org="{name}" matcher="glob"/>' for name in library.excluded)
    return (
        '<ivy-module version="2.0"><info organisation="spark-ledger" module="demo"/>'
        '<configurations><conf name="default"/></configurations><dependencies>'
        f'<dependency org="{library.group}" name="{library.artifact}" rev="{library.version}"'
        f' conf="default->default">{excludes}</dependency></dependencies></ivy-module>'
    )


if __name__ == "__main__":
    try:
        for jar in delta_jars():
            print(jar)
    except (JarsMissing, LedgerError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
