"""Prints as one line of JSON what this Python has of one package. Run by `stagewire doctor`.

Arguments: the beginning of the distribution's name, and the module to import.
"""

import importlib
import importlib.metadata
import json
import platform
import sys


def distribution(prefix):
    for each in importlib.metadata.distributions():
        name = (each.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith(prefix):
            return {"distribution": name, "version": each.version}
    return None


def main():
    prefix, module = sys.argv[1:]
    answer = {"python": platform.python_version(), "program": sys.executable, "found": distribution(prefix)}
    try:
        importlib.import_module(module)
        answer["error"] = None
    except BaseException as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    print("\n" + json.dumps(answer))


main()
