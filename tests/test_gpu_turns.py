"""Tests marked ``gpu_memory`` take turns between processes, also of different test runs."""

from __future__ import annotations

import multiprocessing
import os
import tempfile

import pytest

ROUNDS = 30
MARKED = f"""
import os, time
import pytest

@pytest.mark.gpu_memory(gib=20)
@pytest.mark.parametrize("number", range({ROUNDS}))
def test_that_takes_much(number):
    with open(os.environ["TURNS"], "a", buffering=1) as file:
        file.write(f"begin {{os.getpid()}}\\n")
        for _ in range(20):
            os.sched_yield()
        file.write(f"end {{os.getpid()}}\\n")
    assert number != 3, "a test that fails gives its turn back too"
"""


def work(file, begin):
    begin.wait(100)
    code = pytest.main(
        [str(file), "-q", "-p", "tests.gpu_turns", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    )
    os._exit(code)


def test_marked_tests_of_several_processes_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setenv("TURNS", str(tmp_path / "turns"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "test_marked.py").write_text(MARKED)
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(3)
    processes = [context.Process(target=work, args=(tmp_path / "test_marked.py", begin)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [pytest.ExitCode.TESTS_FAILED] * 3
    lines = (tmp_path / "turns").read_text().split("\n")[:-1]
    assert len(lines) == 2 * 3 * ROUNDS
    assert len(set(lines)) == 2 * 3
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        assert first.replace("begin", "end") == second
