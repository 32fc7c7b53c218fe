"""The command in an interpreter of its own and in two processes: what is on stdout, and one exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.distributed.forked import start_forked
from tests.distributed.scripts import finish
from tests.test_cli import config  # noqa: F401 - an autouse fixture

COMMAND = (sys.executable, "-m", "fabricamp")


SPAWNED = """
from parts_of_command import Data, DataLoader

class Rows(list):
    def __getitem__(self, index):
        print("from a worker")
        return super().__getitem__(index)

class SpawnedData(Data):
    def predict_dataloader(self):
        rows = Rows([[[0.0, 1.0]], [[2.0, 3.0]]])
        return DataLoader(rows, batch_size=None, num_workers=1, multiprocessing_context="spawn", collate_fn=tensors)

def tensors(row):
    import torch
    return [torch.tensor(row)]
"""


def run_forked(*words):
    """Runs the command in a forked process; what it starts, ranks and spawned workers, are new interpreters."""
    code, out, err = finish(start_forked(Path.cwd(), "-m", "fabricamp", *words))
    return SimpleNamespace(returncode=code, stdout=out, stderr=err)


def run(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment,
        timeout=200,
        check=False,
    )


def test_what_spawned_workers_and_descriptor_1_get_is_not_on_stdout():
    Path("spawned.py").write_text(SPAWNED)
    done = run_forked("predict", "config.yaml", "--json", "module.fail=loud", "data._target_=spawned.SpawnedData")
    assert done.returncode == 0, done.stderr
    assert [one["x"] for one in json.loads(done.stdout)["predictions"]] == [[0.0], [2.0]]
    printed = ("from a worker", "from the step", "by number", "by the first object", "by a C library")
    assert [done.stderr.count(words) for words in printed] == [2] * 5


def test_a_reader_of_the_help_may_end_early():
    unread, written = os.pipe()
    os.close(unread)
    with os.fdopen(written, "wb") as pipe:
        done = subprocess.run(
            [*COMMAND, "bench", "--help"], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=200, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_predictions_of_two_processes_are_one_json():
    done = run_forked("predict", "config.yaml", "module.fail=loud", "trainer.devices=2", "--json")
    assert done.returncode == 0, done.stderr
    assert [one["x"] for one in json.loads(done.stdout)["predictions"]] == [[0.0], [2.0], [4.0], [6.0], [8.0]]
    printed = ("from the step", "by number", "by the first object", "by a C library")
    assert [done.stderr.count(words) for words in printed] == [5] * 4


def test_two_processes_fail_as_one():
    wrong = run_forked("fit", "config.yaml", "trainer.devices=2", "module.fail=early")
    assert wrong.returncode == 2
    assert wrong.stderr.count("this cannot work; change that") == 1
    assert "Traceback" not in wrong.stderr


@pytest.mark.slow
def test_two_processes_have_the_traceback_of_a_bug_once():
    """tests/distributed/test_trainer_launch.py tests a rank that raises in a script."""
    bug = run("fit", "config.yaml", "trainer.devices=2", "module.fail=bug")
    assert bug.returncode == 1
    assert bug.stderr.count("RuntimeError: a bug in the step") == 1
