"""Full gradients, kept by each process during an accumulation if memory allows; one exchange at its end is then enough."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from fabricamp.torch_private import keep_whole_gradient, sharded_parameters, whole_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SHARE: Final = 1 / 4
"""Fraction of the memory for full gradients, shards, their gradients and optimizer states; the rest is for activations."""
_BYTES_OF_PARTS: Final = 16
"""Bytes of a shard per parameter: value, gradient and two optimizer moments, in fp32."""


def memory_of(device: torch.device, processes: int) -> int:
    """Returns the bytes of a GPU, or of the host divided by its ``processes``; total memory, so a resumed run decides the same."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes


def fits(trained: int, sharing: int, memory: int) -> bool:
    """Returns whether ``trained`` bytes of full gradients (fp32 or wider) fit, if ``sharing`` ranks share a copy of the module."""
    return trained + _BYTES_OF_PARTS * trained / 4 / sharing <= _SHARE * memory


class WholeGradients:
    """A context in which backward keeps full gradients; also saves and restores them for an accumulation in progress."""

    def __init__(self, module: nn.Module, mesh: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._module = module
        self._mesh = mesh
        self._units: list[Any] = [one for one in module.modules() if isinstance(one, FSDPModule)]

    def __enter__(self) -> None:
        for one in self._units:
            one.set_requires_gradient_sync(False, recurse=False)

    def __exit__(self, *_: object) -> None:
        for one in self._units:
            one.set_requires_gradient_sync(True, recurse=False)

    def _named(self) -> Iterator[tuple[str, Any]]:
        for one in self._units:
            one.reshard()  # after it named_parameters() yields the shards
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for one in self._units:
            for record in sharded_parameters(one):
                yield names[id(record.sharded_param)], record

    def stacked(self) -> dict[str, Tensor]:
        """Returns the kept gradients by name, each stacked over the ranks as a DTensor with one entry per rank."""
        found = {}
        for name, record in self._named():
            gradient = whole_gradient(record)
            if gradient is None:
                continue
            exchanged: Any = record.sharded_param.grad
            if exchanged is not None:  # resumed from an accumulation of another number of ranks, exchanged already
                gradient = gradient + exchanged.full_tensor()
            found[name] = self._stack(gradient.detach())
        return found

    def places(self) -> dict[str, Tensor]:
        """Returns tensors like those of :meth:`stacked`, for all parameters, without values."""
        found = {}
        for name, record in self._named():
            one = record.sharded_param
            found[name] = self._stack(torch.empty(one.shape, dtype=one.dtype, device=one.device))
        return found

    def take(self, stacked: Mapping[str, Any]) -> None:
        """Resumes an accumulation from the result of :meth:`stacked`."""
        for one in self._units:
            one.unshard()  # creates the gathered parameters: from torch 2.15 on they hold the gradients
            one.reshard()
        for name, record in self._named():
            keep_whole_gradient(record, stacked[name].to_local()[0] if name in stacked else None)

    def forget(self) -> None:
        """Drops the kept gradients."""
        for _, record in self._named():
            keep_whole_gradient(record, None)

    def _stack(self, gradient: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        own = gradient.unsqueeze(0)
        shape = torch.Size((self._mesh.size(), *gradient.shape))
        stride = torch.empty(shape, device="meta", dtype=own.dtype).stride()
        placements = [Shard(0)] * self._mesh.ndim
        return DTensor.from_local(own, self._mesh, placements, run_check=False, shape=shape, stride=stride)
