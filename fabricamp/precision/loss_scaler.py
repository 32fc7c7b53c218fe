"""Dynamic loss scaling: its state lives on the device, its verdicts reach the host exactly two windows later, through a ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from fabricamp import ops
from fabricamp.precision.base import Verdict

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LAG", "LossScaler"]

LAG: Final = 2
"""How many windows later the host reads what became of one: the same on every device and rank, so that resumed runs agree."""
_SLOTS: Final = 4
INITIAL_SCALE: Final = 2.0**16
FACTOR: Final = 2.0


class LossScaler:
    """One scale a loss, one verdict a window.

    ``state`` is the struct that steps write to.  With one loss it holds that loss's scale too; with several each has a struct
    of its own in ``losses``.  A window ends with :meth:`close`, which copies ``state`` into a ring on the device and from
    there into pinned host memory, and reads the slot of two windows ago.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        num_losses: int = 1,
        window: int = 2000,
        minimum: float = 2.0**-14,
        maximum: float = 2.0**24,
        hysteresis: int = 1,
    ) -> None:
        self.device = torch.device(device)
        self._rule: dict[str, Any] = {
            "growth_factor": FACTOR,
            "backoff_factor": 1 / FACTOR,
            "growth_interval": window,
            "minimum": minimum,
            "maximum": maximum,
            "hysteresis": hysteresis,
        }
        scale = max(min(INITIAL_SCALE, maximum), minimum)
        self.state = ops.StepState.on(self.device, scale=scale, hysteresis=hysteresis)
        self.losses = [self.state]
        if num_losses > 1:
            self.losses = [ops.StepState.on(self.device, scale=scale, hysteresis=hysteresis) for _ in range(num_losses)]
        self._ring = torch.zeros(_SLOTS, ops.StepState.WORDS, dtype=torch.int32, device=self.device)
        cuda = self.device.type == "cuda"
        self._host = torch.zeros(_SLOTS, ops.StepState.WORDS, dtype=torch.int32, pin_memory=cuda)
        self._integers = self._host.numpy()
        self._floats = self._host.view(torch.float32).numpy()
        self._events = [torch.cuda.Event() for _ in range(_SLOTS)] if cuda else []
        self._windows = 0
        self.known = Verdict(applied=True, scale=scale, loss=float("nan"), applied_steps=0, skipped_steps=0)

    def close(self, loss: Tensor | None) -> Verdict | None:
        """Ends a window: moves the scales, and returns what became of the window two windows ago (None before there is one)."""
        state = self.state
        if loss is None:
            state.loss.fill_(float("nan"))
        else:
            loss = loss.detach().to(self.device, torch.float32)
        rule = self._rule
        if len(self.losses) > 1:
            for one in self.losses:
                ops.update_scale(one, **rule)
            state.scale.copy_(self.losses[0].scale)
            rule = {**rule, "growth_factor": 1.0, "backoff_factor": 1.0}
        ops.update_scale(state, **rule, loss=loss, ring=self._ring)
        self._publish(self._windows % _SLOTS)
        self._windows += 1
        if self._windows <= LAG:
            return None
        self.known = self._read((self._windows - 1 - LAG) % _SLOTS)
        return self.known

    def pending(self) -> list[Verdict]:
        """Reads, waiting, the verdicts that :meth:`close` has not told yet, oldest first; they stay to be told."""
        first = max(self._windows - LAG, 0)
        verdicts = [self._read(window % _SLOTS) for window in range(first, self._windows)]
        self.known = verdicts[-1] if verdicts else self.known
        return verdicts

    def _publish(self, slot: int) -> None:
        # All slots: which one is new, only the device knows in a replayed graph.
        self._host.copy_(self._ring, non_blocking=True)
        if self._events:
            self._events[slot].record()

    def _read(self, slot: int) -> Verdict:
        if self._events and not self._events[slot].query():
            self._events[slot].synchronize()
        word = ops.StepState.word
        return Verdict(
            applied=bool(self._integers[slot, word("finite")]),
            scale=float(self._floats[slot, word("scale")]),
            loss=float(self._floats[slot, word("loss")]),
            applied_steps=int(self._integers[slot, word("applied")]),
            skipped_steps=int(self._integers[slot, word("skipped")]),
        )

    def state_dict(self) -> dict[str, Any]:
        """Scales and counters, the verdicts on their way, and what the host knew; tensors are copies on the device."""
        return {
            "window": self.state.state_dict(),
            "scalers": [state.state_dict() for state in self.losses],
            "ring": self._ring.clone(),
            "windows": self._windows,
            "known": list(self.known),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave; scalers that it does not name stay as they are."""
        self.state.load_state_dict(state["window"])
        for own, saved in zip(self.losses, state["scalers"], strict=False):
            own.load_state_dict(saved)
            own.scale.clamp_(self._rule["minimum"], self._rule["maximum"])
        self._ring.copy_(state["ring"])
        self._windows = int(state["windows"])
        self.known = Verdict(*state["known"])
        for slot in range(_SLOTS):
            self._publish(slot)
