"""The committed files of bookie.proto are what its compiler makes of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.generated_code import code_of

ROOT = Path(__file__).parents[4]
CONTRACT = "bookie_server/api/bookie.proto"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}"]
    command += [f"--python_out={folder}", f"--grpc_python_out={folder}", CONTRACT]
    subprocess.run(command, check=True, cwd=ROOT)
    return folder


@pytest.mark.parametrize(
    ("name", "folder"),
    [("bookie_pb2.py", "bookie_server/api"), ("bookie_pb2_grpc.py", "tests/kit")],
)
def test_generated_code_equals_what_is_committed(made, name, folder):
    fresh = (made / "bookie_server/api" / name).read_text()
    kept = (ROOT / folder / name).read_text()
    assert code_of(fresh) == code_of(kept), (
        "run: python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. "
        f"{CONTRACT}, and move {name} to {folder}"
    )
