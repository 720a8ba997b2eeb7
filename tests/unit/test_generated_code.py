"""The committed files of Pulsar's messages are what the compiler makes of the .proto files."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.generated_code import code_of

ROOT = Path(__file__).parents[2]
CONTRACTS = ("spark_ledger/topic/entry/pulsar_message", "spark_ledger/broker/wire/commands")


@pytest.mark.parametrize("contract", CONTRACTS)
def test_generated_code_equals_what_is_committed(contract, tmp_path):
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"--python_out={tmp_path}"]
    subprocess.run([*command, f"{contract}.proto"], check=True, cwd=ROOT)
    fresh, kept = (tmp_path / f"{contract}_pb2.py", ROOT / f"{contract}_pb2.py")
    assert code_of(fresh.read_text()) == code_of(kept.read_text()), (
        f"run: python -m grpc_tools.protoc -I. --python_out=. {contract}.proto"
    )
