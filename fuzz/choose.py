"""Chooses a small corpus: choose.py REACHED CORPUS, where REACHED is the control file of a libFuzzer merge.

Files with a name (`seed-pin`, `found-empty-tensor`) stay; those named by their hash are chosen anew.
"""

import hashlib
import sys
from pathlib import Path

# Files of a corpus.
MOST = 50


def main(reached: Path, corpus: Path) -> None:
    lines = reached.read_text().splitlines()
    count = int(lines[0])
    files = [Path(line) for line in lines[2 : 2 + count]]
    features: dict[int, set[str]] = {}
    for line in lines[2 + count :]:
        kind, index, *rest = line.split()
        if kind == "FT":
            features[int(index)] = set(rest)
    inputs = [(files[index].read_bytes(), found) for index, found in features.items()]
    named = {path.read_bytes() for path in corpus.glob("*-*")}
    seen = set().union(*(found for data, found in inputs if data in named))
    chosen: list[bytes] = []
    while len(named) + len(chosen) < MOST:
        # What reaches most that is new; of those the shortest.
        data, found = max(inputs, key=lambda item: (len(item[1] - seen), -len(item[0])))
        if not found - seen:
            break
        seen |= found
        chosen.append(data)
    for path in corpus.iterdir():
        if "-" not in path.name:
            path.unlink()
    for data in chosen:
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    print(f"{corpus}: {len(named)} named and {len(chosen)} chosen")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
