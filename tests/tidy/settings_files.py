"""conf/*.toml as the classes that read them say: `python -m tests.tidy.settings_files` writes them.

A setting is described once, in its class: default, limits, meaning, heading.
"""

import textwrap
from collections.abc import Iterator, Mapping

from bookie_server.api.settings import Settings
from bookie_server.config import BookieConfig
from spark_ledger.broker.settings import BrokerSettings
from spark_ledger.config import ClientConfig
from tests.tidy.sources import ROOT

COLUMNS = 100
FILES: Mapping[str, tuple[type[Settings], str]] = {
    "conf/bookie.toml": (
        BookieConfig,
        "Settings of a bookie, one storage node: python -m bookie_server --config conf/bookie.toml."
        " Every setting is here with its default; delete what you do not change, or override one"
        ' with --set key=value; a list as --set key=a,b or --set \'key=["a", "b"]\'. Sizes are'
        " bytes; times are seconds, or milliseconds where the name ends in _ms.",
    ),
    "conf/broker.toml": (
        BrokerSettings,
        "Settings of a broker, which serves Pulsar's clients: spark-ledger broker start --config"
        " conf/broker.toml. Every setting is here with its default; delete what you do not change."
        " Some are options of the command too, which win over the file. Sizes are bytes, times are"
        " seconds. The service URL can also come from the environment (LEDGER_SERVICE_URL).",
    ),
    "conf/client.toml": (
        ClientConfig,
        "Settings of a client of Spark Ledger. Every setting is here with its default; delete what"
        " you do not change. Sizes are bytes, times are seconds. The service URL can also come from"
        " the environment (LEDGER_SERVICE_URL) or the option serviceUrl.",
    ),
}


def text_of(path: str) -> str:
    """What the file says."""
    settings, head = FILES[path]
    return "\n".join([*_remark(head), *_lines(settings)]) + "\n"


def _lines(settings: type[Settings]) -> Iterator[str]:
    """Section by section, in the order of SECTIONS."""
    sections: Mapping[str, str] = settings.SECTIONS  # type: ignore[attr-defined]
    lines: dict[str, list[str]] = {}
    first = ""
    for name, field in settings.model_fields.items():
        first = name if name in sections else first
        assert field.description is not None
        described = [*_remark(field.description), f"{name} = {_value(field.default)}"]
        lines.setdefault(first, []).extend(described)
    for first, heading in sections.items():
        title, _, remark = heading.partition("\n")
        yield ""
        yield f"# -- {title} ".ljust(COLUMNS - 4, "-")
        yield from _remark(remark)
        yield ""
        yield from lines[first]


def _remark(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent="# ", subsequent_indent="# ")


def _value(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, (int, float)):
        return f"{default:_}" if default >= 10_000 else str(default)
    return str(default) if isinstance(default, list) else f'"{default}"'


if __name__ == "__main__":
    for path in FILES:
        (ROOT / path).write_text(text_of(path))
