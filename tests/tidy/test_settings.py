"""conf/*.toml against the classes that read them: every setting, its default and its meaning."""

import ast
import dataclasses
import tomllib

import pytest

from bookie_server.api.settings import BadSettings, load
from spark_ledger.spark.options.options import ReadOptions, WriteOptions
from tests.tidy import settings_files
from tests.tidy.sources import ROOT, sources

CLASSES = tuple(settings for settings, _ in settings_files.FILES.values())


@pytest.mark.parametrize("path", settings_files.FILES)
def test_the_file_is_what_its_class_says(path):
    assert (ROOT / path).read_text() == settings_files.text_of(path), (
        "run: python -m tests.tidy.settings_files"
    )


@pytest.mark.parametrize("path", settings_files.FILES)
def test_the_file_lists_every_setting_of_its_class_with_its_default(path):
    listed = tomllib.loads((ROOT / path).read_text())
    fields = settings_files.FILES[path][0].model_fields
    assert listed == {name: field.default for name, field in fields.items()}


@pytest.mark.parametrize("settings_class", CLASSES)
def test_every_setting_of_the_class_says_what_it_means(settings_class):
    silent = [key for key, field in settings_class.model_fields.items() if not field.description]
    assert not silent


@pytest.mark.parametrize("settings_class", CLASSES)
def test_an_unknown_setting_is_refused_with_the_nearest_name(settings_class):
    known = next(iter(settings_class.model_fields))
    with pytest.raises(BadSettings, match=f"{known}x.*nearest is '{known}'"):
        load(settings_class, None, {f"{known}x": 1})


TWICE = {
    ("spark_ledger/local/cluster.py", "autorecovery"): "a process for a whole local cluster",
    ("spark_ledger/repair/service.py", "host"): "of an auditor's process",
    ("spark_ledger/repair/status.py", "host"): "as that",
    ("bookie_server/api/messages.py", "retry_after_ms"): "0 in a response: nothing to wait for",
    ("bookie_server/api/messages.py", "entry_bytes_max"): "0 in a response: not known",
    ("spark_ledger/bookies/directory.py", "rack"): "of a bookie that registered without one",
    ("spark_ledger/topic/log/policies.py", "ensemble_size"): "of a topic; a client's is of ledgers",
    ("spark_ledger/topic/log/policies.py", "write_quorum"): "as that",
    ("spark_ledger/topic/log/policies.py", "ack_quorum"): "as that",
}
"""Defaults of what only has the name of a setting."""


def _defaults(tree):
    """(name, default) of each argument and each field of a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            plain = [*arguments.posonlyargs, *arguments.args]
            last = plain[len(plain) - len(arguments.defaults) :]
            named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            for argument, default in [*zip(last, arguments.defaults, strict=True), *named]:
                yield argument.arg, default
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id, field.value


def _is_number_or_text(node):
    """Whether the expression is a literal, or arithmetic of literals."""
    if isinstance(node, ast.Constant):
        return node.value is not None
    if isinstance(node, ast.BinOp):
        return _is_number_or_text(node.left) and _is_number_or_text(node.right)
    return isinstance(node, ast.UnaryOp) and _is_number_or_text(node.operand)


def test_the_default_of_a_setting_is_written_once():
    settings = {name for kind in CLASSES for name in kind.model_fields}
    twice = {
        (source.path, name)
        for source in sources()
        for name, default in _defaults(source.tree)
        if name in settings and _is_number_or_text(default)
    }
    assert twice == set(TWICE)


def test_the_default_of_a_spark_option_is_written_once_in_its_table():
    fields = [*dataclasses.fields(ReadOptions), *dataclasses.fields(WriteOptions)]
    assert fields and all(field.default is dataclasses.MISSING for field in fields)
    assert all(field.default_factory is dataclasses.MISSING for field in fields)
