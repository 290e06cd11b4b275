"""One stage that reads the picture it is given, and makes another of it."""

import os

import stagewire


@stagewire.stage("mirror")
def mirror(ctx):
    image = ctx.params["image"]
    if image is None:
        return stagewire.Result({}, info={"image": None})
    picture = image.read_bytes()
    return stagewire.Result(
        {"mirrored.bin": stagewire.Artefact(picture[::-1])},
        info={"nbytes": len(picture), "writable": bool(image.stat().st_mode & 0o222), "pid": os.getpid()},
    )
