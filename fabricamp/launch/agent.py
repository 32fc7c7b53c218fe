"""Runs torch's elastic agent over this machine's workers: without its log lines, with Ctrl-C passed on once."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from fabricamp._utils.first_rank import STARTED_BY
from fabricamp.launch.on_first import FOLDER
from fabricamp.launch.start import STARTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from fabricamp.launch.start import StartMethod

END_SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals on which the agent ends its workers."""

# Long, because a rank that was asked to end may have a checkpoint to write.
_SHUTDOWN_SECONDS = 60


class Outcome(NamedTuple):
    """How the workers ended: failures by rank in the order of their discovery, and the number of Ctrl-Cs passed on."""

    failures: dict[int, ProcessFailure]
    interrupts: int


def run_agent(
    num_processes: int, entrypoint: Callable[..., Any] | str, args: tuple[Any, ...], method: StartMethod, folder: Path
) -> Outcome:
    """Runs the workers and returns how they ended; they write errors below ``folder``.  A signal that ends the agent exits here."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as in a service
            stream.flush()
    with _variables(num_processes, method, folder):
        spec = _worker_spec(num_processes, entrypoint, args)
        # torch 2.11 has no such argument, and waits for 30 seconds.
        has_timeout = "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters
        options: dict[str, Any] = {"shutdown_timeout": _SHUTDOWN_SECONDS} if has_timeout else {}
        agent = LocalElasticAgent(
            spec,
            DefaultLogsSpecs(log_dir=str(folder / "ranks")),
            start_method="spawn" if method == "script" else method,
            **options,
        )
        with _quiet(), _signals(agent) as interrupts:
            try:
                result = agent.run()
            except SignalException as ended:
                sys.exit(128 + ended.sigval)
            finally:
                spec.rdzv_handler.shutdown()
    return Outcome({**_unreported(agent), **result.failures}, len(interrupts))


def _unreported(agent: LocalElasticAgent) -> dict[int, ProcessFailure]:
    """Returns every rank that failed when workers run a function: there the agent reports only the first failure it saw."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    started = getattr(getattr(agent, "_pcontext", None), "_pc", None)  # None for workers that run a script
    return {
        rank: ProcessFailure(local_rank=rank, pid=process.pid, exitcode=process.exitcode, error_file="")
        for rank, process in enumerate(getattr(started, "processes", []))
        if process.exitcode
    }


def _worker_spec(num_processes: int, entrypoint: Callable[..., Any] | str, args: tuple[Any, ...]) -> WorkerSpec:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from fabricamp.launch.rendezvous import OneMachine

    return WorkerSpec(
        role="rank",
        local_world_size=num_processes,
        entrypoint=entrypoint,
        args=args,
        rdzv_handler=OneMachine(),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )


@contextlib.contextmanager
def _variables(num_processes: int, method: StartMethod, folder: Path) -> Iterator[None]:
    """Sets the environment variables that workers inherit, in addition to those that the agent sets for each rank."""
    before = dict(os.environ)
    os.environ[STARTED_BY] = method
    os.environ[STARTER] = str(os.getpid())
    os.environ[FOLDER] = str(folder)
    # SIGINT is left out: on it the agent would end the workers instead of letting them finish their step.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(END_SIGNALS)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_processes)))
    # All ranks are on this machine: Gloo needs neither the host's name nor its network.
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the agent's loggers: the caller reports a failure once."""
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    noisy = [
        logger for logger in loggers if logger.name.startswith(("torch.distributed.elastic", "torch.multiprocessing"))
    ]
    # The agent creates this logger while it runs, and writes one line of JSON per event to it.
    noisy.append(logging.getLogger("torchelastic-events-null"))
    noisy = [logger for logger in noisy if not logger.disabled]  # those that a user disabled stay so
    for logger in noisy:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in noisy:
            logger.disabled = False


@contextlib.contextmanager
def _signals(agent: LocalElasticAgent) -> Iterator[list[int]]:
    """Passes each Ctrl-C on to the workers (they finish their step; the third kills), and restores all handlers afterwards.

    Yields a list that grows by one entry with each Ctrl-C.
    """
    interrupts: list[int] = []
    starter = os.getpid()

    def pass_on(signum: int, _frame: object) -> None:
        pids = [worker.id for worker in agent.get_worker_group().workers if isinstance(worker.id, int)]
        if os.getpid() != starter or not pids:
            raise KeyboardInterrupt
        interrupts.append(signum)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if len(interrupts) >= 3 else signum)

    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = {name: signal.getsignal(getattr(signal, name)) for name in ("SIGINT", *END_SIGNALS)}
    if before["SIGINT"] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, pass_on)
    try:
        yield interrupts
    finally:
        for name, handler in before.items():
            if handler is not None:
                signal.signal(getattr(signal, name), handler)
