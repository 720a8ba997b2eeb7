import os

import pytest
from pydantic import BaseModel, Field

from bookie_server.api.settings import BadSettings, Settings, load, parse_overrides


class Example(Settings):
    journal_bytes: int = Field(7, gt=0, description="An example.")
    rack: str = Field("", description="Another.")


def test_an_override_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    file = tmp_path / "example.toml"
    file.write_text('journal_bytes = 8\nrack = "a"\n')
    assert load(Example) == Example(journal_bytes=7, rack="")
    assert load(Example, file) == Example(journal_bytes=8, rack="a")
    assert load(Example, file, {"rack": "b"}) == Example(journal_bytes=8, rack="b")


@pytest.mark.parametrize("told", [None, "some-plugin"])
def test_a_class_of_settings_asks_no_plugin_and_leaves_the_environment_as_it_was(monkeypatch, told):
    monkeypatch.delenv("PYDANTIC_DISABLE_PLUGINS", raising=False)
    if told is not None:
        monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", told)
    before = dict(os.environ)
    asked = []
    monkeypatch.setattr("pydantic.plugin._loader.entry_points", lambda **_: asked.append(1) or ())
    monkeypatch.setattr("pydantic.plugin._loader._plugins", None)

    class Another(Settings):
        rack: str = ""

    assert (Another(rack="a").rack, asked, dict(os.environ)) == ("a", [], before)

    class Users(BaseModel):
        rack: str = ""

    assert asked == [1]


def test_texts_from_the_command_line_become_numbers():
    assert load(Example, None, parse_overrides(["journal_bytes=9", "rack=x=y"])) == Example(
        journal_bytes=9, rack="x=y"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("journal_byte = 1", "unknown setting 'journal_byte'; the nearest is 'journal_bytes'"),
        ("journal_bytes = 0", "journal_bytes: .*greater than 0.*got 0"),
        ("journal_bytes = 'many'", "journal_bytes: .*integer.*'many'"),
        ("journal_bytes =", "is no toml file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_name(tmp_path, content, said):
    file = tmp_path / "example.toml"
    file.write_text(content)
    with pytest.raises(BadSettings, match=said) as wrong:
        load(Example, file)
    assert str(file) in str(wrong.value)


def test_a_missing_file_and_a_setting_without_a_value_are_refused(tmp_path):
    with pytest.raises(BadSettings, match="cannot be read"):
        load(Example, tmp_path / "nowhere.toml")
    with pytest.raises(BadSettings, match="key=value"):
        parse_overrides(["rack"])


def test_a_setting_like_none_is_refused_without_a_guess_and_a_long_value_is_cut():
    with pytest.raises(BadSettings, match=r"^unknown setting 'zzz'$"):
        load(Example, None, {"zzz": 1})
    with pytest.raises(BadSettings) as wrong:
        load(Example, None, {"journal_bytes": "x" * 5000})
    assert str(wrong.value).startswith("journal_bytes: ")
    assert len(str(wrong.value)) < 300
