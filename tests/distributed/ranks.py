"""Runs a function on several Gloo ranks, for tests of several processes.

from tests.distributed.ranks import import_compiler, run_ranks, side_by_side
"""

from __future__ import annotations

import datetime as dt
import faulthandler
import functools
import gc
import logging
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.orphans import end_with

if multiprocessing.parent_process() is None:
    import torch._dynamo  # every forked process would import it, for seconds; a spawned one has no use for it

__all__ = ["import_compiler", "run_ranks", "side_by_side", "variables_of"]


@functools.cache
def import_compiler():
    """Compiles a function and its derivative: what that imports takes 1.6 s of every rank that is forked without it."""
    torch.compile(torch.cos, backend="aot_eager")(torch.ones(2, requires_grad=True)).sum().backward()
    torch.compiler.reset()


def run_ranks(function, world_size, *args, timeout=200.0, start_method=None, backend="gloo"):
    """Returns ``[function(*args) on rank 0, on rank 1, ...]``, each called in a separate process.

    Each process has torchrun's environment variables, one torch thread, and a process group (``backend=None``: none yet).
    The ranks connect only after all are forked: a rank that is forked while a thread of this process serves an earlier one would
    inherit that thread's locks, locked forever.
    Processes are forked (0.2 s, closures and lambdas are fine), or with ``start_method="spawn"`` started afresh (3 s, ``function``
    has to pickle).  If a rank fails, all are ended, and the AssertionError has its traceback; ranks that are not done after
    ``timeout`` seconds fail with their stacks.
    """
    method = start_method or ("spawn" if torch.cuda.is_initialized() else "fork")
    context = torch.multiprocessing.get_context(method)
    all_here = context.Barrier(world_size)
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = [variables_of(rank, world_size, store.port) for rank in range(world_size)]
        processes = [
            context.Process(
                target=_work,
                args=(function, args, variables[rank], folder, timeout, backend, all_here, os.getpid()),
                name=f"rank{rank}",
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, folder, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                if process.pid is not None:
                    process.join()
        return [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(world_size)]


def side_by_side(*functions):
    """Calls all functions concurrently, each in a forked process, and waits for them; for tests that mostly wait."""

    def one_of_them():
        function = functions[int(os.environ["RANK"])]
        for name in variables_of(0, 1, 0).keys() - {"OMP_NUM_THREADS"}:
            del os.environ[name]
        faulthandler.cancel_dump_traceback_later()  # its thread does not exist here; later forks would wait for it
        try:
            function()
        except BaseException:  # pytest.fail and pytest.raises raise no Exception
            return traceback.format_exc()
        return ""

    failures = run_ranks(one_of_them, len(functions), backend=None)
    assert not any(failures), "\n".join(failures)


def variables_of(rank, world_size, port):
    """Returns the variables that torchrun sets for a rank with its store at ``port`` of this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"ranks{port}",
        "OMP_NUM_THREADS": "1",
    }


def _work(function, args, variables, folder, timeout, backend, all_here, parent):
    end_with(parent)
    # A rank must not collect garbage of earlier tests: stores and groups would wait for threads that were not forked.
    gc.freeze()
    # Removes pytest's handlers, so the rank's messages go to its stderr.
    logging.root.handlers.clear()
    os.environ.update(variables)
    rank = int(variables["RANK"])
    torch.set_num_threads(1)
    with (folder / f"stacks{rank}").open("w") as stacks:
        faulthandler.enable(stacks)  # writes the stack of a rank that dies in C code
        faulthandler.dump_traceback_later(max(timeout - 1.0, 0.1), file=stacks)
        try:
            all_here.wait(timeout)
            if backend is not None:
                dist.init_process_group(backend, timeout=dt.timedelta(seconds=timeout))
            result = function(*args)
            torch.save(result, folder / f"result{rank}")
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
        except BaseException:
            # Written to another name first, because the parent may read the file at any moment.
            (folder / f"part{rank}").write_text(traceback.format_exc())
            (folder / f"part{rank}").rename(folder / f"failure{rank}")
            raise SystemExit(1) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()  # before its file is closed


def _wait(processes, folder, timeout):
    deadline = time.monotonic() + timeout
    waiting = {process.sentinel: (rank, process) for rank, process in enumerate(processes)}
    while waiting:
        ended = multiprocessing.connection.wait(waiting, timeout=max(deadline - time.monotonic(), 0.0))
        if not ended:
            raise AssertionError(
                f"ranks {sorted(rank for rank, _ in waiting.values())} hang after {timeout} s" + _stacks(folder)
            )
        for sentinel in ended:
            rank, process = waiting.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                told = _failures(folder) + (_stacks(folder) if process.exitcode < 0 else "")
                raise AssertionError(f"rank {rank} failed with exit code {process.exitcode}\n{told}")


def _failures(folder):
    """Returns the tracebacks, oldest first: the oldest is the cause, the others often only lost their peer."""
    files = sorted(folder.glob("failure*"), key=lambda file: file.stat().st_mtime_ns)
    return "\n".join(f"--- {file.name.replace('failure', 'rank ')} ---\n{file.read_text()}" for file in files)


def _stacks(folder):
    return "".join(
        f"\n--- {file.name.replace('stacks', 'rank ')} ---\n{file.read_text()}"
        for file in sorted(folder.glob("stacks*"))
    )
