"""The plain data of YAML and JSON texts, with the line of each key, and its validation: what schema files and access
documents have in common.

Parsing remembers the line of each key, so that a fault can name file, line and path. YAML is read through its node
tree, because the plain loader loses line numbers and silently keeps the last of two equal keys, which would drop a
type or a right. Aliases are refused: with them a few lines can grow without bound."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import pydantic
import yaml

from tao.model.errors import OperatorError

MAX_CHARACTERS: Final = 4 << 20  # thousands of types; a larger file is not one of these documents
_MAX_DEPTH: Final = 8  # the documents need six levels; the bound protects the recursive parser
_FAULTS_SHOWN: Final = 20

Path = tuple[str | int, ...]


class DocumentKind(NamedTuple):
    """A kind of document: what messages call it, and the error that its faults raise."""

    name: str
    failure: type[OperatorError]


STRICT: Final = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)
"""How entries of these documents are read: their keys and no others, each of just its type."""

_Entry = TypeVar("_Entry", bound=pydantic.BaseModel)


@dataclass(frozen=True, slots=True)
class Parsed:
    """Plain data (dicts, lists, scalars), the name of its source, and the line (from 1) of each path, if known."""

    data: object
    source: str
    kind: DocumentKind
    lines: Mapping[Path, int] = field(default_factory=dict)

    def error(self, faults: Iterable[tuple[Path, str]]) -> OperatorError:
        """Return one error that lists the faults in the file's order, each as ``source:line: path: message``."""
        placed = sorted((self._line_of(path), ".".join(map(str, path)), what) for path, what in faults)
        shown = [
            ": ".join(part for part in (f"{self.source}:{line}" if line else self.source, path, what) if part)
            for line, path, what in placed[:_FAULTS_SHOWN]
        ]
        if len(placed) > _FAULTS_SHOWN:
            shown.append(f"… and {len(placed) - _FAULTS_SHOWN} more")
        return self.kind.failure("\n".join(shown))

    def _line_of(self, path: Path) -> int:
        # A missing key has no line of its own: point at the nearest key that holds it.
        for length in range(len(path), -1, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return line
        return 0


def parse_yaml(text: str, source: str, kind: DocumentKind) -> Parsed:
    """Return the plain data of a YAML text.

    Raises the kind's error for invalid YAML, repeated keys, aliases, and nesting beyond the bound."""
    _bound_size(text, source, kind)
    try:
        _refuse_aliases_and_depth(text, source, kind)
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise kind.failure(f"{source}: the {kind.name} is empty")
        lines: dict[Path, int] = {}
        return Parsed(_plain(loader, root, (), lines, source, kind), source, kind, lines)
    except (yaml.YAMLError, ValueError) as why:  # ValueError: a scalar such as the date 2020-13-01
        raise kind.failure(yaml_fault(why, source)) from None


def yaml_fault(why: yaml.YAMLError | ValueError, source: str) -> str:
    """Return the text of an error of the YAML parser, with ``source``, whose name the parser does not know."""
    if isinstance(why, yaml.MarkedYAMLError):
        where = f"{source}:{why.problem_mark.line + 1}" if why.problem_mark else source
        return f"{where}: not valid YAML: {why.problem}"
    if isinstance(why, yaml.reader.ReaderError):
        return f"{source}: not valid YAML: {why.reason} at position {why.position}"
    return f"{source}: not valid YAML: {why}"


def parse_json(text: str | bytes, source: str, kind: DocumentKind) -> Parsed:
    """Return the plain data of a JSON text. Raises the kind's error for invalid JSON."""
    _bound_size(text, source, kind)
    try:
        return Parsed(json.loads(text), source, kind)
    except (ValueError, RecursionError) as why:
        raise kind.failure(f"{source}: not valid JSON: {why}") from None


def _bound_size(text: str | bytes, source: str, kind: DocumentKind) -> None:
    if len(text) > MAX_CHARACTERS:
        raise kind.failure(f"{source}: {len(text)} characters is above the limit of {MAX_CHARACTERS}")


def _refuse_aliases_and_depth(text: str, source: str, kind: DocumentKind) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent):
            raise kind.failure(
                f"{source}:{line}: aliases (*{event.anchor}) are not allowed in a {kind.name}; write the value out"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                raise kind.failure(f"{source}:{line}: nested deeper than {_MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _plain(
    loader: yaml.SafeLoader, node: yaml.Node, path: Path, lines: dict[Path, int], source: str, kind: DocumentKind
) -> object:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                # YAML reads a bare `yes`, `on` or `1` as a value that is not text.
                raise kind.failure(f"{source}:{line}: the key {key!r} is not text; put it in quotes")
            if key in mapping:
                raise kind.failure(f"{source}:{line}: the key {key!r} appears twice")
            lines[(*path, key)] = line
            mapping[key] = _plain(loader, value_node, (*path, key), lines, source, kind)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return [_plain(loader, item, (*path, index), lines, source, kind) for index, item in items]
    value: object = loader.construct_object(node)
    return value


def validate(parsed: Parsed, model: type[_Entry], keys: Sequence[str]) -> _Entry:
    """Return the entry that plain data means. ``keys`` are those of the document, for hints. Raises the kind's error
    with the line and path of every fault."""
    try:
        return model.model_validate(parsed.data)
    except pydantic.ValidationError as why:
        faults = why.errors()
        raise parsed.error(_explained(each["loc"], each["type"], each["msg"], keys) for each in faults) from None


def _explained(path: Path, kind: str, message: str, keys: Sequence[str]) -> tuple[Path, str]:
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(str(path[-1]), keys, n=1)
        if near and near[0] == path[-1]:
            return path, "unknown key here; entries of another kind have it"
        return path, "unknown key" + (f"; did you mean {near[0]!r}?" if near else "")
    if kind == "missing":
        return path, "is missing"
    if kind in ("model_type", "dict_type"):
        return path, "must be a mapping of keys to values"
    if path and path[-1] == "[key]":  # how pydantic marks a fault in a key itself
        return path[:-1], f"as a name: {message}"
    return path, message
