"""The transport over Mooncake's engine: the wheel's own where it is there, and objects that behave like it."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peers
import pytest
from engine_peer import pattern, zeros
from stagewire import conformance, errors
from stagewire.mooncake import EngineTransport, _span, make_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
ROUNDS = 1000 if os.environ.get("STAGEWIRE_SOAK") else 50


class Child:
    """`engine_peer.py` in a process of its own."""

    def __init__(self) -> None:
        environment = os.environ | {"STAGEWIRE_PEERS": str(peers.FOLDER), "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("engine_peer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@@"):
                return line[2:].strip()
        raise AssertionError("the child ended without a word")

    def ask(self, command: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self._answer())
        if "reason" in answer:
            raise AssertionError(f"{command}: {answer['reason']}: {answer['message']}")
        return answer["value"]

    @property
    def address(self) -> bytes:
        return bytes.fromhex(self.ask("address"))

    def register(self, name: str, nbytes: int, seed: int, *, writable: bool = False) -> bytes:
        return bytes.fromhex(self.ask("register", name, nbytes, seed, writable))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        until("the child stands still", lambda: ") T " in stat.read_text())

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def until(what: str, condition: Callable[[], bool], within: float = 10.0) -> None:
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, f"not within {within} s: {what}"
        time.sleep(0.005)


@pytest.fixture
def child() -> Iterator[Child]:
    peers.need_mooncake()
    child = Child()
    yield child
    child.kill()


@pytest.fixture
def transport() -> Iterator[EngineTransport]:
    peers.need_mooncake()
    with EngineTransport() as transport:
        yield transport


def test_the_wheel_conforms() -> None:
    peers.need_mooncake()
    sides: list[EngineTransport] = []

    def side() -> EngineTransport:
        sides.append(EngineTransport())
        return sides[-1]

    outcomes = conformance.run(side)
    assert len(outcomes) > 20
    assert [outcome for outcome in outcomes if outcome.problem] == []
    for side_ in sides:
        side_.close()


def test_5000_records_arrive_exactly(child: Child, transport: EngineTransport) -> None:
    reference = child.register("a", 16 * MIB, 1)
    source, target = pattern(16 * MIB, 1), zeros(5000 * 1000)
    # In reverse, so that no two are one.
    records = [(3000 * index, 1000 * (4999 - index), 1000, 1, 0, 0) for index in range(5000)]
    outside = [*records[:4321], (16 * MIB - 1, 0, 2, 1, 0, 0), *records[4322:]]
    with pytest.raises(errors.Invalid) as refused:
        transport.read(child.address, reference, target, records=outside)
    assert refused.value.details["record"] == "4321"
    assert not target.any()
    transport.read(child.address, reference, target, records=records)
    rows = target.reshape(5000, 1000)[::-1]
    expected = source[: 5000 * 3000].reshape(5000, 3000)[:, :1000]
    assert (rows == expected).all()
    assert child.ask("release", "a", 5.0)


def test_what_is_written_arrives_and_read_only_memory_does_not_change(child: Child, transport: EngineTransport) -> None:
    writable, fixed = child.register("w", 4 * MIB, 1, writable=True), child.register("f", 4 * MIB, 2)
    with transport.pin(child.address, writable) as pinned:
        pinned.write(pattern(4 * MIB, 3))
    with transport.pin(child.address, fixed) as pinned, pytest.raises(errors.Denied) as refused:
        pinned.write(pattern(4 * MIB, 3))
    assert refused.value.reason == "transfer.read_only"
    assert child.ask("release", "w", 5.0)
    assert child.ask("is_pattern", "w", 3)
    assert child.ask("is_pattern", "f", 2)


def in_flight(transport: EngineTransport) -> bool:
    return transport.stats()["in_flight_bytes"] > 0


class Reading(threading.Thread):
    """Reads on a thread, over and over, until there is an error."""

    def __init__(self, pinned: Any, target: Any, deadline: float | None = 60.0) -> None:
        super().__init__(daemon=True)
        self.pinned, self.target, self.deadline = pinned, target, deadline
        self.error: errors.StagewireError | None = None
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        try:
            while True:
                self.pinned.read(self.target, deadline=self.deadline)
        except errors.StagewireError as error:
            self.error = error
            self.ended = time.monotonic()


def test_an_owner_that_is_killed_is_noticed_within_a_second(child: Child, transport: EngineTransport) -> None:
    reference = child.register("a", 64 * MIB, 1)
    reading = Reading(transport.pin(child.address, reference), zeros(64 * MIB))
    until("it reads", lambda: in_flight(transport))
    killed = time.monotonic()
    child.kill()
    reading.join(10)
    assert isinstance(reading.error, errors.Unavailable), reading.error
    assert reading.error.reason == "peer.lost"
    assert reading.ended - killed < 1.0


def test_an_owner_that_stops_is_noticed_by_the_deadline(child: Child, transport: EngineTransport) -> None:
    reference = child.register("a", 64 * MIB, 1)
    pinned = transport.pin(child.address, reference)
    pinned.read(zeros(64 * MIB))
    child.stop()
    begun = time.monotonic()
    with pytest.raises(errors.Deadline) as late:
        pinned.read(zeros(64 * MIB), deadline=1.0)
    assert 0.9 < time.monotonic() - begun < 2.0
    assert late.value.reason == "transfer.deadline"
    assert str(child.process.pid) in late.value.message
    child.go_on()
    target = zeros(64 * MIB)
    pinned.read(target)
    assert (target == pattern(64 * MIB, 1)).all()
    # The late read held the pin on its own until it had ended.
    pinned.close()
    assert child.ask("release", "a", 10.0)


def test_a_stopped_owner_costs_next_to_nothing(child: Child, transport: EngineTransport) -> None:
    cost = cost_of_standing_still(child, transport)
    assert sum(cost.values()) < 20, f"CPU for a transfer that stood still for 3 s: {cost} ms"


def cost_of_standing_still(child: Child, transport: EngineTransport) -> dict[tuple[str, str], float]:
    """Milliseconds of CPU by thread, of this one and those that are ours by their name, while an owner stands still."""
    reference = child.register("a", 64 * MIB, 1)
    pinned, target = transport.pin(child.address, reference), zeros(64 * MIB)
    for _ in range(3):
        pinned.read(target)
    child.stop()

    def spent() -> dict[tuple[str, str], int]:
        tasks = {task: (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
        ours = [(task, name) for task, name in tasks.items() if name.startswith(("sw-", "stagewire"))]
        return {(task.name, name): int((task / "schedstat").read_text().split()[0]) for task, name in ours}

    before = spent()
    # Of this thread without what looking at the others costs.
    here = time.thread_time_ns()
    with pytest.raises(errors.Deadline):
        pinned.read(target, deadline=3.0)
    here = time.thread_time_ns() - here
    after = spent() | {("", "this thread"): here}
    return {thread: round((nanos - before.get(thread, 0)) / 1e6, 2) for thread, nanos in after.items()}


def test_a_restarted_owner_is_another_one(child: Child, transport: EngineTransport) -> None:
    reference, address = child.register("a", MIB, 1), child.address
    transport.read(address, reference, zeros(MIB))
    child.kill()
    successor = Child()
    try:
        again = successor.register("a", MIB, 2)
        with pytest.raises(errors.Unavailable):
            transport.read(address, reference, zeros(MIB), deadline=2.0)
        with pytest.raises((errors.NotFound, errors.Denied)):
            transport.read(successor.address, reference, zeros(MIB))
        target = zeros(MIB)
        transport.read(successor.address, again, target)
        assert (target == pattern(MIB, 2)).all()
    finally:
        successor.kill()


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_reader_that_is_killed_lets_go(child: Child, transport: EngineTransport, fault: str) -> None:
    memory = pattern(64 * MIB, 1)
    region = transport.register(memory)
    child.ask("read_forever", transport.address.hex(), region.reference.hex(), 64 * MIB)
    assert not region.is_idle
    if fault == "stopped":
        child.stop()
        assert not region.release(0.3), "given back while a stopped reader may still read it"
    child.kill()
    assert region.release(1.0), "a dead reader keeps memory"


def test_a_late_write_lands_only_in_memory_that_is_still_held(child: Child, transport: EngineTransport) -> None:
    reference = child.register("w", 64 * MIB, 1, writable=True)
    pinned = transport.pin(child.address, reference)
    child.stop()
    with pytest.raises(errors.Unavailable) as doubtful:
        pinned.write(pattern(64 * MIB, 2), deadline=0.5)
    assert doubtful.value.reason == "transfer.in_doubt"
    pinned.close()
    child.go_on()
    # Idle is the region only when the write has ended, one way or the other: from then on nothing changes.
    assert child.ask("release", "w", 20.0)
    landed = child.ask("is_pattern", "w", 2)
    assert landed
    assert transport.stats()["in_flight_bytes"] == 0


def test_registering_and_releasing_races_no_read(child: Child, transport: EngineTransport) -> None:
    address = child.address
    target = zeros(256 * 1024)
    for index in range(ROUNDS):
        reference = child.register("a", len(target), index)
        reading = threading.Thread(target=lambda: child.ask("release", "a", 0.0))
        try:
            pinned = transport.pin(address, reference)
        except errors.NotFound:
            continue
        reading.start()
        pinned.read(target)
        pinned.close()
        reading.join()
        assert (target == pattern(len(target), index)).all(), f"round {index}: other bytes"


def test_a_program_that_keeps_the_gil_delays_transfers_and_does_not_end_them(
    child: Child, transport: EngineTransport
) -> None:
    reference = child.register("a", 16 * MIB, 1)
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    spinning = threading.Thread(target=spin)
    spinning.start()
    try:
        target = zeros(16 * MIB)
        transport.read(child.address, reference, target, deadline=20.0)
        assert (target == pattern(16 * MIB, 1)).all()
    finally:
        stop.set()
        spinning.join()


def test_device_memory_passes_through(child: Child, transport: EngineTransport) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: passing device memory to the engine cannot be tried here")
    # The wheel for CPUs refuses it; the one for CUDA takes it.
    try:
        region = transport.register(torch.arange(1000, device="cuda"))
    except errors.Unavailable as error:
        assert error.reason == "register.backend"  # noqa: PT017
        pytest.skip(f"this wheel of Mooncake takes no device memory: {error}")
    assert region.release(5.0)
    reference = child.register("d", MIB, 1)
    target = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    # Still queued when the read begins: it must not come after the bytes.
    torch.cuda._sleep(100_000_000)
    target.zero_()
    transport.read(child.address, reference, target)
    assert (target.cpu().numpy() == pattern(MIB, 1)).all()


def test_device_memory_is_used_once_its_stream_has_come_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    calls: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            calls.append("synchronize")

    class OnDevice:
        device = "cuda:1"
        nbytes = 16

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 1

        def is_contiguous(self) -> bool:
            return True

        def data_ptr(self) -> int:
            calls.append("address")
            return 4096

    def current_stream(device: str) -> Stream:
        calls.append(device)
        return Stream()

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    tensor = OnDevice()
    assert _span(tensor) == (4096, 16, 1, False, tensor)
    assert calls == ["cuda:1", "synchronize", "address"]


class Loopback:
    """Behaves like the wheel's engine object, between engines of one process. Transfers end at the second look."""

    ports = itertools.count(1)

    def __init__(self) -> None:
        self.port = next(self.ports)
        self.ids = itertools.count(1)
        self.pending: dict[int, tuple[int, int, int]] = {}
        self.registered: dict[int, int] = {}
        self.outcome = 1
        self.begins = True
        self.loses = 0
        """The engine gives up on slices of so many bytes."""
        self.register_returns = 0

    def get_rpc_port(self) -> int:
        return self.port

    def register_memory(self, address: int, length: int, location: str) -> int:
        if location != "*":
            return -6
        if self.register_returns == 0:
            self.registered[address] = length
        return self.register_returns

    def unregister_memory(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else -3

    def _submit(self, _host: str, to: list[int], source: list[int], lengths: list[int]) -> int:
        assert len(to) == len(source) == len(lengths) == 1
        if not self.begins:
            return 0
        number = next(self.ids)
        self.pending[number] = (to[0], source[0], lengths[0])
        return number

    def batch_transfer_async_read(self, host: str, local: list[int], remote: list[int], lengths: list[int]) -> int:
        return self._submit(host, local, remote, lengths)

    def batch_transfer_async_write(self, host: str, local: list[int], remote: list[int], lengths: list[int]) -> int:
        return self._submit(host, remote, local, lengths)

    def transfer_check_status(self, number: int) -> int:
        # Asked once more after the end, the wheel would crash; this raises.
        to, source, length = self.pending[number]
        outcome = -1 if length == self.loses else self.outcome
        if outcome == 1:
            ctypes.memmove(to, source, length)
        if outcome in {1, -1}:
            del self.pending[number]
        return outcome


def loopback(engine: Loopback | None = None, **options: Any) -> EngineTransport:
    return EngineTransport(engine=engine or Loopback(), **options)


def test_an_object_like_the_wheels_engine_conforms() -> None:
    sides: list[EngineTransport] = []

    def side() -> EngineTransport:
        sides.append(loopback())
        return sides[-1]

    assert [outcome for outcome in conformance.run(side) if outcome.problem] == []


def test_return_codes_become_errors() -> None:
    owner, engine = loopback(), Loopback()
    reader = loopback(engine)
    region = owner.register(pattern(1000, 1))
    target = zeros(1000)
    engine.begins = False
    with pytest.raises(errors.Unavailable, match="does not reach it") as refused:
        reader.read(owner.address, region.reference, target)
    assert refused.value.reason == "transfer.backend"
    engine.begins, engine.outcome = True, -1
    with pytest.raises(errors.Unavailable, match="gave up on 1000 bytes"):
        reader.read(owner.address, region.reference, target)
    engine.outcome = -2
    with pytest.raises(errors.Deadline):
        reader.read(owner.address, region.reference, target, deadline=0.2)
    assert not region.is_idle, "late is not over: the pin is still needed"
    engine.outcome = 1
    until("the late read has ended", lambda: region.is_idle)
    reader.read(owner.address, region.reference, target)
    assert (target == pattern(1000, 1)).all()
    engine.register_returns = -7
    with pytest.raises(errors.Unavailable, match="-7") as refused:
        reader.register(zeros(10))
    assert refused.value.reason == "register.backend"


@pytest.mark.parametrize("way", ["read", "write"])
def test_the_record_that_the_engine_gave_up_on_is_named(way: str) -> None:
    owner, engine = loopback(), Loopback()
    other = loopback(engine)
    region = owner.register(zeros(1000), writable=True)
    engine.loses = 7
    # Rows of 10 and 7 bytes; the second and third are not next to what comes before on the other side.
    records = [(0, 0, 10, 3, 20, 30), (100, 200, 10, 1, 0, 0), (300, 400, 7, 2, 50, 60)]
    with other.pin(owner.address, region.reference) as pinned:
        with pytest.raises(errors.Unavailable, match="record 2 of the batch") as failed:
            getattr(pinned, way)(zeros(1000), records=records)
        assert failed.value.reason == ("transfer.backend" if way == "read" else "transfer.in_doubt")
        if way == "read":
            assert failed.value.details["record"] == "2"


def test_memory_is_registered_while_its_region_lives() -> None:
    engine = Loopback()
    owner = loopback(engine)
    memory = pattern(1000, 1)
    region = owner.register(memory)
    assert engine.registered == {memory.ctypes.data: 1000}
    assert region.release(1.0)
    until("it is registered no more", lambda: engine.registered == {})


def test_a_stuck_engine_is_replaced() -> None:
    owner, stuck, fresh = loopback(), Loopback(), Loopback()
    stuck.outcome = -1
    reader = loopback(stuck, rebuild=lambda: (fresh, "other:1"))
    region = owner.register(pattern(1000, 1))
    target = zeros(1000)
    end = time.monotonic() + 10
    reason = ""
    while reason != "transfer.engine_stuck":
        assert time.monotonic() < end
        with pytest.raises(errors.Unavailable) as failed:
            reader.read(owner.address, region.reference, target)
        reason = failed.value.reason
        time.sleep(0.1)
    reader.read(owner.address, region.reference, target)
    assert (target == pattern(1000, 1)).all()
    assert next(fresh.ids) > 1


def test_what_cannot_be_an_address_or_memory_is_refused() -> None:
    one = loopback()
    region = one.register(bytes(10))
    with pytest.raises(errors.Invalid):
        one.pin(b"nonsense", region.reference)
    with pytest.raises(errors.Invalid):
        one.pin(one.address, b"nonsense")
    with pytest.raises(errors.Invalid, match="no address"):
        loopback(host="host.invalid")
    with pytest.raises(errors.Invalid, match="no address"):
        loopback(bind="127.0.0.1")
    with pytest.raises(errors.Invalid, match="contiguous"):
        one.register(zeros(100).reshape(10, 10)[:, :5])
    with pytest.raises(errors.Invalid, match="read-only"):
        one.register(bytes(10), writable=True)
    with pytest.raises(errors.Invalid, match="0 bytes"):
        one.register(b"")
    pinned = one.pin(one.address, region.reference)
    with pytest.raises(errors.Invalid, match="record 1"):
        pinned.read(zeros(10), records=[(0, 0, 5, 1, 0, 0), (6, 5, 5, 1, 0, 0)])
    pinned.close()
    with pytest.raises(errors.Invalid, match="closed"):
        pinned.read(zeros(10))


def test_an_engine_that_takes_another_protocol_says_so() -> None:
    peers.need_mooncake()
    with pytest.raises(errors.Unsupported, match="'pigeon'") as failed:
        make_engine("127.0.0.1", "pigeon")
    assert failed.value.reason == "mooncake.protocol_unavailable"


def test_other_hosts_need_a_token() -> None:
    with pytest.raises(errors.Unauthenticated) as refused:
        loopback(bind="0.0.0.0:0")
    assert refused.value.reason == "network.token_missing"
    owner, stranger, friend = loopback(token="one"), loopback(token="two"), loopback(token="one")
    region = owner.register(pattern(1000, 1))
    with pytest.raises(errors.StagewireError):
        stranger.pin(owner.address, region.reference)
    assert friend.pin(owner.address, region.reference).nbytes == 1000
