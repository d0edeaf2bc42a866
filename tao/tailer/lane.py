"""What one leader has still to be told: its queues, and what becomes of them when it cannot be told (DESIGN.md §7).

A lane does no I/O and keeps no accounts. A shard that the leader does not accept is *held*: it waits in a queue of its
own and is tried alone, so that it holds up no other. What nobody can be told in the memory there is becomes one bulk
invalidation per shard, which the topology bounds. A proof of a time stands for every shard of the leader, so none is
told while a shard is held, and of those that wait only the newest is worth telling.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final

import msgspec

from tao.tailer.relay_parts import Part, is_proof
from tao.tailer.settings import DeliverySettings


class Lane:
    """The queues of one leader. Of a shard, parts keep their order and are all in one queue."""

    __slots__ = (
        *("failures", "held", "held_tries", "hurried", "leader", "parts", "proof", "refused", "retry_at", "running"),
        *("routed_by", "sending", "sending_count", "timer", "woken"),
    )

    def __init__(self, leader: str) -> None:
        self.leader: Final = leader
        self.parts: deque[Part] = deque()
        """Of the shards that are not held."""
        self.held: Final[dict[int, deque[Part]]] = {}
        self.refused: Final[set[int]] = set()
        """Of the held shards, those that were not accepted alone either."""
        self.proof: Part | None = None
        """Waits until no shard is held."""
        self.failures = 0
        """Of the leader as a whole, one after the other. Above zero: it is away."""
        self.held_tries = 0
        self.retry_at = 0.0
        """In the loop's time: when held shards are tried again."""
        self.routed_by = 0
        """The version of the topology by which its shards are this leader's."""
        self.running = False
        """A task sends."""
        self.hurried = 0
        """So many of `parts`, at least, may not wait for more."""
        self.timer: asyncio.TimerHandle | None = None
        """Until then those that may do; set while there are some and no task sends."""
        self.sending: deque[Part] | None = None
        """The queue whose first ``sending_count`` parts are under way."""
        self.sending_count = 0
        self.woken: Final = asyncio.Event()
        """Something was added."""

    @property
    def empty(self) -> bool:
        """Nothing is left to tell."""
        return not self.parts and not self.held

    def may_rest(self, settings: DeliverySettings) -> bool:
        """Whether nothing is left to tell, or only what may wait for more."""
        if not self.parts:
            self.hurried = 0
        patient = not (self.failures or self.held) and self.hurried <= 0 and len(self.parts) < settings.gather_parts
        return patient or self.empty

    def add(self, part: Part, *, patient: bool = False) -> Part | None:
        """Queue a part; ``patient``: it may wait for more. Returns the proof that it makes superfluous, if any."""
        superfluous = None
        if self.held and is_proof(part):
            superfluous, self.proof = self.proof, part
        else:
            self.held.get(part.shard, self.parts).append(part)
        if not patient:
            self.hurried = len(self.parts)
        self.woken.set()
        return superfluous

    def disprove(self) -> None:
        """The proofs that wait prove nothing any more; a later one may."""
        under_way = self.sending_count if self.parts is self.sending else 0
        for part in (*islice(self.parts, under_way, None), *filter(None, (self.proof,))):
            part.proven_unix_ms = 0

    def hold(self, shards: Iterable[int]) -> list[Part]:
        """Put the shards' parts aside, each shard's into a queue of its own. Returns superfluous proofs."""
        for shard in shards:
            self.held.setdefault(shard, deque())
        superfluous = []
        parts, self.parts = self.parts, deque()
        for part in parts:
            replaced = self.add(part)
            if replaced is not None:
                superfluous.append(replaced)
        return superfluous

    def release(self, shard: int) -> None:
        """The shard is accepted again (or gone): what is left of it takes its place at the end."""
        self.parts.extend(self.held.pop(shard))
        self.refused.discard(shard)
        if not self.held:
            self.held_tries = 0
            if self.proof is not None:
                self.parts.append(self.proof)
                self.proof = None
        self.hurried = len(self.parts)  # it has waited long enough

    def take_all(self) -> list[Part]:
        """Empty the lane: its parts, each shard's in their order, then the proof."""
        parts = list(self.parts)
        for queue in self.held.values():
            parts.extend(queue)
        if self.proof is not None:
            parts.append(self.proof)
        self.parts.clear()
        self.held.clear()
        self.refused.clear()
        self.proof = None
        return parts

    def collapse(self) -> tuple[list[Part], int]:
        """Say of the refused shards, of all shards when the leader is away, only that they are void. Returns the parts
        that are said no more, and the bytes of those that stay for them, which have the earliest receipts."""
        dropped: list[Part] = []
        freed_bytes = 0
        if self.failures:
            freed_bytes += self._collapse(self.parts, dropped)
        for shard, queue in self.held.items():
            if self.failures or shard in self.refused:
                freed_bytes += self._collapse(queue, dropped)
        return dropped, freed_bytes

    def _collapse(self, queue: deque[Part], dropped: list[Part]) -> int:
        under_way = self.sending_count if queue is self.sending else 0
        waiting = [queue.pop() for _ in range(len(queue) - under_way)]
        waiting.reverse()
        newest_proof = next((part for part in reversed(waiting) if is_proof(part)), None)
        void: set[int] = set()
        freed_bytes = 0
        for part in waiting:
            if part.shard in void or (is_proof(part) and part is not newest_proof):
                dropped.append(part)
                continue
            if not is_proof(part):
                void.add(part.shard)
                part.content = part.shard
                part.span = msgspec.structs.replace(part.span, more=False)  # what follows is dropped, and void, too
            # There is at most one of each shard: they count for nothing, or they could fill the room they make.
            freed_bytes += part.size_bytes
            part.size_bytes = 0
            queue.append(part)
        return freed_bytes


def head_of(queue: deque[Part], settings: DeliverySettings) -> list[Part]:
    """As much of a queue as one relay holds."""
    taken: list[Part] = []
    size = 0
    for part in islice(queue, settings.relay_parts):
        size += part.size_bytes
        if taken and size > settings.relay_bytes:
            break
        taken.append(part)
    return taken
