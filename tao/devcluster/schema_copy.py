"""The schema of a development cluster: a copy in its folder, which may be edited while it runs.

A schema that stored data would contradict is refused before anything starts.
"""

from __future__ import annotations

from pathlib import Path

import tao
from tao.devcluster.state_folder import StateFolder
from tao.model.errors import OperatorError, SchemaError
from tao.schema.compatibility import compare
from tao.schema.registry import Schema, load_schema


def example_schema_file() -> Path:
    """The schema that comes with this package: beside it in a checkout, inside it in a wheel."""
    package = Path(tao.__file__).parent
    installed = package / "_config" / "schema.yaml"
    return installed if installed.exists() else package.parent / "config" / "schema.yaml"


def read_schema(path: Path) -> tuple[Schema, str]:
    """The schema and its text. Raises `OperatorError` when the file cannot be read, `SchemaError` when it is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OperatorError(f"cannot read the schema file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SchemaError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    return load_schema(text, str(path)), text


def place_schema(folder: StateFolder, wanted: Path | None) -> Schema:
    """Put the schema into the folder and return it; without ``wanted`` the folder's own stays, if it has one.

    Raises `SchemaError` when it is wrong, or when it contradicts the one that the folder's data were written under.
    """
    own = folder.schema
    if wanted is None and own.exists():
        return read_schema(own)[0]
    schema, text = read_schema(wanted or example_schema_file())
    if own.exists():
        broken = [change for change in compare(read_schema(own)[0], schema) if not change.compatible]
        if broken:
            raise SchemaError(
                f"{wanted} contradicts the data in {folder.path}: {broken[0].path}: {broken[0].why}; "
                f"`tao schema check {own} {wanted}` lists everything"
            )
    folder.write_file(own, text.encode())
    return schema
