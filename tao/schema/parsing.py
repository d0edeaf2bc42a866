"""Text of a schema → plain data that remembers where each key stood, so that a fault can name file, line and path.

YAML is read through its node tree, because the plain loader loses line numbers and silently keeps the last of two
equal keys, which in a schema would drop a type. Aliases are refused: they let a few lines grow without bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import yaml

from tao.model.errors import SchemaError

MAX_SCHEMA_CHARACTERS: Final = 4 << 20  # thousands of types; a larger file is not a schema
_MAX_DEPTH: Final = 8  # a schema needs six levels; the parser recurses
_FAULTS_SHOWN: Final = 20

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Parsed:
    """Plain data (dicts, lists, scalars), the name of its source, and the line (from 1) of each path, if known."""

    data: object
    source: str
    lines: Mapping[Path, int] = field(default_factory=dict)

    def error(self, faults: Iterable[tuple[Path, str]]) -> SchemaError:
        """One error listing the faults in the file's order, each as ``source:line: path: what is wrong``."""
        placed = sorted((self._line_of(path), ".".join(map(str, path)), what) for path, what in faults)
        shown = [
            ": ".join(part for part in (f"{self.source}:{line}" if line else self.source, path, what) if part)
            for line, path, what in placed[:_FAULTS_SHOWN]
        ]
        if len(placed) > _FAULTS_SHOWN:
            shown.append(f"… and {len(placed) - _FAULTS_SHOWN} more")
        return SchemaError("\n".join(shown))

    def _line_of(self, path: Path) -> int:
        # A missing key has no line of its own: point at the nearest thing that holds it.
        for length in range(len(path), -1, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return line
        return 0


def parse_yaml(text: str, source: str) -> Parsed:
    """Plain data of a YAML text. Raises `SchemaError` for what is not YAML, repeated keys, aliases and deep nests."""
    _bound_size(text, source)
    try:
        _refuse_aliases_and_depth(text, source)
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise SchemaError(f"{source}: the schema is empty")
        lines: dict[Path, int] = {}
        return Parsed(_plain(loader, root, (), lines, source), source, lines)
    except yaml.MarkedYAMLError as why:
        where = f"{source}:{why.problem_mark.line + 1}" if why.problem_mark else source
        raise SchemaError(f"{where}: not valid YAML: {why.problem}") from None
    except (yaml.YAMLError, ValueError) as why:  # ValueError: a scalar such as the date 2020-13-01
        raise SchemaError(f"{source}: not valid YAML: {why}") from None


def parse_json(text: str | bytes, source: str) -> Parsed:
    """Plain data of a JSON text. Raises `SchemaError` for what is not JSON."""
    _bound_size(text, source)
    try:
        return Parsed(json.loads(text), source)
    except (ValueError, RecursionError) as why:
        raise SchemaError(f"{source}: not valid JSON: {why}") from None


def _bound_size(text: str | bytes, source: str) -> None:
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise SchemaError(f"{source}: {len(text)} characters is more than a schema may have ({MAX_SCHEMA_CHARACTERS})")


def _refuse_aliases_and_depth(text: str, source: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent):
            raise SchemaError(f"{source}:{line}: aliases (*{event.anchor}) are not used in schema files; write it out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                raise SchemaError(f"{source}:{line}: nested deeper than {_MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _plain(loader: yaml.SafeLoader, node: yaml.Node, path: Path, lines: dict[Path, int], source: str) -> object:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                # YAML reads a bare `yes`, `on` or `1` as something else than a name.
                raise SchemaError(f"{source}:{line}: the key {key!r} is not text; put it in quotes")
            if key in mapping:
                raise SchemaError(f"{source}:{line}: the key {key!r} stands here twice")
            lines[(*path, key)] = line
            mapping[key] = _plain(loader, value_node, (*path, key), lines, source)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, (*path, index), lines, source) for index, item in enumerate(node.value)]
    value: object = loader.construct_object(node)
    return value
