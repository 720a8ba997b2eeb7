"""What may not appear: clocks and chance in code that decides, paths of somebody's machine, lines
of the docs that are wider than a window, more words of a dialect than there are today."""

import ast
import re
from collections import Counter

import pytest

from tests.tidy.dialect import bindings_of, ruled_out_in, words
from tests.tidy.sources import PACKAGES, ROOT, Source, sources, tracked_files

DECIDING = ("bookie_server", "spark_ledger/ledger", "spark_ledger/topic", "spark_ledger/bookies")
# These files touch the world for everybody else, or run only in the process that starts them.
EDGES = (
    "bookie_server/__main__.py",
    "bookie_server/serve/gateway.py",
    "bookie_server/disk/identity.py",
    "bookie_server/serve/registration.py",
    "bookie_server/start/opening.py",
    "bookie_server/disk/os_disk.py",
    "spark_ledger/bookies/local_reads.py",
    "bookie_server/logs/rocks_index.py",
    "spark_ledger/topic/blocking.py",
)
FORBIDDEN = {
    "time.time",
    "time.time_ns",
    "time.monotonic",
    "time.sleep",
    "uuid.uuid4",
    "uuid.uuid1",
    "uuid4",
    "datetime.now",
    "datetime.datetime.now",
    "datetime.utcnow",
    "asyncio.wait",
    "os.urandom",
    "secrets.token_bytes",
    "threading.Thread",
}
DOC_COLUMNS_MAX = 140
# What is there today; each of the two only falls (`python -m tests.tidy.dialect` counts them).
RULED_OUT_PER_THOUSAND_LINES_MAX = 0.3
BINDINGS_MAX = 0
RANDOM_MODULE = re.compile(r"random\.(?!Random$)\w+")


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def forbidden_calls(source: Source):
    for node in source.nodes:
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in FORBIDDEN or RANDOM_MODULE.fullmatch(name):
                yield f"{source.path}:{node.lineno} calls {name}"


def iterated_sets(source: Source):
    for node in source.nodes:
        is_loop = isinstance(node, ast.For | ast.comprehension)
        if is_loop and isinstance(node.iter, ast.Set | ast.SetComp):
            yield f"{source.path}:{node.iter.lineno} iterates over a set"
        if is_loop and isinstance(node.iter, ast.Call) and dotted(node.iter.func) == "set":
            yield f"{source.path}:{node.iter.lineno} iterates over a set"


@pytest.mark.parametrize("package", DECIDING)
def test_code_that_decides_asks_no_clock_and_no_chance(package):
    deciding = [source for source in sources(package) if source.path not in EDGES]
    found = [call for source in deciding for call in forbidden_calls(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", DECIDING)
def test_nothing_unordered_decides(package):
    found = [place for source in sources(package) for place in iterated_sets(source)]
    assert not found, "\n".join(found)


def prose(text: str):
    """The numbered lines outside of code blocks and tables, whose lines cannot be broken."""
    in_code = False
    for number, line in enumerate(text.split("\n"), 1):
        in_code ^= line.lstrip().startswith("```")
        if not (in_code or line.startswith("|")):
            yield number, line


def test_no_line_of_the_docs_is_wider_than_a_window():
    pages = sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("docs/decisions/*.md"))
    wide = [
        f"{page.relative_to(ROOT)}:{number} has {len(line)} columns"
        for page in pages
        for number, line in prose(page.read_text())
        if len(line) > DOC_COLUMNS_MAX
    ]
    assert pages and not wide, "\n".join(wide)


def test_no_file_names_a_folder_of_somebodys_machine():
    private = re.compile(
        r"/(?:work|root|home/\w+)/|(?<![\w/.-])shared/(?:design|style|refer|peers)"
    )
    found = []
    for path in tracked_files():
        if path == "tests/tidy/test_words.py":
            continue
        text = (ROOT / path).read_bytes().decode(errors="replace")
        found += [f"{path}: {match.group(0)}" for match in private.finditer(text)]
    assert not found, "\n".join(found)


def test_prose_and_names_are_plain_technical_english():
    counted = words(*PACKAGES, "docs")
    print(f"{counted.per_thousand:.1f} ruled-out words, {len(counted.bindings)} bindings")
    assert counted.per_thousand <= RULED_OUT_PER_THOUSAND_LINES_MAX
    assert len(counted.bindings) <= BINDINGS_MAX


def test_one_class_name_is_one_class():
    names = Counter(
        node.name
        for source in sources(*PACKAGES)
        for node in source.nodes
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("the broker is told to stop", 1),
        ("who subscribes is asked; nobody answers", 2),
        ("a user who subscribes", 0),
        ("a segment, if there is one", 0),
    ],
)
def test_words_are_counted_by_their_kind(line, count):
    assert len(list(ruled_out_in(line))) == count


def test_bindings_are_counted_where_a_reader_cannot_see_the_whole_scope():
    short = "for one in entries:\n    use(one)\n"
    long = "def act(found):\n    a = 1\n    b = 2\n    return [one for one in found]\n"
    source = Source("x.py", short + long, ast.parse(short + long))
    assert [place.text for place in bindings_of(source)] == ["found"]
