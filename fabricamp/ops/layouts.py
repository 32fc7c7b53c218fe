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
        woven = [row for row, one in enumerate(rows) if one is not None and not one.is_contiguous()]
        self._even: Callable[[Any], Any] | None = None
        if woven:
            self._even = _picker(sorted(set(range(len(rows))).difference(woven)))
        self._woven = _picker(woven)
        self._strides = [one.stride() for row in woven if (one := rows[row]) is not None]

    def learn(self, tensors: Sequence[Tensor | None]) -> None:
        """Stores the strides of ``tensors`` (none is None) as those of the rows: they may differ in dimensions of size 1."""
        if self._strides:
            self._strides = list(map(Tensor.stride, self._woven(tensors)))

    def fit(self, tensors: Sequence[Tensor | None]) -> bool:
        """Returns whether each tensor is None or has its row's memory order.

        Checked in every step, because the same address may hold a tensor of another layout.
        """
        even = tensors if self._even is None else self._even(tensors)
        try:
            return all(map(Tensor.is_contiguous, even)) and (
                not self._strides or list(map(Tensor.stride, self._woven(tensors))) == self._strides
            )
        except TypeError:  # there is a None
            if not all(one is None or one.is_contiguous() for one in even):
                return False
            pairs = zip(self._woven(tensors), self._strides, strict=True)
            return all(one is None or one.stride() == stride for one, stride in pairs)


def _picker(places: Sequence[int]) -> Callable[[Any], Any]:
    """Returns a function that picks the values at ``places`` from a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: [values[place] for place in places]


def anchors(columns: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Returns one tensor per row: the kernels read all columns of the row in its memory order (None: a row without tensors).

    It is the row's first tensor in the order columns 1, 2, ..., 0; if this is not dense, a contiguous one of its shape.
    """
    found: list[Tensor | None] = []
    for row in zip(*columns[1:], columns[0], strict=True):
        first = next((tensor for tensor in row if tensor is not None), None)
        if first is None or is_dense(first):
            found.append(first)
        else:
            found.append(torch.empty(first.shape, dtype=first.dtype, device=first.device))
    return found


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


def same_layout(tensor: Tensor, anchor: Tensor) -> bool:
    """Returns whether two tensors of one shape have the same memory order."""
    if tensor.is_contiguous() and anchor.is_contiguous():
        return True
    if tensor.shape != anchor.shape:
        return False
    return all(
        own == theirs or size == 1
        for own, theirs, size in zip(tensor.stride(), anchor.stride(), tensor.shape, strict=True)
    )
