from typing import final

from tao.cache import GraphCache
from tao.model.queries import Query
from tao.routing.read_rates import ReadRates
from tao.serving.access import ReadCheck

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
        rates: ReadRates,
        check: ReadCheck | None,
        for_fill: bool,
    ) -> tuple[bytes, tuple[int, int, int, int, int, int], list[int], list[Query], dict[int, int], int] | None: ...
