"""What the pages show is run as it stands, in a session of its own, as a new user types it in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.pages import Block, blocks, unsaid

ROOT = Path(__file__).resolve().parents[2]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "spark.md"
TEN = 10


def test_the_ten_things_and_the_ten_lines_of_the_readme_work_as_they_stand(cluster, tmp_path):
    environment = {
        **os.environ,
        "LEDGER_SERVICE_URL": cluster.service_url,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.pages", str(README), str(PAGE)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    for page in (README, PAGE):
        for block in blocks(page):
            assert (
                block.name is None or f"== {page.name}:{block.line} {block.name}\n" in done.stdout
            )


def test_there_are_ten_things_and_no_code_on_the_page_that_is_not_run():
    found = list(blocks(PAGE))
    assert [block.line for block in found if block.name is None] == []
    text = PAGE.read_text()
    for number in range(1, TEN + 1):
        section = text[text.index(f"\n### {number}. ") :].split("\n#", 2)[1]
        assert "<!-- run: " in section, f"number {number} shows nothing"
    assert f"\n### {TEN + 1}." not in text


@pytest.fixture
def page(tmp_path):
    """`page(text)`: the blocks of a page of that text."""

    def make(text: str) -> list[Block]:
        path = tmp_path / "page.md"
        path.write_text(text)
        return list(blocks(path))

    return make


def test_an_error_names_the_page_and_its_line(page):
    (block,) = page("\n\n<!-- run: it -->\n```python\nx = 1\nraise KeyError(x)\n```\n")
    with pytest.raises(KeyError) as caught:
        block.run({})
    last = caught.traceback[-1]
    assert (Path(str(last.path)).name, last.lineno + 1) == ("page.md", 6)
    (block,) = page("<!-- run: it -->\n```sh\ntrue\nfalse\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:3"):
        block.run({})


def test_what_a_block_should_print_is_looked_for_line_by_line(page):
    (block,) = page("<!-- run: it -->\n```python\nprint(1)  # 1\nprint(3)  # 2\n```\n")
    assert block.says == ["1", "2"]
    assert unsaid(block.says, block.run({})) == ["2"]
    assert unsaid(["1", "2"], "2\n1\n") == ["2"]
    assert unsaid(["1", "2"], "0\n1\n+---+\n2\n") == []
