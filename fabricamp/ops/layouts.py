"""Memory layouts of many tensors, checked in every step: the loops run in C, without Python code per tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final

import torch
from torch import Tensor

_dtype: Final = attrgetter("dtype")


def addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    """Returns the address of each tensor: -1 for None, 0 for a tensor without elements."""
    try:
        return list(map(Tensor.data_ptr, tensors))  # type: ignore[arg-type]
    except TypeError:  # there is a None
        return [-1 if one is None else one.data_ptr() for one in tensors]


def dtypes(tensors: Sequence[Tensor | None]) -> list[torch.dtype]:
    """Returns the dtype of each tensor; none of them may be None."""
    return list(map(_dtype, tensors))


class Layouts:
    """The memory order in which kernels read each row of a table: that of the row's anchor (see :func:`anchors`)."""

    def __init__(self, rows: Sequence[Tensor | None]) -> None:
        """``rows`` are the anchors; no reference to them is kept."""
        strided = {row: anchor for row, anchor in enumerate(rows) if anchor is not None and not anchor.is_contiguous()}
        # None: every row is contiguous, as in most tables.
        self._contiguous: Callable[[Any], Any] | None = None
        if strided:
            self._contiguous = _picker([row for row in range(len(rows)) if row not in strided])
        self._strided = _picker(list(strided))
        self._strides = [anchor.stride() for anchor in strided.values()]
        lazy = [row for row, anchor in enumerate(rows) if anchor is not None and may_be_lazy(anchor)]
        self._lazy = _picker(lazy) if lazy else None

    def learn(self, tensors: Sequence[Tensor | None]) -> None:
        """Stores the strides of ``tensors`` (none is None) as those of the rows: they may differ in dimensions of size 1."""
        if self._strides:
            self._strides = list(map(Tensor.stride, self._strided(tensors)))

    def fit(self, tensors: Sequence[Tensor | None]) -> bool:
        """Returns whether each tensor is None or has its row's memory order.

        Checked in every step, because the same address may hold a tensor of another layout.
        """
        if self._lazy is not None and any(tensor is not None and is_lazy(tensor) for tensor in self._lazy(tensors)):
            return False
        contiguous = tensors if self._contiguous is None else self._contiguous(tensors)
        try:
            if not all(map(Tensor.is_contiguous, contiguous)):
                return False
            return not self._strides or list(map(Tensor.stride, self._strided(tensors))) == self._strides
        except TypeError:  # there is a None
            if not all(tensor is None or tensor.is_contiguous() for tensor in contiguous):
                return False
            pairs = zip(self._strided(tensors), self._strides, strict=True)
            return all(tensor is None or tensor.stride() == stride for tensor, stride in pairs)


def _picker(indices: Sequence[int]) -> Callable[[Any], Any]:
    """Returns a function that picks the values at ``indices`` from a sequence."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: [values[index] for index in indices]  # itemgetter returns a single value by itself


def anchors(columns: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Returns one tensor per row: the kernels read all columns of the row in its memory order (None: a row without tensors).

    It is the row's first tensor in the order columns 1, 2, ..., 0; if this is not dense, a contiguous one of its shape.
    """
    chosen: list[Tensor | None] = []
    for row in zip(*columns[1:], columns[0], strict=True):
        first = next((tensor for tensor in row if tensor is not None), None)
        if first is None or is_dense(first):
            chosen.append(first)
        else:
            chosen.append(torch.empty(first.shape, dtype=first.dtype, device=first.device))
    return chosen


def is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements fill one block of memory without gaps and overlap, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of ``tensor`` (uint8, 1-dim) in their order in memory: a view, or of a tensor with gaps a copy."""
    dense = tensor.detach()
    if not is_dense(dense):
        dense = dense.contiguous()
    offset = dense.storage_offset() * dense.itemsize
    flat = torch.empty(0, dtype=torch.uint8, device=dense.device)
    return flat.set_(dense.untyped_storage(), offset, (dense.nbytes,), (1,))


def elements_of(tensor: Tensor) -> int:
    """Returns how many numbers kernels read of ``tensor``: a complex element is two, its real and its imaginary part."""
    return 2 * tensor.numel() if tensor.is_complex() else tensor.numel()


def is_lazy(tensor: Tensor) -> bool:
    """Returns whether the values of ``tensor`` are the conjugates or the negatives of those in its memory."""
    return tensor.is_conj() or tensor.is_neg()


def may_be_lazy(parameter: Tensor) -> bool:
    """Returns whether autograd may leave a view that :func:`is_lazy` as the gradient of ``parameter``.

    Views that conjugate are complex.  Those that negate are imaginary parts: only a single one is a gradient as it is, since
    several are not next to each other in memory, and are copied.
    """
    return parameter.is_complex() or parameter.numel() == 1


def same_layout(tensor: Tensor, anchor: Tensor) -> bool:
    """Returns whether two tensors of one shape have the same memory order, and ``tensor`` has its values in memory."""
    if is_lazy(tensor):
        return False
    if tensor.is_contiguous() and anchor.is_contiguous():
        return True
    if tensor.shape != anchor.shape:
        return False
    return all(
        own == theirs or size == 1
        for own, theirs, size in zip(tensor.stride(), anchor.stride(), tensor.shape, strict=True)
    )
