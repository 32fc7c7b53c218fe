"""FP8 all-gathers: torch's FSDP gathers the weights of layers with FP8 products in FP8, each with one scale on all ranks.

torch asks a parameter's shard for the functions ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.  Here they are attributes of
the plain tensor that holds the shard, so that optimizers, clipping and checkpoints work with the same tensors as without them.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fabricamp.errors import ConfigError
from fabricamp.ops.shards import SharedRows, local
from fabricamp.strategies.fsdp_collectives import ShardCast, ShardFunctions, has_equal_shards

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabricamp._utils.types import StateDict


class Float8Gather:
    """Casts the shards of layers with FP8 products to FP8 before FSDP gathers them.

    A scale is that of the whole weight in the dtype in which it would be gathered otherwise, and the cast rounds to that dtype
    first: the products are the same to the bit.  The scales of all layers are computed together, in one all-reduce, at each gather;
    within :meth:`keeping` only at the first gather after :meth:`forget`.

    Left out are layers whose rows the ranks cannot share equally: torch pads their shards.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        shared = [layer for layer in layers if has_equal_shards(layer.weight)]
        self._shards: list[Any] = [local(layer.weight) for layer in shared]
        self._ranks = SharedRows.of([layer.weight for layer in shared])
        self._keeps = False
        self._is_known = False
        device = self._shards[0].device if shared else torch.device("cpu")
        # 16 bytes for each scale: compiled code copies an input whose address 16 does not divide.
        self._scales = torch.ones(len(shared), 4, dtype=torch.float32, device=device)[:, :1]
        self._hooks = []
        # The functions of FSDP's own copies, which these replace.
        self._replaced = [dict(vars(shard)) for shard in self._shards]
        for layer, shard, scale in zip(shared, self._shards, self._scales, strict=True):
            weight = _Weight(self, layer, shard, scale)
            shard.fsdp_pre_all_gather = weight
            shard.fsdp_post_all_gather = weight.after_gather
            self._hooks.append(layer.register_load_state_dict_pre_hook(weight.refuse_assign))

    def line(self, layers: int) -> str:
        """Returns a line for the summary of a run with FP8 products in ``layers`` layers."""
        line = f"float8 all-gather: the weights of {len(self._shards)} layers are gathered in FP8"
        others = layers - len(self._shards)
        return f"{line}, of {others} in bf16, as the ranks cannot share their rows equally" if others else line

    def forget(self) -> None:
        """Makes the next gather compute the scales; called where the weights may have changed since the last one."""
        self._is_known = False

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """A context for forward and backward, in which the weights do not change: known scales are not computed again.

        Around it, code of the user may call the module twice with a change of the weights in between.
        """
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    def know(self, dtype: torch.dtype, float8: torch.dtype) -> None:
        """Computes the scales unless they are known: a collective of the ranks that share the weights."""
        if self._is_known and self._keeps:
            return
        from torchao.float8.float8_utils import amax_to_scale

        largest = torch.stack(torch._foreach_norm(self._shards, float("inf")))
        if self._ranks is not None:
            largest = self._ranks.largest(largest.float())
        # The largest of rounded values is the largest value, rounded.
        self._scales.copy_(amax_to_scale(largest.to(dtype), float8).unsqueeze(1))
        self._is_known = True

    def take_off(self) -> None:
        """Gives the shards the attributes that they had before, and takes the hooks off the layers."""
        for hook in self._hooks:
            hook.remove()
        for shard, replaced in zip(self._shards, self._replaced, strict=True):
            vars(shard).clear()
            vars(shard).update(replaced)
        self._shards = []


class _Weight(ShardFunctions):
    """The functions that FSDP calls for a weight."""

    def __init__(self, gather: Float8Gather, layer: Any, shard: Tensor, scale: Tensor) -> None:
        self._gather = gather
        # The layer has other weights while it is gathered.
        self._layer = weakref.ref(layer)
        self._shard = shard
        self._scale = scale
        self._cast: ShardCast | None = None
        # Settings that torchao's class gives its layers.
        self._products = layer.linear_mm_config
        self._float8 = layer.config.cast_config_weight.target_dtype

    def __call__(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[Any, Any]:
        """Returns the shard in FP8 as a tuple, and what :meth:`after_gather` gets as ``metadata``: the weight's shape."""
        dtype = policy.param_dtype or self._shard.dtype
        self._gather.know(dtype, self._float8)
        if self._cast is None:  # only now the dtype is known
            self._cast = ShardCast(self._shard, dtype, self._scale)
        return (self._cast,), size

    def after_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Returns the whole weight as torchao's tensor, and the memory that FSDP frees and fills again.

        With ``out``, the tensor of an earlier call, FSDP has filled that memory, and the scale is updated in place.
        """
        if out is not None:
            return None
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        data = gathered[0].view(metadata)
        whole = Float8TrainingTensor(data, self._scale[0], dtype, self._products, GemmInputRole.WEIGHT)
        return whole, (data,)

    def refuse_assign(self, layer: nn.Module, state: StateDict, prefix: str, metadata: StateDict, *_: Any) -> None:
        """A pre-hook for loading: a new weight would lack the functions, while torch keeps the FP8 memory of the old one."""
        name = f"{prefix}weight"
        replaces = name in state and metadata.get("assign_to_params_buffers", False)
        if replaces and layer is self._layer():
            raise ConfigError(
                f"load_state_dict(assign=True) would replace {name}, which is gathered in FP8; load without assign"
            )
