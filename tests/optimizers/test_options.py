"""Invalid options are refused by name in parameter groups too, and the group is not added."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricamp import optimizers
from fabricamp.errors import ConfigError

FUSED = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedLion", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]


def parameters():
    return [nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize("name", FUSED)
def test_a_group_with_a_learning_rate_that_is_none(name):
    optimizer = getattr(optimizers, name)(parameters(), lr=0.1)
    for value in ("x", [0.1], -1.0, float("nan"), torch.ones(2)):
        with pytest.raises(ConfigError, match=f"{name} got lr="):
            optimizer.add_param_group({"params": parameters(), "lr": value})
    with pytest.raises(ConfigError, match=f"{name} got weight_decay='x'"):
        getattr(optimizers, name)([{"params": parameters(), "weight_decay": "x"}], lr=0.1)
    assert len(optimizer.param_groups) == 1
