from collections.abc import Container
from typing import final

from tao.cache import GraphCache
from tao.routing.read_rates import Key
from tao.wire.read_batch import OperationSizes

@final
class HitBatches:
    def __init__(
        self,
        cache: GraphCache,
        limits: dict[int, int],
        max_bytes: int,
    ) -> None: ...
    def answer(
        self,
        request: bytes,
        newest_version: int,
        max_queries: int,
        hot: Container[Key],
        otypes: bytes | None,
        atypes: bytes | None,
    ) -> tuple[bytes, OperationSizes] | None: ...
