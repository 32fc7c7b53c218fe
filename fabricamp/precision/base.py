"""The interface of a precision: it sets the module's compute dtype, runs backward, and makes the update."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from fabricamp._utils.keywords import NamesKeywords
from fabricamp._utils.registry import Registry
from fabricamp.gradients.flat import IN_PLACE, Gradients
from fabricamp.precision.update_plan import Stages, StepPlan, UpdatePlan, is_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp._utils.types import AnyBatch, StateDict, Step
    from fabricamp.gradients.memory import GradientMemory
    from fabricamp.precision.step_results import StepResults
    from fabricamp.strategies.base import Strategy


class Clip(NamedTuple):
    """How gradients are clipped: by their total norm, or each value by itself."""

    value: float
    algorithm: Literal["norm", "value"] = "norm"


class Conversion(NamedTuple):
    """Two functions of a converted module, returned by :meth:`Precision.convert_module`: ``undo()`` and ``full_state(state)``.

    ``undo`` restores the module after a run: it puts full-precision weights (the masters' values) in place and removes the hooks.
    ``full_state`` takes the module's state dict and returns it with the masters' values instead of their half copies.
    """

    undo: Callable[[], None]
    full_state: Callable[[StateDict], StateDict]


NOT_CONVERTED: Final = Conversion(lambda: None, lambda state: state)
"""The conversion of a module that was left unchanged."""


class Precision(NamesKeywords):
    """Full precision: the module's own dtypes, autograd's gradients, torch's own clipping.

    A training step calls ``forward`` and ``backward`` per micro-batch, then ``step`` per optimizer.  If there are
    :attr:`verdicts`, their ``launch_end`` and ``note_end`` follow.
    """

    name: str = "O0"
    verdicts: StepResults | None = None
    """The statuses of past steps (applied or skipped); None if every step is applied."""

    def check_strategy(self, strategy: Strategy) -> None:
        """Raises :class:`ConfigError` if this precision does not work with ``strategy``; called before processes start."""

    def convert_module(self, module: nn.Module) -> Conversion | None:
        """Converts the module in place to its compute dtype; returns the functions that undo it (None: nothing to undo).

        Called once, with the module on its device, before the optimizers are built.
        """
        return None

    def convert_input(self, batch: AnyBatch) -> AnyBatch:
        """Casts a batch to the module's input dtype; called during the transfer to the device."""
        return batch

    def setup_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], strategy: Strategy, *, accumulates: bool = False
    ) -> None:
        """Gives the optimizers the tensors to update (fp32 masters if the module is half), and checks that the setup can work.

        ``accumulates``: a step has several micro-batches.
        """

    def gradients(self, optimizer: Optimizer) -> GradientMemory:
        """Returns the memory with this optimizer's gradients before :meth:`step`; a strategy exchanges it.

        Its parameters are the tensors with a ``.grad`` from backward, such as the half copies of masters.  If the memory has
        sums, call its ``add`` after every micro-batch.
        """
        return self._stages(optimizer).gradients()

    def _stages(self, optimizer: Optimizer) -> Stages:
        """Returns the stages of the update of ``optimizer``."""
        return Stages(optimizer)

    def plan(self, optimizer: Optimizer, strategy: Strategy, clip: Clip | None) -> UpdatePlan:
        """Returns the update of ``optimizer`` in automatic optimization; called once a fit, after :meth:`setup_optimizers`.

        In full precision without clipping, its ``run`` calls only ``optimizer.step`` if nothing is exchanged.
        """
        if clip is None and self.verdicts is None and is_own(self, "step", Precision):
            return StepPlan(self, optimizer, strategy, None)
        return UpdatePlan(self, optimizer, strategy, clip)

    def forward(self, step: Step, *args: Any) -> Any:
        """Runs the user's code: ``configure_model``, and the steps of training and evaluation."""
        return step(*args)

    def backward(
        self, loss: Tensor, loss_id: int = 0, run: Callable[..., object] = Tensor.backward, **options: Any
    ) -> None:
        """Runs ``run(loss, **options)`` on the scaled loss."""
        run(loss, **options)

    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients = IN_PLACE,
        clip: Clip | None = None,
        run: Callable[[], object] | None = None,
        loss: Tensor | None = None,
        look: Callable[[], Clip | None] | None = None,
    ) -> None:
        """Clips and updates, or skips; ``run`` replaces ``optimizer.step`` if the user overrides the call.

        ``look`` is called first, with unscaled, averaged gradients in ``.grad`` of the updated tensors.  It may edit them, and the
        update uses the edited gradients; it returns how to clip them.  ``loss``: given only if this call is the training step's
        only optimizer step; ``verdicts.launch_end`` is called with the same loss right after.
        """
        stages = self._stages(optimizer)
        if look is not None:
            stages.show(gradients)
            clip = look()
            gradients = IN_PLACE
        stages.step(gradients, clip, run, loss)

    @property
    def splits_steps(self) -> bool:
        """Whether :meth:`prepare_step` and :meth:`step_prepared` do the same as :meth:`step`: not if a subclass overrides that."""
        return is_own(self, "step", Precision)

    def prepare_step(self, optimizer: Optimizer, gradients: Gradients, clip: Clip | None, loss: Tensor | None) -> None:
        """Writes the gradients into ``.grad`` that ``optimizer.step`` reads: the part of :meth:`step` that a graph captures."""
        self._stages(optimizer).prepare(gradients, clip, loss)

    def step_prepared(self, optimizer: Optimizer, run: Callable[[], object] | None = None) -> None:
        """Steps the optimizer with these gradients, or skips: the rest of :meth:`step`."""
        self._stages(optimizer).step_prepared(run)

    def notes(self) -> list[str]:
        """Returns lines for the summary of a fit, with the module converted."""
        return []

    def slowness(self, *, compiled: bool) -> str:
        """Returns why steps will be slow, or an empty string; ``compiled``: parts of them are compiled, here or by the user."""
        return ""

    def take_edits(self, *, look: bool = False) -> None:
        """Lets the masters take edits of the module's weights that version counters show, and the weights those of the masters.

        :meth:`step` does so itself; called before anything else that reads masters, or replays a step.  ``look``: also compares the
        values, and raises :class:`ConfigError` for edits that no counter shows, at once or in a later call: the host does not wait.
        """

    def note_restored_weights(self) -> None:
        """Notes that weights and their fp32 masters were written together, from an earlier state: neither was edited."""

    @contextlib.contextmanager
    def fp32_values(self, module: nn.Module) -> Iterator[dict[str, Tensor]]:
        """Yields the parameters of ``module`` by name, to be edited in place, without gradients: masters where there are some.

        At the end of the block edited masters are rounded into their half weights.

        >>> net = torch.nn.Linear(2, 1)
        >>> with Precision().fp32_values(net) as values:
        ...     _ = values["weight"].clamp_(-0.05, 0.05)
        """
        with torch.no_grad():
            yield dict(module.named_parameters())

    def refresh_masters(self) -> None:
        """Lets the masters take every element of the module's weights that was changed, also through ``.data``."""

    def state_dict(self) -> StateDict:
        """Returns scalers, counters and level, as tensors, numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Restores the state that :meth:`state_dict` returned."""


PRECISIONS: Registry[Precision] = Registry("precision", "precision")
