import stat
from pathlib import Path

import pytest

from spark_ledger.errors import BadConfig
from spark_ledger.local.embedded_zookeeper import find_java, major_version


def jdk(folder: Path, version: str, *, release: bool = False) -> Path:
    """A JDK that says it is `version`, in its release file or when asked."""
    (folder / "bin").mkdir(parents=True)
    java = folder / "bin" / "java"
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    if release:
        (folder / "release").write_text(f'IMPLEMENTOR="X"\nJAVA_VERSION="{version}"\n')
    return folder


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ('IMPLEMENTOR="X"\nJAVA_VERSION="11.0.2"\n', 11),
        ("no such thing", None),
    ],
)
def test_the_major_version_is_read_from_what_java_says(text, major):
    assert major_version(text) == major


@pytest.mark.parametrize("release", [True, False])
def test_java_home_is_taken_before_path(tmp_path, monkeypatch, release):
    home, other = jdk(tmp_path / "home", "17.0.1", release=release), jdk(tmp_path / "o", "21")
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("PATH", str(other / "bin"))
    assert find_java() == str(home / "bin" / "java")
    monkeypatch.delenv("JAVA_HOME")
    assert find_java() == str(other / "bin" / "java")


def test_a_java_that_is_too_old_is_named_with_its_version(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(jdk(tmp_path / "old", "1.8.0_392")))
    with pytest.raises(BadConfig, match=r"17 or later.*old/bin/java is Java 8.*Install Java"):
        find_java()


def test_no_java_is_said_with_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadConfig, match="no java on PATH"):
        find_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(BadConfig, match=f"JAVA_HOME={tmp_path} holds no bin/java"):
        find_java()
