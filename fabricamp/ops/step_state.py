"""What a step decides on the device: one small struct that the kernels and the references share."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from fabricamp.ops.bridge import structure

_FIELDS: Final = {field[0]: field[1] for field in structure("common.cuh", "StepState")._fields_}
_NAMES: Final = tuple(_FIELDS)
_LASTING: Final = (
    "scale",
    "growth",
    "hysteresis",
    "applied",
    "skipped",
    "streak",
    "first_window",
    "first_loss",
    "first_scale",
    "first_chunk",
)


class StepState:
    """Sixteen 32-bit words in device memory, each named one a 0-dim view.

    ``scale`` (float): what the next loss is multiplied by.  ``growth`` (int): windows applied since the scale last changed.
    ``hysteresis`` (int): overflows still tolerated before the scale backs off.  ``applied``, ``skipped`` (int): windows so
    far.  ``finite`` (int): 1 while every step of this window was finite.  ``found_inf`` (float): 1.0 where the last step that
    was finished has to be skipped.  ``multiplier`` (float): what its gradients are multiplied by.  ``norm`` (float): their
    norm, unscaled and averaged, before clipping.  ``loss`` (float): the window's loss.  ``bad_chunk`` (int): the lowest chunk
    with a non-finite gradient in this window, -1 where none is known.  ``streak`` (int): windows skipped in a row; of the
    first of them ``first_window`` (int, windows before it), ``first_loss``, ``first_scale`` (float) and ``first_chunk`` (int).
    """

    WORDS: Final = len(_NAMES)

    scale: Tensor
    growth: Tensor
    hysteresis: Tensor
    applied: Tensor
    skipped: Tensor
    finite: Tensor
    found_inf: Tensor
    multiplier: Tensor
    norm: Tensor
    loss: Tensor
    bad_chunk: Tensor
    streak: Tensor
    first_window: Tensor
    first_loss: Tensor
    first_scale: Tensor
    first_chunk: Tensor

    def __init__(self, words: Tensor) -> None:
        self.words = words
        floats = words.view(torch.float32)
        for word, name in enumerate(_NAMES):
            setattr(self, name, (floats if _FIELDS[name] is ctypes.c_float else words)[word])

    @classmethod
    def on(cls, device: torch.device | str, *, scale: float = 1.0, hysteresis: int = 1) -> StepState:
        """Returns a fresh struct on ``device``."""
        state = cls(torch.zeros(cls.WORDS, dtype=torch.int32, device=device))
        state.scale.fill_(scale)
        state.multiplier.fill_(1.0)
        state.hysteresis.fill_(hysteresis)
        state.finite.fill_(1)
        state.bad_chunk.fill_(-1)
        return state

    def seen_from(self, device: torch.device) -> StepState:
        """Returns the struct itself where it is on ``device``, else a copy there, made without waiting."""
        return self if self.words.device == device else StepState(self.words.to(device, non_blocking=True))

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of what outlives a window, on the device."""
        return {name: getattr(self, name).clone() for name in _LASTING}

    def load_state_dict(self, state: Mapping[str, Tensor | float]) -> None:
        """Takes back what :meth:`state_dict` gave; what is missing stays as it is."""
        for name in _LASTING:
            if name in state:
                own: Tensor = getattr(self, name)
                own.copy_(torch.as_tensor(state[name], dtype=own.dtype, device=own.device))

    @staticmethod
    def word(name: str) -> int:
        """The index of the word called ``name``."""
        return _NAMES.index(name)
