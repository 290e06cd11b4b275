"""A tiny server that answers like Stagewire's, from a script, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

JOB = "0190a000-0000-7000-8000-000000000001"


def event(seq: int, kind: str, **more: Any) -> bytes:
    """One server-sent event. Progress has no id of its own, as at the server."""
    data = json.dumps({"seq": seq, "at_ns": 1_000 + seq, "type": kind, **more})
    number = "" if kind == "progress" else f"id: 1.{seq}\n"
    return f"data: {data}\n{number}\n".encode()


class FakeServer:
    """Serves on a port of its own. `streams` holds what each connection to the events is sent, one after the other."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.job: dict[str, Any] = {"id": JOB, "state": "active"}
        self.streams: list[list[bytes]] = []
        self.hang = threading.Event()
        self.refusal: tuple[int, Any] | None = None
        self.files = {"a": b"\x00\x01video" * 1000}
        self.info: Any = {"fps": 12}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def handle_all(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                fake.requests.append((self.command, self.path, headers, body))
                if fake.refusal is not None:
                    self.answer(*fake.refusal)
                elif self.path == f"/v1/jobs/{JOB}/events":
                    self.events()
                elif self.path == f"/v1/jobs/{JOB}/result":
                    artefact = {
                        "name": "video.mp4",
                        "media_type": "video/mp4",
                        "nbytes": len(fake.files["a"]),
                        "url": f"/v1/jobs/{JOB}/artefacts/a",
                    }
                    self.answer(200, {"artefacts": [artefact], "info": fake.info})
                elif self.path == f"/v1/jobs/{JOB}/artefacts/a":
                    self.send(200, fake.files["a"], "video/mp4")
                elif self.path == "/v1/jobs" and self.command == "GET":
                    self.answer(200, {"jobs": [fake.job]})
                elif self.path == "/v1/jobs":
                    self.answer(201, fake.job)
                elif self.path == "/v1/pipeline":
                    self.answer(200, {"params": {"prompt": {"type": "string"}, "image": {"type": "input"}}})
                elif self.path in {"/v1/pipeline/pause", "/v1/pipeline/resume"}:
                    self.answer(200, {"paused": self.path.endswith("pause")})
                elif self.path == "/v1/pipeline/drain":
                    self.answer(202, {"workers": [{"name": "decode-0", "state": "draining"}]})
                elif self.path == "/v1/pools":
                    self.answer(200, {"paused": False, "stages": []})
                elif self.path == "/v1/inputs":
                    self.answer(201, {"name": f"blake3:{len(body)}"})
                elif self.path == f"/v1/jobs/{JOB}/cancel":
                    fake.job["state"] = "cancelling"
                    self.answer(200, fake.job)
                elif self.path == "/v1/dead-letters":
                    self.answer(200, {"dead_letters": [{"id": "a"}, {"id": JOB}], "next": JOB})
                elif self.path == f"/v1/dead-letters?before={JOB}":
                    self.answer(200, {"dead_letters": [{"id": "c"}], "next": None})
                elif self.path in {f"/v1/dead-letters/{JOB}/redrive", f"/v1/dead-letters/{JOB}/discard"}:
                    fake.job["state"] = "active" if self.path.endswith("redrive") else "failed"
                    self.answer(202, fake.job)
                elif self.path == f"/v1/jobs/{JOB}":
                    self.answer(200, fake.job)
                else:
                    failure = {"class": "not_found", "reason": "job.unknown", "message": f"no {self.path}"}
                    self.answer(404, {"error": failure})

            do_GET = handle_all
            do_POST = handle_all

            def events(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                pieces = fake.streams.pop(0) if fake.streams else []
                for piece in pieces:
                    self.wfile.write(piece)
                    self.wfile.flush()
                if not pieces:
                    fake.hang.wait(30)
                self.close_connection = True

            def answer(self, status: int, body: Any) -> None:
                text = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send(status, text, "application/json")

            def send(self, status: int, body: bytes, media_type: str) -> None:
                self.send_response(status)
                self.send_header("content-type", media_type)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self._http.server_port}"

    def publish(self, run_dir: Path) -> None:
        """Writes ``server.json``."""
        run_dir.mkdir(mode=0o700, exist_ok=True)
        address = self.url.removeprefix("http://")
        server = {"schema": 1, "process": {"pid": 1, "started": 1}, "http": address, "pipeline": "p", "epoch": 1}
        (run_dir / "server.json").write_text(json.dumps(server))

    def asked(self, path: str) -> list[tuple[str, str, dict[str, str], bytes]]:
        """The requests for a path."""
        return [request for request in self.requests if request[1] == path]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hang.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
