"""A rank's heartbeat: its position, how long it has been idle, and what its main thread does; plain values."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from fabricamp.state import NOT_VALIDATING, RunningStage, RunState, Scope
from fabricamp.torch_private import starts_workers

# What the main thread does.
DATA = "data"
STARTING = "starting"
ELSEWHERE = "elsewhere"
SAVING = "saving"
ENDED = "ended"
WAITING = "waiting"
_PACKAGE = str(Path(__file__).parents[1])
# The innermost frame in one of these files decides.  The elastic agent's frames are a worker's outermost: reached last, they mean
# that nothing else matched.
_FILES = (
    ("/torch/distributed/elastic/", ELSEWHERE),
    ("/torch/distributed/", WAITING),
    (f"{_PACKAGE}/watchdog/", WAITING),
    (f"{_PACKAGE}/checkpoint", SAVING),
    (f"{_PACKAGE}/data/", DATA),
    ("/torch/utils/data/", DATA),
)
# An innermost frame in one of these files waits inside torch: for an exchange that backward began, or for the GPU.
_INNERMOST = ("/torch/autograd/graph.py", "/torch/nn/parallel/distributed.py", "/torch/cuda/")
_WORDS = {
    DATA: "waiting for its loader",
    STARTING: "waiting for the first batch of its loader, whose workers start",
    SAVING: "writing a checkpoint",
    ENDED: "at the end of its run",
    WAITING: "waiting for the other ranks",
}
# State letters in /proc/<pid>/stat.  A dead process is a zombie until its parent waits for it.
_DEAD = ("Z", "X")
_STOPPED = ("T", "t")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The heartbeat that a rank publishes every few seconds."""

    rank: int
    beat: int
    """Counts up; if it stops, the rank is gone or its interpreter is stuck."""
    idle: float
    """Seconds since the main thread last made progress."""
    position: str
    """Stage, epoch, step and batch, as text."""
    epoch: int
    batch: int
    """Micro-batches done in the epoch."""
    activity: str
    host: str
    """Host name and PID namespace, in which ``pid`` is valid."""
    pid: int
    stack: str = ""

    def encode(self) -> str:
        """Returns the heartbeat as text for the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: bytes) -> Heartbeat:
        """Returns the heartbeat that :meth:`encode` turned into ``text``."""
        return Heartbeat(**json.loads(text))

    @property
    def ended(self) -> bool:
        """Whether the rank's run is over, and its watchdog has stopped."""
        return self.activity == ENDED

    @property
    def waits(self) -> bool:
        """Whether the rank waits for others, rather than others for this rank."""
        return self.activity == WAITING

    @property
    def starts(self) -> bool:
        """Whether the rank waits for the first batch of loader workers, which may have much to import and to open."""
        return self.activity == STARTING

    @property
    def innermost_line(self) -> str:
        """The innermost line of the stack outside torch."""
        lines = [line for line in self.stack.splitlines() if line.startswith('  File "') and "/torch/" not in line]
        return lines[-1] if lines else ""

    def describe(self, *, silent: bool) -> str:
        """Returns one line about the rank for the diagnosis."""
        if silent:
            return f"rank {self.rank} gives no sign of life ({self._why_silent()}); last seen {self.position}"
        activity = f", {_WORDS[self.activity]}" if self.activity in _WORDS else ""
        return f"rank {self.rank}: {self.position}{activity}" + ("" if self.ended else f", for {self.idle:.0f} s")

    @property
    def gone(self) -> bool:
        """Whether the rank's process has certainly died: it ran on this machine, and did not end its run."""
        return not self.ended and self.host == _host() and not _lives(self.pid)

    @property
    def stopped(self) -> bool:
        """Whether the rank's process is certainly stopped (by SIGSTOP, Ctrl-Z or a debugger)."""
        return not self.ended and self.host == _host() and _status(self.pid) in _STOPPED

    def _why_silent(self) -> str:
        if self.gone:
            return "its process is gone"
        if self.stopped:
            return "its process is stopped: by SIGSTOP, Ctrl-Z or a debugger"
        return "its process is gone, its machine cannot be reached, or something holds its interpreter's lock"


class HeartbeatSource:
    """Makes the heartbeats of this process: created in the thread that runs the loop, called by the watchdog thread.

    It costs the loop nothing: it only reads counters that the loop keeps anyway.
    """

    def __init__(self, state: RunState, rank: int) -> None:
        self._state = state
        self._rank = rank
        self._thread = threading.get_ident()
        self._mark: tuple[object, ...] = ()
        self._since = 0.0
        self._beat = 0
        self._host = _host()

    def idle(self, now: float) -> float:
        """Returns the seconds since the counters last changed."""
        state = self._state
        counters = (state.epoch, state.global_step, state.batch_idx, state.batches_done, state.evaluated)
        mark = (state.fn, state.stage, state.user_call.scope, *counters)
        if mark != self._mark:
            self._mark = mark
            self._since = now
        return now - self._since

    def take(self, now: float, *, stack: bool, ended: bool = False) -> Heartbeat:
        """Returns the current heartbeat; with ``stack`` it has the main thread's stack, and what that thread is doing."""
        self._beat += 1
        idle = self.idle(now)
        frame = sys._current_frames().get(self._thread) if stack and not ended else None
        return Heartbeat(
            rank=self._rank,
            beat=self._beat,
            idle=idle,
            position=position_of(self._state),
            epoch=self._state.epoch,
            batch=self._state.batch_idx,
            activity=ENDED if ended else _activity_of(frame),
            host=self._host,
            pid=os.getpid(),
            stack="".join(traceback.format_stack(frame)) if frame is not None else "",
        )


def position_of(state: RunState) -> str:
    """Returns the loop's position as text."""
    if state.fn is None or state.stage is None:
        return "outside fit, validate, test and predict"
    name = state.stage if state.stage is RunningStage.SANITY_CHECKING else state.fn
    step = f"in {name} at step {state.global_step} (epoch {state.epoch}, batch {state.batch_idx}), "
    if state.evaluated != NOT_VALIDATING:
        return f"{step}in validation batch {state.evaluated}"
    if state.user_call.scope is Scope.NOWHERE:
        return f"{step}before, between or after epochs"
    return f"{step}{state.user_call.scope.value}"


def _activity_of(frame: FrameType | None) -> str:
    if frame is not None and any(part in frame.f_code.co_filename for part in _INNERMOST):
        return WAITING
    while frame is not None:
        activity = next((activity for part, activity in _FILES if part in frame.f_code.co_filename), None)
        if activity is not None:
            return STARTING if activity == DATA and _waits_for_first_batch(frame) else activity
        frame = frame.f_back
    return ELSEWHERE


def _waits_for_first_batch(frame: FrameType | None) -> bool:
    """Returns whether a frame belongs to an iterator over loader workers that has returned no batch yet."""
    while frame is not None:
        if "/torch/utils/data/" in frame.f_code.co_filename and starts_workers(frame.f_locals.get("self")):
            return True
        frame = frame.f_back
    return False


def _host() -> str:
    """Returns the host's name and PID namespace: each container of a machine may number its processes separately."""
    spaces = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {spaces.readlink() if spaces.is_symlink() else ''}"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _status(pid) not in _DEAD


def _status(pid: int) -> str:
    """Returns the state letter of a process on Linux; an empty string elsewhere."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
