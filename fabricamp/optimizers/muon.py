"""What torch's Muon does not update rightly, told before the batch whose step would."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.optim import Muon

from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer


def check_shapes(optimizer: Optimizer) -> None:
    """Raises :class:`ConfigError` for a parameter of torch's Muon that is no matrix, in a group that was added.

    Its constructor refuses such parameters; ``add_param_group`` takes them, and the next step would fail.
    """
    if type(optimizer) is not Muon:  # a subclass may take others
        return
    for number, group in enumerate(optimizer.param_groups):
        shapes = [tuple(parameter.shape) for parameter in group["params"] if parameter.ndim != 2]
        if shapes:
            raise ConfigError(
                f"torch's Muon updates matrices alone, and its group {number} has a parameter of shape {shapes[0]}, with which its "
                "next step would fail; add parameters of 2 dimensions alone, and give the others to a second optimizer "
                "(self.automatic_optimization = False steps two), or train all with torch.optim.AdamW"
            )


def check_momentum(optimizer: Optimizer) -> None:
    """Raises :class:`ConfigError` for ``nesterov=False`` with bf16 weights, where torch's Muon scales its momentum to norm 1."""
    if type(optimizer) is not Muon:  # a subclass may take others
        return
    for group in optimizer.param_groups:
        halves = any(parameter.dtype == torch.bfloat16 for parameter in group["params"])
        if halves and not group["nesterov"] and _scales_momentum():
            raise ConfigError(
                f"Muon(nesterov=False) of torch {torch.__version__} scales the momentum of bf16 weights to norm 1 in each step, "
                "and so forgets how large gradients were; give precision='O5', whose fp32 master weights it updates rightly, or "
                "nesterov=True"
            )


@functools.cache
def _scales_momentum() -> bool:
    """Whether this torch's Muon writes into the momentum of bf16 weights when it normalises the update."""
    weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16, device="cpu"))
    weight.grad = torch.full_like(weight, 64.0)
    probe = Muon([weight], momentum=0.0, nesterov=False)
    probe.step()
    return bool(probe.state[weight]["momentum_buffer"].abs().max() < 64.0)
