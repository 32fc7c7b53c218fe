"""apex's FusedSGD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp import optimizers
from fabricamp.apex._extensions import amp_C
from fabricamp.apex.optimizers._layout import OverflowBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FusedSGD"]


class FusedSGD(OverflowBuffer, optimizers.FusedSGD):
    """:class:`fabricamp.optimizers.FusedSGD` with the attributes that scripts read."""

    @property
    def multi_tensor_sgd(self) -> Callable[..., None]:
        """The function of ``amp_C`` for this rule."""
        return amp_C.multi_tensor_sgd
