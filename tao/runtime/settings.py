"""Settings files: YAML outside, frozen dataclasses inside, one readable error between them.

The dataclasses are the single definition: field names, types and defaults. No other code knows that a file was there,
and tests make settings by calling the dataclasses.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from tao.model.errors import SettingsError, unreadable
from tao.model.settings import FORMERLY
from tao.schema.plain_data import yaml_fault

MAX_SETTINGS_BYTES: Final = 1 << 20  # a settings file has a hundred lines; anything larger is another file

SettingsType = TypeVar("SettingsType")


def load_settings(path: Path, model: type[SettingsType]) -> SettingsType:
    """Read a YAML file into the dataclass ``model``, whose fields may be dataclasses. A field that the file leaves out
    has its default; an empty file is all defaults.

    Raises `SettingsError` for a file that cannot be read or is not YAML, and for unknown, missing or wrong fields, with
    every fault in one message as ``file: field: what is wrong``.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_SETTINGS_BYTES + 1)
    except OSError as error:
        raise SettingsError(unreadable(path, error)) from error
    if len(text) > MAX_SETTINGS_BYTES:
        raise SettingsError(f"{path}: is larger than {MAX_SETTINGS_BYTES} bytes; is it the right file?")
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(yaml_fault(error, str(path))) from error
    return parse_settings({} if found is None else found, model, str(path))


def parse_settings(found: object, model: type[SettingsType], source: str) -> SettingsType:
    """Make settings from plain data, as `load_settings` does; ``source`` names the data in errors."""
    if not isinstance(found, Mapping):
        raise SettingsError(f"{source}: must be settings with their names, as `name: value`")
    found = _with_present_names(found, model, "", source)
    unknown = [f"{source}: {field}" for field in _unknown(found, model, "")]
    try:
        settings = TypeAdapter(model).validate_python(found)
    except ValidationError as error:
        wrong = [
            f"{source}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            for fault in error.errors(include_url=False, include_context=False)
        ]
        raise SettingsError("\n".join([*unknown, *wrong])) from error
    except (ValueError, TypeError) as error:  # a dataclass that checks itself
        raise SettingsError(f"{source}: {error}") from error
    if unknown:
        raise SettingsError("\n".join(unknown))
    return settings


def _with_present_names(found: Mapping[object, object], model: type, path: str, source: str) -> dict[object, object]:
    """Return the settings with former names replaced by the present ones, each with a line on standard error."""
    fields = dataclasses.fields(model) if dataclasses.is_dataclass(model) else ()
    present = {field.metadata[FORMERLY]: field.name for field in fields if FORMERLY in field.metadata}
    hints = get_type_hints(model)
    named: dict[object, object] = {}
    for key, value in found.items():
        name = present.get(str(key), key)
        if name != key and name not in found:
            hint = f"{path}{key} is now called {path}{name}; the former name works until the next release"
            sys.stderr.write(f"warning: {source}: {hint}\n")
        elif name != key:
            name = key  # Both names were given. The former one is then reported as unknown.
        inner = hints.get(str(name))
        if isinstance(value, Mapping) and isinstance(inner, type) and dataclasses.is_dataclass(inner):
            value = _with_present_names(value, inner, f"{path}{name}.", source)
        named[name] = value
    return named


def _unknown(found: Mapping[object, object], model: type, path: str) -> Iterator[str]:
    """Yield a fault for each field that no dataclass has: a misspelt setting must not silently stay at its default.

    pydantic's own check (``extra="forbid"``) was tried. It says "Unexpected keyword argument", and not which settings
    there are; and it has to be declared in every dataclass.
    """
    hints = get_type_hints(model)
    known = {field.name for field in dataclasses.fields(model)} if dataclasses.is_dataclass(model) else set(hints)
    for key, value in found.items():
        if key not in known:
            yield f"{path}{key}: there is no such setting; there are {', '.join(sorted(known))}"
            continue
        inner = hints[str(key)]
        if isinstance(value, Mapping) and isinstance(inner, type) and dataclasses.is_dataclass(inner):
            yield from _unknown(value, inner, f"{path}{key}.")
