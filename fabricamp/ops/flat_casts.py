"""Casts pieces of tensors into flat memory, by one launch for each sixteen tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fabricamp.ops.bridge import c_type, kernel
from fabricamp.ops.uploads import lasting_memory, upload

_TENSORS: Final = 16
"""Tensors of a launch, which takes the address of each as an argument: those of gradients are new in every step."""
_THREADS: Final = 256
_ELEMENTS: Final = 8 * 2 * _THREADS
"""Elements of a block."""
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes from and to which it casts."""


class Piece(NamedTuple):
    """Consecutive elements of a tensor, and where their cast lies."""

    tensor: int
    """Number of the tensor."""
    first: int
    """The first of the elements."""
    place: int
    """The first byte of the cast in the flat memory."""
    elements: int
    """Number of elements."""
    scale: Tensor | None = None
    """A value in fp32: the cast is rounded to the target dtype, multiplied in fp32, and rounded to e4m3; None: the target dtype."""


class FlatCast:
    """Casts ``pieces`` of contiguous tensors of dtype ``source`` to ``target`` on a device that runs kernels.

    Values beyond the largest one of e4m3 become the largest one.
    """

    def __init__(self, pieces: Sequence[Piece], source: torch.dtype, target: torch.dtype, device: torch.device) -> None:
        self._kernel = kernel(
            "flat_casts", "flat_casts", (), device, (("FROM", c_type(source)), ("TO", c_type(target)))
        )
        self._scales = [piece.scale for piece in pieces]  # the launches read them
        tensors = 1 + max(piece.tensor for piece in pieces)
        self._launches = [
            _Launch([piece for piece in pieces if 0 <= piece.tensor - first < _TENSORS], first, device)
            for first in range(0, tensors, _TENSORS)
        ]

    def __call__(self, tensors: Sequence[Tensor], flat: Tensor) -> None:
        """Casts the pieces of ``tensors`` into ``flat``, on the current stream."""
        to = flat.data_ptr()
        for launch in self._launches:
            if launch.number == 0:  # all pieces are empty
                continue
            addresses = [tensor.data_ptr() for tensor in tensors[launch.tensors]]
            unused = (0,) * (_TENSORS - len(addresses))
            self._kernel.launch(launch.number, _THREADS, *launch.layout, to, *addresses, *unused)


class _Launch:
    """The layout of one launch, in device memory."""

    def __init__(self, pieces: Sequence[Piece], first: int, device: torch.device) -> None:
        self.tensors = slice(first, first + _TENSORS)
        blocks = [-(-piece.elements // _ELEMENTS) for piece in pieces]
        self.number = sum(blocks)
        rows = [
            (
                piece.tensor - first,
                piece.first,
                piece.place,
                piece.elements,
                0 if piece.scale is None else piece.scale.data_ptr(),
                block,
            )
            for piece, block in zip(pieces, np.cumsum([0, *blocks[:-1]]).tolist(), strict=True)
        ]
        lines = np.ascontiguousarray(np.asarray(rows, np.int64).T)
        self._lines = lasting_memory(lines.shape, torch.int64, device)
        upload(lines, self._lines)
        pieces_of_blocks = np.repeat(np.arange(len(pieces), dtype=np.int32), blocks)
        self._blocks = lasting_memory(pieces_of_blocks.shape, torch.int32, device)
        upload(pieces_of_blocks, self._blocks)
        self.layout = (self._lines.data_ptr(), self._blocks.data_ptr(), len(pieces))
