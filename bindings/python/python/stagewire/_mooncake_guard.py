"""Payloads that stay with their producer, and go to Mooncake Store when their consumer is lost.

The handle says from the beginning where else its payload may be one day, so that it stays good wherever that goes, and
after its producer has ended. No room is kept for it: Mooncake forgets reservations. Where the store has none, the
payload stays with its producer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from ._mooncake_client import Until
from .errors import StagewireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._mooncake_backend import Backend
    from ._native import Connector, Handle, Pending, Publication

_LOG = logging.getLogger(__name__)

# Seconds between two looks at a payload that somebody reads, or whose chunks are not all there.
_PAUSE = 0.1

# Seconds after which what was consumed is forgotten, where nothing else is published.
_LOOK = 1.0


class Guarded:
    """A payload with its producer, as `_native.Publication` is one, which may move.

    Args:
        publication: The payload.
        handle: Its handle, which says where it may be found one day.
        put: Brings its tensors to the store.
        exclusive: Whether its consumer deletes it.
    """

    def __init__(
        self, publication: Publication, handle: Handle, put: Callable[[Until], object], *, exclusive: bool
    ) -> None:
        self._publication = publication
        self.handle = handle
        self.put = put
        self.exclusive = exclusive
        self.mode = ("p2p", "consumer_alive")

    def __getattr__(self, name: str) -> Any:
        """All else is as the publication has it: a payload that has moved is released here."""
        return getattr(self._publication, name)


class Guard:
    """Watches the consumers of payloads, one thread for each consumer.

    Args:
        native: What publishes.
        store: Where payloads go.
        within: Seconds that one may take.
    """

    def __init__(self, native: Connector, store: Backend, within: float) -> None:
        self._native = native
        self._store = store
        self._within = within
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._of: dict[bytes, list[Guarded]] = {}
        self._watches: dict[bytes, Pending] = {}
        self._threads: list[threading.Thread] = []
        self._count = 0
        self._moved = 0
        self._unmoved = 0

    def add(self, guarded: Guarded, consumer: bytes) -> None:
        """Watches over a payload for its consumer."""
        with self._lock:
            self._count += 1
            self._let_go(consumer)
            self._of.setdefault(consumer, []).append(guarded)
            if consumer not in self._watches and not self._closed.is_set():
                lost = self._watches[consumer] = self._native.lost(consumer)
                arguments = (consumer, lost)
                thread = threading.Thread(target=self._watch, args=arguments, name="sw-mooncake-guard", daemon=True)
                self._threads = [earlier for earlier in self._threads if earlier.is_alive()]
                thread.start()
                self._threads.append(thread)

    def _let_go(self, consumer: bytes) -> None:
        """Forgets what was consumed: its tensors may go."""
        waiting = self._of.get(consumer, [])
        waiting[:] = [guarded for guarded in waiting if not guarded.wait_released(0)]

    def stats(self) -> dict[str, int]:
        """What the connector has counted as asked for, and how it really is."""
        with self._lock:
            count, moved, unmoved = self._count, self._moved, self._unmoved
        return {
            "published_p2p_requested": -count,
            "published_p2p_consumer_alive": count - moved,
            "published_store_consumer_lost": moved,
            "mooncake_unmoved": unmoved,
        }

    def close(self, within: float) -> None:
        """Watches nobody any more. What moves has so long to end."""
        end = time.monotonic() + within
        self._closed.set()
        with self._lock:
            watches, threads = list(self._watches.values()), list(self._threads)
        for lost in watches:
            lost.cancel()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _watch(self, consumer: bytes, lost: Pending) -> None:
        while not lost.wait(_LOOK):
            with self._lock:
                self._let_go(consumer)
        with self._lock:
            left = self._of.pop(consumer, [])
            self._watches.pop(consumer, None)
            if self._closed.is_set():
                return
        while left:
            left = [guarded for guarded in left if not self._is_moved(guarded)]
            if left and self._closed.wait(_PAUSE):
                return

    def _is_moved(self, guarded: Guarded) -> bool:
        """Moves a payload, unless somebody reads it, or it is not complete. Whether nothing is left to do."""
        payload_id = guarded.handle.payload_id
        if guarded.wait_released(0):
            return True
        if not guarded.sealed:
            return False
        with contextlib.ExitStack() as claimed:
            if guarded.exclusive:
                # As a consumer of its own, which others are kept out by until the store has it.
                own = self._native.consume(guarded.handle, None, deadline=self._within)
                claimed.callback(own.close)
                try:
                    own.next()
                except StagewireError:
                    # Somebody reads it, or has read it; the next look tells.
                    return False
            try:
                guarded.put(Until(self._within))
            except StagewireError as error:
                with self._lock:
                    self._unmoved += 1
                _LOG.warning("payload %s stays with its producer, though its consumer is lost: %s", payload_id, error)
                return True
            if not self._native.release_own(guarded.handle):
                # Somebody has deleted it meanwhile.
                self._store.release(payload_id)
                return True
        with self._lock:
            self._moved += 1
        guarded.mode = ("store", "consumer_lost")
        return True
