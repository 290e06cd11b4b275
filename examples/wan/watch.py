"""Shows a job while it runs: bars on a terminal, plain lines elsewhere, both from the job's event stream."""

import shutil
import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

BAR = 24


@dataclass
class StageView:
    """What is known of one stage."""

    state: str = "waits"
    worker: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    began: int = 0
    ended: int = 0
    handed: str = ""
    chunks: list[dict] = field(default_factory=list)

    def begin(self, event) -> None:
        self.state, self.worker, self.done, self.ended = "runs", event.data.get("worker") or "", 0, 0
        self.began = event.at_ns

    @property
    def seconds(self) -> float:
        return (self.ended - self.began) / 1e9 if self.ended else 0.0


class Watch:
    """Follows one job's events and remembers what the summary needs.

    Args:
        stages: Names of the stages, in order.
        out: Where to draw.
    """

    def __init__(self, stages: list[str], out: TextIO = sys.stdout) -> None:
        self.stages = {name: StageView() for name in stages}
        self.began = 0
        self.ended = 0
        self.first_frame = 0
        self.requeued: list[str] = []
        self.failure = ""
        self._out = out
        self._live = out.isatty()
        self._drawn = 0
        self._width = max(map(len, stages), default=0)

    def see(self, event) -> None:
        """Takes in one event and draws."""
        self.began = self.began or event.at_ns
        view = self.stages.get(event.stage)
        text = self._stage_event(view, event) if view else self._job_event(event)
        if self._live:
            self._draw()
        elif text:
            at = (event.at_ns - self.began) / 1e9
            print(f"  {at:6.2f} s  {event.stage or 'job':<{self._width}}  {text}", file=self._out, flush=True)

    def _stage_event(self, view: StageView, event) -> str:
        match event.type:
            case "running":
                view.begin(event)
                return f"runs on {view.worker}"
            case "progress":
                progress = event.progress
                view.done, view.total, view.unit = progress.done, progress.total, progress.unit
                if progress.unit == "frame" and not self.first_frame:
                    self.first_frame = event.at_ns
                return f"{progress.unit} {progress.done}/{progress.total}"
            case "published":
                payload = event.data["payload"]
                chunks = f"{payload['chunks']} chunks" if payload["chunks"] > 1 else "whole"
                view.handed = f"{human(payload['nbytes'])}, {chunks}, {payload['mode']}"
                return f"hands over {view.handed}"
            case "chunk":
                view.chunks.append(event.data["handover"])
                return ""
            case "stage_done":
                view.state, view.ended, view.done = "done", event.at_ns, view.total
                return f"done after {view.seconds:.2f} s"
            case "requeued":
                reason = (event.data.get("failure") or {}).get("message", "its worker was lost")
                self.requeued.append(f"{event.stage}: {reason}")
                view.state, view.done, view.ended = "waits", 0, 0
                if view.unit == "frame":
                    self.first_frame = 0  # retracted with its attempt
                return f"starts again: {reason}"
        return ""

    def _job_event(self, event) -> str:
        if event.ends:
            self.ended = event.at_ns
            self.failure = (event.data.get("failure") or {}).get("message", "")
            return event.type + (f": {self.failure}" if self.failure else "")
        return ""

    def _draw(self) -> None:
        lines = [self._line(name, view) for name, view in self.stages.items()]
        columns = shutil.get_terminal_size().columns
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        body = "".join(f"{line[: columns - 1]}\x1b[K\n" for line in lines)
        self._out.write(up + body)
        self._out.flush()
        self._drawn = len(lines)

    def _line(self, name: str, view: StageView) -> str:
        share = 1.0 if view.state == "done" else view.done / view.total if view.total else 0.0
        full = round(share * BAR)
        bar = "█" * full + "░" * (BAR - full)
        count = f"{view.unit} {view.done}/{view.total}" if view.total else ""
        note = f"{view.seconds:5.2f} s" if view.state == "done" else view.state
        return f"  {name:<{self._width}}  {bar}  {note:<8} {count:<12} {view.handed and '→ ' + view.handed}"


class Waiting:
    """One line that says what is waited for, and for how long."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._live = out.isatty()
        self._began = time.monotonic()
        self._said = ""

    def say(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        if self._live:
            self._out.write(f"\r  {text} ({seconds:.0f} s)\x1b[K")
            self._out.flush()
        elif text != self._said:
            print(f"  {text}", file=self._out, flush=True)
        self._said = text

    def done(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        self._out.write(
            f"{chr(13) if self._live else ''}  {text} after {seconds:.1f} s{chr(27) + '[K' if self._live else ''}\n"
        )
        self._out.flush()


def human(nbytes: int) -> str:
    """`147.0 KiB`."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{nbytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
