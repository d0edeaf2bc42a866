"""What a query of one awaiter costs is counted for both processes and printed as one table."""

from loadtest.research.lone_query import Measured, Side, table


def side(calls: dict[str, float]) -> Side:
    return Side(user_us=20.4, system_us=9.6, wake_ups=0.5, calls=calls)


def test_the_table_has_a_column_for_each_process_and_counts_the_turns_of_its_loop() -> None:
    client, server = side({"epoll_pwait": 2.0, "read": 1.0, "write": 1.0}), side({"epoll_wait": 1.0, "read": 1.25})
    measured = Measured(contestant="tao", p50_us=50.0, mean_us=60.0, client=client, server=server)
    assert table([measured]).splitlines() == [
        "| a query | tao: client | tao: server |",
        "|---|---:|---:|",
        "| system calls | 4.00 | 2.25 |",
        "| of them turns of the loop | 2.00 | 1.00 |",
        "| wake-ups | 0.50 | 0.50 |",
        "| CPU, user and kernel, µs | 20, 10 | 20, 10 |",
    ]
