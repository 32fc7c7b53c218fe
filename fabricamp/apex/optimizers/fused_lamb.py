"""apex's FusedLAMB."""

from __future__ import annotations

from collections.abc import Callable

from fabricamp import optimizers
from fabricamp.apex._extensions import amp_C
from fabricamp.apex.optimizers._layout import StepInGroup

__all__ = ["FusedLAMB"]


class FusedLAMB(StepInGroup, optimizers.FusedLAMB):
    """:class:`fabricamp.optimizers.FusedLAMB` with apex's layout."""

    @property
    def multi_tensor_l2norm(self) -> Callable[..., object]:
        """The function of ``amp_C`` for the norm of all gradients."""
        return amp_C.multi_tensor_l2norm

    @property
    def multi_tensor_lamb(self) -> Callable[..., None]:
        """The function of ``amp_C`` for this rule."""
        return amp_C.multi_tensor_lamb
