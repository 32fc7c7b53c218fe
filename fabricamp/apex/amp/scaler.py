"""apex's LossScaler: its names, with the loss scale in fabricamp's scaler on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from fabricamp import ops
from fabricamp.apex.amp._amp_state import maybe_print
from fabricamp.precision import loss_scaler as device_scaler
from fabricamp.precision.param_grads import values_of

_is_sparse: Final = attrgetter("is_sparse")

_FLOOR: Final = 2.0**-14
"""The minimum of a scale without ``min_loss_scale``: apex's scale would fall to zero and then be a divisor."""


class LossScaler:
    """The scale of one loss, ``"dynamic"`` or a number.

    apex keeps the state in Python numbers; here it is in device memory: reading ``loss_scale()`` or ``_unskipped`` waits for the
    device, training does not.

    >>> scaler = LossScaler("dynamic", init_scale=2.0**8, max_loss_scale=2.0**10)
    >>> scaler.loss_scale()
    256.0
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._constant = 1.0 if self.dynamic else float(loss_scale)
        self._init_scale = min(max_loss_scale, init_scale)
        self._factor = scale_factor
        self._window = scale_window
        self._minimum, self._maximum = min_loss_scale, max_loss_scale
        self._has_overflow = False
        self._flag: Tensor | None = None
        self._applied = 0
        self._moving: device_scaler.LossScaler | None = None
        self._open = False
        self._told: deque[bool] = deque(maxlen=device_scaler.LAG + 1)

    # -- its device, and the attributes that scripts read and set --------------------------------------------------------------

    def place(self, device: torch.device) -> None:
        """Moves the scaler to ``device``."""
        if self._moving is None:
            self.device = device
        elif device != self.device:
            self._rebuild(device)

    @property
    def moving(self) -> device_scaler.LossScaler:
        """The scaler on the device, for a dynamic scale."""
        if self._moving is None:
            self._moving = device_scaler.LossScaler(
                self.device,
                initial=self._init_scale,
                factor=self._factor,
                window=self._window,
                minimum=self._minimum or _FLOOR,
                maximum=self._maximum,
            )
        return self._moving

    def _rebuild(self, device: torch.device) -> None:
        """Replaces the scaler on the device by one with the current options and the same state."""
        state = self.state_dict()
        self.device, self._moving = device, None
        self._told.clear()
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale and the number of backward passes since its last change, in apex's form; waits for the device."""
        return {"loss_scale": self.loss_scale(), "unskipped": self._unskipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of :meth:`state_dict`, or one scaler's entry of apex's ``amp.state_dict()``; a constant scale stays."""
        if self.dynamic:
            self._loss_scale = state["loss_scale"]
        self._unskipped = state["unskipped"]

    def loss_scale(self) -> float:
        """Returns the current scale; waits for the device."""
        return self._loss_scale

    @property
    def _loss_scale(self) -> float:
        return float(self.moving.state.scale) if self.dynamic else self._constant

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        if self.dynamic:
            self.moving.state.scale.fill_(max(min(float(value), self._maximum), self._minimum or _FLOOR))
        else:
            self._constant = float(value)

    @property
    def _unskipped(self) -> int:
        return int(self.moving.state.growth) if self.dynamic else self._applied

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        if self.dynamic:
            self.moving.state.growth.fill_(int(value))
        else:
            self._applied = int(value)

    @property
    def _scale_seq_len(self) -> int:
        return self._window

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: int) -> None:
        self._window = int(value)
        self._rebuild(self.device)

    @property
    def _min_loss_scale(self) -> float | None:
        return self._minimum

    @_min_loss_scale.setter
    def _min_loss_scale(self, value: float | None) -> None:
        self._minimum = value
        self._rebuild(self.device)

    @property
    def _max_loss_scale(self) -> float:
        return self._maximum

    @_max_loss_scale.setter
    def _max_loss_scale(self, value: float) -> None:
        self._maximum = value
        self._rebuild(self.device)

    @property
    def _overflow_buf(self) -> Tensor:
        """The flag that ``amp_C``'s functions write and :meth:`update_scale` reads: an int32 in device memory."""
        if self._flag is None:
            self._flag = torch.zeros(1, dtype=torch.int32, device=self.device)
            if self._open:
                self._flag.copy_(self.moving.state.found_inf)
        return self._flag

    @_overflow_buf.setter
    def _overflow_buf(self, value: Tensor) -> None:
        self._flag = value

    # -- a backward pass -------------------------------------------------------------------------------------------------------

    @property
    def is_one(self) -> bool:
        """Whether the scale is constant and 1."""
        return not self.dynamic and self._constant == 1.0

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns ``loss`` times the scale."""
        if not self.dynamic:
            return loss * self._constant
        return loss * self.moving.state.scale.to(loss.device, non_blocking=True)

    @property
    def factor(self) -> Tensor | float:
        """The current scale, a tensor on the device if it is dynamic."""
        return self.moving.state.scale if self.dynamic else self._constant

    @property
    def multiplier(self) -> Tensor | float:
        """The factor that unscales gradients; valid after :meth:`look`."""
        return self.moving.state.multiplier if self.dynamic else 1.0 / self._constant

    def look(self, gradients: Sequence[Tensor]) -> None:
        """Checks on the device whether scaled gradients are finite; with a constant scale does nothing."""
        if not self.dynamic:
            return
        state = self.moving.state
        if any(map(_is_sparse, gradients)):
            gradients = list(map(values_of, gradients))
        statistics = [
            ops.gradient_statistics(some, state.scale.to(device)).to(self.device)
            for device, (some,) in by_device(gradients)
        ] or [ops.gradient_statistics([], state.scale)]
        whole = torch.cat(statistics) if len(statistics) != 1 else statistics[0]
        ops.finish(state, whole, scale=state.scale)
        self._open = True
        if self._flag is not None:
            self._flag.copy_(state.found_inf)

    def clear_overflow_state(self) -> None:
        """Clears the result of a :meth:`look` that no :meth:`end_pass` followed."""
        self._has_overflow = False
        if self._flag is not None:
            self._flag.zero_()
        if self._open:
            self._open = False
            self.moving.state.finite.fill_(1)
            self.moving.state.bad_chunk.fill_(-1)

    def end_pass(self, loss: Tensor | None, *, waits: bool, loss_id: int = 0) -> tuple[bool, bool]:
        """Ends a backward pass: updates the scale and reports overflows.

        Returns (whether this pass overflowed, whether training cannot continue); the first is False too if the host does not know
        yet.  ``waits``: the host reads the status of this pass; otherwise that of two passes before.
        """
        if not self.dynamic:
            self._applied += 1
            return False, False
        self._open = False
        verdict = self.moving.end_step(loss)
        self._told.append(waits)
        hopeless = False
        if verdict is not None:
            hopeless = verdict.ends_run
            if not verdict.applied and len(self._told) > device_scaler.LAG and not self._told[0]:
                self._tell(verdict.scale, loss_id)
        if not waits:
            return False, hopeless
        now = self.moving.pending()[-1]
        self._has_overflow = not now.applied
        if self._has_overflow:
            self._tell(now.scale, loss_id)
        return self._has_overflow, hopeless or now.ends_run

    @staticmethod
    def _tell(scale: float, loss_id: int) -> None:
        maybe_print(
            f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scale}", rank0=True
        )

    # -- apex's own calls ------------------------------------------------------------------------------------------------------

    def update_scale(self) -> bool:
        """Updates the scale from ``_overflow_buf``, and waits for this flag; returns whether the step has to be skipped."""
        if not self.dynamic:
            self._applied += 1
            return False
        self._has_overflow = bool(self._overflow_buf.item())
        self.moving.state.finite.fill_(int(not self._has_overflow))
        self._open = False
        self._told.append(True)
        self.moving.end_step(None)
        return self._has_overflow

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: float = 1.0,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Writes ``model_grads`` divided by the scale (or by ``scale_override``) into ``master_grads``, and checks for overflow."""
        if models_are_masters and self.is_one and scale_override is None:
            return
        self.look(model_grads)
        multiplier = self.multiplier if scale_override is None else 1.0 / scale_override
        multiply(model_grads, master_grads, multiplier)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Writes ``model_grads`` divided by the scale, plus ``stashed_master_grads``, into ``master_grads``.

        ``scale_override``: the scales of ``model_grads``, of ``stashed_master_grads`` and of the result.
        """
        self.look(model_grads)
        alpha, beta = self.multiplier, 1.0
        if scale_override is not None:
            incoming, stashed, outgoing = scale_override
            alpha, beta = outgoing / incoming, outgoing / stashed
        add(model_grads, stashed_master_grads, master_grads, alpha, beta)

    unscale_python = unscale
    unscale_with_stashed_python = unscale_with_stashed


def by_device(*columns: Sequence[Tensor]) -> list[tuple[torch.device, list[list[Tensor]]]]:
    """Returns (device, lists) for each device, where ``lists`` are ``columns`` with only the rows on that device."""
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(columns[0]):
        places.setdefault(tensor.device, []).append(place)
    return [(device, [[column[place] for place in own] for column in columns]) for device, own in places.items()]


def multiply(sources: Sequence[Tensor], destinations: Sequence[Tensor], multiplier: Tensor | float) -> None:
    """Writes ``sources * multiplier`` into ``destinations``, on any devices."""
    for device, (some, into) in by_device(sources, destinations):
        ops.scale(some, into, _on(multiplier, device))


def add(
    sources: Sequence[Tensor],
    others: Sequence[Tensor],
    destinations: Sequence[Tensor],
    alpha: Tensor | float,
    beta: float = 1.0,
) -> None:
    """Writes ``alpha * sources + beta * others`` into ``destinations``, on any devices."""
    for device, (some, more, into) in by_device(sources, others, destinations):
        ops.axpby(_on(alpha, device), some, beta, more, into)


def _on(value: Tensor | float, device: torch.device) -> Tensor | float:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
