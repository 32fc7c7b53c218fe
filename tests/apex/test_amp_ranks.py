"""amp under parallel wrappers: ranks with different initial weights get the same masters, bit for bit."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fabricamp.apex import amp, fp16_utils
from fabricamp.apex.parallel import DistributedDataParallel
from tests.apex.amp_nets import OPTIMIZERS, loss_of, net, start, train
from tests.distributed.ranks import run_ranks

WRAPPERS = {
    "torch": TorchDDP,
    "apex": DistributedDataParallel,
    "apex delayed": lambda model: DistributedDataParallel(model, delay_allreduce=True),
}


def trained_values(wrapper, level, when):
    rank = dist.get_rank()
    model = net(seed=rank)
    optimizer = OPTIMIZERS["FusedAdam"](model.parameters())
    if when == "optimizer after":
        amp.initialize(model, opt_level=level, verbosity=0)
        wrapped = WRAPPERS[wrapper](model)
        optimizer = OPTIMIZERS["FusedAdam"](model.parameters())
    else:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        wrapped = WRAPPERS[wrapper](model)
    if when == "loaded by rank 0 only" and rank == 0:
        del wrapped
        model.load_state_dict(net(seed=7).state_dict())
    if when.startswith("loaded"):
        dist.barrier()
        wrapped = WRAPPERS[wrapper](model)
    for step in range(4):
        loss = loss_of(wrapped, 10 * rank + step)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    masters = [one.detach().clone() for one in amp.master_params(optimizer)]
    amp.shutdown()
    return masters


CASES = [
    *[(wrapper, level, "fresh") for wrapper in WRAPPERS for level in ("O1", "O2")],
    *[(wrapper, "O2", "loaded by rank 0 only") for wrapper in ("torch", "apex")],
    *[(wrapper, "O2", "optimizer after") for wrapper in ("torch", "apex")],
    ("apex delayed", "O3", "fresh"),
]


def overflow_lines():
    model, optimizer = start("O1")
    wrapped = TorchDDP(model)
    amp._amp_state.verbosity = 1
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        with amp.scale_loss(loss_of(wrapped, 0), optimizer) as scaled_loss:
            (scaled_loss * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
        optimizer.step()
        train(wrapped, optimizer, range(3))
    result = printed.getvalue(), amp.state_dict()
    amp.shutdown()
    return result


def refused():
    """Checks that the error for a wrapper before initialize names the line to move."""
    wrapped = TorchDDP(net())
    with pytest.raises(RuntimeError, match=r"AFTER amp\.initialize"):
        amp.initialize(wrapped, opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match=r"AFTER amp\.initialize"):
        amp.initialize(DistributedDataParallel(net()), opt_level="O2", verbosity=0)


def passes(wrapped, optimizer, *, exchanged, bad=()):
    """Runs two micro-batches as in users' scripts; the first is within ``no_sync`` unless ``exchanged``."""
    first = contextlib.nullcontext if exchanged else wrapped.no_sync
    for index, context in enumerate([first, contextlib.nullcontext]):
        with context(), amp.scale_loss(loss_of(wrapped, 10 * dist.get_rank() + index), optimizer) as scaled_loss:
            (scaled_loss * (float("inf") if (dist.get_rank(), index) in bad else 1.0)).backward()


def average_of_two_passes():
    model = net()
    for index in range(2):
        loss_of(model, 10 * dist.get_rank() + index).backward()
    gradients = [one.grad for one in model.parameters()]
    for one in gradients:
        dist.all_reduce(one)
    return [one / dist.get_world_size() for one in gradients]


def check_accumulated(wrapper, level):
    """apex#708: gradients of micro-batches without an exchange are averaged too."""
    expected = average_of_two_passes()
    for exchanged in (False, True):
        model, optimizer = start(level, "FusedAdam")
        wrapped = WRAPPERS[wrapper](model)
        for _ in range(3):
            optimizer.zero_grad()
            passes(wrapped, optimizer, exchanged=exchanged)
        for one, other in zip(amp.master_params(optimizer), expected, strict=True):
            assert torch.allclose(one.grad, other, rtol=2e-2, atol=2e-3)
        amp.shutdown()


def skipped_window(wrapper):
    model, optimizer = start("O2", "FusedAdam")
    wrapped = WRAPPERS[wrapper](model)
    train(wrapped, optimizer, [0])
    before = [one.detach().clone() for one in amp.master_params(optimizer)]
    optimizer.zero_grad()
    passes(wrapped, optimizer, exchanged=False, bad=[(1, 0)])
    optimizer.step()
    assert all(map(torch.equal, before, amp.master_params(optimizer)))
    result = amp.state_dict()
    amp.shutdown()
    return result


def steps_of_their_own(wrapper):
    model, optimizer = start("O2", "FusedAdam")
    wrapped = WRAPPERS[wrapper](model)
    train(wrapped, optimizer, [0])
    before = model.last.bias.detach().clone()
    optimizer.zero_grad()
    with wrapped.no_sync(), amp.scale_loss(loss_of(wrapped, 1), optimizer) as scaled_loss:
        (scaled_loss * (float("inf") if dist.get_rank() else 1.0)).backward()
    optimizer.step()
    assert torch.equal(before, model.last.bias) is (dist.get_rank() == 1)
    result = amp.state_dict()["loss_scaler0"]["loss_scale"]
    amp.shutdown()
    return result


def values_after_zeros(wrapper, *, to_none):
    model, optimizer = start("O2", "FusedSGD")
    wrapped = WRAPPERS[wrapper](model)
    for index in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        passes(wrapped, optimizer, exchanged=index % 2 == 0)
        optimizer.step()
    masters = [one.detach().clone() for one in amp.master_params(optimizer)]
    amp.shutdown()
    return masters


def values_of_the_old_optimizer(wrapper, *, to_none):
    model = fp16_utils.network_to_half(net())
    wrapped = WRAPPERS[wrapper](model)
    optimizer = fp16_utils.FP16_Optimizer(OPTIMIZERS["SGD"](model.parameters()), static_loss_scale=128.0, verbose=False)
    for index in range(3):
        optimizer.zero_grad(to_none)
        optimizer.backward(loss_of(wrapped, 10 * dist.get_rank() + index))
        optimizer.step()
    return [one.detach().clone() for group in optimizer.param_groups for one in group["params"]]


def check_zeros():
    """Gradients that are views of a wrapper's memory can be zeroed as well as set to None."""
    for wrapper in WRAPPERS:
        for values in (values_after_zeros, values_of_the_old_optimizer):
            zeros, nothing = [values(wrapper, to_none=to_none) for to_none in (False, True)]
            assert all(map(torch.equal, zeros, nothing))
            everywhere = [one.clone() for one in zeros]
            for one in everywhere:
                dist.broadcast(one, 0)
            assert all(map(torch.equal, zeros, everywhere))


def full_values_of_several_models():
    """Eight models in one wrapper, which each rank converts in another order, so that their addresses differ."""
    models = torch.nn.ModuleList([torch.nn.Linear(size, 3) for size in range(1, 9)])
    amp.initialize(list(models)[:: -1 if dist.get_rank() else 1], opt_level="O2", verbosity=0)
    DistributedDataParallel(models)
    state = models.state_dict()
    amp.shutdown()
    return state


def everything():
    refused()
    check_zeros()
    for wrapper in WRAPPERS:
        for level in ("O1", "O2"):
            check_accumulated(wrapper, level)
    skipped = [skipped_window(wrapper) for wrapper in WRAPPERS]
    own = [steps_of_their_own(wrapper) for wrapper in WRAPPERS]
    return overflow_lines(), [trained_values(*case) for case in CASES], skipped, own, full_values_of_several_models()


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(everything, 2)


def test_masters_agree_at_every_level_under_every_wrapper(ranks):
    for case, left, right in zip(CASES, ranks[0][1], ranks[1][1], strict=True):
        assert all(torch.equal(mine, yours) for mine, yours in zip(left, right, strict=True)), case


def test_an_overflow_on_one_rank_skips_on_all_and_rank_0_tells(ranks):
    (line, state), (silence, other) = ranks[0][0], ranks[1][0]
    assert line.strip() == "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    assert silence == ""
    assert state == other == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 3}}


def test_apex_708_an_overflow_in_a_pass_without_exchange_skips_on_all(ranks):
    assert ranks[0][2] == ranks[1][2] == [{"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 0}}] * len(WRAPPERS)


def test_steps_without_an_exchange_are_judged_by_each_rank(ranks):
    assert ranks[0][3] == [65536.0] * len(WRAPPERS)
    assert ranks[1][3] == [32768.0] * len(WRAPPERS)


def test_full_values_of_several_models_in_one_wrapper_are_rank_0s(ranks):
    mine, yours = ranks[0][4], ranks[1][4]
    assert len(mine) == 16
    assert all(value.dtype is torch.float32 for value in mine.values())
    assert all(torch.equal(value, yours[name]) for name, value in mine.items())
