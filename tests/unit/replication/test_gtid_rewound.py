"""Histories in the two notations, and positions as they were."""

from __future__ import annotations

import pytest

from tao.model.errors import OperatorError
from tao.replication.gtid import history_of, rewound

A, B = "3e11fa47-71ca-11e1-9e33-c80aa9429562", "4e11fa47-71ca-11e1-9e33-c80aa9429562"


@pytest.mark.parametrize(
    ("gtid", "history", "number"),
    [("0-1-4711", "0-1", 4711), (f"{A}:23", A, 23), (f"{A.upper()}:1-4:6-90", A, 90), (f"{A}:1-9:11", A, 11)],
)
def test_a_transaction_has_a_number_in_the_history_of_who_committed_it(gtid: str, history: str, number: int) -> None:
    assert history_of(gtid) == (history, number)


@pytest.mark.parametrize("text", ["", "region invalidated", "0-1", f"{A}:", "x:1"])
def test_what_is_no_gtid_is_in_no_history(text: str) -> None:
    with pytest.raises(OperatorError):
        history_of(text)


def test_a_position_goes_back_in_one_history_and_stays_where_it_is_in_the_others() -> None:
    assert rewound("0-2-900,7-3-5", "0-1", 850) == "7-3-5,0-1-850"
    assert rewound(f"{A}:1-90:95-99,{B}:1-7", A, 96) == f"{A}:1-90:95-96,{B}:1-7"
    assert rewound(f"{A}:1-90:95-99,{B}:1-7", A, 50) == f"{A}:1-50,{B}:1-7"
