"""`fabricamp verify` on real scripts: equal bits, or the first difference with its cause."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fabricamp.callbacks._verification import VARIABLE, digests
from fabricamp.cli import main
from fabricamp.runs import verify
from fabricamp.runs.verify import compare
from tests.distributed.forked import start_forked

SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from fabricamp import Trainer, TrainingModule, seed_everything

seed_everything(1)

class Net(TrainingModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)), 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return self.net(batch[0]).square().mean() * (self.seen if sys.argv[1] == "--weighed" else 1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)

data = DataLoader(TensorDataset(torch.arange(40.0).view(10, 4)), 2, shuffle=True)
options = {"precision": "O5", "devices": 1}
if sys.argv[1] == "--searches":
    from fabricamp.callbacks import LearningRateFinder
    options["callbacks"] = LearningRateFinder(num_training_steps=12, early_stop_threshold=None, update_attr=False)
if sys.argv[1] == "--ranks":  # whose losses differ, where steps are skipped for overflow
    options = {"precision": "O1", "devices": 2, "strategy": "ddp", "start_method": "fork", "accumulate_grad_batches": 2}
Trainer(max_epochs=9, accelerator="cpu", **options).fit(Net(), data)
print("behind the fit", file=open("behind", "w"))
"""


run_in_new_interpreter = subprocess.run


def forked(command, env, stdout, **options):
    """Runs the script in a forked process with all imports done; the resumed part of the plain script in a new interpreter."""
    if command[-1] == "--plain" and json.loads(env[VARIABLE])["folder"].endswith("resumed"):
        run_in_new_interpreter(command, env=env, stdout=stdout, **options)
        return
    process = start_forked(Path.cwd(), *command[1:], streams=[stdout.fileno()] * 2, **env)
    process.communicate(timeout=200)


@pytest.mark.parametrize(
    ("argument", "code", "said"),
    [
        (
            "--plain",
            0,
            [
                "8 batches on 1 process, killed after batch 0 of epoch 1, resumed after batch 3 of epoch 0",
                "bitwise equal",
            ],
        ),
        (
            "--ranks",
            0,
            [
                "8 batches on 2 processes, killed after batch 2 of epoch 1, resumed after batch 0 of epoch 1",
                "bitwise equal",
            ],
        ),
        (
            "--searches",  # before the fit: its steps are none of the fit's
            0,
            [
                "8 batches on 1 process, killed after batch 0 of epoch 1, resumed after batch 3 of epoch 0",
                "bitwise equal",
            ],
        ),
        (
            "--weighed",
            1,
            ["resumed differs at batch 4 of epoch 0, step 5: state_dict.net.0.weight", "a plain attribute"],
        ),
    ],
)
def test_a_script(argument, code, said, capsys, monkeypatch):
    Path("train.py").write_text(SCRIPT)
    constants = {"DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT}
    monkeypatch.setattr(verify, "subprocess", SimpleNamespace(run=forked, **constants))
    assert main(["verify", "--batches", "8", "train.py", argument]) == code
    printed = capsys.readouterr().out
    assert [words for words in said if words not in printed] == []
    assert [path.name for path in Path.cwd().iterdir()] == ["train.py"], (
        "no logs, no checkpoints, nothing behind the fit"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "'nowhere.py' is not there"),
        (["--batches", "3", "fails.py"], "batches=3: choose 4 or more"),
        (
            ["fails.py"],
            "fails.py ended too early (straight); its last words:\nno trainer here",
        ),
        (
            ["ends.py"],
            "ends.py ended without a call of Trainer.fit; its last words:\nno trainer here",
        ),
    ],
)
def test_a_script_that_cannot_be_tried(words, message, capsys):
    Path("ends.py").write_text("print('no trainer here')")
    Path("fails.py").write_text("print('no trainer here')\nraise SystemExit(1)")
    assert main(["verify", *words]) == 2
    assert message in capsys.readouterr().err


def record(**changes):
    """Returns records of two batches; ``changes`` named ``batch_part`` replace digests."""
    line = {
        place: {part: {part: f"{place} {part}"} for part in ("data", "rng", "state")}
        for place in ("start", "0/0", "0/1")
    }
    for where, value in changes.items():
        place, part = where.rsplit("_", 1)
        line[{"start": "start", "first": "0/0", "second": "0/1"}[place]][part] = {part: value}
    return {place: {"at": place, "step": number, **parts} for number, (place, parts) in enumerate(line.items())}


@pytest.mark.parametrize(
    ("changes", "place", "part", "cause"),
    [
        ({"start_state": "x", "first_data": "x"}, "start", "start", "drawn without a seed"),
        ({"first_state": "x", "first_data": "x"}, "0/0", "data", "an order or augmentation"),
        ({"second_rng": "x", "second_state": "x"}, "0/1", "rng", "drew random numbers"),
        ({"second_state": "x"}, "0/1", "state", "the step draws from its own generator"),
    ],
)
def test_what_differs_first_decides_the_cause(changes, place, part, cause):
    found = compare("again", [record()], [record(**changes)])
    assert (found.position, found.part) == (place, part)
    assert f"likely cause: {cause}" in str(found) or cause in str(found)
    assert compare("again", [record()], [record()]) is None


def test_another_rank_is_named():
    found = compare("again", [record(), record()], [record(), record(second_data="x")])
    assert "at batch 1 of epoch 0, step 2 on rank 1: data" in str(found)


def test_a_resumed_run_begins_where_the_straight_one_was_saved():
    saved = record()["0/0"]
    resumed = {"start": saved | {"at": "start"}, "0/1": record()["0/1"]}
    assert compare("resumed", [record()], [resumed], begun_at="0/0") is None
    resumed["start"] = saved | {"state": {"state": "x"}}
    assert "the checkpoint restores these with other values" in str(
        compare("resumed", [record()], [resumed], begun_at="0/0")
    )


def test_digests_know_bits_types_and_shapes():
    tensors = [
        torch.tensor([0.0]),
        torch.tensor([-0.0]),
        torch.tensor([0]),
        torch.tensor([[0.0]]),
        torch.tensor(0.0),
        0.0,
        0,
        "0",
    ]
    assert len({digests(one, "x")["x"] for one in tensors}) == len(tensors)
    assert digests({"a": [1, object()]}, "x").keys() == {"x.a.0", "x.a.1"}
    assert digests(object(), "x") == digests(object(), "x"), "no address is in it"
