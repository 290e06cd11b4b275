"""Connectors on two hosts, and the transports that are named. The other host is a pid namespace of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stagewire import errors
from stagewire.diffusion import DiffusionConnector, HostStore, StageHandle, StagePayload

if TYPE_CHECKING:
    from pathlib import Path

NETWORK = {"bind": "127.0.0.1", "token": "of all"}
PRODUCER = """
import sys, torch
from stagewire.diffusion import DiffusionConnector, StagePayload

network = {"bind": "127.0.0.1", "token": sys.argv[2]}
with DiffusionConnector(role="denoise", run_dir=sys.argv[1], network=network) as conn:
    latents = torch.arange(2 * 21 * 5, dtype=torch.int64).reshape(2, 21, 5)
    handle = conn.publish(StagePayload(request_id="r", tensor=latents, chunk_dim=1, num_chunks=8))
    print(handle.to_bytes().hex(), flush=True)
    sys.stdin.read()
"""


def elsewhere() -> list[str]:
    """What runs a command in a pid namespace of its own."""
    own = ["unshare", "--pid", "--mount-proc", "--kill-child"]
    for words in (own, [own[0], "--user", "--map-root-user", *own[1:]]):
        try:
            ran = subprocess.run([*words, "true"], capture_output=True, check=False)
        except FileNotFoundError:
            break
        if ran.returncode == 0:
            return words
    pytest.skip("this user may not make a pid namespace")


def producer(run_dir: Path, token: str) -> subprocess.Popen[str]:
    words = [*elsewhere(), sys.executable, "-c", PRODUCER, str(run_dir), token]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> StageHandle:
    assert process.stdout is not None
    return StageHandle.from_bytes(bytes.fromhex(process.stdout.readline()))


def test_a_payload_of_another_host(run_dir: Path) -> None:
    expected = torch.arange(2 * 21 * 5, dtype=torch.int64).reshape(2, 21, 5)
    with (
        producer(run_dir / "there", "of all") as process,
        DiffusionConnector("decode", run_dir=run_dir / "here", network=NETWORK) as conn,
    ):
        handle = said(process)
        dst = torch.empty_like(expected)
        sizes = [chunk.shape[1] for chunk in conn.consume(handle, dst=dst, deadline=20)]
        assert torch.equal(dst, expected)
        assert sizes == [part.shape[1] for part in expected.tensor_split(8, dim=1)]
        with pytest.raises(errors.NotFound) as gone:
            conn.fetch(handle, deadline=20)
        assert gone.value.reason == "payload.gone"
        process.kill()


def test_the_end_and_the_token_of_another_host(run_dir: Path) -> None:
    with DiffusionConnector("decode", run_dir=run_dir / "here", network=NETWORK) as conn:
        with producer(run_dir / "there", "of others") as process:
            with pytest.raises(errors.StagewireError, match="give all processes of a deployment the same one") as token:
                conn.fetch(said(process), deadline=20)
            assert token.value.reason == "connect.token"
            process.kill()
        with producer(run_dir / "there", "of all") as process:
            handle = said(process)
            process.kill()
            process.wait()
            with pytest.raises(errors.Unavailable) as lost:
                conn.fetch(handle, deadline=20)
            assert lost.value.reason == "peer.lost"


@pytest.mark.parametrize("transport", ["shm", "tcp", "mooncake"])
def test_the_named_transport_carries_it(run_dir: Path, transport: str) -> None:
    te_config = {"transports": [transport]}
    tensor = torch.randn(4, 6)
    with (
        DiffusionConnector("p", te_config=te_config, run_dir=run_dir) as source,
        DiffusionConnector("c", te_config=te_config, run_dir=run_dir) as sink,
        DiffusionConnector("d", te_config={"transports": ["cma"]}, run_dir=run_dir) as other,
    ):
        handle = source.publish(StagePayload(request_id="r", tensor=tensor, lease="pinned"))
        assert torch.equal(sink.fetch(handle), tensor)
        with pytest.raises(errors.Unsupported, match=transport):
            other.fetch(handle)


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        ({"bind": "eth0"}, "connector.network"),
        ({"bind": "127.0.0.1", "advertise": "me"}, "connector.network"),
        ({"port": 7}, "connector.config"),
        ({"bind": 7}, "connector.config"),
        ({"bind": "0.0.0.0"}, "network.token_missing"),
        ({"bind": "0.0.0.0", "token": "t"}, "network.advertise_missing"),
    ],
)
def test_wrong_networks(run_dir: Path, network: dict[str, Any], reason: str) -> None:
    for made in (
        lambda: DiffusionConnector("a", network=network, run_dir=run_dir),
        lambda: HostStore(network=network, run_dir=run_dir),
    ):
        with pytest.raises(errors.StagewireError) as caught:
            made()
        assert caught.value.reason == reason
