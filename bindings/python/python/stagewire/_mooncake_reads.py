"""Reading payloads from Mooncake Store, with every byte verified.

Over TCP the bytes come straight from the process that lends the memory into their place, over Mooncake's wire but
without its client: a read that is given up writes nothing any more. Else the wheel's client reads into a staging
buffer, since what it was told to read may arrive long after it has failed.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from ._mooncake_client import LEASE_EXPIRED, NOT_FOUND, failure
from ._mooncake_objects import Block, Layout, Placed, Run
from ._mooncake_writes import groups
from ._native import Pending, Segments, Tensor, run_digest, run_scatter
from .errors import Cancelled, Corrupt, Deadline, StagewireError, Unavailable

if TYPE_CHECKING:
    import uuid

    from ._mooncake_client import Client, Until
    from ._mooncake_staging import Staging

Wanted = tuple[int, Tensor, Run]
"""Number of the part, and where it goes."""


class Reads:
    """The reading half of a store."""

    def __init__(self, client: Client, staging: Staging, *, direct: bool) -> None:
        self._client = client
        self._staging = staging
        self._bytes = 0
        self._staged = 0
        self._folder = tempfile.mkdtemp(prefix="sw-mooncake-") if direct else None
        self._segments = None if self._folder is None else Segments(self._folder)

    def stats(self) -> dict[str, int]:
        return {"read_bytes": self._bytes, "read_staged_bytes": self._staged}

    def close(self) -> None:
        segments, self._segments = self._segments, None
        if segments is not None and self._folder is not None:
            segments.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def header(self, payload_id: uuid.UUID, until: Until) -> Placed:
        what = f"looking for payload {payload_id} in Mooncake Store"
        key = Layout(payload_id, payload_id, self._staging.nbytes, ()).header_key
        found = self.small(what, key, until)
        if isinstance(found, int):
            raise failure(found, what, {"payload": str(payload_id)})
        return Placed.from_bytes(found)

    def small(self, what: str, key: str, until: Until) -> bytes | int:
        """The bytes of an object that fits into a staging buffer, or the negative number that says why not."""
        with self._staging.take(until) as staged:
            place = (staged.tensor.data_ptr, staged.tensor.nbytes)
            code = self._client.call(what, until, lambda store: int(store.get_into(key, *place)), after=staged.hold())
            return code if code < 0 else staged.memory[:code]

    def parts(self, placed: Placed, wanted: list[Wanted], until: Until) -> None:
        """Reads parts to where they are wanted, and verifies them."""
        where = {part: (tensor, run) for part, tensor, run in wanted}
        blocks = [block for block in placed.layout.blocks() if block.part in where]
        for group in groups(iter(blocks), self._staging.nbytes):
            replicas = self._replicas(placed, group.blocks, until)
            if replicas is None:
                self._staged_read(placed, group.blocks, where, until)
            else:
                self._pull(placed, group.blocks, replicas, where, until)
            self._bytes += group.nbytes

    def _replicas(self, placed: Placed, blocks: list[Block], until: Until) -> list[list[tuple[str, int]]] | None:
        """Segment and address of each copy of each block; None where one has no copy in memory."""
        if self._segments is None:
            return None
        keys = [placed.layout.key(block) for block in blocks]
        what = f"asking where payload {placed.payload_id} is in Mooncake Store"

        def ask(store: Any) -> list[list[tuple[str, int]]] | int:
            found = store.batch_get_replica_desc(keys)
            places = []
            for key in keys:
                if key not in found:
                    # It does not say why.
                    return min(int(store.get_size(key)), 0)
                memory = [
                    replica.get_memory_descriptor().buffer_descriptor
                    for replica in found[key]
                    if replica.is_memory_replica()
                ]
                places.append([(buffer.transport_endpoint, buffer.buffer_address) for buffer in memory])
            return places

        answer = self._client.call(what, until, ask)
        if isinstance(answer, int):
            raise failure(answer or NOT_FOUND, what, {"payload": placed.payload_id})
        return answer if all(answer) else None

    def _pull(
        self,
        placed: Placed,
        blocks: list[Block],
        replicas: list[list[tuple[str, int]]],
        where: dict[int, tuple[Tensor, Run]],
        until: Until,
    ) -> None:
        segments = self._segments
        if segments is None:
            raise Cancelled(f"payload {placed.payload_id}: the store is closed", reason="mooncake_store.closed")
        copies = min(map(len, replicas))
        for copy in range(copies):
            jobs = [
                (*places[copy], (*where[block.part], block.start, block.nbytes))
                for block, places in zip(blocks, replicas, strict=True)
            ]
            try:
                _finish(segments.pull(jobs, until.left()), until)
                break
            except Cancelled:
                raise
            except Deadline as error:
                raise Deadline(
                    f"payload {placed.payload_id} cannot be read in time from the process that lends its memory: "
                    f"{error.message}",
                    reason="mooncake_store.deadline",
                    details={"payload": placed.payload_id, "cause": error.reason},
                ) from error
            except StagewireError as error:
                if copy + 1 == copies:
                    raise Unavailable(
                        f"payload {placed.payload_id} cannot be read from the process that lends its memory, which is "
                        f"dead or unreachable; it may be lost: {error.message}",
                        reason="mooncake_store.transfer",
                        details={"payload": placed.payload_id, "cause": error.reason},
                    ) from error
        for block in blocks:
            tensor, run = where[block.part]
            found = run_digest((tensor, run, block.start, block.nbytes))
            if found != placed.digests[block.number]:
                raise self._other_bytes(placed, block, found, until)

    def _staged_read(
        self, placed: Placed, blocks: list[Block], where: dict[int, tuple[Tensor, Run]], until: Until
    ) -> None:
        what = f"reading payload {placed.payload_id} from Mooncake Store"
        keys = [placed.layout.key(block) for block in blocks]
        sizes = [block.nbytes for block in blocks]
        places = [0, *itertools.accumulate(sizes[:-1])]
        # Who wrote them may have larger blocks than this store.
        with self._staging.take(until, sum(sizes)) as staged:
            addresses = [staged.tensor.data_ptr + place for place in places]

            def read(store: Any) -> list[int]:
                return list(store.batch_get_into(keys, addresses, sizes))

            codes = self._client.call(what, until, read, after=staged.hold())
            for block, code, place in zip(blocks, codes, places, strict=True):
                # A lease that ended too early says nothing about the bytes. Their digest does.
                if code not in (block.nbytes, LEASE_EXPIRED):
                    raise failure(min(code, -1), what, {"payload": placed.payload_id})
                found = run_digest((staged.tensor, (place, block.nbytes, 1, block.nbytes), 0, block.nbytes))
                if found != placed.digests[block.number]:
                    raise self._other_bytes(placed, block, found, until)
                run_scatter((*where[block.part], block.start, block.nbytes), staged.tensor, place)
                self._staged += block.nbytes

    def _other_bytes(self, placed: Placed, block: Block, found: bytes, until: Until) -> StagewireError:
        """Why other bytes came than were written: mostly, because the object was removed meanwhile."""
        what = f"reading payload {placed.payload_id} from Mooncake Store"
        details = {"payload": placed.payload_id, "part": str(block.part), "block": str(block.number)}
        key = placed.layout.key(block)
        code = self._client.call(what, until, lambda store: int(store.get_size(key)))
        if code < 0:
            return failure(code, what, details)
        expected = placed.digests[block.number]
        return Corrupt(
            f"{what}: block {block.number} of part {block.part} arrived with the digest {found.hex()}, it was written "
            f"with {expected.hex()}; somebody wrote into the store's memory",
            reason="payload.digest",
            details={**details, "found": found.hex(), "expected": expected.hex()},
        )


def _finish(pending: Pending, until: Until) -> None:
    """Waits for a read. It writes nothing any more when this has returned, or raised."""
    try:
        with until.waking(pending.cancel):
            pending.wait()
    except BaseException:
        pending.cancel()
        pending.wait()
        raise
    pending.take()
