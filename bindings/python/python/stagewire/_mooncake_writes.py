"""Writing payloads into Mooncake Store: a put session over all of a payload's objects."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from ._mooncake_client import BAD_ARGUMENTS, EXISTS, failure
from ._mooncake_objects import Block, Layout, Placed, Run
from ._native import Tensor, run_digest, run_gather, run_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._mooncake_client import Client, Until
    from ._mooncake_staging import Staging

Source = tuple[Tensor, Run]

DIRECT_ROW = 256 << 10
"""Rows shorter than this are packed first: each piece of a transfer costs Mooncake some 50 µs, a copy of these less."""

_MOST_BLOCKS = 256
"""Objects of one call: Mooncake's queue is full with 2048 pieces, and may stay so."""


@dataclasses.dataclass(slots=True)
class _Group:
    """Blocks that one call moves."""

    blocks: list[Block] = dataclasses.field(default_factory=list)
    nbytes: int = 0


def groups(blocks: Iterator[Block], most: int) -> Iterator[_Group]:
    """Blocks in calls of at most so many bytes."""
    group = _Group()
    for block in blocks:
        if group.blocks and (group.nbytes + block.nbytes > most or len(group.blocks) == _MOST_BLOCKS):
            yield group
            group = _Group()
        group.blocks.append(block)
        group.nbytes += block.nbytes
    if group.blocks:
        yield group


class Writes:
    """The writing half of a store."""

    def __init__(self, client: Client, staging: Staging, *, direct: bool) -> None:
        self._client = client
        self._staging = staging
        self._direct = direct
        self._bytes = 0
        self._staged = 0

    def stats(self) -> dict[str, int]:
        return {"written_bytes": self._bytes, "write_staged_bytes": self._staged}

    def reserve(self, layout: Layout, until: Until, *, pinned: bool = True) -> int:
        """Begins all objects of a payload, or none. 0, or the number that says why not."""
        keys = [layout.header_key, *map(layout.key, layout.blocks())]
        sizes = [layout.header_bytes, *(block.nbytes for block in layout.blocks())]
        config = self._client.pinned if pinned else self._client.evictable

        mine: list[str] = []

        def start(store: Any) -> int:
            codes = list(store.batch_put_session_start(keys, sizes, config))
            begun = [key for key, code in zip(keys, codes, strict=True) if code == 0]
            refused = [code for code in codes if code != 0]
            if refused:
                if begun:
                    store.batch_put_session_revoke(begun)
                # Bad arguments are what the wheel calls an id that this very process is writing.
                return EXISTS if codes[0] in (EXISTS, BAD_ARGUMENTS) else int(refused[0])
            mine.extend(keys)
            return 0

        what = f"beginning payload {layout.payload_id} in Mooncake Store"

        def undo(store: Any) -> None:
            # Another draft of this id may have the keys.
            if mine:
                store.batch_put_session_revoke(mine)

        return self._client.call(what, until, start, undo)

    def write(self, layout: Layout, sources: list[Source], until: Until) -> Placed:
        """Fills and finishes a payload that was begun, or abandons it."""
        try:
            return self._write(layout, sources, until)
        except BaseException:
            self.abandon(layout)
            raise

    def _write(self, layout: Layout, sources: list[Source], until: Until) -> Placed:
        digests: list[bytes] = []
        for group in groups(layout.blocks(), self._staging.nbytes):
            digests += self._fill(layout, group, sources, until)
        placed = Placed(layout, tuple(digests))
        what = f"finishing payload {layout.payload_id} in Mooncake Store"
        header, header_key, keys = Tensor.from_buffer(placed.to_bytes()), layout.header_key, placed.keys()

        def finish(store: Any) -> list[int]:
            size = header.nbytes
            written = store.batch_put_from_multi_buffer_ranges([header_key], [[header.data_ptr]], [[size]], [[0]])
            # The header is the last of the keys: who finds it finds everything.
            return [0, *store.batch_put_session_end(keys)] if list(written) == [size] else list(written)

        for code in self._client.call(what, until, finish, self._undo(layout)):
            if code != 0:
                raise failure(min(code, -1), what, {"payload": str(layout.payload_id)})
        self._bytes += layout.nbytes
        return placed

    def _fill(self, layout: Layout, group: _Group, sources: list[Source], until: Until) -> list[bytes]:
        """Writes blocks into their objects; their digests."""
        keys = [layout.key(block) for block in group.blocks]
        sizes = [block.nbytes for block in group.blocks]
        rows = [
            _rows(*sources[block.part], block) if self._direct and _wide(sources[block.part][1]) else None
            for block in group.blocks
        ]
        with self._staging.take(until) if None in rows else contextlib.nullcontext() as staged:
            digests, pieces, at = [], [], 0
            for block, direct in zip(group.blocks, rows, strict=True):
                tensor, run = sources[block.part]
                if direct is None and staged is not None:
                    run_gather((tensor, run, block.start, block.nbytes), staged.tensor, at)
                    tensor, run = staged.tensor, (at, block.nbytes, 1, block.nbytes)
                    direct = [(at, block.nbytes)]
                    digests.append(run_digest((tensor, run, 0, block.nbytes)))
                    at += block.nbytes
                    self._staged += block.nbytes
                else:
                    digests.append(run_digest((tensor, run, block.start, block.nbytes)))
                pieces.append((tensor, direct or []))
            addresses = [[tensor.data_ptr + offset for offset, _ in rows] for tensor, rows in pieces]
            lengths = [[length for _, length in rows] for _, rows in pieces]
            places = [[0, *itertools.accumulate(row[:-1])] for row in lengths]

            def write(store: Any) -> list[int]:
                # What is read from stays as long as the call does.
                _ = pieces
                return list(store.batch_put_from_multi_buffer_ranges(keys, addresses, lengths, places))

            what = f"writing {group.nbytes} bytes of payload {layout.payload_id} into Mooncake Store"
            after = None if staged is None else staged.hold()
            codes = self._client.call(what, until, write, self._undo(layout), after)
        for code, size in zip(codes, sizes, strict=True):
            if code != size:
                raise failure(min(code, -1), what, {"payload": str(layout.payload_id)})
        return digests

    def abandon(self, layout: Layout, until: Until | None = None) -> None:
        """Takes away whatever there is of a payload that was begun, and waits for that as long as it is told to."""
        undo = self._undo(layout)
        if until is None:
            self._client.later(undo)
        else:
            self._client.call(f"abandoning payload {layout.payload_id} in Mooncake Store", until, undo)

    @staticmethod
    def _undo(layout: Layout) -> Callable[[Any], None]:
        keys = [*map(layout.key, layout.blocks()), layout.header_key]

        def undo(store: Any) -> None:
            revoked = store.batch_put_session_revoke(keys)
            finished = [key for key, code in zip(keys, revoked, strict=True) if code != 0]
            if finished:
                store.batch_remove(finished, True)

        return undo


def _wide(run: Run) -> bool:
    _, width, rows, pitch = run
    return rows <= 1 or width == pitch or width >= DIRECT_ROW


def _rows(tensor: Tensor, run: Run, block: Block) -> list[tuple[int, int]]:
    return run_rows((tensor, run, block.start, block.nbytes))
