"""The face of a precision: what dtype the module runs in, and how a loss becomes an update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from torch import Tensor

from fabricamp.gradients.flat import IN_PLACE, Gradients
from fabricamp.keywords import NamesKeywords
from fabricamp.precision.plain_step import PLAIN, Stepper
from fabricamp.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp.gradients.memory import GradientMemory
    from fabricamp.precision.verdicts import Verdicts
    from fabricamp.strategies.base import Strategy


class Clip(NamedTuple):
    """How gradients are limited: by their common norm, or each value by itself."""

    value: float
    algorithm: Literal["norm", "value"] = "norm"


class Conversion(NamedTuple):
    """A module as :meth:`Precision.convert_module` left it: ``undo()``, and ``full_state(state)``.

    ``undo`` gives the module back after a run: full-precision weights (the masters' values) in place, hooks removed.
    ``full_state`` returns the module's state dict that it is given with the masters' values in place of their half copies.
    """

    undo: Callable[[], None]
    full_state: Callable[[dict[str, Any]], dict[str, Any]]


NOT_CONVERTED: Final = Conversion(lambda: None, lambda state: state)
"""A module as it came."""


class Precision(NamesKeywords):
    """Full precision: what the module brought, autograd's gradients, torch's own clipping.

    One update window is ``forward`` and ``backward`` per micro-batch, then ``step`` per optimizer, then, where
    there are :attr:`verdicts`, their ``close_window``.
    """

    name: str = "O0"
    verdicts: Verdicts | None = None
    """What became of the windows, where one may be skipped; None where every window is applied."""
    _stepper: Stepper = PLAIN

    def convert_module(self, module: nn.Module) -> Conversion | None:
        """Brings the module to the dtype that it runs in, in place; returns how that is undone (None: there is nothing to undo).

        Called once, on the device, before the optimizers are built.
        """
        return None

    def convert_input(self, batch: Any) -> Any:
        """Brings a batch to the dtype that the module takes; called on the way to the device."""
        return batch

    def setup_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], strategy: Strategy, *, accumulates: bool = False
    ) -> None:
        """Gives the optimizers what they update (fp32 masters where the module is half) and checks that this can work.

        ``accumulates``: a window has several micro-batches.
        """

    def gradients(self, optimizer: Optimizer) -> GradientMemory:
        """Where this optimizer's gradients are before :meth:`step`: what a strategy exchanges.

        Its parameters are those whose ``.grad`` backward fills, such as the half copies of masters.  Where it has sums, these take
        in every micro-batch's gradients through ``add``.
        """
        return self._stepper.gradients(optimizer)

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs what the user wrote: ``configure_model``, and the steps of training and evaluation."""
        return step(*args)

    def backward(
        self, loss: Tensor, loss_id: int = 0, run: Callable[..., Any] = Tensor.backward, **options: Any
    ) -> None:
        """Runs ``run(loss, **options)`` on the scaled loss."""
        run(loss, **options)

    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients = IN_PLACE,
        clip: Clip | None = None,
        run: Callable[[], Any] | None = None,
        loss: Tensor | None = None,
        look: Callable[[], Clip | None] | None = None,
    ) -> None:
        """Clips and updates, or skips; ``run`` stands for ``optimizer.step`` where the user overrides the call.

        ``look``: called first, with unscaled, averaged gradients in ``.grad`` of what the optimizer updates; what it makes of them
        is what the update takes, and what it returns is how they are clipped.  ``loss``: given where this step is all of its
        window, what ``verdicts.close_window`` is called with right after.
        """
        if look is not None:
            self._stepper.show(optimizer, gradients)
            clip, gradients = look(), IN_PLACE
        self._stepper.step(optimizer, gradients, clip, run, loss)

    def refresh_masters(self) -> None:
        """Takes the masters anew from the module's weights, after these were edited in place."""

    def state_dict(self) -> dict[str, Any]:
        """Scalers, counters and level: tensors, numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned."""


PRECISIONS: Registry[Precision] = Registry("precision", "precision")
