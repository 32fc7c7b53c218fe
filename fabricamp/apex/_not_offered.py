"""Names that apex has and fabricamp does not, with the error messages for their import."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from typing import Any, Final

_SHARDED: Final = (
    "use Trainer(strategy='fsdp') with FusedAdam or FusedLAMB, or torch.distributed.optim.ZeroRedundancyOptimizer"
)
_ATTENTION: Final = "use torch.nn.functional.scaled_dot_product_attention"
_COMPILED: Final = "use torch's modules under torch.compile"
_SYMMETRIC: Final = "use torch.distributed._symmetric_memory, torch.cuda.MemPool"
_OWN: Final = "it has a project of its own"
_SOFTMAX: Final = "use torch.softmax under torch.compile, or torch.nn.functional.scaled_dot_product_attention"

NOT_OFFERED: Final = {
    "apex.transformer": "it lives on in Megatron Core (megatron.core.tensor_parallel, megatron.core.pipeline_parallel)",
    "apex.pyprof": "use torch.profiler",
    "apex.reparameterization": "use torch.nn.utils.parametrizations.weight_norm",
    "apex.distributed_testing": "use torch.testing._internal.common_distributed",
    "apex.contrib.bottleneck": _COMPILED,
    "apex.contrib.conv_bias_relu": _COMPILED,
    "apex.contrib.cudnn_gbn": _COMPILED,
    "apex.contrib.fmha": _ATTENTION,
    "apex.contrib.gpu_direct_storage": "use torch.cuda.gds",
    "apex.contrib.group_norm": "use torch.nn.GroupNorm with channels-last tensors, under torch.compile",
    "apex.contrib.multihead_attn": _ATTENTION,
    "apex.contrib.nccl_allocator": _SYMMETRIC,
    "apex.contrib.nccl_p2p": _SYMMETRIC,
    "apex.contrib.openfold_triton": _OWN,
    "apex.contrib.optimizers.distributed_fused_adam": _SHARDED,
    "apex.contrib.optimizers.distributed_fused_lamb": _SHARDED,
    "apex.contrib.peer_memory": _SYMMETRIC,
    "apex.contrib.torchsched": _OWN,
    "apex.contrib.transducer": "use torchaudio.functional.rnnt_loss",
    "bnp": "use apex.contrib.groupbn",
    "distributed_adam_cuda": _SHARDED,
    "distributed_lamb_cuda": _SHARDED,
    "focal_loss_cuda": "use apex.contrib.focal_loss",
    "fused_adam_cuda": "use apex.contrib.optimizers.FusedAdam",
    "fused_dense_cuda": "use apex.fused_dense",
    "fused_index_mul_2d": "use apex.contrib.index_mul_2d",
    "fused_lamb_cuda": "use apex.optimizers.FusedLAMB",
    "fused_rotary_positional_embedding": "write it in torch, under torch.compile",
    "fused_weight_gradient_mlp_cuda": "use Megatron Core",
    "generic_scaled_masked_softmax_cuda": _SOFTMAX,
    "scaled_masked_softmax_cuda": _SOFTMAX,
    "scaled_softmax_cuda": _SOFTMAX,
    "scaled_upper_triang_masked_softmax_cuda": _SOFTMAX,
}
"""What to use instead, by the name that scripts import."""


class _Finder:
    """The last finder on ``sys.meta_path``; Python calls it for modules that no other finder has found."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        """Raises for a module that is not offered: ``from apex import x`` would not show an error raised by ``__getattr__``.

        Callers of ``importlib.util.find_spec`` get None, as from any other finder.
        """
        known = name.removeprefix("fabricamp.")
        if known in NOT_OFFERED and not _is_only_asked():
            raise ModuleNotFoundError(
                f"fabricamp's apex has no {known}: {NOT_OFFERED[known]} (fabricamp help from-apex)", name=known
            )
        return None


def _is_only_asked() -> bool:
    """Returns whether the call comes from ``importlib.util.find_spec``; its callers expect None and no error."""
    asking = sys._getframe(3)  # the frame above the finder's find_spec and importlib's _find_spec
    return asking.f_globals.get("__name__") == "importlib.util"


def tell_on_import() -> None:
    """Installs the finder, so that imports of modules that are not offered raise an error with what to use instead."""
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)
