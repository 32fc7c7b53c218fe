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
    wrapped(torch.ones(2, 8))
    second = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(fabricamp.ConfigError, match="setup_optimizers, at precision 'O4', after the first forward"):
        second.step()
    fabric = fabric_class(**CPU)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(range(2)))
    with pytest.raises(fabricamp.ConfigError, match="give each object once"):
        fabric.setup_dataloaders(loader)
    with pytest.raises(fabricamp.ConfigError, match="setup_dataloaders got no loader"):
        fabric.setup_dataloaders()
    with pytest.raises(TypeError, match="filter should be a dict"):
        fabric.save("one.ckpt", {"a": 1}, filter="a")
    with pytest.raises(fabricamp.ConfigError, match=r"filter has 'b', which is not in state: \['a'\]"):
        fabric.save("one.ckpt", {"a": 1}, filter={"b": bool})
    with pytest.raises(fabricamp.ConfigError, match=r"'loss', a tensor of shape \(2,\)"):
        fabric_class(**CPU, loggers=[object()]).log("loss", torch.ones(2))
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
    fabric.save("all.ckpt", {"model": model, "step": 3}, filter={"model": lambda name, _: "0" in name, "step": bool})
    rest = fabric.load("all.ckpt")
    assert (sorted(rest["model"]), rest["step"]) == (["0.bias", "0.weight"], 3)
    torch.save(model.state_dict(), "raw.ckpt")
    other, _ = net()
    nn.init.zeros_(other[0].weight)
    fabric.load_raw("raw.ckpt", other, weights_only=True)
    assert torch.equal(other[0].weight, model[0].weight)


def test_arguments_come_from_the_environment_too(fabric_class, monkeypatch):
    monkeypatch.setenv("LT_PRECISION", "bf16-mixed")
    monkeypatch.setenv("LT_DEVICES", "1")
    assert fabric_class(accelerator="cpu").strategy.precision.name == "O4"
    with pytest.raises(fabricamp.ConfigError, match=r"Fabric\(precision='64-true'\), and LT_PRECISION=bf16-mixed"):
        fabric_class(**CPU, precision="64-true")


def test_a_fabric_on_one_device_takes_the_precision_of_another(alias, fabric_class):
    fabric = fabric_class(**CPU, precision="bf16-true")
    strategy = alias("lightning.fabric.strategies").SingleDeviceStrategy(
        device=fabric.device, accelerator=fabric.accelerator, checkpoint_io=None, precision=fabric._precision
    )
    player = fabric_class(strategy=strategy, devices=1).setup_module(nn.Linear(2, 2))
    assert player(torch.ones(1, 2)).dtype is torch.float32
    assert player.weight.dtype is torch.bfloat16


def test_workers_are_seeded_by_rank_by_default(fabric_class, monkeypatch):
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "FABRICAMP_GLOBAL_SEED", "FABRICAMP_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    fabric_class.seed_everything(3)
    assert os.environ["PL_SEED_WORKERS"] == "1"
    fabric_class.seed_everything(3, workers=False)
    assert os.environ["PL_SEED_WORKERS"] == "0"


def test_loggers_take_fabrics_arguments_and_write_all_at_the_end(alias, fabric_class, tmp_path):
    loggers = alias("lightning.fabric.loggers")
    fabric = fabric_class(
        **CPU, loggers=[loggers.CSVLogger(root_dir=tmp_path, name="csv", flush_logs_every_n_steps=10)]
    )
    fabric.log("loss", 1.5)
    fabric.log("loss", torch.tensor(2.5))
    alias("lightning.fabric.fabric")._close_loggers()
    assert (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines() == ["step,loss", "0,1.5", "1,2.5"]


def test_rates_are_over_the_window(alias, fabric_class):
    throughput = alias("lightning.fabric.utilities.throughput")
    window = throughput.Throughput(available_flops=100, world_size=2, window_size=2)
    window.update(time=1.0, batches=1, samples=4, lengths=40, flops=10)
    assert window.compute() == {"time": 1.0, "batches": 1, "samples": 4, "lengths": 40}
    window.update(time=3.0, batches=5, samples=20, lengths=200, flops=20)
    found = window.compute()
    assert (found["device/batches_per_sec"], found["samples_per_sec"], found["device/items_per_sec"]) == (
        2.0,
        16.0,
        80.0,
    )
    assert (found["device/flops_per_sec"], found["device/mfu"]) == (10.0, 0.1)
    with pytest.raises(ValueError, match="time=2.0 is no more than the last one, 3.0"):
        window.update(time=2.0, batches=6, samples=24)
    monitor = throughput.ThroughputMonitor(fabric_class(**CPU), window_size=2)
    monitor.update(time=1.0, batches=1, samples=1)
    assert monitor.compute_and_log()["samples"] == 1


def test_a_compiled_module_is_saved_under_its_own_names(fabric_class):
    fabric = fabric_class(**CPU)
    model, optimizer = net()
    wrapped, stepped = fabric.setup(torch.compile(model, backend="eager"), optimizer)
    fabric.backward(wrapped(torch.ones(2, 8)).sum())
    stepped.step()
    assert wrapped.module is model
    assert list(wrapped.state_dict()) == list(model.state_dict())


def collective():
    from fabricamp.lightning.packages.fabric.plugins.collectives.torch_collective import TorchCollective

    group = TorchCollective().setup(backend="gloo").create_group()
    gathered = [None, None, None]
    group.all_gather_object(gathered, group.rank)
    return gathered, group.all_reduce(torch.ones(1)).item(), group.world_size


def three_ranks():
    from fabricamp.lightning.packages.fabric.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=3, strategy="ddp")
    fabric.seed_everything(5, verbose=False)
    model, optimizer = fabric.setup(*net())
    for number in range(4):
        fabric.backward(model(torch.full((2, 8), float(fabric.global_rank + number))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    weights = fabric.all_gather(model.module[0].weight.detach())
    last = fabric.broadcast(fabric.global_rank, src=2)
    return collective(), fabric.all_reduce(fabric.global_rank, reduce_op="sum").item(), last, weights


def test_three_ranks():
    for group, total, last, weights in run_ranks(three_ranks, 3):
        assert group == ([0, 1, 2], 3.0, 3)
        assert (total, last) == (3, 2)
        assert torch.equal(weights[0], weights[1])
        assert torch.equal(weights[0], weights[2])
