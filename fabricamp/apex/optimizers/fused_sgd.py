"""apex's FusedSGD."""

from __future__ import annotations

from collections.abc import Callable

from fabricamp import optimizers
from fabricamp.apex._extensions import amp_C
from fabricamp.apex.optimizers._layout import OverflowBuffer

__all__ = ["FusedSGD"]


class FusedSGD(OverflowBuffer, optimizers.FusedSGD):
    """:class:`fabricamp.optimizers.FusedSGD` with the attributes that scripts read."""

    @property
    def multi_tensor_sgd(self) -> Callable[..., None]:
        """The function of ``amp_C`` for this rule."""
        return amp_C.multi_tensor_sgd
