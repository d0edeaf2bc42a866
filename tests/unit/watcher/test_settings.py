"""A watcher's settings."""

from __future__ import annotations

import pytest
import yaml

from tao.model.errors import SettingsError
from tao.runtime.settings import load_settings, parse_settings
from tao.watcher.settings import WatcherSettings
from tests.unit.test_config_examples import CONFIG

FILE = CONFIG / "watcher.yaml"


def test_no_watcher_promotes_with_an_account_that_its_settings_do_not_name() -> None:
    shown = yaml.safe_load(FILE.read_text())
    assert load_settings(FILE, WatcherSettings).administrator_user == "tao_watcher"
    del shown["administrator_user"]
    with pytest.raises(SettingsError, match="administrator_user: Field required"):
        parse_settings(shown, WatcherSettings, "watcher.yaml")
