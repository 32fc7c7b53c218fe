"""The state of a step on the device (loss scale, overflow flags, counters): one small struct for kernels and references."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from fabricamp.ops.bridge import Kernel, kernel, runs_kernels, structure

_FIELDS: Final = {field[0]: field[1] for field in structure("common.cuh", "StepState")._fields_}
_NAMES: Final = tuple(_FIELDS)
_LASTING: Final = {
    "scale": "scale",
    "growth": "growth",
    "hysteresis": "hysteresis",
    "applied": "applied",
    "skipped": "skipped",
    "streak": "streak",
    "first_step": "first_window",
    "first_loss": "first_loss",
    "first_scale": "first_scale",
    "first_chunk": "first_chunk",
}
"""The words that outlive an accumulation step: their names in the kernels' struct by their keys in a state dict."""


class StepState:
    """Sixteen 32-bit words in device memory; each named attribute is a 0-dim view of one word.

    ``scale`` (float): the factor of the next loss.  ``growth`` (int): accumulation steps applied in a row, counted anew when the
    scale grows.  ``hysteresis`` (int): overflows left before the scale backs off.  ``applied``, ``skipped`` (int): accumulation
    steps so far.  ``finite`` (int): 1 while every optimizer's step of this accumulation step was finite.

    Of the last optimizer's step given to ``finish``: ``found_inf`` (float): 1.0 if the step has to be skipped.  ``multiplier``
    (float): the factor of its gradients.  ``norm`` (float): the norm of its gradients, unscaled and averaged, before clipping.

    Of the accumulation step: ``loss`` (float).  ``bad_chunk`` (int): the first chunk with a non-finite gradient, -1 if none is
    known.  ``streak`` (int): steps skipped in a row.  The first of these is described by ``first_window`` (int, the number of
    steps before it), ``first_loss``, ``first_scale`` (float) and ``first_chunk`` (int).
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

    @functools.cached_property
    def finish_kernel(self) -> Kernel | None:
        """The kernel that finishes a step on this device; None where the reference does.  Looked up once: a step is short."""
        device = self.words.device
        return kernel("finish", "finish", (), device) if runs_kernels(device) else None

    @classmethod
    def on(cls, device: torch.device | str, *, scale: float = 1.0, hysteresis: int = 1) -> StepState:
        """Returns a new struct on ``device``."""
        state = cls(torch.zeros(cls.WORDS, dtype=torch.int32, device=device))
        state.scale.fill_(scale)
        state.multiplier.fill_(1.0)
        state.hysteresis.fill_(hysteresis)
        state.finite.fill_(1)
        state.bad_chunk.fill_(-1)
        return state

    def seen_from(self, device: torch.device) -> StepState:
        """Returns the struct itself if it is on ``device``, else a copy on ``device``, made without waiting."""
        return self if self.words.device == device else StepState(self.words.to(device, non_blocking=True))

    def state_dict(self) -> dict[str, Tensor]:
        """Returns copies, on the device, of the words that outlive an accumulation step."""
        return {key: getattr(self, name).clone() for key, name in _LASTING.items()}

    def load_state_dict(self, state: Mapping[str, Tensor | float]) -> None:
        """Restores the words of a :meth:`state_dict`; missing words keep their values."""
        for key, name in _LASTING.items():
            if key in state:
                own: Tensor = getattr(self, name)
                own.copy_(torch.as_tensor(state[key], dtype=own.dtype, device=own.device))

    @staticmethod
    def word(name: str) -> int:
        """Returns the index of the word ``name``."""
        return _NAMES.index(name)
