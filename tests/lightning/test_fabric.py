"""Loops around Lightning's Fabric run by its name, with Lightning's numbers; what a Loop cannot do is refused by name."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import fabricamp
from tests.distributed.ranks import run_ranks
from tests.lightning.run import nearly
from tests.lightning.test_door import DOOR, run
from tests.lightning.test_names import alias as alias  # noqa: PLC0414 - a fixture

HERE = Path(__file__).parent
CPU = {"accelerator": "cpu", "devices": 1}


def test_loops_print_what_they_print_under_lightning(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{HERE.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    shown, _ = run(tmp_path, *DOOR, str(HERE / "fabric_program.py"))
    expected = (HERE / "fabric_printed.txt").read_text()
    pairs = itertools.zip_longest(expected.splitlines(), shown.splitlines(), fillvalue="(no line)")
    different = [f"\nLightning  {one}\nfabricamp  {two}" for one, two in pairs if not nearly(one, two, 1e-6)]
    assert not different, "".join(different)


@pytest.fixture
def fabric_class(alias):
    return alias("lightning.fabric").Fabric


def net():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def test_it_is_one_class_under_each_name(alias, fabric_class):
    assert fabric_class is alias("lightning").Fabric
    assert fabric_class is alias("lightning_fabric").Fabric


def test_wrappers_are_what_they_wrap(fabric_class):
    fabric = fabric_class(**CPU)
    model, optimizer = net()
    wrapped, stepped = fabric.setup(model, optimizer)
    wrapped.eval()
    assert not model.training
    wrapped.note = 3
    assert (model.note, wrapped.note, wrapped.module) == (3, 3, model)
    assert wrapped.state_dict().keys() == model.state_dict().keys()
    stepped.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert type(stepped).__name__ == "FabricAdamW"
    schedule = torch.optim.lr_scheduler.StepLR(stepped, 1, 0.1)
    fabric.backward(wrapped(torch.ones(2, 8)).sum())
    stepped.step()
    schedule.step()  # does not warn: the step was counted
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def on_two_ranks():
    from fabricamp.lightning.packages.fabric.fabric import Fabric

    found = []
    for strategy, precision in (("ddp", "32-true"), ("delayed_ddp", "bf16-mixed")):
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
        model, optimizer = fabric.setup(*net())
        data = torch.utils.data.TensorDataset(torch.arange(64.0).view(8, 8) / 64)
        (loader,) = [fabric.setup_dataloaders(torch.utils.data.DataLoader(data, 2))]
        assert len(loader) == 2
        for (x,) in loader:
            fabric.backward(model(x).square().mean())
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([one.detach().flatten() for one in model.parameters()]))
        fabric.save(Path(f"{strategy}.ckpt"), {"model": model, "optimizer": optimizer, "step": 2})
        fabric.barrier()
        state = {"model": model, "optimizer": optimizer, "step": 0}
        assert fabric.load(f"{strategy}.ckpt", state) == {}
        assert state["step"] == 2
    return found


def test_two_ranks_have_the_same_weights():
    first, second = run_ranks(on_two_ranks, 2)
    assert all(map(torch.equal, first, second))


def test_what_cannot_work_is_refused_by_name(fabric_class):
    with pytest.raises(fabricamp.ConfigError, match=r"Fabric\(strategy='fsdp'\).*'ddp'"):
        fabric_class(**CPU, strategy="fsdp")
    fabric = fabric_class(**CPU, precision="bf16-mixed")
    model, optimizer = net()
    wrapped, stepped = fabric.setup(model, optimizer)
    with pytest.raises(fabricamp.ConfigError, match="give each object once"):
        fabric.setup(wrapped)
    with pytest.raises(fabricamp.ConfigError, match="not computed at precision 'O4'"):
        fabric.backward(model(torch.ones(2, 8)).sum())
    with pytest.raises(fabricamp.ConfigError, match="setup after the first forward"):
        fabric.setup(*net())
    with pytest.raises(fabricamp.ConfigError, match="one of clip_val and max_norm"):
        fabric.clip_gradients(wrapped, stepped)
    model, _ = net()
    wrapped, _ = fabric_class(**CPU).setup(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(fabricamp.ConfigError, match="LBFGS calls the forward itself"):
        wrapped(torch.ones(2, 8))


def test_a_missing_entry_of_a_file_is_named(fabric_class):
    fabric = fabric_class(**CPU)
    model, _ = net()
    fabric.save("one.ckpt", {"model": model})
    with pytest.raises(KeyError, match=r"one\.ckpt has no \['optimizer'\]; it has \['model'\]"):
        fabric.load("one.ckpt", {"optimizer": None})
    assert fabric.load("one.ckpt", {"optimizer": None}, strict=False).keys() == {"model"}
    torch.save(model.state_dict(), "raw.ckpt")
    other, _ = net()
    nn.init.zeros_(other[0].weight)
    fabric.load_raw("raw.ckpt", other)
    assert torch.equal(other[0].weight, model[0].weight)
