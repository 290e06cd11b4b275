"""Prints as one line of JSON what this Python has of one package. Run by `stagewire doctor`.

Arguments: the beginning of the distribution's name, then the module to import or the shared library to open.
"""

import ctypes
import importlib
import importlib.metadata
import json
import platform
import sys


def distribution(prefix, library):
    """The installed distribution of that name, and where its library is; the one that has the library wins."""
    found = None
    for each in importlib.metadata.distributions():
        name = (each.metadata["Name"] or "").lower().replace("_", "-")
        if not name.startswith(prefix):
            continue
        files = [str(each.locate_file(file)) for file in each.files or [] if str(file).endswith(library)]
        if found is None or files:
            found = {"distribution": name, "version": each.version, "library": files[0] if files else None}
        if files:
            break
    return found


def main():
    prefix, target = sys.argv[1:]
    is_library = target.endswith(".so")
    answer = {"python": platform.python_version(), "program": sys.executable}
    answer["found"] = found = distribution(prefix, target if is_library else "\0")
    try:
        if not is_library:
            importlib.import_module(target)
        elif found and found["library"]:
            ctypes.CDLL(found["library"])
        else:
            raise FileNotFoundError(f"no installed package has a file {target}")
        answer["error"] = None
    except BaseException as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    print("\n" + json.dumps(answer))


main()
