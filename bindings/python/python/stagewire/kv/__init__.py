"""KV caches between engines of different tensor-parallel size: handshake, plans, and the rooms that move them.

    full = kv.Component("full", layers=18, kv_heads=8, k_dim=64, v_dim=64, dtype="bfloat16")
    swa = kv.Component("swa", layers=18, kv_heads=8, k_dim=64, v_dim=64, dtype="bfloat16", window=127)
    prefill = kv.Engine(tp_size=1, page_size=64, components=[full, swa])
    decode = kv.Engine(tp_size=4, page_size=64, components=[full, swa])

On a rank of prefill, whose `sender.handle` goes to decode by the framework's own means:

    sender = kv.Sender(connector, prefill, rank=0, buffers={"full": (ks, vs), "swa": (swa_ks, swa_vs)})
    room = sender.room(7, seq_len=8192)
    room.send((0, 4096), {"full": pages})
    room.send((4096, 8192), {"full": more, "swa": window}, last=True, aux=first_token)
    room.wait_released()

On a rank of decode:

    receiver = kv.Receiver(connector, decode, rank=2, buffers=...)
    room = receiver.room(7, handles, seq_len=8192, pages={"full": [...], "swa": [...]})
    room.wait()
    room.aux

Whoever moves bytes himself takes plans:

    pair = kv.handshake(prefill, decode)
    for src_rank, dst_rank in pair.routes():
        plan = pair.plan(src_rank, dst_rank, seq_len=8192, src_pages=..., dst_pages=...)
        plan.descriptors()

Page tables give one physical page for each logical page of the sequence, -1 where it is not resident.
`Plan.descriptors` and `Plan.records` need NumPy.
"""

from ._connector import Connector
from ._errors import Incompatible
from ._geometry import Component, Engine
from ._plan import Pair, Plan, handshake
from ._receiver import Receiver, ReceiverRoom
from ._room import Phase
from ._sender import Sender, SenderRoom

__all__ = [
    "Component",
    "Connector",
    "Engine",
    "Incompatible",
    "Pair",
    "Phase",
    "Plan",
    "Receiver",
    "ReceiverRoom",
    "Sender",
    "SenderRoom",
    "handshake",
]
