"""Write the reference pages that follow from the code: settings, commands, errors, metrics (`make reference`).

Each page is made of one definition in the code, so that the two cannot disagree; a test fails when a page is out of
date. The pages depend on nothing but the sources: not on what was imported before, the terminal or the
environment.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple, get_type_hints

import click

from tao.model.settings import FORMERLY

ROOT: Final = Path(__file__).resolve().parents[1]
REFERENCE: Final = Path("docs/reference")
WIDTH: Final = 100
INSTRUMENTS: Final = ("counter", "gauge", "gauge_family", "histogram")
ROLES: Final = ("follower", "leader", "tailer", "watcher", "worker")
ROLE_OF_PACKAGE: Final = {**{role: role for role in ROLES}, "journal": "follower"}
"""The role whose metrics a package registers."""
MADE_BY: Final = "<!-- Made by `make reference` from {}; edit that instead. -->"


def main() -> None:
    """Write every generated page."""
    for path, text in pages().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(path)  # noqa: T201 - the command's output


def pages() -> dict[Path, str]:
    """Return the text of every generated page by its path in the repository."""
    return {
        REFERENCE / "settings.md": settings_page(),
        REFERENCE / "cli.md": commands_page(),
        REFERENCE / "errors.md": errors_page(),
        REFERENCE / "metrics.md": metrics_page(),
        **{Path(f"config/{role}.yaml"): config_file(role) for role in ROLES},
    }


# --- text -----------------------------------------------------------------------------------------------------------


def paragraphs(text: str) -> list[str]:
    """Return Markdown lines of a docstring: its paragraphs, filled; indented paragraphs as code."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if block.startswith(("\b", " ")):
            lines += ["", *textwrap.indent(textwrap.dedent(block.lstrip("\b\n")), "    ").splitlines()]
        else:
            lines += ["", *filled(block)]
    return lines[1:]


def filled(text: str) -> list[str]:
    """Return the text as lines of at most `WIDTH` columns."""
    return textwrap.wrap(plain(text), WIDTH, break_long_words=False, break_on_hyphens=False)


def plain(text: str) -> str:
    """Return the text in one line, with reStructuredText's double backquotes as Markdown's single ones."""
    return " ".join(text.split()).replace("``", "`")


def cell(text: str) -> str:
    """Return the text as it may stand in a table."""
    return plain(text).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(cell(each) for each in row) + " |" for row in rows),
    ]


def page(title: str, source: str, *parts: list[str]) -> str:
    """Return a page with its title, the note of its origin and its parts."""
    lines = [f"# {title}", "", MADE_BY.format(source)]
    for part in parts:
        lines += ["", *part]
    return "\n".join(lines).rstrip() + "\n"


# --- settings -------------------------------------------------------------------------------------------------------


SETTINGS: Final = (
    ("A follower's file", "tao.follower.settings", "FollowerSettings"),
    ("A leader's file", "tao.leader.settings", "LeaderSettings"),
    ("A tailer's file", "tao.tailer.settings", "TailerSettings"),
    ("A watcher's file", "tao.watcher.settings", "WatcherSettings"),
    ("A worker's file", "tao.worker.settings", "WorkerSettings"),
    ("The SDK", "tao.client.settings", "ClientSettings"),
)


class Documented(NamedTuple):
    """A field of a settings dataclass: its type as written, and the text that follows it."""

    annotation: str
    text: str


def settings_page() -> str:
    """Return the page of all settings, one section for each settings file."""
    introduction = filled(
        "A server reads one YAML file (`tao follower --settings FILE`). What the file leaves out has its default, and "
        "a misspelt setting is an error. The SDK takes the same kind of settings as `ClientSettings(…)`. A setting of "
        "a group is written under the group's name. Units are in the names. Commented examples of the files are in "
        "`config/`."
    )
    parts = [introduction]
    for title, model in setting_models():
        parts += [[f"## {title}"], *settings_parts(model, "", None)]
    return page("Settings", "the settings dataclasses of the code", *parts)


def setting_models() -> Iterator[tuple[str, type]]:
    """Yield the title and the dataclass of each settings file."""
    for title, module_name, class_name in SETTINGS:
        yield title, getattr(importlib.import_module(module_name), class_name)


def settings_parts(model: type, group: str, made: object | None, formerly: str = "") -> Iterator[list[str]]:
    """Yield the table of one settings dataclass, then those of its groups.

    ``group`` is the dotted name under which the file has them, ``made`` the group's default value, ``formerly`` its
    former name.
    """
    documented = documented_fields(model)
    hints = get_type_hints(model)
    rows: list[tuple[str, ...]] = []
    groups: list[tuple[str, type, object, str]] = []
    for each in dataclasses.fields(model):
        default = default_of(each) if made is None else getattr(made, each.name)
        kind = hints[each.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and default is not dataclasses.MISSING:
            groups.append((f"{group}{each.name}", kind, default, each.metadata.get(FORMERLY, "")))
            continue
        written = documented.get(each.name, Documented("", ""))
        text = written.text
        if former := each.metadata.get(FORMERLY):
            text = f"{text} The former name `{former}` is still accepted.".lstrip()
        rows.append((f"`{each.name}`", f"`{written.annotation}`", default_text(each.name, default), text))
    if group:
        yield [f"### `{group.rstrip('.')}`", "", *paragraphs(model.__doc__ or "")]
    if formerly:
        yield [f"The former name `{formerly}` is still accepted."]
    if rows:
        yield table(("setting", "type", "default", "what it is, and why"), rows)
    for name, kind, default, former in groups:
        yield from settings_parts(kind, f"{name}.", default, former)


def config_file(role: str) -> str:
    """Return ``config/<role>.yaml`` with the comment above each setting taken from the setting's field.

    The keys, the values, and comments above anything else stay as they are in the file.
    """
    lines: list[str] = []
    comment: list[str] = []
    models = [next(model for title, model in setting_models() if role in title)]
    for line in (ROOT / "config" / f"{role}.yaml").read_text().splitlines():
        key = re.match(r"#?( *)([a-z_]+):", line)
        if key is None:
            if re.match(r"#? *# |# ", line):
                comment.append(line)
                continue
            lines += [*comment, line]
            comment = []
            continue
        indent, name = key[1], key[2]
        del models[len(indent) // 2 + 1 :]
        text = documented_fields(models[-1])[name].text if name in documented_fields(models[-1]) else ""
        kind = get_type_hints(models[-1]).get(name)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            models.append(kind)
            text = text or (kind.__doc__ or "").split("\n\n")[0]
        text = re.sub(r" *Raises `.*", "", plain(text))
        if text:
            wrapped = textwrap.wrap(text, 118 - len(indent), break_on_hyphens=False)
            comment = [f"{indent}# {each}" for each in wrapped]
        lines += [*comment, line]
        comment = []
    return "\n".join([*lines, *comment]) + "\n"


def default_of(field: dataclasses.Field[Any]) -> object:
    """Return a field's default, `dataclasses.MISSING` where a file must give one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def default_text(name: str, default: object) -> str:
    """Return a default as a settings file would have it; sizes also in the unit that a person reads."""
    if default is dataclasses.MISSING:
        return "*required*"
    if isinstance(default, int) and not isinstance(default, bool) and name.endswith("_bytes") and default >= 1 << 20:
        return f"`{default}` ({default >> 20} MiB)"
    return f"`{yaml_text(default)}`"


def yaml_text(value: object) -> str:
    """Return a value in the flow style of YAML."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Enum():
            return str(value.value)
        case str():
            return value or '""'
        case Mapping():
            return "{" + ", ".join(f"{key}: {yaml_text(each)}" for key, each in value.items()) + "}"
        case frozenset() | set():
            return "[" + ", ".join(sorted(map(yaml_text, value))) + "]"
        case tuple() | list():
            return "[" + ", ".join(map(yaml_text, value)) + "]"
        case _:
            return str(value)


@functools.cache
def documented_fields(model: type) -> Mapping[str, Documented]:
    """Return the annotation and the text of each field of a dataclass, inherited ones first, as the source has them."""
    found: dict[str, Documented] = {}
    for base in filter(dataclasses.is_dataclass, model.__bases__):
        found.update(documented_fields(base))
    tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    name = ""
    for node in tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            found[name] = Documented(ast.unparse(node.annotation), "")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = Documented(found[name].annotation, str(node.value.value))
    return found


# --- commands -------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """Return the page of all commands, from the definitions of click."""
    from tao.cli.commands import tao

    parts = list(command_parts(tao, ["tao"]))
    return page("Commands", "the help texts of `tao`", *parts)


def command_parts(command: click.Command, path: list[str]) -> Iterator[list[str]]:
    """Yield help and options of a command, then of its subcommands in alphabetical order."""
    context = click.Context(command, info_name=" ".join(path), terminal_width=WIDTH, max_content_width=WIDTH)
    context.show_default = command.context_settings.get("show_default")
    if len(path) > 1:
        yield [f"{'#' * min(len(path), 4)} {' '.join(path)}"]
    pieces = " ".join(command.collect_usage_pieces(context))
    yield [f"    {' '.join(path)} {pieces}".rstrip()]
    if command.help:
        yield paragraphs(command.help)
    rows = [row for each in command.params if (row := option_row(each, context)) is not None]
    if rows:
        yield table(("option", "what it does"), rows)
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            inner = command.commands[name]
            if not inner.hidden:
                yield from command_parts(inner, [*path, name])


def option_row(parameter: click.Parameter, context: click.Context) -> tuple[str, str] | None:
    """Return an option and its help with default and environment variable; None for arguments and hidden options."""
    record = parameter.get_help_record(context)
    if record is None or not isinstance(parameter, click.Option):
        return None
    return f"`{record[0]}`", record[1]


# --- errors ---------------------------------------------------------------------------------------------------------


def errors_page() -> str:
    """Return the page of all errors in the order in which the code defines them."""
    from tao.model import errors
    from tao.wire.status import status_of

    classes = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, errors.TaoError)]
    introduction = filled(
        "Every error has a reason, which travels on the wire (in gRPC as the trailing metadata `tao-reason`), and says "
        "whether sending the same request again can help. Catch a class to catch those below it as well: "
        "`RetryableError` for everything after which nothing was written."
    )
    tree = ["    " + line for line in error_tree(errors.TaoError, classes, 0)]
    rows = [
        (
            f"`{each.__name__}`",
            f"`{each.reason}`",
            "yes" if each.retryable else "no",
            f"`{status_of(each('')).name}`",
            each.__doc__ or "",
        )
        for each in classes
    ]
    return page(
        "Errors",
        "`tao/model/errors.py`",
        introduction,
        ["## The tree", "", *tree],
        ["## All errors", "", *table(("class", "reason", "retryable", "gRPC status", "meaning"), rows)],
    )


def error_tree(root: type, classes: list[type], depth: int) -> Iterator[str]:
    """Yield the name of a class and, indented, of those below it."""
    yield "  " * depth + root.__name__
    for each in classes:
        if each.__bases__[0] is root:
            yield from error_tree(each, classes, depth + 1)


# --- metrics --------------------------------------------------------------------------------------------------------


class Metric(NamedTuple):
    """One metric as a role registers it."""

    name: str
    labels: str
    roles: frozenset[str]
    text: str


def metrics_page() -> str:
    """Return the page of all metrics, in alphabetical order."""
    introduction = filled(
        "Every server shows its metrics at `/metrics` of its admin port, in the format of Prometheus. All have the "
        "labels `role` and `server`. A name in `_total` is a counter; `_seconds` without a gauge's meaning is a "
        "histogram. [Monitor](../how-to/monitor.md) says which deserve an alarm."
    )
    rows = [
        (f"`tao_{each.name}`", each.labels, ", ".join(sorted(each.roles)), each.text) for each in registered_metrics()
    ]
    return page(
        "Metrics", "the code that registers them", introduction, table(("metric", "labels", "by", "what"), rows)
    )


@functools.cache
def registered_metrics() -> tuple[Metric, ...]:
    """Return every metric that the code registers, those of one name, labels and text put together."""
    found: dict[tuple[str, str, str], frozenset[str]] = {}
    for package in ("observability", "serving", "runtime", *ROLE_OF_PACKAGE):
        for path in sorted((ROOT / "tao" / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for top in tree.body:
                role = ROLE_OF_PACKAGE.get(package)
                roles = frozenset({role}) if role is not None else users_of(getattr(top, "name", ""))
                for name, labels, text in metric_calls(top, {}):
                    key = (name, labels, text)
                    found[key] = found.get(key, frozenset()) | roles
    return tuple(sorted(Metric(name, labels, roles, text) for (name, labels, text), roles in found.items()))


def users_of(name: str) -> frozenset[str]:
    """Return the roles whose code names a function or class of the packages that they share."""
    return frozenset(role for role in ROLES if name in words_of(role))


@functools.cache
def words_of(role: str) -> frozenset[str]:
    """Return every word of the code of a role, with the server that followers and leaders have in common."""
    paths = sorted((ROOT / "tao" / role).rglob("*.py"))
    if role in ("follower", "leader"):
        paths.append(ROOT / "tao/serving/server.py")
    return frozenset(word for path in paths for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))


def metric_calls(node: ast.AST, names: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, labels and help of each metric registered below ``node``; ``names`` holds the texts of a loop."""
    if isinstance(node, ast.For) and (rounds := loop_rounds(node)):
        for each in rounds:
            for child in node.body:
                yield from metric_calls(child, {**names, **each})
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in INSTRUMENTS:
        name = text_of(node.args[0], names) if node.args else None
        text = text_of(node.args[1], names) if len(node.args) > 1 else None
        if name is not None and text is not None:
            yield name, label_text(node, names), text
    for child in ast.iter_child_nodes(node):
        yield from metric_calls(child, names)


def loop_rounds(node: ast.For) -> list[dict[str, str]]:
    """Return the texts that each round of a loop over written-out tuples binds to names; nothing for other loops."""
    if not isinstance(node.iter, ast.Tuple | ast.List) or not isinstance(node.target, ast.Tuple):
        return []
    targets = [each.id if isinstance(each, ast.Name) else "" for each in node.target.elts]
    return [
        {
            target: value.value
            for target, value in zip(targets, each.elts, strict=False)
            if isinstance(value, ast.Constant) and isinstance(value.value, str)
        }
        for each in node.iter.elts
        if isinstance(each, ast.Tuple)
    ]


def text_of(node: ast.expr, names: Mapping[str, str]) -> str | None:
    """Return the text that an expression is, None where only the running code knows."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return names.get(name)
        case ast.JoinedStr(values=values):
            parts = [text_of(each.value if isinstance(each, ast.FormattedValue) else each, names) for each in values]
            return None if None in parts else "".join(part for part in parts if part is not None)
        case _:
            return None


def label_text(call: ast.Call, names: Mapping[str, str]) -> str:
    """Return the labels of a registered metric, with their values where the code writes them out."""
    labels: dict[str, list[str]] = {}
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in {"buckets", "read"}:
            value = text_of(keyword.value, names)
            labels[keyword.arg] = [value] if value is not None else []
    if isinstance(call.func, ast.Attribute) and call.func.attr == "gauge_family" and len(call.args) > 2:
        label = text_of(call.args[2], names)
        if label is not None:
            labels[label] = written_keys(call.args[3] if len(call.args) > 3 else None)
    return "; ".join(
        f"`{label}`" + (f": {', '.join(f'`{each}`' for each in values)}" if values else "")
        for label, values in labels.items()
    )


def written_keys(node: ast.expr | None) -> list[str]:
    """Return the keys of a dictionary that a lambda writes out; nothing for any other reading."""
    if isinstance(node, ast.Lambda) and isinstance(node.body, ast.Dict):
        return [key.value for key in node.body.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return []


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
