"""The former names of settings. A settings file may use the former name of a renamed field until the next release."""

from __future__ import annotations

import dataclasses
from typing import Final, TypeVar

FORMERLY: Final = "formerly"
"""The key in a dataclass field's metadata under which the field's former name is stored."""

Default = TypeVar("Default")


def renamed(default: Default, formerly: str) -> Default:
    """Return the default of a dataclass field which settings files may still call by its former name."""
    found: Default = dataclasses.field(default=default, metadata={FORMERLY: formerly})
    return found
