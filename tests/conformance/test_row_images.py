"""Both decoders of row images, compiled and in Python, make the same of the same bytes."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tao.tailer.row_images_python import BYTES, SIGNED, Image
from tao.tailer.row_images_python import row_images as specified

COMPILED: Final = "tao.tailer.row_images_core"
needs_compiled = pytest.mark.skipif(importlib.util.find_spec(COMPILED) is None, reason="no compiled core here")

RowImages = Callable[[bytes, int, int, tuple[str, ...], bytes, int], list[Image]]
Value = int | bytes | None

FORMS: Final = (*range(1, 9), *(SIGNED | width for width in range(1, 9)), *(BYTES | width for width in range(1, 5)))


@pytest.fixture(scope="module", params=["tao.tailer.row_images_python", pytest.param(COMPILED, marks=needs_compiled)])
def row_images(request: pytest.FixtureRequest) -> RowImages:
    decode: RowImages = importlib.import_module(request.param).row_images
    return decode


def names_of(forms: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"column{number}" for number in range(len(forms)))


def encoded(value: Value, form: int) -> bytes:
    """Return a value as an event holds it; nothing for NULL."""
    width = form & 0x0F
    if value is None:
        return b""
    if isinstance(value, bytes):
        return len(value).to_bytes(width, "little") + value
    return value.to_bytes(width, "little", signed=bool(form & SIGNED))


def bits(flags: Sequence[bool]) -> bytes:
    return sum(flag << place for place, flag in enumerate(flags)).to_bytes((len(flags) + 7) // 8, "little")


def event(forms: Sequence[int], present: Sequence[Sequence[bool]], images: Sequence[Sequence[Value]]) -> bytes:
    """Return the end of a row event, from its number of columns on. ``present``: the columns that each side holds."""
    parts = [bytes([len(forms)]), *map(bits, present)]
    for number, image in enumerate(images):
        held = [place for place, is_held in enumerate(present[number % len(present)]) if is_held]
        parts.append(bits([image[place] is None for place in held]))
        parts += [encoded(image[place], forms[place]) for place in held]
    return b"".join(parts)


def values(form: int) -> st.SearchStrategy[Value]:
    width = form & 0x0F
    if form & BYTES:
        return st.none() | st.binary(max_size=300 if width > 1 else 255)
    if form & SIGNED:
        return st.none() | st.integers(-(1 << 8 * width - 1), (1 << 8 * width - 1) - 1)
    return st.none() | st.integers(0, (1 << 8 * width) - 1)


@st.composite
def events(draw: st.DrawFn) -> tuple[list[int], list[list[bool]], list[list[Value]]]:
    forms = draw(st.lists(st.sampled_from(FORMS), min_size=1, max_size=20))
    sides = draw(st.integers(1, 2))
    flags = st.lists(st.sampled_from([True, True, True, False]), min_size=len(forms), max_size=len(forms))
    present = [draw(flags.filter(any)) for _ in range(sides)]
    image = st.tuples(*map(values, forms)).map(list)
    images = draw(st.lists(image, max_size=4 * sides).filter(lambda some: len(some) % sides == 0))
    return forms, present, images


def outcome(decode: RowImages, data: bytes, forms: Sequence[int], sides: int) -> list[Image] | str:
    """Return all that a caller learns of a call."""
    try:
        return decode(data, 0, len(data), names_of(forms), bytes(forms), sides)
    except ValueError as error:
        return str(error)


@given(events())
def test_the_images_are_the_values_that_were_written(
    row_images: RowImages, drawn: tuple[list[int], list[list[bool]], list[list[Value]]]
) -> None:
    forms, present, images = drawn
    written = [
        {
            name: value if is_held else None
            for name, value, is_held in zip(names_of(forms), image, present[number % len(present)], strict=True)
        }
        for number, image in enumerate(images)
    ]
    assert outcome(row_images, event(forms, present, images), forms, len(present)) == written


def test_rows_that_end_early_or_late_are_refused(row_images: RowImages) -> None:
    forms = (8, 2, BYTES | 1)
    rows = event(forms, [[True] * 3], [[1, 2, b"three"]])
    no_rows = event(forms, [[True] * 3], [])
    assert outcome(row_images, no_rows, forms, 1) == []
    for end in {*range(len(rows))} - {len(no_rows)}:
        assert isinstance(outcome(row_images, rows[:end], forms, 1), str)
    assert isinstance(outcome(row_images, rows + bytes(3), forms, 1), str)
    assert isinstance(outcome(row_images, event(forms, [[True] * 3] * 2, [[1, 2, b"x"]]), forms, 2), str)


def test_other_columns_than_the_table_has_are_refused(row_images: RowImages) -> None:
    data = event((8, 2), [[True] * 2], [[1, 2]])
    assert isinstance(outcome(row_images, data, (8,), 1), str)
    assert isinstance(outcome(row_images, data, (8, 2, 2), 1), str)
    assert isinstance(outcome(row_images, b"\x00", (), 1), str)


def test_rows_without_columns_end(row_images: RowImages) -> None:
    assert isinstance(outcome(row_images, b"\x01\x00" + bytes(8), (8,), 1), str)


@needs_compiled
@given(st.binary(max_size=120), st.lists(st.sampled_from(FORMS), min_size=1, max_size=20), st.integers(1, 2))
@example(b"\x01\x01\x00", [BYTES | 4], 1)
@example(b"\x01\x01\x00\xff\xff\xff\xff", [BYTES | 4], 1)
def test_both_make_the_same_of_any_bytes(data: bytes, forms: list[int], sides: int) -> None:
    compiled: Any = importlib.import_module(COMPILED)
    for each in (data, bytes([len(forms)]) + data):
        assert outcome(compiled.row_images, each, forms, sides) == outcome(specified, each, forms, sides)
