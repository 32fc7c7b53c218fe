"""The random generators of a GPU that a captured call may draw from: torch's own one, and those that the module has."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn


class Generators:
    """Torch's generator of the current GPU, and those that are attributes of ``module`` or of its parts."""

    def __init__(self, module: nn.Module) -> None:
        self._own = generators_of(module)
        self._all = [torch.cuda.default_generators[torch.cuda.current_device()], *self._own]

    def states(self) -> list[Tensor]:
        """Returns copies of their states."""
        return [one.get_state() for one in self._all]

    def put_back(self, states: Sequence[Tensor]) -> None:
        """Leaves them as they were."""
        for one, state in zip(self._all, states, strict=True):
            one.set_state(state)

    def are(self, states: Sequence[Tensor]) -> bool:
        """Whether they are as they were."""
        return all(map(torch.equal, self.states(), states))

    @contextlib.contextmanager
    def captured(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Lets ``graph`` draw from them; a capture that fails leaves them as if it went on, and they are brought out of it."""
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
    """Returns the generators of a GPU that are attributes of ``module`` or of its parts."""
    found = [one for part in module.modules() for one in vars(part).values() if isinstance(one, torch.Generator)]
    return list(dict.fromkeys(one for one in found if one.device.type == "cuda"))
