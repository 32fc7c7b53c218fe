"""The flat memory for exchanging a module's gradients; it is rebuilt when parameters change, which scripts do without notice."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fabricamp.gradients.flat import FlatGradients, Transport
from fabricamp.strategies.exchange import indices_of_triggers
from fabricamp.strategies.unused_parameters import UnusedParamsReport

_kind: Final = operator.attrgetter("requires_grad", "dtype", "device")
_MOST_FLATS: Final = 4


class ModuleLayout:
    """The flat memory for a module's gradients; :meth:`refresh` rebuilds it if the parameters have changed."""

    def __init__(
        self,
        module: nn.Module,
        transport: Transport,
        world_size: int,
        rank: int,
        *,
        message_size: float = math.inf,
        triggers: Sequence[Any] = (),
    ) -> None:
        self._module = module
        self._transport = transport
        indices_of_triggers(triggers, module, ())  # raises for an unknown trigger at once
        self._rank = rank
        self._world_size = world_size
        self._message_size = message_size
        self._triggers = triggers
        self._parameters: list[nn.Parameter] = []
        self._kinds: list[Any] = []
        self._flats: dict[tuple[Any, ...], tuple[FlatGradients, UnusedParamsReport]] = {}
        self._registered = -1
        self.stale = True
        self.flat: FlatGradients | None = None
        self.differences = UnusedParamsReport([], rank)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._parameters[0].device if self._parameters else torch.device("cpu")

    def refresh(self) -> FlatGradients:
        """Returns the flat memory, rebuilt if parameters were added, frozen, unfrozen or cast; every rank has to do the same."""
        if self.stale or self._registered != registrations.count:
            self._registered = registrations.count
            self.stale = False
            parameters = list(self._module.parameters())
            if len(parameters) != len(self._parameters) or not all(map(operator.is_, parameters, self._parameters)):
                self._parameters = parameters
                self.flat = None
                self._flats.clear()
        kinds = list(map(_kind, self._parameters))
        if self.flat is None or kinds != self._kinds:
            self._kinds = kinds
            self.flat, self.differences = self._flat_of(tuple(kinds))
        return self.flat

    def _flat_of(self, kinds: tuple[Any, ...]) -> tuple[FlatGradients, UnusedParamsReport]:
        """Returns the flat memory for ``kinds``, from a cache if possible: GAN scripts freeze and unfreeze networks in turn."""
        known = self._flats.get(kinds)
        if known is None:
            if len(self._flats) == _MOST_FLATS:
                self._flats.clear()
            flat = FlatGradients(
                self._parameters,
                self._transport,
                self._world_size,
                message_size=self._message_size,
                triggers=indices_of_triggers(self._triggers, self._module, self._parameters),
            )
            names = [name for name, _ in self._module.named_parameters()]
            known = flat, UnusedParamsReport(names, self._rank)
            self._flats[kinds] = known
        return known

    def exchange(self) -> None:
        """Averages every ``.grad`` over all ranks now."""
        flat = self.flat
        assert flat is not None
        flat.write_back(flat.exchange())
        self.differences.look()
        if flat.missing:
            self.differences.note(flat.present, flat.missing)


class _Registrations:
    """Counts the registrations of parameters and submodules in any module, to notice new ones without a search."""

    def __init__(self) -> None:
        self.count = 0
        self._counts = False

    def begin(self) -> None:
        """Starts counting, once per process."""
        if not self._counts:
            self._counts = True
            register_module_parameter_registration_hook(self._note)
            register_module_module_registration_hook(self._note)

    def _note(self, *_: object) -> None:
        self.count += 1


registrations = _Registrations()
