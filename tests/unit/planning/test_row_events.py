"""Translations of row events into messages to caches, as transcripts: `transcripts/*.txt`.

A scenario is a title, the transaction's rows and what follows. ``+`` is an insertion, ``-`` a deletion, ``~`` an
update with ``before|after`` where the two differ; ``1:7`` is the id 7 of shard 1, ``2.9`` version 9 of epoch 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tao.model.changes import ListChange, ListInvalidation, Message, ObjectChange
from tao.model.ids import SHARD_SHIFT
from tao.model.relay import Touch, TouchKind
from tao.model.versions import counter_of, epoch_of
from tao.planning.row_events import RowEvent, Translated, translate
from tests.unit.planning.stored_rows import SCHEMA

TRANSCRIPTS = Path(__file__).parent / "transcripts"
MAX_TOUCHES = 2


def scenarios() -> Iterator[object]:
    for file in sorted(TRANSCRIPTS.glob("*.txt")):
        for text in file.read_text().strip().split("\n\n"):
            title, *lines = text.splitlines()
            rows = [line.strip() for line in lines if line.startswith("  ")]
            expected = [line.removeprefix("=> ") for line in lines if line.startswith("=> ")]
            assert len(rows) + len(expected) == len(lines), text
            yield pytest.param(rows, expected, id=f"{file.stem}: {title}")


def value(name: str, text: str) -> object:
    if text == "NULL":
        return None
    if name in ("data", "writer", "text", "master_server", "owner", "atypes"):
        return text.encode()
    if (found := re.fullmatch(r"(\d+):(\d+)", text)) is not None:
        return int(found[1]) << SHARD_SHIFT | int(found[2])
    if (found := re.fullmatch(r"(\d+)\.(\d+)", text)) is not None:
        return int(found[1]) << 48 | int(found[2])
    return int(text)


def row_event(line: str) -> RowEvent:
    shard, table, sign, *columns = line.split()
    images: tuple[dict[str, object], dict[str, object]] = ({}, {})
    for column in columns:
        name, _, text = column.partition("=")
        old, _, new = text.partition("|")
        images[0][name] = value(name, old)
        images[1][name] = value(name, new if "|" in text else old)
    event = RowEvent(int(shard), table, images[0] if sign != "+" else None, images[1] if sign != "-" else None)
    assert event.kind == {"+": "insert", "-": "delete", "~": "update"}[sign]
    return event


def an_id(number: int) -> str:
    return f"{number >> SHARD_SHIFT}:{number & (1 << SHARD_SHIFT) - 1}"


def a_version(version: int) -> str:
    return f"{epoch_of(version)}.{counter_of(version)}"


def message_line(message: Message) -> str:
    match message:
        case ObjectChange():
            head = f"object {an_id(message.id)} {a_version(message.before)} -> {a_version(message.after)}"
            data = message.data or b""
            shown = f"was {int.from_bytes(data, 'little')}" if message.deleted else data.decode()
            return f"{head} otype {message.otype} {shown}".rstrip()
        case ListChange():
            versions = f"{a_version(message.before)} -> {a_version(message.after)}"
            words = [f"list {an_id(message.id1)}/{message.atype} {versions} count {message.count}"]
            if message.gone:
                words += ["gone", *(f"{an_id(edge.id2)}@{edge.time}" for edge in message.gone)]
            if message.put:
                words += ["put"]
            for edge in message.put:
                words.append(f"{an_id(edge.id2)}@{edge.time}" + (f"={edge.data.decode()}" if edge.data else ""))
            return " ".join(words)
        case ListInvalidation():
            return f"drop list {an_id(message.id1)}/{message.atype} below {a_version(message.version)}"
        case _:
            raise AssertionError(f"a translation has no {message}")


def touch_line(touch: Touch) -> str:
    key = an_id(touch.id) + (f"/{touch.atype}" if touch.kind is TouchKind.LIST else "")
    return f"touch {key} above {a_version(touch.version)}"


def transcript(translated: Translated) -> list[str]:
    lines = [
        f"shard {each.shard} epoch {each.version_epoch}: {message_line(message)}"
        for each in translated.messages
        for message in each.messages
    ]
    lines += map(touch_line, translated.touches)
    lines += [f"invalidate {shard}" for shard in translated.bulk_shards]
    lines += [f"heartbeat {each.writer} {each.unix_ms}" for each in translated.heartbeats]
    if translated.passed_over:
        lines.append(f"passed over {translated.passed_over}")
    if translated.unknown_columns:
        lines.append(f"unknown columns {translated.unknown_columns}")
    return lines or ["nothing"]


@pytest.mark.parametrize(("rows", "expected"), list(scenarios()))
def test_the_row_events_translate_to_the_transcript(rows: list[str], expected: list[str]) -> None:
    assert transcript(translate(list(map(row_event, rows)), SCHEMA, MAX_TOUCHES)) == expected


def test_text_in_a_binary_column_invalidates_the_shard_unless_it_is_empty() -> None:
    row = {"id": 1 << SHARD_SHIFT | 1, "otype": 1, "version": 1 << 48 | 1, "deleted": 0}
    (messages,) = translate([RowEvent(1, "objects", None, {**row, "data": ""})], SCHEMA).messages
    assert messages.messages == (ObjectChange(row["id"], 0, row["version"], 1, b""),)
    assert translate([RowEvent(1, "objects", None, {**row, "data": "é"})], SCHEMA).bulk_shards == (1,)
