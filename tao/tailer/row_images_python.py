"""Decode the row images of a row event. `tao.tailer.row_images_core` is the compiled twin.

Only columns of integers and of bytes are read
here, which is all that a shard's tables have; `tao.tailer.row_images` leaves other tables to the library.
"""

from __future__ import annotations

from typing import Final

Image = dict[str, int | bytes | None]
"""The values of a row by column name; None is NULL, or a column that the event leaves out."""

SIGNED: Final = 0x10
BYTES: Final = 0x20
"""A *form* says how an event holds a column's values: an integer of so many bytes, with `SIGNED` a signed one, or, with
`BYTES`, a string of bytes after a length of so many bytes."""
_WIDTH: Final = 0x0F
LARGEST_COUNT: Final = 250
"""The largest number of columns that an event writes in one byte."""


def row_images(data: bytes, at: int, stop: int, names: tuple[str, ...], forms: bytes, sides: int) -> list[Image]:
    """Return the images of an event's rows, in order: one of each row, or with two ``sides`` those before and after.

    ``at``: where the number of columns stands, behind which the bitmaps of present columns and the rows follow up to
    ``stop``. ``names`` and ``forms``: of the columns. Raises `ValueError` when the bytes are not rows of these columns.
    """
    count = len(names)
    if not 0 < count <= LARGEST_COUNT or len(forms) != count or not 0 <= at < stop <= len(data) or data[at] != count:
        raise broken_rows()
    at += 1
    width = (count + 7) // 8
    first = at + sides * width
    if first > stop:
        raise broken_rows()
    present = [int.from_bytes(data[at + side * width : at + (side + 1) * width], "little") for side in range(sides)]
    images: list[Image] = []
    at = first
    while at < stop:
        begun = at
        for columns in present:
            image, at = _image(data, at, stop, names, forms, columns & ((1 << count) - 1))
            images.append(image)
        if at == begun:
            raise broken_rows()  # rows without columns would never end
    return images


def _image(data: bytes, at: int, stop: int, names: tuple[str, ...], forms: bytes, present: int) -> tuple[Image, int]:
    end = at + (present.bit_count() + 7) // 8
    if end > stop:
        raise broken_rows()
    nulls = int.from_bytes(data[at:end], "little")
    at = end
    image: Image = {}
    for name, form in zip(names, forms, strict=True):
        is_present = present & 1
        present >>= 1
        if not is_present:
            image[name] = None
            continue
        is_null = nulls & 1
        nulls >>= 1
        if is_null:
            image[name] = None
            continue
        end = at + (form & _WIDTH)
        if end > stop:
            raise broken_rows()
        number = int.from_bytes(data[at:end], "little", signed=bool(form & SIGNED))
        at = end
        if form & BYTES:
            end = at + number
            if end > stop:
                raise broken_rows()
            image[name] = data[at:end]
            at = end
        else:
            image[name] = number
    return image, at


def broken_rows() -> ValueError:
    """Return the error of an event whose rows do not end where it does."""
    return ValueError("the rows do not end with their event, or have other columns than their table")
