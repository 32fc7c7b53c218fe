"""Optimizer states of eight bits: a code for each element, and for each block of 256 elements the scale of its codes.

A code is dynamic: its values lie in levels, each of which spans a factor of 8 and has half as many values, evenly spaced, as the
one above.  A signed state has 7 bits and a sign: its scale is the block's largest magnitude, and what is below 8^-6 of it may
become 0.
A state of squares has 8 bits for the root of each value: the scale is the block's largest value, and nothing becomes 0 beside
it (a square that did would make its element's step many times too large).  The largest value of a block comes back exactly.
A block with a value that is not finite comes back as nan.

Blocks are counted in the order of elements.  Those of a shard begin with it, so scales are a matrix: (shards, blocks of one).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricamp.ops.shards import first_element, is_shard, local, shards_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BLOCK: Final = 256
DTYPE: Final = torch.uint8
FEWEST: Final = 4096
"""Smaller parameters are not worth a rounding."""
_LARGEST: Final = torch.finfo(torch.float32).max
_SMALLEST: Final = torch.finfo(torch.float32).tiny
_LEVELS: Final = {False: 7, True: 8}
_EIGHT_SEVENTHS: Final = float.fromhex("0x1.24924ap+0")  # 8 / 7 and 6 / 7 in fp32
_SIX_SEVENTHS: Final = float.fromhex("0x1.b6db6ep-1")


def is_coded(tensor: Tensor | None) -> bool:
    """Whether ``tensor`` holds codes, and not values."""
    return tensor is not None and tensor.dtype is DTYPE


def fits(parameter: Any) -> bool:
    """Whether states of ``parameter`` may be codes: two dimensions, 4,096 elements, contiguous, fp32 or half."""
    return (
        parameter.dim() > 1
        and parameter.numel() >= FEWEST
        and parameter.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and local(parameter).is_contiguous()
        and first_element(parameter) >= 0  # a Trainer refuses shards of another kind
    )


def scales_for(parameter: Any) -> Any:
    """Returns zeros as scales (fp32) of a state of ``parameter``, sharded as it is."""
    shards = shards_of(parameter)
    blocks = -(-_elements_of_shard(parameter.shape, shards) // BLOCK)
    own = torch.zeros(1, blocks, dtype=torch.float32, device=local(parameter).device)
    if not is_shard(parameter):
        return own
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    sizes = map(mesh.size, range(mesh.ndim))
    pairs = zip(parameter.placements, sizes, strict=True)
    placements = [Replicate() if size == 1 else placement for placement, size in pairs]
    shape = torch.Size((shards, blocks))
    scales = DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=(blocks, 1))
    return scales.to(own.device)  # with CPU offload shards are in host memory, and not on the mesh's device


def _elements_of_shard(shape: Sequence[int], shards: int) -> int:
    """Returns the number of elements of each shard but the last ones, along the first dimension."""
    size = 1
    for dimension in shape[1:]:
        size *= dimension
    return -(-shape[0] // shards) * size


@functools.cache
def _values(squares: bool, device: torch.device) -> Tensor:
    """Returns the value (fp32) of each of the 256 codes at scale 1; all of them are exact."""
    count = torch.arange(1, 257 if squares else 129, dtype=torch.float64, device="cpu")
    level = count.log2().floor()
    values = (7 * count / 2**level - 6) / 8 * 8.0 ** (level + 1 - _LEVELS[squares])
    if squares:
        return values.square().float().to(device)
    values[0] = 0
    return torch.cat((values, -values)).float().to(device)


def encode_into(values: Tensor, codes: Tensor, scales: Tensor, *, squares: bool) -> None:
    """Encodes fp32 ``values`` of one shard, or of a whole parameter, into its ``codes`` and ``scales`` (1 x blocks)."""
    blocks = _in_blocks(values.detach())
    largest = blocks.abs().amax(1) if blocks.numel() else blocks.new_zeros(0)
    own = torch.where(largest >= _SMALLEST, largest, 0.0).masked_fill_(~(largest <= _LARGEST), torch.nan)
    inverse = torch.where(own > 0, 1 / own, 0.0)
    share = blocks.abs() * inverse[:, None]
    found = _codes(share.sqrt() if squares else share, _LEVELS[squares])
    if not squares:
        found |= blocks.signbit().to(DTYPE) << 7
    codes.copy_(found.view(-1)[: codes.numel()].view(codes.shape))
    scales.zero_()
    scales[0, : len(own)] = own


def _codes(share: Tensor, levels: int) -> Tensor:
    """Returns the nearest codes of shares of a scale (fp32); the kernels' ``code_of`` computes the same bits."""
    share = share.fmax(share.new_tensor(8.0**-levels))  # a nan becomes the smallest
    bits = share.view(torch.int32)
    level = (((bits >> 23) - (127 - 3 * levels)) * 11) >> 5  # the exponent, divided by 3
    within = (bits + ((3 * (levels - 1 - level)) << 23)).view(torch.float32)  # from 1/8 to 1
    # Products of two fp32 numbers are exact in fp64, so this is rounded once, as a fused multiply-add.
    place = (within.double() * _EIGHT_SEVENTHS + _SIX_SEVENTHS).float()
    return (place * 2.0**level - 1).round().to(DTYPE)


def decoded(codes: Any, scales: Any, *, squares: bool) -> Tensor:
    """Returns the fp32 values of ``codes``; of sharded ones, those of this rank.

    ``scales`` that are not sharded are those of all shards, maybe of another number of them.
    """
    own = local(codes)
    values = _values(squares, own.device)
    if is_shard(scales) or (not is_shard(codes) and len(scales) == 1):
        of_codes: Tensor = values[_in_blocks(own).int()] * local(scales)[0, : -(-own.numel() // BLOCK), None]
        return of_codes.view(-1)[: own.numel()].view(own.shape)
    of_elements: Tensor = values[own.int()] * _at(scales, codes, own.numel(), 1).view(own.shape)
    return of_elements


def moved(scales: Any, codes: Any, own: Any) -> Any:
    """Returns the ``scales`` of all shards' codes in the place of ``own``, which has the same blocks in other shards."""
    here = local(own)
    blocks = -(-local(codes).numel() // BLOCK)
    here[0, :blocks] = _at(scales, codes, blocks, BLOCK)
    return own


def _at(scales: Tensor, codes: Any, count: int, step: int) -> Tensor:
    """Returns the scale of each of ``count`` elements of this rank's ``codes``, ``step`` elements apart."""
    own = local(codes)
    element = max(first_element(codes), 0) + step * torch.arange(count, dtype=torch.int64, device=own.device)
    each = max(_elements_of_shard(codes.shape, len(scales)), 1)
    return scales.to(own.device)[element // each, element % each // BLOCK]


def has_same_blocks(shape: Sequence[int], one: int, other: int) -> bool:
    """Whether a state of this shape has the same blocks in ``one`` number of shards as in ``other``."""
    return one == other or not any(_elements_of_shard(shape, shards) % BLOCK for shards in (one, other) if shards > 1)


def _in_blocks(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    blocks = -(-flat.numel() // BLOCK)
    return torch.nn.functional.pad(flat, (0, blocks * BLOCK - flat.numel())).view(blocks, BLOCK)
