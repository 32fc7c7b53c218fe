"""What a step decides on the device: one small struct that the kernels and the references share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["StepState"]

_LAYOUT: Final = {
    "scale": (0, torch.float32),
    "growth": (1, torch.int32),
    "hysteresis": (2, torch.int32),
    "applied": (3, torch.int32),
    "skipped": (4, torch.int32),
    "finite": (5, torch.int32),
    "found_inf": (6, torch.float32),
    "multiplier": (7, torch.float32),
    "norm": (8, torch.float32),
    "loss": (9, torch.float32),
}


class StepState:
    """Sixteen 32-bit words in device memory, each named one a 0-dim view.

    ``scale`` (float): what the next loss is multiplied by.  ``growth`` (int): windows applied since the scale last changed.
    ``hysteresis`` (int): overflows still tolerated before the scale backs off.  ``applied``, ``skipped`` (int): windows so
    far.  ``finite`` (int): 1 while every step of this window was finite.  ``found_inf`` (float): 1.0 where the last step that
    was finished has to be skipped.  ``multiplier`` (float): what its gradients are multiplied by.  ``norm`` (float): their
    norm, unscaled and averaged, before clipping.  ``loss`` (float): the window's loss.  Words 10 to 15 are free.
    """

    WORDS: Final = 16

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

    def __init__(self, words: Tensor, *, scale: float = 1.0, hysteresis: int = 1) -> None:
        self.words = words.zero_()
        floats = words.view(torch.float32)
        for name, (word, dtype) in _LAYOUT.items():
            setattr(self, name, (floats if dtype is torch.float32 else words)[word])
        self.scale.fill_(scale)
        self.hysteresis.fill_(hysteresis)
        self.finite.fill_(1)

    @classmethod
    def on(cls, device: torch.device | str, *, scale: float = 1.0, hysteresis: int = 1) -> StepState:
        """Returns a fresh struct on ``device``."""
        return cls(torch.zeros(cls.WORDS, dtype=torch.int32, device=device), scale=scale, hysteresis=hysteresis)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of what outlives a window, on the device."""
        return {name: getattr(self, name).clone() for name in ("scale", "growth", "hysteresis", "applied", "skipped")}

    def load_state_dict(self, state: Mapping[str, Tensor | float]) -> None:
        """Takes back what :meth:`state_dict` gave; what is missing stays as it is."""
        for name in ("scale", "growth", "hysteresis", "applied", "skipped"):
            if name in state:
                own: Tensor = getattr(self, name)
                own.copy_(torch.as_tensor(state[name]))

    @staticmethod
    def word(name: str) -> int:
        """The index of the word called ``name``."""
        return _LAYOUT[name][0]
