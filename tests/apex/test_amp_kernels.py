"""amp with the kernels, on the CPU and on a GPU: the same results as with the references."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricamp.apex import amp
from tests.apex.amp_nets import ALL_OPTIMIZERS
from tests.cuda_on_cpu.compiler import references


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()


def run(level, name, device):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device)
    optimizer = ALL_OPTIMIZERS[name](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for index in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            loss = model(torch.full((2, 3), 0.1 * (index + micro), device=device)).float().pow(2).mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                (scaled_loss * (float("inf") if index == 1 and micro else 1.0)).backward()
        optimizer.step()
    result = [one.detach().clone() for one in amp.master_params(optimizer)], amp.state_dict()
    amp.shutdown()
    return result


@pytest.mark.parametrize("name", ["SGD", "FusedAdam"])
def test_kernels_and_references_agree(name, kernel_device):
    values, scale = run("O2", name, kernel_device)
    with references(kernel_device):
        expected, expected_scale = run("O2", name, kernel_device)
    assert scale == expected_scale == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 2}}
    assert all(torch.allclose(one, other, rtol=1e-6) for one, other in zip(values, expected, strict=True))
