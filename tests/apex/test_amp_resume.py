"""Exact resume from the checkpoint with three keys, and constant memory."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from torch import nn

from fabricamp.apex import amp
from fabricamp.precision import OptLevel
from tests.apex.amp_nets import ALL_OPTIMIZERS, LEVELS, OPTIMIZERS, net, snapshot, start, train
from tests.distributed.ranks import run_ranks

STEPS = 10
CASES = [(level, name) for level in LEVELS for name in OPTIMIZERS]


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()


def scale_window(steps):
    """Makes the scale change within the test, so that a resume has to restore it."""
    amp._amp_state.loss_scalers[0]._scale_seq_len = steps


def all_state(optimizer):
    groups = [one for group in optimizer.param_groups for one in group["params"]]
    return [value for one in groups for value in optimizer.state[one].values() if isinstance(value, torch.Tensor)]


def keep(folder, level, name, part, model, optimizer):
    content = [snapshot(model, optimizer), [one.clone() for one in all_state(optimizer)], amp.state_dict()]
    torch.save(content, folder / f"{level}-{name}-{part}.pt")


def continue_all(folder):
    """Restores each checkpoint as in apex's README, and continues training; runs in a second process."""
    for level, name in CASES:
        model, optimizer = start(level, name, seed=99)
        scale_window(7)
        checkpoint = torch.load(f"{folder}/{level}-{name}-checkpoint.pt", weights_only=False)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
        train(model, optimizer, range(STEPS, 2 * STEPS))
        keep(folder, level, name, "resumed", model, optimizer)
        amp.shutdown()


def test_apex_250_resume_at_every_level_in_a_new_process(tmp_path):
    for level, name in CASES:
        model, optimizer = start(level, name)
        scale_window(7)
        train(model, optimizer, range(STEPS))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
        torch.save(state, tmp_path / f"{level}-{name}-checkpoint.pt")
        train(model, optimizer, range(STEPS, 2 * STEPS))
        keep(tmp_path, level, name, "straight", model, optimizer)
        amp.shutdown()
    run_ranks(continue_all, 1, tmp_path, start_method="spawn", backend=None)
    for level, name in CASES:
        straight, resumed = (
            torch.load(tmp_path / f"{level}-{name}-{part}.pt", weights_only=False) for part in ("straight", "resumed")
        )
        assert straight[2] == resumed[2], (level, name)
        if level in ("O1", "O2"):
            assert straight[2]["loss_scaler0"]["loss_scale"] != 2.0**16  # it moved
        for one, other in zip(straight[:2], resumed[:2], strict=True):
            assert len(one) == len(other)
            assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True)), (level, name)


@pytest.mark.parametrize("name", ["SGD", "FusedAdam"])
def test_restored_before_initialize(name):
    model, optimizer = start("O2", name)
    train(model, optimizer, range(5))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    state = torch.load(_saved(state), weights_only=False)
    train(model, optimizer, range(5, 8))
    expected = snapshot(model, optimizer)
    amp.shutdown()
    model = net(9)
    optimizer = ALL_OPTIMIZERS[name](model.parameters())
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    amp.load_state_dict(state["amp"])
    train(model, optimizer, range(5, 8))
    assert all(torch.equal(one, other) for one, other in zip(snapshot(model, optimizer), expected, strict=True))


def tensors_alive():
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def _saved(state):
    torch.save(state, "checkpoint.pt")
    return "checkpoint.pt"


def test_apexs_own_file():
    """Loads a file in apex's format: half weights cast to fp32, two numbers per scaler, torch's optimizer state."""
    model, optimizer = start("O2", "Adam")
    train(model, optimizer, range(3))
    file = {
        "model": {
            name: value.half().float() if value.is_floating_point() else value
            for name, value in model.state_dict().items()
        },
        "optimizer": optimizer.state_dict(),
        "amp": {"loss_scaler0": {"loss_scale": 8192.0, "unskipped": 41}},
    }
    file = torch.load(_saved(file), weights_only=True)
    model, optimizer = start("O2", "Adam", seed=4)
    model.load_state_dict(file["model"])
    optimizer.load_state_dict(file["optimizer"])
    amp.load_state_dict(file["amp"])
    assert amp.state_dict() == file["amp"]
    master = next(iter(amp.master_params(optimizer)))
    assert torch.equal(master, file["model"]["first.weight"])
    assert optimizer.state[master]["exp_avg_sq"].dtype is torch.float32
    train(model, optimizer, range(3))


def test_apex_480_small_squares_survive_loading():
    """In fp16 the squares would be 0, and the next step far too large."""
    model, optimizer = start("O2", "Adam")
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["exp_avg_sq"].fill_(1e-10)
    optimizer.load_state_dict(state)
    for parameter in amp.master_params(optimizer):
        assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], torch.full_like(parameter, 1e-10))


def test_scalers_that_one_side_lacks(capsys):
    start("O1", num_losses=3)
    three = amp.state_dict()
    assert json.loads(json.dumps(three)) == three
    assert list(three) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
    start("O1")
    amp._amp_state.verbosity = 1
    three["loss_scaler0"]["loss_scale"] = 4.0
    amp.load_state_dict(three)
    printed = capsys.readouterr().out
    assert "3 entries, while 1 loss_scalers" in printed
    assert "Skipping loss_scaler2" in printed
    assert amp._amp_state.loss_scalers[0].loss_scale() == 4.0
    with pytest.raises(RuntimeError, match="scaler"):
        amp.load_state_dict({"scaler": {}})
    destination = {"mine": 1}
    assert list(amp.state_dict(destination)) == ["mine", "loss_scaler0"]


def test_a_constant_scale_stays_what_the_script_asks_for():
    start("O2", loss_scale=128.0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}})
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 3}}


def test_weights_go_to_the_trainers_levels():
    model, optimizer = start("O2")
    train(model, optimizer, range(2))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other = net(3)
    precision = OptLevel("O2")
    conversion = precision.convert_module(other)
    other.load_state_dict(state)
    assert torch.equal(conversion.full_state(other.state_dict())["first.weight"], state["first.weight"])


def test_apex_439_twenty_runs_leave_memory_flat_and_torch_as_it_was():
    import torch._dynamo  # the first import makes torch replace some of its own functions

    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # the first optimizer makes torch wrap its class's step
    namespaces = (torch, torch.Tensor, torch.nn.functional, torch.optim.SGD, nn.Module)
    before = [dict(vars(one)) for one in namespaces]
    counts = []
    for index in range(20):
        model, optimizer = start(LEVELS[index % 4], list(ALL_OPTIMIZERS)[index % 6])
        train(model, optimizer, range(2))
        amp.shutdown()
        del model, optimizer
        if index % 6 == 1:
            counts.append(tensors_alive())
    for one, known in zip(namespaces, before, strict=True):
        now = dict(vars(one))
        assert {name for name in known if now.get(name) is not known[name]} <= {"__warningregistry__"}, one
    assert counts[-1] <= counts[1], counts


def test_apex_626_runs_that_nobody_shut_down_are_freed():
    counts = []
    for index in range(8):
        model, optimizer = start(LEVELS[index % 4])
        train(model, optimizer, range(2))
        del model, optimizer
        if index % 4 == 3:
            counts.append(tensors_alive())
    assert counts[1] <= counts[0] + 2, counts
    assert len(amp._amp_state.conversions) == 0
