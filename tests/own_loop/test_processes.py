"""A script with a Loop of two processes: it is run again in each of them, and values are logged once."""

from __future__ import annotations

import json

import pytest

from fabricamp import ConfigError, Loop
from fabricamp.checkpoint import read_checkpoint
from fabricamp.loggers import CSVLogger
from tests.distributed.forked import start_forked
from tests.distributed.ranks import run_ranks
from tests.distributed.scripts import finish
from tests.own_loop.same import prepared

SCRIPT = """
import json
import torch, fabricamp
run = fabricamp.Loop(accelerator="cpu", devices=2, strategy="delayed_ddp", seed=0)
model = torch.nn.Linear(8, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
loader = run.prepare_data(torch.utils.data.DataLoader(torch.randn(32, 8), 4))
for batch in loader:
    run.step(lambda x: model(x).square().mean(), batch)
total = run.all_reduce(model.weight.sum(), "sum").item() / 2 - model.weight.sum().item()
run.print(json.dumps({"ranks": run.world_size, "steps": run.global_step, "apart": total, "batches": len(loader)}))
run.close()
run.print("closed")
"""


def test_a_script_is_run_again_in_each_process(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    code, out, err = finish(start_forked(tmp_path, "train.py"))
    assert code == 0, err
    first, last = out.splitlines()
    assert json.loads(first) == {"ranks": 2, "steps": 4, "apart": 0.0, "batches": 4}
    assert last == "closed"


OPEN = """
import torch, fabricamp
from fabricamp.loggers import CSVLogger
run = fabricamp.Loop(accelerator="cpu", devices=1, logger=CSVLogger("logs"), deterministic=True)
model = torch.nn.Linear(8, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
run.log({"loss": run.step(lambda x: model(x).sum(), torch.ones(4, 8))})
run.save("last", asynchronous=True)
"""


def test_a_script_that_does_not_close_its_loop_ends_with_its_files(tmp_path):
    (tmp_path / "train.py").write_text(OPEN)
    code, out, err = finish(start_forked(tmp_path, "train.py"))
    assert (code, out, err) == (0, "", "")
    (file,) = tmp_path.rglob("metrics.csv")
    assert len(file.read_text().splitlines()) == 2
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 1


def other_devices():
    with pytest.raises(ConfigError, match="devices asks for 3 processes"):
        Loop(accelerator="cpu", devices=3)


def test_other_devices_than_the_starters_are_refused():
    run_ranks(other_devices, 2)


def logged(folder):
    run, model, _, train = prepared("sgd", logger=CSVLogger(folder), devices="auto", strategy="ddp")
    with run:
        for batch in train:
            loss = run.step(lambda b: model(b[0]).square().mean(), batch)
            if run.global_step % 2 == 0:
                run.log({"loss": loss, "lr": 0.1, "weights": model[0].weight.sum()})
        return run.rank


def test_values_are_logged_once_at_their_step(tmp_path):
    run_ranks(logged, 2, tmp_path)
    (file,) = tmp_path.rglob("metrics.csv")
    rows = [line.split(",") for line in file.read_text().splitlines()]
    assert {"loss", "lr", "step"} <= set(rows[0])
    assert [row[rows[0].index("step")] for row in rows[1:]] == ["2", "4"]
