"""A pipeline whose only stage refuses what it is asked with an exception of its own."""

import stagewire


@stagewire.stage("paint")
def paint(ctx):
    if ctx.params["frames"] % 4 != 1:
        raise ValueError(f"frames is {ctx.params['frames']}, it must be 1 more than a multiple of 4")
    return stagewire.Result({"prompt.txt": stagewire.Artefact(ctx.params["prompt"].encode())})
