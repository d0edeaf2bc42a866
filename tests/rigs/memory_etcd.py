"""An etcd in a dictionary, whose answers can be lost, and which can carry out a transaction a second time, late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

from tao.etcd.client import EtcdClient, EtcdRefused
from tao.etcd.location import EtcdLocation, EtcdSettings
from tao.etcd.v3 import kv_pb2
from tao.etcd.v3 import rpc_pb2 as pb
from tao.model.errors import TaoError

PLACE = EtcdLocation(("127.0.0.1:1",), "/tao")


class MemoryEtcd(EtcdClient):
    """Implements what documents and locks use, but watches. Leases end by the clock of the test."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(PLACE, EtcdSettings())
        self._now = clock
        self._numbers = count(1)
        self.revision = 1
        self.keys: dict[bytes, kv_pb2.KeyValue] = {}
        self.leases: dict[int, tuple[int, float]] = {}
        """Lease → its length in seconds, and its end."""
        self.transactions: list[pb.TxnRequest] = []
        self.refusal: TaoError | None = None
        """What calls raise, without an effect, until it is None again."""
        self.lost_answer: TaoError | None = None
        """What the next transaction raises after it was carried out."""
        self.before_transaction: Callable[[pb.TxnRequest], None] = lambda _request: None

    async def read(self, key: bytes, range_end: bytes = b"") -> pb.RangeResponse:
        await self._begin()
        return self._range(pb.RangeRequest(key=key, range_end=range_end))

    async def transact(
        self, compare: Sequence[pb.Compare], success: Sequence[pb.RequestOp], failure: Sequence[pb.RequestOp] = ()
    ) -> pb.TxnResponse:
        await self._begin()
        request = pb.TxnRequest(compare=compare, success=success, failure=failure)
        self.before_transaction(request)
        answer = self.carry_out(request)
        self.transactions.append(request)
        if (lost := self.lost_answer) is not None:
            self.lost_answer = None
            raise lost
        return answer

    async def grant_lease(self, seconds: int) -> int:
        await self._begin()
        number = next(self._numbers)
        self.leases[number] = (seconds, self._now() + seconds)
        return number

    async def keep_lease(self, lease: int) -> bool:
        await self._begin()
        if lease not in self.leases:
            return False
        seconds, _ = self.leases[lease]
        self.leases[lease] = (seconds, self._now() + seconds)
        return True

    async def revoke_lease(self, lease: int) -> None:
        await self._begin()
        self._end_lease(lease)

    def carry_out(self, request: pb.TxnRequest) -> pb.TxnResponse:
        """Carry out a transaction, or the late duplicate of one."""
        self._end_leases()
        succeeded = all(map(self._holds, request.compare))
        operations = request.success if succeeded else request.failure
        if any(each.request_put.lease and each.request_put.lease not in self.leases for each in operations):
            raise EtcdRefused("etcd refused it: etcdserver: requested lease not found")
        self.revision += 1
        answers = [self._apply(each) for each in operations]
        header = pb.ResponseHeader(revision=self.revision)
        return pb.TxnResponse(header=header, succeeded=succeeded, responses=answers)

    async def _begin(self) -> None:
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        self._end_leases()

    def _end_leases(self) -> None:
        for number in [number for number, (_, end) in self.leases.items() if end <= self._now()]:
            self._end_lease(number)

    def _end_lease(self, number: int) -> None:
        self.leases.pop(number, None)
        for key in [key for key, each in self.keys.items() if each.lease == number]:
            del self.keys[key]

    def _between(self, key: bytes, range_end: bytes) -> list[kv_pb2.KeyValue]:
        end = range_end or key + b"\0"
        return [self.keys[each] for each in sorted(self.keys) if key <= each < end]

    def _range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        found = self._between(request.key, request.range_end)
        return pb.RangeResponse(header=pb.ResponseHeader(revision=self.revision), kvs=found)

    def _holds(self, compare: pb.Compare) -> bool:
        found = self._between(compare.key, compare.range_end)
        if compare.target == pb.Compare.CREATE:
            return not found
        if compare.target == pb.Compare.VALUE:
            return bool(found) and found[0].value == compare.value
        if compare.result == pb.Compare.LESS:
            return all(each.mod_revision < compare.mod_revision for each in found)
        return sum(each.mod_revision for each in found) == compare.mod_revision

    def _apply(self, operation: pb.RequestOp) -> pb.ResponseOp:
        if operation.HasField("request_put"):
            put = operation.request_put
            self.keys[put.key] = kv_pb2.KeyValue(
                key=put.key, value=put.value, lease=put.lease, mod_revision=self.revision
            )
        elif operation.HasField("request_delete_range"):
            gone = operation.request_delete_range
            for each in self._between(gone.key, gone.range_end):
                del self.keys[each.key]
        else:
            return pb.ResponseOp(response_range=self._range(operation.request_range))
        return pb.ResponseOp()
