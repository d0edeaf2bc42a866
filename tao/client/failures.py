"""What a many-form raises when some of its items failed."""

from __future__ import annotations

from collections.abc import Sequence

from tao.model.errors import TaoError


class SomeFailed(TaoError):
    """Some items of a many-form failed; the others were done, and their results are here.

    ``results``: in the order of the items, a `TaoError` in the place of each that failed; ``errors``: those alone, by
    the item's index. Raised after every item has its result, so that nothing is left under way.
    """

    reason = "SOME_FAILED"

    def __init__(self, results: Sequence[object]) -> None:
        errors = {index: each for index, each in enumerate(results) if isinstance(each, TaoError)}
        first, error = next(iter(errors.items()))
        super().__init__(
            f"{len(errors)} of {len(results)} items failed; the first is item {first}: {error.reason}: {error.message}"
        )
        self.results = results
        self.errors = errors

    @property
    def all_retryable(self) -> bool:
        """Repeating the failed items may help, and none of them was written."""
        return all(error.retryable for error in self.errors.values())
