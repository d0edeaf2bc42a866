from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tao.client.batches_python import Made, Receiver, Row, Server, Type

def are_ids(values: tuple[object, ...]) -> bool: ...
def by_server(
    rows: Sequence[Row], receivers: Sequence[Receiver], reader: Callable[[int], Server]
) -> dict[Server, tuple[list[Row], list[Receiver]]]: ...
def deliver(waiters: list[Any], slots: Sequence[int] | None, values: Sequence[Any], joined: type[Any]) -> None: ...
def objects_of(
    ids: Sequence[int],
    values: Sequence[object],
    types: Mapping[bytes, Type],
    make: Callable[[int, Type, bytes], Made],
) -> list[Made] | None: ...
