"""conf/*.toml against the classes that read them: every setting, its default and its meaning."""

import re
import tomllib

import pytest

from bookie_server.api.settings import BadSettings, load
from bookie_server.config import BookieConfig
from spark_ledger.config import ClientConfig
from tests.tidy.sources import ROOT

FILES = {"bookie.toml": BookieConfig, "client.toml": ClientConfig}


def text_of(name):
    return (ROOT / "conf" / name).read_text()


@pytest.mark.parametrize("name", FILES)
def test_the_file_lists_every_setting_of_its_class_with_its_default(name):
    listed = tomllib.loads(text_of(name))
    settings = FILES[name].model_fields
    required = {key for key, field in settings.items() if field.is_required()}
    expected = {key: field.default for key, field in settings.items() if key not in required}
    assert {key: value for key, value in listed.items() if key not in required} == expected
    for key in required:
        assert re.search(rf"^#? ?{key} = ", text_of(name), re.MULTILINE), key


@pytest.mark.parametrize("name", FILES)
def test_every_setting_in_the_file_has_its_meaning_above_it(name):
    lines = text_of(name).splitlines()
    bare = [
        line
        for above, line in zip(["", *lines], lines, strict=False)
        if re.match(r"[a-z_]+ = ", line) and not above.startswith("# ")
    ]
    assert not bare


@pytest.mark.parametrize("name", FILES)
def test_every_setting_of_the_class_says_what_it_means(name):
    silent = [key for key, field in FILES[name].model_fields.items() if not field.description]
    assert not silent


@pytest.mark.parametrize("name", FILES)
def test_an_unknown_setting_is_refused_with_the_nearest_name(name):
    known = next(iter(FILES[name].model_fields))
    with pytest.raises(BadSettings, match=f"{known}x.*nearest is '{known}'"):
        load(FILES[name], None, {f"{known}x": 1})
