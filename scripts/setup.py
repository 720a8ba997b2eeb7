"""Makes .venv and installs the package with the extras named on the command line. Needs no root.

    python3 scripts/setup.py demo           what `make demo` needs
    python3 scripts/setup.py dev demo       what `make test` needs
    python3 scripts/setup.py spark41 dev    .venv-spark41, with Spark 4.1: `make spark41`

The package takes any Spark that it works with; here it is installed with the one it is tested with.
Always true: it either leaves a working .venv or says in one line what is missing, and exits 1.
A repeated call with nothing changed costs a hash of pyproject.toml. Runs under the oldest python3
a machine may have, so that it can say that this one is too old: no syntax newer than 3.6 here.
"""
# ruff: noqa: UP031

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

PYTHON_MIN = (3, 11)
JAVA_MIN = 17
FREE_BYTES_MIN = 3 * 1024**3
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SPARK_41 = "spark41"
PYSPARK = "4.1.1" if SPARK_41 in sys.argv[1:] else "4.2.0"
VENV = os.path.join(ROOT, ".venv-spark41" if SPARK_41 in sys.argv[1:] else ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "spark-ledger.stamp")
LOG = os.path.join(VENV, "setup.log")
COPIED = ("pyproject.toml", os.path.join("spark_ledger", "spark", "spark-ledger-python"))
NETWORK_SIGNS = re.compile(
    "NewConnectionError|Temporary failure in name resolution|Network is unreachable|ConnectTimeout|"
    "ReadTimeout|ProxyError|Connection refused|No route to host|from versions: none|"
    "Name or service not known"
)


def fail(sentence):
    sys.stderr.write("setup: " + sentence + "\n")
    raise SystemExit(1)


def version_of(python):
    """The (major, minor) of an interpreter, None when it does not run."""
    code = "import sys; print('%d %d' % sys.version_info[:2])"
    try:
        out = subprocess.check_output([python, "-c", code], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
    return tuple(int(word) for word in out.split())


def find_python():
    """This interpreter if it is new enough, else the newest python3.N of PATH that runs."""
    if sys.version_info[:2] >= PYTHON_MIN:
        return sys.executable
    for minor in range(20, PYTHON_MIN[1] - 1, -1):
        path = shutil.which("python3.%d" % minor)
        if path and (version_of(path) or (0, 0)) >= PYTHON_MIN:
            return path
    return fail(
        "Python %d.%d or newer is needed; found %s at %s and no newer python3.N on PATH"
        % (*PYTHON_MIN, sys.version.split()[0], sys.executable)
    )


def check_java():
    """Java as Spark looks for it: JAVA_HOME first, then PATH."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    where = "JAVA_HOME=" + home if home else "PATH"
    if not java or not os.path.exists(java):
        fail("Java %d or newer is needed; no java found (%s)" % (JAVA_MIN, where))
    try:
        done = subprocess.run([java, "-version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        fail("Java %d or newer is needed; %s does not run: %s" % (JAVA_MIN, java, error))
    text = done.stdout.decode(errors="replace")
    found = re.search(r'version "(?:1\.)?(\d+)[^"]*"', text)
    if not found:
        first = (text.strip().splitlines() or ["it printed nothing"])[0]
        fail("Java %d or newer is needed; %s -version said: %s" % (JAVA_MIN, java, first))
    if int(found.group(1)) < JAVA_MIN:
        fail("Java %d or newer is needed; found %s at %s" % (JAVA_MIN, found.group(0), java))


def check_disk():
    free = shutil.disk_usage(ROOT).free
    if free < FREE_BYTES_MIN:
        needed = FREE_BYTES_MIN / 1024.0**3
        fail("%.0f GiB free disk needed in %s; %.1f GiB free" % (needed, ROOT, free / 1024.0**3))


def fingerprint():
    """Changes whenever what is installed must: what pip copies, Spark, or where the clone lies."""
    whole = hashlib.sha256((VENV + PYSPARK).encode())
    for copied in COPIED:
        with open(os.path.join(ROOT, copied), "rb") as file:
            whole.update(file.read())
    return whole.hexdigest()


def read_stamp():
    """What is installed: the set of extras, empty when something changed or nothing is."""
    try:
        with open(STAMP) as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return set()
    if stamp.get("fingerprint") != fingerprint() or not os.path.exists(VENV_PYTHON):
        return set()
    return set(stamp.get("extras", ()))


def make_venv(python):
    if os.path.exists(VENV_PYTHON) and (version_of(VENV_PYTHON) or (0, 0)) >= PYTHON_MIN:
        return
    shutil.rmtree(VENV, ignore_errors=True)
    done = subprocess.run(
        [python, "-m", "venv", VENV], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        text = done.stdout.decode(errors="replace")
        shutil.rmtree(VENV, ignore_errors=True)
        if "No space left" in text:
            fail("the disk of %s is full" % ROOT)
        if "ensurepip" in text or "No module named venv" in text:
            fail("Python's venv module is missing for %s (on Debian: python3-venv)" % python)
        fail("%s -m venv failed: %s" % (python, " ".join(text.split())[-300:]))


def run_logged(what, command, why):
    """Runs a command with its output in the log; on failure `why(output)` gives the one line."""
    print("setup: " + what, flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = done.stdout.decode(errors="replace")
    with open(LOG, "a") as log:
        log.write("$ " + " ".join(command) + "\n" + text + "\n")
    if done.returncode:
        fail(why(text) + " (all of it: %s)" % os.path.relpath(LOG, ROOT))


def why_pip_failed(text):
    if "No space left" in text:
        return "the disk is full: pip ran out of space"
    package = re.search(r"No matching distribution found for (\S+)", text)
    if NETWORK_SIGNS.search(text):
        return "no network: pip could not fetch " + (package.group(1) if package else "packages")
    if package:
        return "pip found no %s for this Python (%s)" % (package.group(1), sys.version.split()[0])
    errors = [line for line in text.splitlines() if line.startswith("ERROR")]
    return "pip failed: " + (errors or text.strip().splitlines() or ["no output"])[-1]


def why_jar_failed(text):
    return (text.strip().splitlines() or ["the Delta jar could not be fetched"])[-1]


def install(extras):
    names = ",".join(sorted(extras))
    pip = [VENV_PYTHON, "-m", "pip", "install", "--retries", "2", "--disable-pip-version-check"]
    run_logged(
        "installing the package with [%s] into %s" % (names, os.path.basename(VENV)),
        [*pip, "-e", ".[%s]" % names, "pyspark==" + PYSPARK],
        why_pip_failed,
    )


def fetch_jars():
    run_logged(
        "fetching Delta Lake's jar, once",
        [VENV_PYTHON, "-m", "spark_ledger_demo.jars"],
        why_jar_failed,
    )


def fetch_java_client():
    """One test alone needs it, and is skipped without it."""
    print("setup: fetching Pulsar's Java client, once", flush=True)
    done = subprocess.run(
        [VENV_PYTHON, "-m", "tests.kit.pulsar_java"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        why = done.stdout.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        print("setup: its test will be skipped: " + why[-1], flush=True)


def main():
    wanted = set(sys.argv[1:]) - {SPARK_41}
    python = find_python()
    check_java()
    installed = read_stamp()
    if wanted <= installed:
        return
    check_disk()
    make_venv(python)
    extras = wanted | installed
    install(extras)
    if "demo" in extras:
        fetch_jars()
    if "dev" in extras:
        fetch_java_client()
    with open(STAMP, "w") as file:
        json.dump({"fingerprint": fingerprint(), "extras": sorted(extras)}, file)


if __name__ == "__main__":
    main()
