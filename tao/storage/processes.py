"""What the connections of a database server are about."""

from __future__ import annotations

from typing import Final, NamedTuple

from tao.storage.dialect import Dialect
from tao.storage.result_packets import Columns, Row
from tao.storage.session import Session

_SHOWN: Final = ("Id", "User", "Host", "db", "Command", "Time", "State", "Info")
_ALSO_SHOWN: Final = {Dialect.MARIADB: ("Progress",), Dialect.MYSQL: ()}


class ServerProcess(NamedTuple):
    """One connection. ``state``: of the statement under way, in the server's words; "" for none."""

    thread: int
    user: str
    command: str
    state: str


async def server_processes(session: Session, *, deadline: float) -> list[ServerProcess]:
    """All of them, this session's among them. Raises as `Session.stream`."""
    names = _SHOWN + _ALSO_SHOWN[session.dialect]
    rows: list[Row] = []
    # As bytes: a statement under way holds what somebody stores, in no character set at all, and the tables of
    # information_schema make that column, and fail, also when it is not asked for.
    undecoded = Columns(names, (None,) * len(names))
    await session.stream("SHOW FULL PROCESSLIST", (), rows.extend, deadline=deadline, columns=undecoded)
    return [
        ServerProcess(int(thread), user.decode(), command.decode(), (state or b"").decode())
        for thread, user, _, _, command, _, state, *_ in rows
    ]
