"""What torch passes to an autograd function as ``ctx``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Context(Protocol):
    """The object in which a forward keeps what its backward needs.

    A function declares a face of its own, with the types of its saved tensors and the attributes that its forward sets.
    """

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors given to :meth:`save_for_backward`, in its order; read in the backward."""
        ...

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """Whether each argument of the forward needs a gradient."""
        ...

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps inputs and outputs of the forward; called once."""
        ...
