"""``TorchCollective``: a process group of torch as an object, for programs whose ranks have several roles."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_PASSED_ON = ("reduce_scatter", "all_to_all", "all_gather_object", "gather_object", "broadcast_object_list")


class TorchCollective:
    """Calls functions of ``torch.distributed`` with one group: :meth:`setup`, then :meth:`create_group`."""

    def __init__(self) -> None:
        if not dist.is_available():
            raise RuntimeError("this torch has no torch.distributed; install a build that has it")
        self._group: Any = None

    @property
    def group(self) -> Any:
        """The group; raises RuntimeError before :meth:`create_group`."""
        if self._group is None:
            raise RuntimeError(f"{type(self).__name__} has no group; call create_group() first")
        return self._group

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        """The number of processes in the group."""
        return dist.get_world_size(self.group)

    def setup(self, main_address: str | None = None, main_port: str | None = None, **options: Any) -> Self:
        """Makes torch's default group, if there is none."""
        if not dist.is_initialized():
            given = {"MASTER_ADDR": main_address, "MASTER_PORT": main_port}
            os.environ.update({name: value for name, value in given.items() if value is not None})
            backend = options.pop("backend", "nccl" if torch.cuda.is_available() else "gloo")
            dist.init_process_group(backend, **options)
        return self

    def create_group(self, **options: Any) -> Self:
        """Makes the group: of ``ranks``, by default all."""
        self._group = dist.new_group(**options)
        return self

    def teardown(self) -> Self:
        """Ends the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        return self

    @staticmethod
    def is_available() -> bool:
        """Whether torch has ``torch.distributed``."""
        return dist.is_available()

    @staticmethod
    def is_initialized() -> bool:
        """Whether torch's default group was made."""
        return dist.is_available() and dist.is_initialized()

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        """Overwrites the tensor with rank ``src``'s."""
        dist.broadcast(tensor, src, group=self.group)
        return tensor

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        """Reduces the tensor over the ranks, in place."""
        dist.all_reduce(tensor, op=_op(op), group=self.group)
        return tensor

    def reduce(self, tensor: Tensor, dst: int, op: Any = "sum") -> Tensor:
        """Reduces the tensor to rank ``dst``."""
        dist.reduce(tensor, dst, op=_op(op), group=self.group)
        return tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        """Writes every rank's tensor into the list."""
        dist.all_gather(tensor_list, tensor, group=self.group)
        return tensor_list

    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        """Writes every rank's tensor into rank ``dst``'s list."""
        dist.gather(tensor, gather_list, dst, group=self.group)
        return gather_list

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        """Writes rank ``src``'s tensor for this rank into ``tensor``."""
        dist.scatter(tensor, scatter_list, src, group=self.group)
        return tensor

    def scatter_object_list(self, output: list[Any], given: list[Any] | None, src: int = 0) -> list[Any]:
        """Writes rank ``src``'s object for this rank into ``output``."""
        dist.scatter_object_list(output, given, src, group=self.group)
        return output

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Sends a tensor to rank ``dst``."""
        dist.send(tensor, dst, tag=tag, group=self.group)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        """Receives a tensor."""
        dist.recv(tensor, src, tag=tag, group=self.group)
        return tensor

    def barrier(self, device_ids: Sequence[int] | None = None) -> None:
        """Waits for every rank of the group."""
        dist.barrier(group=self.group, device_ids=None if device_ids is None else list(device_ids))

    def __getattr__(self, name: str) -> Any:
        """Passes the other functions of ``torch.distributed`` on, with the group; they return their first argument."""
        if name not in _PASSED_ON:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")

        def call(first: Any, *args: Any, **options: Any) -> Any:
            getattr(dist, name)(first, *args, group=self.group, **options)
            return first

        return call


def _op(op: Any) -> Any:
    return getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op
