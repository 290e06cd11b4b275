"""A stage that goes wrong as often as a file says, and in the way that the job asks for."""

import os
import signal
from pathlib import Path

import stagewire


@stagewire.stage("paint")
def paint(ctx):
    counter = Path(ctx.params["counter"])
    left = int(counter.read_text())
    if left:
        counter.write_text(str(left - 1))
        if ctx.params["how"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"{left} times to go")
    return stagewire.Result({"done.txt": stagewire.Artefact(b"done")})
