"""A tailer's settings, and the example file of them."""

from __future__ import annotations

import pytest
import yaml

from tao.model.errors import SettingsError
from tao.runtime.settings import load_settings, parse_settings
from tao.tailer.settings import TailerSettings
from tests.unit.test_config_examples import CONFIG, assert_all_shown, commented_out

FILE = CONFIG / "tailer.yaml"


def test_the_example_shows_every_setting_with_its_default() -> None:
    shown = yaml.safe_load("\n".join(commented_out(FILE.read_text())))
    assert_all_shown(TailerSettings, shown, "tailer")
    assert parse_settings(shown, TailerSettings, "tailer") == load_settings(FILE, TailerSettings)


def test_a_password_is_not_shown() -> None:
    assert "change-me" not in repr(load_settings(FILE, TailerSettings))


@pytest.mark.parametrize("server_id", [-1, 1 << 32])
def test_a_server_id_fits_in_32_bits(server_id: int) -> None:
    with pytest.raises(SettingsError, match="32 bits"):
        parse_settings({**yaml.safe_load(FILE.read_text()), "server_id": server_id}, TailerSettings, "tailer")
