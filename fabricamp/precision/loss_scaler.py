"""The loss scaler: loss scale and overflow flag on the device; step statuses reach the host two steps later, through a ring."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from fabricamp import ops
from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.uploads import pinned_for_kernels
from fabricamp.precision.opt_levels import DEFAULT_CEILING, DEFAULT_FLOOR, DEFAULT_WINDOW
from fabricamp.torch_private import stream_in_use

if TYPE_CHECKING:
    from torch import Tensor

    from fabricamp._utils.types import StateDict
    from fabricamp.precision.opt_levels import Level

LAG: Final = 2
"""Steps between a step and the host's read of its status; the same on every device and rank, so resumed runs agree."""
PATIENCE: Final = 20
"""After this number of skipped steps in a row with the scale at its floor, the run ends."""
SLOTS: Final = 4
"""Size of the ring buffer with one step per launch."""
_POLLS: Final = 2000
"""Reads of pinned memory in a busy loop, before the host sleeps ``_NAP`` between two reads."""
_NAP: Final = 5e-5
"""Seconds."""
INITIAL_SCALE: Final = 2.0**16
FACTOR: Final = 2.0

_WORDS: Final = ops.StepState.WORDS
_FINITE, _SCALE, _LOSS, _APPLIED, _SKIPPED = map(ops.StepState.word, ("finite", "scale", "loss", "applied", "skipped"))
_FIRST_STEP, _FIRST_LOSS, _FIRST_SCALE, _FIRST_CHUNK = map(
    ops.StepState.word, ("first_window", "first_loss", "first_scale", "first_chunk")
)


class StepStatus(NamedTuple):
    """The status of one step: applied or skipped, with scale, loss and counters; decided on the device, read by the host."""

    applied: bool
    scale: float
    loss: float
    applied_steps: int
    skipped_steps: int
    ends_run: bool = False
    """Whether this step has to end the run: by ``nan_policy``, or because too many steps in a row were skipped."""


class Overflow(NamedTuple):
    """Values of the first of several steps skipped in a row; ``chunk`` is the lowest non-finite statistic, -1 if not known."""

    step: int
    loss: float
    scale: float
    chunk: int


class LossScaler:
    """Keeps one scale per loss and one status per step.

    Optimizer steps write to the struct ``state``.  With one loss it also holds the scale; several losses have a struct each in
    ``losses``.  :meth:`end_step` ends a step; an optimizer step that was given :meth:`ending` ends it in its own launch.  The
    struct is then copied into a ring buffer, on the device and in pinned host memory; the host reads the slot of two steps ago.

    ``sticky``: after a skipped step all later steps are skipped too, and the scale stays.  The scale is constant if ``minimum``
    equals ``maximum``.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        num_losses: int = 1,
        initial: float = INITIAL_SCALE,
        factor: float = FACTOR,
        window: int = DEFAULT_WINDOW,
        minimum: float = DEFAULT_FLOOR,
        maximum: float = DEFAULT_CEILING,
        hysteresis: int = 1,
        sticky: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.sticky = sticky
        scale = max(min(initial, maximum), minimum)
        self.state = ops.StepState.on(self.device, scale=scale, hysteresis=hysteresis)
        self.losses = [self.state]
        if num_losses > 1:
            self.losses = [ops.StepState.on(self.device, scale=scale, hysteresis=hysteresis) for _ in range(num_losses)]
        self._make_ring(SLOTS)
        moves: dict[str, Any] = {
            "growth_interval": window,
            "minimum": minimum,
            "maximum": maximum,
            "hysteresis": hysteresis,
        }
        self._loss_rule = ops.ScaleRule(growth_factor=factor, backoff_factor=1 / factor, **moves)
        # With several losses, state.scale is only for display (the minimum of the losses' scales), so it must not move itself.
        own_factor = factor if num_losses == 1 else 1.0
        moves |= {"sticky": sticky, "ring": self._ring, "mirror": self._mirror}
        self._rule = ops.ScaleRule(growth_factor=own_factor, backoff_factor=1 / own_factor, **moves)
        self._limits = minimum, maximum
        self._floor, self._initial = torch.tensor([minimum, scale], dtype=torch.float32, device="cpu").tolist()
        self.steps = 0
        """Number of ended steps."""
        self._ended_by_optimizer = False
        """Whether the optimizer step's own launch ends the step in progress."""
        self._settled = False
        self._ends_run_from = 0
        """Skipped steps before this one do not end the run: a run that was resumed has dealt with them."""
        self._resumed_at = 0
        """The number of steps in the state that was loaded: the run that saved it made them."""
        self._at_floor = 0
        """Number of steps in a row that were skipped with the scale at its floor, up to the last status read."""
        self.overflow = Overflow(0, float("nan"), scale, -1)
        self.known = StepStatus(applied=True, scale=scale, loss=float("nan"), applied_steps=0, skipped_steps=0)

    def _make_ring(self, slots: int) -> None:
        cuda = self.device.type == "cuda"
        self._slots = slots
        self._ring = torch.zeros(slots, _WORDS, dtype=torch.int32, device=self.device)
        self._host = pinned_for_kernels(slots, _WORDS, dtype=torch.int32) if cuda else self._ring
        # A memoryview returns Python numbers ten times as fast as a tensor does.
        words: Any = self._host.view(-1).numpy()
        self._integers, self._floats = memoryview(words), memoryview(words.view("float32"))
        self._events = [torch.cuda.Event() for _ in range(slots)] if cuda else []
        # With several steps per launch an event completes only after the complete launch, so the host polls the ring instead.
        self._polls = slots > SLOTS and runs_kernels(self.device)

    @property
    def _mirror(self) -> Tensor | None:
        """The ring's copy in host memory; None if the ring itself is there."""
        return None if self._host is self._ring else self._host

    def resize_ring(self, slots: int) -> None:
        """Resizes the ring to ``slots`` slots, for several steps per launch; keeps its contents."""
        saved = self._saved_ring()
        self._make_ring(slots)
        self._rule = dataclasses.replace(self._rule, ring=self._ring, mirror=self._mirror)
        self._load_ring(saved)

    @classmethod
    def for_level(cls, level: Level, device: torch.device, *, sticky: bool) -> LossScaler:
        """Returns the scaler of an opt level; a constant scale has one loss."""
        if level.loss_scale != "dynamic":
            return cls(device, minimum=level.loss_scale, maximum=level.loss_scale, sticky=sticky)
        return cls(
            device,
            num_losses=level.num_losses,
            window=level.scale_window,
            minimum=level.min_loss_scale,
            maximum=level.max_loss_scale,
            sticky=sticky,
        )

    @property
    def can_move(self) -> bool:
        """Whether the scale has more than one possible value."""
        minimum, maximum = self._limits
        return minimum < maximum

    @property
    def is_lowest(self) -> bool:
        """Whether the scale in the last status that was read cannot fall any further."""
        return bool(self.known.scale <= self._floor)

    def change_since(self, steps: int) -> Tensor | None:
        """Returns, on the device, the scale of now divided by that of ``steps`` ended steps ago.

        None if the scale then is not known any more, or if the quotient may be no power of two.  Only with one loss.
        """
        if steps >= self._slots or not all(math.frexp(one)[0] == 0.5 for one in (*self._limits, self._initial)):
            return None
        step = self.steps - 1 - steps  # this one has recorded the scale
        if step < 0:
            change: Tensor = self.state.scale / self._initial
        else:
            change = self.state.scale / self._ring[step % self._slots, _SCALE].view(torch.float32)
        return change

    def ending(self) -> ops.ScaleRule:
        """Returns the rule for an optimizer step that also ends the training step; :meth:`launch_end` then does nothing.

        Only with one loss.
        """
        self._ended_by_optimizer = True
        return self._rule

    def end_step(self, loss: Tensor | None) -> StepStatus | None:
        """Ends a step: updates the scales, and returns the status of the step two steps ago (None before there is one)."""
        self.launch_end(loss)
        return self.note_end()

    def note_end(self) -> StepStatus | None:
        """Counts a step that has ended on the device; returns the status of the step two steps ago.  Launches nothing."""
        self._ended_by_optimizer = False
        if self._events and not self._polls:
            self._events[self.steps % self._slots].record(stream_in_use(self._ring.device))
        self.steps += 1
        due = self.steps - 1 - LAG
        if due < 0:
            return None
        self.known, self._at_floor = self._read(due, self._at_floor)
        return self.known

    def launch_end(self, loss: Tensor | None) -> None:
        """Updates the scales and records the step status in the ring, unless an optimizer step did so in its own launch."""
        if self._ended_by_optimizer:
            return
        state = self.state
        if loss is None:
            state.loss.fill_(float("nan"))
        else:
            loss = self.as_loss(loss)
        if len(self.losses) > 1:
            for own in self.losses:
                ops.update_scale(own, self._loss_rule)
            state.scale.copy_(torch.stack([own.scale for own in self.losses]).amin())
        ops.update_scale(state, self._rule, loss=loss)

    def as_loss(self, loss: Tensor) -> Tensor:
        """Returns ``loss`` as one fp32 number on the device, for a kernel or without gradients."""
        if loss.dtype is torch.float32 and loss.device == self.device:
            return loss
        return loss.detach().to(self.device, torch.float32)

    def pending(self) -> list[StepStatus]:
        """Returns the statuses that :meth:`note_end` has not returned yet, oldest first; waits for the device.

        :meth:`note_end` still returns them later.
        """
        statuses = []
        at_floor = self._at_floor
        for step in range(max(self.steps - LAG, 0), self.steps):
            status, at_floor = self._read(step, at_floor)
            statuses.append(status)
        if statuses:
            self.known = statuses[-1]
        return statuses

    def _read(self, step: int, at_floor: int) -> tuple[StepStatus, int]:
        """Returns the status of ``step``, and the new ``at_floor``: the number of steps in a row skipped at the floor."""
        slot = step % self._slots
        word = slot * _WORDS
        if self._polls:
            self._poll(step, word)
        elif self._events and not self._events[slot].query():
            self._events[slot].synchronize()
        integers = self._integers
        floats = self._floats
        applied = integers[word + _FINITE] != 0
        ends_run = False
        if applied:
            at_floor = 0
        else:
            # A step ran with the scale recorded by the step before it.
            scale = floats[(step - 1) % self._slots * _WORDS + _SCALE] if step else self._initial
            at_floor = at_floor + 1 if scale <= self._floor else 0
            ends_run = at_floor >= PATIENCE or (self.sticky and step >= self._ends_run_from)
            self.overflow = Overflow(
                integers[word + _FIRST_STEP],
                floats[word + _FIRST_LOSS],
                floats[word + _FIRST_SCALE],
                integers[word + _FIRST_CHUNK],
            )
        status = StepStatus(
            applied,
            floats[word + _SCALE],
            floats[word + _LOSS],
            integers[word + _APPLIED],
            integers[word + _SKIPPED],
            ends_run,
        )
        return status, at_floor

    def _poll(self, step: int, word: int) -> None:
        """Waits for the status of a step, without waiting for later steps of the same launch."""
        integers = self._integers
        polls = 0
        # Applied plus skipped steps is the step's number plus one, as soon as its slot is written.
        while integers[word + _APPLIED] + integers[word + _SKIPPED] != step + 1:
            polls += 1
            if polls > _POLLS:
                time.sleep(_NAP)
                if stream_in_use(self._ring.device).query():  # raises if the device has failed
                    return

    def slot_of(self, overflow: Overflow) -> int:
        """Returns the ring slot of the overflow's step; the last step's slot if that slot was overwritten since."""
        recent = self.steps_since(overflow) < self._slots
        return (overflow.step if recent else self.steps - 1) % self._slots

    @property
    def known_is_inherited(self) -> bool:
        """Whether the status that :meth:`note_end` returned last is of a step of the run that saved the loaded state."""
        return self.steps - 1 - LAG < self._resumed_at

    @property
    def inherited_pending(self) -> int:
        """The number of the oldest statuses of :meth:`pending` that are of steps of the run that saved the loaded state."""
        return max(self._resumed_at - max(self.steps - LAG, 0), 0)

    def steps_since(self, overflow: Overflow) -> int:
        """Returns the number of steps finished after the overflow's step."""
        return self.steps - 1 - overflow.step

    def settle(self) -> None:
        """Marks the overflow as handled: a run resumed from state saved from now on does not keep skipping."""
        self._settled = True

    @property
    def ring(self) -> Tensor:
        """The structs of the last steps, on the device; step ``number`` is in slot ``number % len(ring)``."""
        return self._ring

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The device tensors that a step writes, by name."""
        losses = {f"state of loss {number}": state.words for number, state in enumerate(self.losses)}
        return {"state": self.state.words, **losses, "ring": self._ring}

    def _saved_ring(self) -> Tensor:
        """Returns a copy of the last slots, in a checkpoint's layout: ``SLOTS`` slots, whatever the size of the ring."""
        if self._slots == SLOTS:
            return self._ring.clone()
        saved = torch.zeros(SLOTS, _WORDS, dtype=torch.int32, device=self.device)
        for step in range(max(self.steps - SLOTS, 0), self.steps):
            saved[step % SLOTS].copy_(self._ring[step % self._slots])
        return saved

    def _load_ring(self, saved: Tensor) -> None:
        if self._slots == SLOTS:
            self._ring.copy_(saved)
        for step in range(max(self.steps - SLOTS, 0), self.steps):
            self._ring[step % self._slots].copy_(saved[step % SLOTS])
        if self._host is not self._ring:
            self._host.copy_(self._ring, non_blocking=True)
            for event in self._events:
                event.record()

    def state_dict(self) -> StateDict:
        """Returns scales, counters, statuses not read yet, and the last status read; tensors are copies on the device."""
        return {
            "step_state": self.state.state_dict(),
            "scalers": [state.state_dict() for state in self.losses],
            "ring": self._saved_ring(),
            "steps": self.steps,
            "last_status": self.known._asdict(),
            "steps_at_min_scale": self._at_floor,
            "keep_skipping": self.sticky and not self._settled,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restores a :meth:`state_dict`; losses without an entry in it keep their scale."""
        self.state.load_state_dict(state["step_state"])
        for own, saved in zip(self.losses, state["scalers"], strict=False):
            own.load_state_dict(saved)
            own.scale.clamp_(*self._limits)
        self.steps = int(state["steps"])
        self._resumed_at = self.steps
        self._load_ring(state["ring"])
        self.known = StepStatus(**state["last_status"])
        self._at_floor = int(state.get("steps_at_min_scale", 0))
        if self.sticky and not state.get("keep_skipping", False):
            # The saved run skipped its overflows or was ended by them; they must not end this run.
            self.state.streak.zero_()
            self._ends_run_from = self.steps


def pending_in(state: StateDict) -> list[int | None]:
    """Returns of each step whose status the run that saved ``state`` had not read the number of applied steps; None if skipped.

    ``state`` is a :meth:`LossScaler.state_dict`.
    """
    ring = state["ring"].cpu()
    steps = range(max(int(state["steps"]) - LAG, 0), int(state["steps"]))
    words = [ring[step % len(ring)] for step in steps]
    return [int(status[_APPLIED]) if status[_FINITE] else None for status in words]
