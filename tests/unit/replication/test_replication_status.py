"""What a server's report of its replication says about receiving."""

from __future__ import annotations

import pytest

from tao.replication.server_statements import _status_of
from tao.storage.dialect import Dialect


@pytest.mark.parametrize(
    ("running", "errno", "stopped", "failed"),
    [
        ("Yes", 0, False, False),
        ("Connecting", 2003, False, False),
        ("No", 0, True, False),
        ("No", 2003, True, False),  # stopped by a promotion while its master was out of reach
        ("No", 1236, True, True),
    ],
)
def test_a_replica_that_was_stopped_while_its_master_was_out_of_reach_has_not_failed(
    running: str, errno: int, stopped: bool, failed: bool
) -> None:
    row = {
        "Master_Host": "east",
        "Master_Port": 3306,
        "Slave_IO_Running": running,
        "Slave_SQL_Running": "Yes",
        "Last_IO_Errno": errno,
        "Last_IO_Error": "error" if errno else "",
        "Last_SQL_Error": "",
        "Seconds_Behind_Master": None,
        "Gtid_IO_Pos": "0-1-7",
        "Master_Log_File": "binlog.000001",
        "Read_Master_Log_Pos": 500,
    }
    status = _status_of(Dialect.MARIADB, [row], [{"position": "0-1-7"}], "12")
    assert status is not None
    assert (status.receiving_stopped, status.receiving_failed) == (stopped, failed)
    assert status.heard == "12 binlog.000001:500"
