"""Hands tensors from one process to another: publish in one stage, consume in the next.

```python
from stagewire.diffusion import DiffusionConnector, StageHandle, StagePayload

# the denoiser
conn = DiffusionConnector(role="denoise")
handle = conn.publish(StagePayload(request_id="r1", kind="latent", tensor=latents, chunk_dim=2, num_chunks=8))
queue.put(handle.to_bytes())                    # any queue: the handle is small, the tensor stays

# the decoder
conn = DiffusionConnector(role="decode")
handle = StageHandle.from_bytes(queue.get())
dst = torch.empty(handle.shape, dtype=latents.dtype)
for chunk in conn.consume(handle, dst=dst):     # views of dst; without dst, read-only mapped views
    vae.decode_chunk(chunk)
```

Both processes are on one host and use the same run directory, or on two hosts and have a ``network``. Nothing here
needs a server. For
``transfer_mode="store"`` some process of the host keeps a `HostStore`. `stagewire.aio` has the same names for asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from ._connector import BaseConnector, TransferMode
from ._handle import Described, StageHandle
from ._host_store import HostStore
from ._payload import Lease, StagePayload
from ._stream import StreamingPublish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._consume import Reader
    from ._device import Staging
    from ._native import Publication
    from ._order import Order

__all__ = [
    "DiffusionConnector",
    "HostStore",
    "Lease",
    "StageHandle",
    "StagePayload",
    "StreamingPublish",
    "TransferMode",
]


class DiffusionConnector(BaseConnector[StageHandle, StreamingPublish, "Iterator[Any]", Any]):  # noqa: D101
    __doc__ = BaseConnector.__doc__

    def release(self, handle: Described | bytes) -> None:
        """Deletes a payload, consumed or not, wherever it is. Its memory is free when the last reader is done.

        Does nothing to one that has ended.

        Raises:
            Denied: The handle is forged.
            Unavailable: Who holds it does not answer.
        """
        self._release(handle)

    def close(self) -> None:
        """Releases every payload and ends every connection. Calling it again does nothing.

        What is on its way into a store is waited for, within the connector's deadline.
        """
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, order: Callable[[], Order]) -> StageHandle:
        publication = self._put(order())
        return StageHandle(publication.handle, publication, self._release_own)

    def _stream(self, publication: Publication, staging: Staging) -> StreamingPublish:
        return StreamingPublish(publication, StageHandle(publication.handle, publication, self._release_own), staging)

    def _chunks(self, reader: Reader, on_chunk: Callable[[int, Any], object] | None) -> Iterator[Any]:
        return reader.chunks(on_chunk)

    def _whole(self, reader: Callable[[], Reader]) -> Any:
        return reader().whole()
