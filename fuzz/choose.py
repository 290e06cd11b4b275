"""Chooses a small corpus: choose.py REACHED CORPUS, where REACHED is the control file of a libFuzzer merge."""

import hashlib
import sys
from pathlib import Path

# Seeds included.
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
    seeds = {path.read_bytes() for path in corpus.glob("seed-*")}
    seen = set().union(*(found for data, found in inputs if data in seeds))
    chosen: list[bytes] = []
    while len(seeds) + len(chosen) < MOST:
        # What reaches most that is new; of those the shortest.
        data, found = max(inputs, key=lambda item: (len(item[1] - seen), -len(item[0])))
        if not found - seen:
            break
        seen |= found
        chosen.append(data)
    for path in corpus.iterdir():
        if not path.name.startswith("seed-"):
            path.unlink()
    for data in chosen:
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    print(f"{corpus}: {len(seeds)} seeds and {len(chosen)} inputs")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
