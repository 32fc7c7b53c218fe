"""amp under parallel wrappers: ranks that began with weights of their own have the same masters, bit for bit."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fabricamp.apex import amp
from fabricamp.strategies.scripts import DistributedDataParallel
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
    """A wrapper before initialize: the error names the line to move."""
    wrapped = TorchDDP(net())
    with pytest.raises(RuntimeError, match=r"AFTER amp\.initialize"):
        amp.initialize(wrapped, opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match=r"AFTER amp\.initialize"):
        amp.initialize(DistributedDataParallel(net()), opt_level="O2", verbosity=0)


def everything():
    refused()
    return overflow_lines(), [trained_values(*case) for case in CASES]


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
