"""A field of Pulsar's commands that code does not look at is not named in their file: what a client
asks for by it would be passed over without a word."""

import re
from pathlib import Path

from spark_ledger.broker.wire.commands_pb2 import DESCRIPTOR

ROOT = Path(__file__).parents[2]
BY_HAND = {"redelivery_count"}  # written as bytes (wire/sends.py)


def test_code_looks_at_each_field_of_pulsars_commands():
    files = [one for one in (ROOT / "spark_ledger/broker").rglob("*.py") if "_pb2" not in one.name]
    words = set(re.findall(r"\w+", " ".join(one.read_text() for one in files)))
    fields = {
        (message.name, field.name)
        for message in DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if message.name != "BaseCommand"
    }
    unseen = {field for field in fields if field[1] not in words | BY_HAND}
    assert not unseen
