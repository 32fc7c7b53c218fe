"""apex's FusedAdagrad."""

from __future__ import annotations

from collections.abc import Callable

from fabricamp import optimizers
from fabricamp.apex._extensions import amp_C
from fabricamp.apex.optimizers._layout import OverflowBuffer

__all__ = ["FusedAdagrad"]


class FusedAdagrad(OverflowBuffer, optimizers.FusedAdagrad):
    """:class:`fabricamp.optimizers.FusedAdagrad` with the attributes that scripts read."""

    @property
    def multi_tensor_adagrad(self) -> Callable[..., None]:
        """The function of ``amp_C`` for this rule."""
        return amp_C.multi_tensor_adagrad
