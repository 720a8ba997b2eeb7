"""A class has few fields, or is named here with the reason; in the broker it also has few lines.

Counted are the attributes that a class sets on `self`, and the fields that its body declares.
"""

import ast

from tests.tidy.sources import PACKAGES, sources

FIELDS_MAX, LINES_MAX = 15, 300
SETTINGS = "settings, options or a record: each field is documented, and checked by itself"
ON_EACH_ADD = (
    "every add passes here: the state of an add in one object, not two that call each other"
)
WIRING = "it makes the parts of its process and keeps them; what they do is in them"
WRITES_BEHIND = (
    "what is durable, what is to be, and the task that writes: its steps are pure functions"
)
MANY_FIELDS = {
    "StorageConfig": SETTINGS,
    "BookieConfig": SETTINGS,
    "ClientConfig": SETTINGS,
    "ReadOptions": SETTINGS,
    "WriteOptions": SETTINGS,
    "LedgerRecord": SETTINGS,
    "Bookie": WIRING,
    "Broker": WIRING,
    "MainJob": WIRING,
    "Journal": ON_EACH_ADD,
    "DirectLog": ON_EACH_ADD,
    "LedgerHandle": ON_EACH_ADD,
    "LedgerStorage": ON_EACH_ADD,
    "AddPipeline": ON_EACH_ADD,
    "AsyncLedgerWriter": ON_EACH_ADD,
    "BatchEncoder": ON_EACH_ADD,
    "EntrySender": ON_EACH_ADD,
    "Cursor": WRITES_BEHIND,
    "ConsumerCursor": WRITES_BEHIND,
    "Auditor": "one observer's view of absences and of a pass, which decide together",
    "TopicFollower": "one state of a topic, the watch that renews it, and the callers that wait",
}
MANY_LINES = {"Broker", "Ownership"}


def fields_of(made: ast.ClassDef) -> set[str]:
    declared = (node.target for node in made.body if isinstance(node, ast.AnnAssign))
    of_self = (
        node.attr
        for node in ast.walk(made)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
    return {*of_self, *(target.id for target in declared if isinstance(target, ast.Name))}


def classes(*packages: str) -> dict[str, ast.ClassDef]:
    return {
        node.name: node
        for source in sources(*packages)
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    }


def test_a_class_has_few_fields_unless_the_reason_is_here():
    many = {name: len(fields_of(made)) for name, made in classes(*PACKAGES).items()}
    many = {name: fields for name, fields in many.items() if fields > FIELDS_MAX}
    assert many.keys() - MANY_FIELDS.keys() == set()


def test_no_class_of_the_broker_is_long():
    broker = classes("spark_ledger/broker")
    lines = {name: made.end_lineno - made.lineno + 1 for name, made in broker.items()}
    long = {name: count for name, count in lines.items() if count > LINES_MAX}
    assert long.keys() - MANY_LINES == set()


def test_fields_are_counted_where_they_are_set_and_where_they_are_declared():
    text = "class A:\n    a: int\n    def f(self):\n        self.b, self.c.d = self.a, 2"
    assert fields_of(ast.parse(text).body[0]) == {"a", "b"}
