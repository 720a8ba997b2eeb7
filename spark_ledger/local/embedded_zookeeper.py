"""The ZooKeeper server from pyspark's own jars, as a child process, and the Java that runs it: the
same Java as for Spark (from JAVA_HOME, else PATH), 17 or later.

Always true: the server listens on the loopback interface only and fsyncs every change; its main
class is QuorumPeerMain, not ZooKeeperServerMain, because QuorumPeerMain purges old snapshots.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from spark_ledger import net
from spark_ledger.errors import BadConfig, Unavailable
from spark_ledger.local.processes import HOST, PORT_TRIES, Child, LocalProcess, free_port

MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
HEAP = "-Xmx256m"
JVM_OPTIONS = (  # for a small server that should start fast
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-XX:+ExitOnOutOfMemoryError",
)
JARS = ("zookeeper", "slf4j-api", "log4j-", "netty-", "metrics-core", "snappy-java")
START_TIMEOUT_S, POLL_S = 30.0, 0.02
CONFIG = """\
dataDir={folder}
clientPort={port}
clientPortAddress={host}
tickTime=1000
minSessionTimeout=2000
maxSessionTimeout=60000
maxClientCnxns=0
admin.enableServer=false
autopurge.snapRetainCount=3
autopurge.purgeInterval=1
4lw.commands.whitelist=ruok,srvr
"""


class EmbeddedZooKeeper(LocalProcess):
    """A ZooKeeper server; `folder` keeps its data, configuration and log.

    `pid` is the id of the guardian (guardian.py), whose child the server is. `delete_with_parent`
    is a folder that is deleted if this process dies without stopping the server.
    """

    STOP_TIMEOUT_S = 10.0

    def __init__(
        self, folder: Path, port: int | None = None, delete_with_parent: Path | None = None
    ) -> None:
        super().__init__(folder / "zookeeper.log")
        self._folder = folder
        self._delete = delete_with_parent
        self._port = port or 0

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    def start(self) -> None:
        """Start the server and return when it responds; later starts use the same port.

        Raises errors.BadConfig (no Java, port taken), errors.Unavailable (the server does not
        start).
        """
        java = find_java()
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._port:
            if not net.is_free(HOST, self._port):
                raise BadConfig(f"port {self._port} is taken", "Choose another port with --port.")
            self._run(java)
            return
        for attempt in range(1, PORT_TRIES + 1):
            self._port = free_port()
            try:
                self._run(java)
                return
            except Unavailable:  # another process may have taken the port meanwhile
                if attempt == PORT_TRIES:
                    raise

    def kill(self) -> None:
        """SIGKILL, also to the server; returns when both have ended and the port is free again."""
        super().kill()
        deadline = time.monotonic() + self.STOP_TIMEOUT_S
        while self._child and not net.is_free(HOST, self._port) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _run(self, java: str) -> None:
        config = self._folder / "zoo.cfg"
        config.write_text(
            CONFIG.format(folder=self._folder / "data", port=self._port, host=HOST),
            encoding="utf-8",
        )
        guardian = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py"))]
        delete = ["--delete", str(self._delete)] if self._delete else []
        server = [java, HEAP, *JVM_OPTIONS, "-cp", class_path(), MAIN, str(config)]
        self._child = Child("ZooKeeper", [*guardian, *delete, "--", *server], self.log)
        self._wait_until_serving(self._child)

    def _wait_until_serving(self, child: Child) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_serving(self._port):
            if not child.running:
                raise child.failure_error(f"ended with exit status {child.exit_code}")
            if time.monotonic() > deadline:
                child.kill()
                raise child.failure_error(f"did not answer within {START_TIMEOUT_S:g} s")
            time.sleep(POLL_S)


def _is_serving(port: int) -> bool:
    """Whether a ZooKeeper answers at the port and serves."""
    try:
        with net.dial_blocking(HOST, port, within_s=1) as connection:
            connection.sendall(b"srvr")
            return b"Mode: " in connection.makefile("rb").read()
    except OSError:
        return False


def class_path() -> str:
    """The jars that the server needs: all of Spark's jars would double the time to start."""
    spec = find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise BadConfig("pyspark, whose jars have ZooKeeper, is not installed", "Install pyspark.")
    folder = Path(spec.submodule_search_locations[0]) / "jars"
    jars = sorted(jar for jar in folder.glob("*.jar") if jar.name.startswith(JARS))
    if not any(jar.name.startswith("zookeeper") for jar in jars):
        raise BadConfig(f"there is no ZooKeeper in {folder}", "Install pyspark anew, by pip.")
    return ":".join(map(str, jars))


MAJOR_MIN = 17
_REMEDY = f"Install Java {MAJOR_MIN} or later and put it on PATH, or set JAVA_HOME to it."
_VERSION = re.compile(r'(?:JAVA_VERSION=|version )"(\d+)(?:\.(\d+))?')


def find_java() -> str:
    """The path of `java`. Raises errors.BadConfig if there is no Java, or it is too old."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home) / "bin" / "java")) if home else shutil.which("java")
    if java is None:
        java_problem = f"JAVA_HOME={home} holds no bin/java" if home else "there is no java on PATH"
        raise BadConfig(f"Java {MAJOR_MIN} or later is needed, and {java_problem}", _REMEDY)
    text = _release_file(java) or _java_version_text(java)
    major = major_version(text)
    if major is None or major < MAJOR_MIN:
        fault = f"is Java {major}" if major else f"shows no version ({text.strip()!r})"
        raise BadConfig(f"Java {MAJOR_MIN} or later is needed, and {java} {fault}", _REMEDY)
    return java


def major_version(text: str) -> int | None:
    """The major version in the output of `java -version` or in a JDK's `release` file: 17, or 8 for
    "1.8.0"; None if the text has no version."""
    match = _VERSION.search(text)
    if match is None:
        return None
    first, second = int(match.group(1)), match.group(2)
    return int(second) if first == 1 and second else first


def _release_file(java: str) -> str:
    """The text of the JDK's `release` file; "" without such a file. Reading the file takes less
    time than starting Java."""
    try:
        return (Path(java).resolve().parent.parent / "release").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _java_version_text(java: str) -> str:
    try:
        result = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return result.stderr + result.stdout
