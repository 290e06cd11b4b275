"""The two scripts, piped together as the README shows it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def start(script: str, run_dir: Path, **streams) -> subprocess.Popen:
    environment = {**os.environ, "STAGEWIRE_RUN_DIR": str(run_dir)}
    return subprocess.Popen([sys.executable, HERE / script], env=environment, stderr=subprocess.PIPE, **streams)


def test_what_one_publishes_the_other_reads(tmp_path):
    denoise = start("denoise.py", tmp_path / "run", stdout=subprocess.PIPE)
    decode = start("decode.py", tmp_path / "run", stdin=denoise.stdout)
    _, read = decode.communicate(timeout=120)
    denoise.stdout.close()
    made = denoise.stderr.read().decode()
    read = read.decode()
    assert (denoise.wait(60), decode.returncode) == (0, 0), made + read
    digests = [re.search(r"sha256 (\w{16})", text)[1] for text in (made, read)]
    assert digests[0] == digests[1]
    assert "denoise: released" in made
    assert "0 bytes were copied to publish 4193280" in made
    shapes = re.findall(r"chunk (\d) of 8: \(1, 16, (\d), 60, 104\)", read)
    assert shapes == [(str(index), frames) for index, frames in enumerate("33333222")]
    denoise.stderr.close()


def test_a_dead_producer_is_noticed(tmp_path):
    denoise = start("denoise.py", tmp_path / "run", stdout=subprocess.PIPE)
    decode = start("decode.py", tmp_path / "run", stdin=denoise.stdout)
    lines = []
    while "chunk 1 of 8" not in "".join(lines[-1:]):
        lines.append(decode.stderr.readline().decode())
        assert lines[-1], lines
    denoise.send_signal(signal.SIGKILL)
    denoise.stdout.close()
    rest = decode.stderr.read().decode()
    assert decode.wait(60) == 1, rest
    assert re.search(r"decode: Unavailable peer.lost: request \"r1\", stage denoise, chunk \d of 8", rest), rest
    for process in (denoise, decode):
        process.stderr.close()
    denoise.wait()
