"""``amp.scale_loss``: unscaled gradients, overflows, several losses and optimizers, accumulation, and orders of calls."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn import functional as F

from fabricamp.apex import amp
from fabricamp.errors import NonFiniteError
from fabricamp.optimizers import FusedAdam
from tests.apex.amp_nets import ALL_OPTIMIZERS, LEVELS, loss_of, net, same, snapshot, spoil, start, train

MESSAGE = "Gradient overflow.  Skipping step, loss scaler {} reducing loss scale to {}"
ON_DEVICE = ["FusedAdam", "FusedLAMB", "FusedSGD", "AdamFused"]
ON_HOST = ["SGD", "Adam"]


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()


def unscaled(model, index):
    """Returns the gradients without a loss scale, in the order of the parameters."""
    return torch.autograd.grad(loss_of(model, index), list(model.parameters()))


def close(gradients, expected):
    return all(
        torch.allclose(one, other.float(), rtol=2e-3, atol=2e-4) for one, other in zip(gradients, expected, strict=True)
    )


# -- gradients -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_unscaled_after_it(level):
    model, optimizer = start(level, loss_scale=None if level in ("O1", "O2") else 128.0)
    expected = unscaled(model, 0)
    loss = loss_of(model, 0)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.dtype is torch.float32
        assert scaled_loss.item() == pytest.approx(loss.item() * amp._amp_state.loss_scalers[0].loss_scale())
        scaled_loss.backward()
    assert close([one.grad.float() for one in amp.master_params(optimizer)], expected)
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-3)
    assert float(norm) == pytest.approx(float(torch.stack([one.norm() for one in expected]).norm()), rel=1e-2)
    before = [one.detach().float().clone() for one in amp.master_params(optimizer)]
    optimizer.step()
    moved = torch.stack(
        [(one.float() - two).norm() for one, two in zip(amp.master_params(optimizer), before, strict=True)]
    )
    if level != "O3":  # the update is too small to change half weights
        assert float(moved.detach().norm()) == pytest.approx(0.05 * 1e-3, rel=1e-2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["SGD", "FusedAdam"])
def test_passes_add_up(level, name):
    model, optimizer = start(level, name)
    expected = [one + other for one, other in zip(unscaled(model, 0), unscaled(model, 1), strict=True)]
    for index in (0, 1):
        with amp.scale_loss(loss_of(model, index), optimizer) as scaled_loss:
            scaled_loss.backward()
    assert close([one.grad.float() for one in amp.master_params(optimizer)], expected)
    optimizer.step()
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, 2), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert close([one.grad.float() for one in amp.master_params(optimizer)], unscaled(model, 2))


@pytest.mark.parametrize("level", LEVELS)
def test_delayed_unscaling(level):
    model, optimizer = start(level, loss_scale=64.0)
    expected = [sum(three) for three in zip(*(unscaled(model, index) for index in range(3)), strict=True)]
    optimizer.zero_grad()
    for index in range(3):
        with amp.scale_loss(loss_of(model, index), optimizer, delay_unscale=index < 2) as scaled_loss:
            scaled_loss.backward()
        assert optimizer._amp_stash.params_have_scaled_gradients is (index < 2)
    assert close([one.grad.float() for one in amp.master_params(optimizer)], expected)


def test_delayed_unscaling_from_the_first_pass_on_keeps_batchnorms_gradients():
    model, optimizer = start("O2")  # no zero_grad before
    expected = [one + other for one, other in zip(unscaled(model, 0), unscaled(model, 1), strict=True)]
    with amp.scale_loss(loss_of(model, 0), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    with amp.scale_loss(loss_of(model, 1), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert close([one.grad for one in amp.master_params(optimizer)], expected)


def test_a_delayed_pass_behind_an_unscaled_one():
    model, optimizer = start("O1")
    expected = [sum(three) for three in zip(*(unscaled(model, index) for index in range(3)), strict=True)]
    for index, delay in enumerate((False, True, False)):
        with amp.scale_loss(loss_of(model, index), optimizer, delay_unscale=delay) as scaled_loss:
            scaled_loss.backward()
    assert close([one.grad for one in amp.master_params(optimizer)], expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_several_optimizers_and_losses(level):
    one, two = net(0), net(1)
    optimizers = [ALL_OPTIMIZERS["SGD"](one.parameters()), ALL_OPTIMIZERS["FusedAdam"](two.parameters())]
    amp.initialize([one, two], optimizers, opt_level=level, num_losses=3, verbosity=0)
    losses = [loss_of(one, 0), loss_of(two, 1), loss_of(one, 2) + loss_of(two, 2)]
    expected = [torch.autograd.grad(losses[0] + losses[2], one.last.weight, retain_graph=True)[0]]
    expected += [torch.autograd.grad(losses[1] + losses[2], two.last.weight, retain_graph=True)[0]]
    for loss_id, given in enumerate((optimizers[0], optimizers[1], tuple(optimizers))):
        with amp.scale_loss(losses[loss_id], given, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()
    assert close([list(amp.master_params(one))[4].grad for one in optimizers], expected)
    assert [state["unskipped"] for state in amp.state_dict().values()] == [1, 1, 1]
    with pytest.raises(IndexError, match="num_losses=4"):
        amp.scale_loss(losses[0], optimizers, loss_id=3).__enter__()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_dcgan_overflow_of_one_loss_skips_its_optimizer_only(level, capsys):
    one, two = net(0), net(1)
    optimizers = [ALL_OPTIMIZERS["SGD"](one.parameters()), ALL_OPTIMIZERS["SGD"](two.parameters())]
    amp.initialize([one, two], optimizers, opt_level=level, num_losses=2, verbosity=0)
    amp._amp_state.verbosity = 1
    before = snapshot(one, optimizers[0]), snapshot(two, optimizers[1])
    spoil(optimizers[0], loss_of(one, 0))
    with amp.scale_loss(loss_of(two, 0), optimizers[1], loss_id=1) as scaled_loss:
        scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    weights = [0, 1, -1]
    after = snapshot(one, optimizers[0])
    assert all(torch.equal(after[place], before[0][place]) for place in weights)
    assert not torch.equal(snapshot(two, optimizers[1])[0], before[1][0])
    assert amp.state_dict() == {
        "loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 2.0**16, "unskipped": 1},
    }
    assert capsys.readouterr().out.strip() == MESSAGE.format(0, 2.0**15)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_parameter_of_two_optimizers_is_unscaled_once(level):
    model = net()
    optimizers = [ALL_OPTIMIZERS["SGD"](model.parameters()), ALL_OPTIMIZERS["FusedAdam"](model.last.parameters())]
    amp.initialize(model, optimizers, opt_level=level, verbosity=0)
    expected = unscaled(model, 0)
    with amp.scale_loss(loss_of(model, 0), optimizers) as scaled_loss:
        scaled_loss.backward()
    assert close([one.grad for one in amp.master_params(optimizers[0])], expected)
    assert close([one.grad for one in amp.master_params(optimizers[1])], expected[-2:])


def test_sparse_gradients_of_an_embedding():
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    amp.initialize(table, optimizer, opt_level="O1", verbosity=0)
    before = table.weight.detach().clone()
    for rows in ([1, 1], [2]):
        with amp.scale_loss(table(torch.tensor(rows)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert torch.allclose(before - table.weight, torch.tensor([0.0, 2.0, 1.0, 0.0, 0.0])[:, None].expand(5, 3))


def test_fp64_weights_keep_their_precision():
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for level in LEVELS:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        loss = F.linear(torch.ones(1, 3, dtype=torch.float64), model.weight).sum()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        assert model.weight.grad.dtype is torch.float64
        assert model.weight.grad.mean() == pytest.approx(1.0)


# -- overflows -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", [*ON_HOST, *ON_DEVICE])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_overflow_changes_nothing(level, name, value):
    model, optimizer = start(level, name)
    train(model, optimizer, range(2))
    weights = [one.detach().clone() for one in amp.master_params(optimizer)]
    state = [
        value.clone() for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)
    ]
    optimizer.zero_grad()
    spoil(optimizer, loss_of(model, 2), value)
    optimizer.step()
    assert same(weights, list(amp.master_params(optimizer)))
    assert same(state, [v for one in optimizer.state.values() for v in one.values() if isinstance(v, torch.Tensor)])
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**15
    assert amp._amp_state.loss_scalers[0]._unskipped == 0
    train(model, optimizer, [3])
    assert not same(weights, list(amp.master_params(optimizer)))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", [*ON_HOST, *ON_DEVICE])
def test_the_message(level, name, capsys):
    """The message comes at once if the host reads the overflow anyway, else two steps later; once in either case."""
    model, optimizer = start(level, name)
    amp._amp_state.verbosity = 1
    printed = []
    for index in range(5):
        optimizer.zero_grad()
        if index == 1:
            spoil(optimizer, loss_of(model, index))
            optimizer.step()
        else:
            train(model, optimizer, [index])
        printed.append(capsys.readouterr().out.strip())
    expected = [""] * 5
    expected[1 if name in ON_HOST else 3] = MESSAGE.format(0, 32768.0)
    assert printed == expected


def test_a_message_for_each_of_two_kinds(capsys):
    model, optimizer = start("O1", "FusedAdam")
    other = ALL_OPTIMIZERS["SGD"](net(3).parameters())
    amp._amp_state.verbosity = 1
    spoil(optimizer, loss_of(model, 0))
    spoil([optimizer, other], loss_of(model, 0))
    train(model, optimizer, range(4))
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines == [MESSAGE.format(0, 16384.0), MESSAGE.format(0, 32768.0)]


@pytest.mark.parametrize("name", ["SGD", "FusedAdam"])
def test_one_bad_pass_drops_the_window(name):
    model, optimizer = start("O2", name)
    before = snapshot(model, optimizer)
    for index in range(3):
        if index == 1:
            spoil(optimizer, loss_of(model, index))
        else:
            with amp.scale_loss(loss_of(model, index), optimizer) as scaled_loss:
                scaled_loss.backward()
    optimizer.step()
    assert same(before[-2:], snapshot(model, optimizer)[-2:])
    train(model, optimizer, [3])
    assert not same(before[-2:], snapshot(model, optimizer)[-2:])


@pytest.mark.parametrize("name", ["SGD", "FusedAdam"])
def test_zero_grad_begins_a_new_window(name):
    model, optimizer = start("O2", name)
    before = snapshot(model, optimizer)
    spoil(optimizer, loss_of(model, 0))
    train(model, optimizer, [1])
    assert not same(before[-2:], snapshot(model, optimizer)[-2:])


def test_the_scale_grows_after_its_window_and_stops_at_its_maximum():
    model, optimizer = start("O1", max_loss_scale=2.0**17)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._scale_seq_len = 3
    train(model, optimizer, range(3))
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**17, 0)
    train(model, optimizer, range(3))
    assert scaler.loss_scale() == 2.0**17


def test_min_loss_scale():
    model, optimizer = start("O1", min_loss_scale=2.0**15)
    for _ in range(3):
        spoil(optimizer, loss_of(model, 0))
        optimizer.step()
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**15


@pytest.mark.parametrize("name", ["SGD", "FusedAdam"])
def test_apex_318_endless_overflows_end_with_names(name):
    model, optimizer = start("O2", name)
    with torch.no_grad():
        model.last.bias[0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"first\.weight"):
        train(model, optimizer, range(100))
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**-14


def test_apex_777_the_scale_never_gets_to_zero():
    model, optimizer = start("O1", "SGD")
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 0.0
    assert scaler.loss_scale() == 2.0**-14
    train(model, optimizer, [0])


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_a_constant_scale_never_skips(level):
    model, optimizer = start(level, loss_scale=128.0)
    spoil(optimizer, loss_of(model, 0))
    optimizer.step()
    assert not torch.isfinite(model.last.bias).any()


def test_delayed_overflow_check_leaves_the_decision_to_the_script():
    """As in NVIDIA's BERT: unscale, exchange, then check the scaler by hand."""
    model, optimizer = start("O2", "FusedLAMB")
    scaler = amp._amp_state.loss_scalers[0]
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, 0), optimizer, delay_overflow_check=True) as scaled_loss:
        (scaled_loss * float("inf")).backward()
    assert scaler.loss_scale() == 2.0**16
    assert int(scaler._overflow_buf) == 1
    own, scaler._overflow_buf = scaler._overflow_buf, torch.zeros(1, dtype=torch.int32)
    assert scaler.update_scale() is False
    scaler._overflow_buf = own
    assert scaler.update_scale() is True
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**15, 0)
    optimizer.zero_grad()
    train(model, optimizer, range(3))
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**15, 3)


def test_a_failing_backward_leaves_earlier_gradients():
    model, optimizer = start("O2")
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
        scaled_loss.backward()
    expected = [one.grad.clone() for one in amp.master_params(optimizer)]

    def fail():
        with amp.scale_loss(loss_of(model, 1), optimizer):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert same(expected, [one.grad for one in amp.master_params(optimizer)])


# -- orders of calls -------------------------------------------------------------------------------------------------------------


def test_before_initialize():
    optimizer = ALL_OPTIMIZERS["SGD"](net().parameters())
    with pytest.raises(RuntimeError, match=r"amp\.initialize"):
        amp.scale_loss(torch.zeros(()), optimizer).__enter__()


@pytest.mark.parametrize("level", LEVELS)
def test_apex_1057_an_optimizer_built_after_initialize_is_taken_in(level, caplog):
    model = net()
    model = amp.initialize(model, opt_level=level, verbosity=0)
    optimizer = ALL_OPTIMIZERS["SGD"](model.parameters())
    with caplog.at_level(logging.WARNING, "fabricamp"):
        losses = train(model, optimizer, range(10))
    assert len(caplog.records) == 1
    assert "built after amp.initialize" in caplog.text
    amp.shutdown()
    model, optimizer = start(level)
    assert losses == pytest.approx(train(model, optimizer, range(10)), rel=1e-6)


def test_an_optimizer_built_again_takes_the_masters_over():
    model, optimizer = start("O2")
    train(model, optimizer, range(3))
    masters = list(amp.master_params(optimizer))
    again = ALL_OPTIMIZERS["Adam"](model.parameters())
    train(model, again, range(3))
    assert all(one is other for one, other in zip(amp.master_params(again), masters, strict=True))
    assert torch.equal(model.first.weight, masters[0].half())


def test_apex_341_step_before_backward(caplog):
    model, optimizer = start("O2")
    before = snapshot(model, optimizer)
    with caplog.at_level(logging.WARNING, "fabricamp"):
        optimizer.step()
        optimizer.step()
    assert caplog.text.count("before any backward") == 1
    assert same(before, snapshot(model, optimizer))
    train(model, optimizer, range(2))


def test_a_backward_outside_scale_loss():
    model, optimizer = start("O2")
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"inside amp\.scale_loss"):
        optimizer.step()
    amp.shutdown()
    model, optimizer = start("O1")  # fp32 gradients are valid without a loss scale
    before = model.last.bias.detach().clone()
    loss_of(model, 0).backward()
    optimizer.step()
    assert not torch.equal(before, model.last.bias)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["SGD", "FusedAdam"])
@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_apex_552_schedulers_before_and_after_initialize(level, name, when, recwarn):
    model = net()
    optimizer = ALL_OPTIMIZERS[name](model.parameters())
    schedulers = []
    if when != "after":
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if when != "before":
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    lr = optimizer.param_groups[0]["lr"]
    if level in ("O1", "O2"):
        spoil(optimizer, loss_of(model, 0))  # the first step is skipped
        optimizer.step()
    else:
        train(model, optimizer, [0])
    weight = model.state_dict()["last.weight"].clone()
    for scheduler in schedulers:
        scheduler.step()
    train(model, optimizer, [1])
    assert optimizer.param_groups[0]["lr"] == lr * 0.5 ** len(schedulers)
    assert not torch.equal(weight, model.state_dict()["last.weight"])
    assert not [str(one.message) for one in recwarn if "scheduler" in str(one.message)]
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)  # again, around the scheduler's wrapper
    train(model, optimizer, [2])
    amp.shutdown()
    loss_of(model, 3).backward()
    optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_apex_361_closures_with_a_constant_scale(level):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4) if level != "O3" else None
    optimizer = optimizer or ALL_OPTIMIZERS["SGD"](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_closures_with_a_dynamic_scale():
    _, optimizer = start("O2")
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: None)
    model = net()
    with pytest.raises(RuntimeError, match="LBFGS"):
        amp.initialize(model, torch.optim.LBFGS(model.parameters()), opt_level="O2", verbosity=0)


@pytest.mark.parametrize("name", ["SGD", "FusedAdam"])
@pytest.mark.parametrize("to_none", [True, False, None])
def test_apex_1196_zero_grad_takes_set_to_none(name, to_none):
    model, optimizer = start("O2", name)
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
        scaled_loss.backward()
    if to_none is None:
        optimizer.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=to_none)
    assert next(iter(amp.master_params(optimizer))).grad is None
    half = model.first.weight.grad
    assert half is None if to_none is not False else not half.any()


def test_model_side_zero_grad():
    model, optimizer = start("O2")
    for index in range(2):
        model.zero_grad()
        with amp.scale_loss(loss_of(model, index), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert close([one.grad for one in amp.master_params(optimizer)], unscaled(model, index))
        optimizer.step()


def test_add_param_group_in_training():
    model, optimizer = start("O2")
    train(model, optimizer, range(2))
    extra = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    master = optimizer.param_groups[1]["params"][0]
    assert master.dtype is torch.float32
    loss = loss_of(model, 2) + (extra.float() * 0.5).sum()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert torch.equal(extra, torch.full((3,), 0.5, dtype=torch.float16))
    assert torch.equal(master, torch.full((3,), 0.5))


def test_freezing_and_unfreezing():
    model = net()
    model.first.weight.requires_grad_(False)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    before = model.state_dict()["first.weight"].clone()
    train(model, optimizer, range(2))
    assert torch.equal(model.state_dict()["first.weight"], before)
    model.first.weight.requires_grad_(True)
    train(model, optimizer, range(2))
    assert not torch.equal(model.state_dict()["first.weight"], before)


def test_step_hooks_see_what_is_updated():
    model, optimizer = start("O2", "FusedAdam")
    seen = []
    optimizer.register_step_pre_hook(lambda one, *_: seen.append(next(amp.master_params(one)).grad.dtype))
    train(model, optimizer, range(2))
    assert seen == [torch.float32] * 2
    assert torch.equal(model.first.weight, next(iter(amp.master_params(optimizer))).half())


def test_clipped_gradients_reach_a_fused_step():
    models = []
    for name in ("FusedSGD", "SGD"):
        model, optimizer = start("O2", name)
        for index in range(3):
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, index), optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.05)
            optimizer.step()
        models.append(model.state_dict()["last.weight"].clone())
        amp.shutdown()
    assert torch.allclose(*models, atol=1e-6)
