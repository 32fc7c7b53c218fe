"""Compares a replay with an eager step from the same state, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp.precision.verdicts import Verdicts


class StepState:
    """All that a step writes: weights, buffers, the optimizer's state, loss scale and verdicts, the device's generator."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, verdicts: Verdicts | None, device: torch.device
    ) -> None:
        found = dict(_named(module, optimizer, verdicts))
        self._tensors = {name: one for name, one in found.items() if one.device == device}
        self._device = device

    @property
    def bytes(self) -> int:
        """How much memory a copy takes."""
        return sum(one.numel() * one.element_size() for one in self._tensors.values())

    def copy(self) -> tuple[dict[str, Tensor], Tensor]:
        """Returns copies of everything."""
        copies = {name: one.detach().clone() for name, one in self._tensors.items()}
        return copies, torch.cuda.get_rng_state(self._device)

    @torch.no_grad()
    def put_back(self, copies: tuple[dict[str, Tensor], Tensor]) -> None:
        """Writes everything as it was."""
        for name, one in self._tensors.items():
            one.copy_(copies[0][name])
        torch.cuda.set_rng_state(copies[1], self._device)

    def difference(self, copies: tuple[dict[str, Tensor], Tensor]) -> str:
        """Names the first tensor whose bits are not those of the copy, or the generator; an empty string where all are."""
        for name, one in self._tensors.items():
            if not _equal(one, copies[0][name]):
                return name
        equal = torch.equal(torch.cuda.get_rng_state(self._device), copies[1])
        return "" if equal else "the state of the device's random generator"


def compare(state: StepState, before: tuple[dict[str, Tensor], Tensor], eager: Callable[[], Any]) -> str:
    """Returns what an ``eager`` step from ``before`` leaves otherwise than the replay that has run; an empty string for nothing.

    Where two eager steps differ from each other too, the step's own kernels are not deterministic, and nothing is said of it.
    """
    replayed = state.copy()
    state.put_back(before)
    eager()
    difference = state.difference(replayed)
    if difference:
        first = state.copy()
        state.put_back(before)
        eager()
        if state.difference(first):
            return ""
    return difference


def _equal(one: Tensor, other: Tensor) -> bool:
    left, right = (each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(left, right)


def _named(module: nn.Module, optimizer: Optimizer, verdicts: Verdicts | None) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    names = {id(one): name for name, one in module.named_parameters()}
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter), f"master {number}")
            yield name, parameter
            state = optimizer.state.get(parameter, {})
            yield from ((f"{key} of {name}", one) for key, one in state.items() if isinstance(one, Tensor))
            number += 1
    if verdicts is not None:
        yield from ((f"the loss scaler's {key}", one) for key, one in verdicts.scaler.tensors.items())
