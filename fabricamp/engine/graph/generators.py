"""The GPU's random generators that a captured call may draw from: torch's default generator and those of the module."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn


class Generators:
    """Torch's default generator of the current GPU, and the GPU generators in attributes of ``module`` or its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._own = generators_of(module)
        self._all = [torch.cuda.default_generators[torch.cuda.current_device()], *self._own]

    def states(self) -> list[Tensor]:
        """Returns copies of the generators' states."""
        return [one.get_state() for one in self._all]

    def put_back(self, states: Sequence[Tensor]) -> None:
        """Restores the generators' states."""
        for one, state in zip(self._all, states, strict=True):
            one.set_state(state)

    def are(self, states: Sequence[Tensor]) -> bool:
        """Whether the generators have these states."""
        return all(map(torch.equal, self.states(), states))

    @contextlib.contextmanager
    def captured(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """A context that lets ``graph`` use the generators; resets them after a failed capture, which leaves them capturing."""
        for one in self._own:
            graph.register_generator_state(one)
        spares = [one.clone_state() for one in self._all]
        try:
            yield
        except BaseException:
            for one, spare in zip(self._all, spares, strict=True):
                one.graphsafe_set_state(spare)
            raise


def generators_of(module: nn.Module) -> list[torch.Generator]:
    """Returns the GPU generators in attributes of ``module`` or its submodules, each once."""
    found = [one for part in module.modules() for one in vars(part).values() if isinstance(one, torch.Generator)]
    return list(dict.fromkeys(one for one in found if one.device.type == "cuda"))
