"""Starting real ranks: a script that is run again, functions in forked and spawned workers, failures, Ctrl-C."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import rich
import rich.console
import torch
import torch.distributed as dist

from fabricamp.errors import ConfigError, DistributedError
from fabricamp.launch import choose_start_method, detect, interactive, run_function
from fabricamp.launch.processes import _Job, _load_job, _save_job
from fabricamp.rng import isolate_rng
from tests.distributed.forked import start_forked
from tests.distributed.scripts import finish, start, wait_for_line, without_names

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, os, signal, sys, time
print("start", flush=True)

# Ranks whose imports nobody looks at: a second each.
WITHOUT_TORCH = {
    "arguments": ["0", "1"], "module": ["0", "1"], "exit": ["0"], "kill": ["0", "1"], "interrupt": ["0", "1"], "save": ["0", "1"],
}

def ready(word):
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"ready {word}"), "a") as file:
        file.write("ready\\n")

def work(rank, word):
    if word in ("arguments", "module") and rank == 1:
        print(json.dumps([sys.argv[1:], sys.flags.quiet, os.getcwd(), __name__, os.environ["MASTER_PORT"]]), flush=True)
    if word == "exit" and rank == 1:
        sys.exit(7)
    if word == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "interrupt":
        interruptions = []
        signal.signal(signal.SIGINT, lambda *_: interruptions.append(1))
        ready(word)
        while not interruptions:
            time.sleep(0.01)
        time.sleep(0.5)
        print(f"interrupted {len(interruptions)}", flush=True)
    if word == "save":
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print("saved", flush=True), os._exit(143)))
    if word in ("hang", "save", "exit", "kill"):
        ready(word)
        time.sleep(3600)

def fit():
    rank, word = os.environ.get("RANK", ""), sys.argv[1]
    if rank in WITHOUT_TORCH.get(word, ()):
        return work(int(rank), word)
    from fabricamp.launch import choose_start_method, detect, interactive, record_failure, run_script, script_can_rerun
    if detect() is None:
        print(choose_start_method(), script_can_rerun(), interactive(), flush=True)
        os.chdir("/")  # scripts do such things
        run_script(2)
    try:
        work(int(rank), word)
    except BaseException as error:
        record_failure(error)
        raise

if __name__ == "__main__":
    fit()
    print("after", flush=True)
    if sys.argv[1] == "raise_after":
        raise RuntimeError(f"after fit on {os.environ['RANK']}")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts") / "with space"
    (folder / "package").mkdir(parents=True)
    for file in (folder / "train.py", folder / "package" / "train.py"):
        file.write_text(SCRIPT)
    return folder


def start_script(folder, word):
    """Starts the script's workers by a forked starter; returns the starter."""
    return start_forked(folder, "train.py", word)


def test_script_module_and_parallel_runs(folder):
    words = ["a  b", "it's", '"quoted"', "$HOME $$ ${local_rank}", "--x=*", "", "ü"]
    runs = [
        start(folder, "-q", "train.py", "arguments", *words),
        start(folder, "-q", "-m", "package.train", "module", *words),
    ]
    (code, out, err), (module_code, module_out, module_err) = [finish(run) for run in runs]
    assert (code, err) == (0, "")
    assert (module_code, module_err) == (0, "")
    ports = set()
    for text, word in ((out, "arguments"), (module_out, "module")):
        seen = json.loads(next(line for line in text.splitlines() if line.startswith("[")))
        assert seen[:4] == [[word, *words], 1, str(folder), "__main__"]
        ports.add(seen[4])
        assert text.count("start") == 3  # the starter and two workers
        assert text.count("after") == 2  # the starter runs no code after the call
        assert text.count("script True False\n") == 1  # the starter's method, and whether it is interactive
    assert len(ports) == 2


def test_failures_of_scripts(folder):
    runs = {word: start_script(folder, word) for word in ("exit", "kill", "raise_after")}
    results = {word: finish(run) for word, run in runs.items()}

    code, _, err = results["exit"]
    assert code == 7, err
    assert "rank 1 ended with exit code 7" in err

    code, _, err = results["kill"]
    assert code == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in err
    assert "too much memory" in err

    code, out, err = results["raise_after"]
    assert code == 1
    assert "after" in out
    assert err.count("Traceback (most recent call last)") == 1
    assert "RuntimeError: after fit on" in err


FUNCTION = """
import os, signal, sys, time
from fabricamp.launch import detect, run_function

def wait():
    interruptions = []
    signal.signal(signal.SIGINT, lambda *_: interruptions.append(1))
    if sys.argv[1] == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(f"ready {sys.argv[1]}", "a") as file:
        file.write(f"{os.getpid()}\\n")
    while not interruptions:
        time.sleep(0.01)
    time.sleep(0.5)
    if sys.argv[1] == "stubborn":
        raise KeyboardInterrupt
    return len(interruptions)

try:
    print("result", run_function(wait, (), 2, "fork"))
except KeyboardInterrupt:
    print("keyboard interrupt")
"""


def test_signals_to_the_starter(folder):
    (folder / "function.py").write_text(FUNCTION)
    gentle, stubborn, ended = (start_script(folder, word) for word in ("interrupt", "hang", "save"))
    gentle_call, stubborn_call = (start_forked(folder, "function.py", word) for word in ("gentle", "stubborn"))
    runs = (gentle, stubborn, gentle_call, stubborn_call, ended)
    for run in runs:
        wait_for_line(folder / f"ready {run.args[-1]}", 2, process=run)
    # A terminal sends SIGINT to the complete foreground group.
    for run in runs[:-1]:
        os.killpg(run.pid, signal.SIGINT)
    os.kill(ended.pid, signal.SIGTERM)

    assert finish(gentle_call) == (0, "result 1\n", "")
    assert finish(stubborn_call) == (0, "keyboard interrupt\n", "")

    code, out, err = finish(gentle)
    assert (code, err) == (0, "")
    assert out.count("interrupted 1") == 2  # once per worker
    assert out.count("after") == 2

    code, out, err = finish(stubborn)
    assert code == 128 + signal.SIGINT
    assert "Traceback" not in err
    assert "after" not in out

    code, out, err = finish(ended)
    assert code == 128 + signal.SIGTERM
    assert out.count("saved") == 2  # the starter waits until both have saved
    assert "Traceback" not in err


def test_workers_whose_starter_is_killed_are_killed_too(folder):
    (folder / "function.py").write_text(FUNCTION)
    process = start_forked(folder, "function.py", "deaf")
    wait_for_line(folder / "ready deaf", 2, process=process)
    workers = [int(line) for line in (folder / "ready deaf").read_text().split()]
    process.kill()
    try:
        finish(process)  # returns only when its workers have ended, because they keep its pipes open
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def describe(value, tensor):
    """Returns a description of the worker's process; changes its tensor in place."""
    dist.init_process_group("gloo")
    tensor += dist.get_rank() + 1
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return {
        "value": value,
        "total": total,
        "tensor": tensor,
        "name": detect().name,
        "interactive": interactive(),
        "large": torch.ones(10**6),
        "drawn": drawn(),
    }


def drawn():
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


@pytest.fixture
def _two_threads():
    """Runs a parallel region before the fork, because OpenMP's threads do not survive a fork."""
    torch.set_num_threads(2)
    torch.ones(600, 600) @ torch.ones(600, 600)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_functions_bring_their_result_back(method, monkeypatch):
    if method == "spawn":  # as from standard input: the main module has no real file name
        main = sys.modules["__main__"]
        monkeypatch.setattr(main, "__spec__", None)
        monkeypatch.setattr(main, "__file__", "<stdin>", raising=False)
    before = dict(os.environ)
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)]
    tensor = torch.zeros(3)
    with isolate_rng():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        result = run_function(describe, ("a $$ value", tensor), 2, method)
        assert result["drawn"] == drawn()
    assert result["value"] == "a $$ value"
    assert result["total"].item() == 2
    assert result["tensor"].tolist() == [1, 1, 1]  # rank 0's own copy
    assert tensor.tolist() == [0, 0, 0]
    assert result["name"] == method
    assert result["interactive"]
    assert result["large"].sum().item() == 10**6
    assert dict(os.environ) == before
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)] == handlers


def fail(how):
    rank = detect().rank
    if how == "configuration":
        raise ConfigError("devices=7 is too many")
    if rank == 1 and how == "value":
        raise ValueError("rank one is unwell")
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("configuration", ConfigError, r"^devices=7 is too many\n"),
        (
            "value",
            DistributedError,
            r"rank 1 ended with exit code 1[\s\S]*in fail[\s\S]*ValueError: rank one is unwell",
        ),
        ("kill", DistributedError, r"rank 1 was killed by SIGKILL"),
    ],
)
def test_failures_of_functions(how, error, message, capfd):
    with pytest.raises(error, match=message):
        run_function(fail, (how,), 2, "fork")
    assert without_names(capfd.readouterr().err) == ""


UNCAUGHT = """
from fabricamp.launch import run_function

def fail():
    raise ValueError("every rank is unwell")

if __name__ == "__main__":
    run_function(fail, (), 2, "fork")
"""


def test_an_uncaught_failure_of_a_function_shows_its_sentence_first(folder):
    (folder / "uncaught.py").write_text(UNCAUGHT)
    code, out, err = finish(start_forked(folder, "uncaught.py"))
    assert (code, out) == (1, "")
    assert re.match(r"DistributedError: rank \d ended with exit code 1", err)
    assert err.index("ValueError: every rank is unwell") < err.index('uncaught.py", line 8, in <module>')


def test_a_script_s_own_excepthook_stays(monkeypatch):
    def mine(*_):
        pass

    monkeypatch.setattr(sys, "excepthook", mine)
    with pytest.raises(DistributedError):
        run_function(fail, ("kill",), 2, "fork")
    assert sys.excepthook is mine


def test_an_exit_of_the_function_is_an_exit_here():
    with pytest.raises(SystemExit) as caught:
        run_function(sys.exit, (0,), 2, "fork")
    assert caught.value.code == 0
    with pytest.raises(DistributedError, match="rank 0 ended with exit code 3"):
        run_function(sys.exit, (3,), 1, "fork")


def test_forked_functions_need_not_pickle_and_spawned_ones_say_so():
    offset = 2
    assert run_function(lambda value: value + offset, (1,), 2, "fork") == 3
    with pytest.raises(ConfigError, match=r"no lambdas.*start_method='fork'"):
        run_function(lambda: offset, (), 2, "spawn")


def test_a_script_that_starts_others_while_spawn_imports_it_is_told_where_to_put_the_call(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigError, match="if __name__ == '__main__':"):
        run_function(fail, ("configuration",), 2, "spawn")


def test_a_forked_function_does_not_collect_the_garbage_of_its_starter():
    """A store that is destroyed in the child waits forever for its thread, which was not forked."""
    collected = []

    class Store:
        def __del__(self):
            collected.append(os.getpid())

    def collect():
        gc.collect()
        return collected

    garbage = [Store()]
    garbage.append(garbage)
    gc.disable()
    try:
        del garbage
        assert run_function(collect, (), 2, "fork") == []
    finally:
        gc.enable()
    assert collect() == [os.getpid()]


def test_a_start_looks_at_none_of_the_modules_that_are_loaded(monkeypatch):
    """``inspect`` would search all loaded modules, which takes seconds per start, also in a notebook."""
    looks = []
    with monkeypatch.context() as counted:
        counted.setattr(inspect, "getmodule", lambda *arguments: looks.append(arguments))
        assert run_function(max, (1, 2), 2, "fork") == 2
    assert not looks


def test_fork_is_refused_once_cuda_is_initialised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="restart the kernel"):
        run_function(fail, ("value",), 2, "fork")
    with pytest.raises(ConfigError, match="restart the kernel"):
        choose_start_method("fork")


def test_start_methods_by_name():
    assert choose_start_method() == choose_start_method("auto") == "fork"  # under pytest
    assert choose_start_method("spawn") == "spawn"
    with pytest.raises(ConfigError, match="did you mean 'spawn'"):
        choose_start_method("spwan")


def test_a_script_that_ranks_run_is_not_run_again(monkeypatch):
    monkeypatch.setenv("FABRICAMP_STARTED_BY", "script")
    assert choose_start_method() == "fork"
    with pytest.raises(ConfigError, match=r"start_method='script' would run the script again .*'fork' or 'spawn'"):
        choose_start_method("script")


def test_start_method_of_plain_python(folder):
    """Tests ``-c`` and stdin; scripts are tested above."""
    names = "choose_start_method, script_can_rerun, interactive"
    question = f"from fabricamp.launch import {names}\nfor one in ({names}): print(one(), end=' ')"
    of_command = start(folder, "-c", question)
    piped = subprocess.run(
        [sys.executable], input=question, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200
    )
    assert finish(of_command)[:2] == (0, "spawn False False ")
    assert piped.stdout == "spawn False False "


@pytest.mark.parametrize("where", ["json", "a_module_of_the_prompt"])
def test_what_only_this_session_defines_cannot_be_spawned(monkeypatch, where, tmp_path):
    def mine():
        return 1

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, where, sys.modules.get(where, types.ModuleType(where)))
        patch.setattr(sys.modules[where], "mine", mine, raising=False)
        mine.__module__, mine.__qualname__ = where, "mine"
        told = "a spawned process cannot find what is defined in this session"
        if where != "json":
            with pytest.raises(ConfigError, match=told):
                run_function(mine, (), 1, "spawn")
        _save_job(_Job(mine, (), {}, logging.INFO), tmp_path)
    # Simulates a new process, which would take two seconds more.
    with pytest.raises(ConfigError, match=told):
        _load_job(tmp_path)


def test_forked_workers_print_text_where_a_notebook_would_want_pictures(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    monkeypatch.setattr(rich, "_console", rich.console.Console(force_jupyter=True))
    assert rich.get_console().is_jupyter
    assert run_function(lambda: rich.get_console().is_jupyter, (), 2) is False
