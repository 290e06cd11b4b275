"""A stage that takes batches: it says who ran with whom, and waits where a test tells it to."""

import threading
from pathlib import Path

import stagewire


@stagewire.stage("paint", batch=True)
def paint(batch):
    names = [ctx.params["name"] for ctx in batch]
    gate, pause = Path(batch[0].params["gate"]), threading.Event()
    (gate / f"at-{names[0]}").touch()
    while (gate / f"hold-{names[0]}").exists():
        for ctx in batch:
            ctx.progress(0, 1)
        pause.wait(0.005)
    if "poison" in names:
        raise ValueError("nothing can be painted along with this one")
    return [made(ctx, names) for ctx in batch]


def made(ctx, names):
    if ctx.params["name"].startswith("bad"):
        return ValueError("this one cannot be painted")
    return stagewire.Result({"name.txt": stagewire.Artefact(ctx.params["name"].encode())}, info={"batch": names})
