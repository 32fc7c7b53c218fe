"""Complex parameters on a GPU, where kernels check, unscale, clip and sum their gradients, eagerly and from a CUDA graph."""

from __future__ import annotations

import functools

import pytest
import torch

from fabricamp.callbacks import EMA
from tests.pairs import pairs
from tests.small import quiet_trainer
from tests.trainer.test_complex_parameters import Net, assert_near, batches, by_hand, level_of, tolerance

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(
    ("level", "clip", "accumulate", "policy"),
    pairs(["O0", "O1", "O2", "O4", "O5"], [None, 0.5], [1, 2], [None, "skip"]),
)
def test_a_run_is_that_of_a_loop_by_hand(level, clip, accumulate, policy):
    make = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    options = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate, "nan_policy": policy}
    found = []
    for graph in (False, "auto"):
        net = Net(make)
        trainer = quiet_trainer(
            accelerator="gpu",
            max_epochs=1,
            precision=level_of(level),
            cuda_graph=graph,
            callbacks=[EMA(0.0)],
            **options,
        )
        trainer.fit(net, batches())
        found.append([parameter.detach().cpu() for parameter in net.parameters()])
        assert_near(found[-1], by_hand(clip, accumulate, make=make).parameters(), tolerance(level))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_autograd_may_leave_a_conjugate_view(level, accumulate):
    options = {"make": functools.partial(torch.optim.SGD, lr=0.05), "conjugates": True}
    net = Net(**options)
    trainer = quiet_trainer(
        accelerator="gpu",
        max_epochs=1,
        precision=level_of(level),
        accumulate_grad_batches=accumulate,
        nan_policy="skip",
    )
    trainer.fit(net, batches())
    assert_near([one.cpu() for one in net.parameters()], by_hand(accumulate=accumulate, **options).parameters(), 2e-2)
