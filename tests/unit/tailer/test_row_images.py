"""Which tables' rows are decoded without the library."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pymysqlreplication.constants import FIELD_TYPE

from tao.tailer.row_images import columns_of


@pytest.mark.parametrize(("count", "is_read_here"), [(250, True), (251, False)])
def test_tables_whose_number_of_columns_takes_more_than_a_byte_are_left_to_the_library(
    count: int, is_read_here: bool
) -> None:
    columns = [SimpleNamespace(type=FIELD_TYPE.LONG, unsigned=False, name=f"c{number}") for number in range(count)]
    assert (columns_of(SimpleNamespace(columns=columns)) is not None) == is_read_here
