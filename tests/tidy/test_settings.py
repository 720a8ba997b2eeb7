"""conf/*.toml against the classes that read them: every setting, its default and its meaning."""

import tomllib

import pytest

from bookie_server.api.settings import BadSettings, load
from bookie_server.config import BookieConfig
from spark_ledger.config import ClientConfig
from tests.tidy import settings_files
from tests.tidy.sources import ROOT

CLASSES = (BookieConfig, ClientConfig)


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
