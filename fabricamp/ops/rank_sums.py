"""Adds the values of all ranks, by one launch."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from fabricamp.ops.bridge import c_type, kernel

_THREADS: Final = 256
_ELEMENTS: Final = 8 * _THREADS
_MOST_BLOCKS: Final = 1024


def rank_sums(own: Tensor, others: Tensor, to: Tensor, *, rank: int, factor: float) -> None:
    """Writes ``factor`` times the sum over the ranks into ``to``: in fp32, and in the order of the ranks.

    ``own``: the part of ``rank``, in fp16 or bf16, on a device that runs kernels.  ``others``: those of the others, a line each.
    """
    ranks = others.shape[0] + 1
    if own.numel() == 0:
        return
    run = kernel("rank_sums", "rank_sums", (), own.device, (("HALF", c_type(own.dtype)),))
    blocks = min(-(-own.numel() // _ELEMENTS), _MOST_BLOCKS)
    run.launch(
        blocks, _THREADS, own.data_ptr(), others.data_ptr(), to.data_ptr(), own.numel(), rank, ranks, float(factor)
    )
