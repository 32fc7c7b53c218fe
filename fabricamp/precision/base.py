"""The interface of a precision: it sets the module's compute dtype, runs backward, and makes the update."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from fabricamp._utils.keywords import NamesKeywords
from fabricamp._utils.registry import Registry
from fabricamp.errors import ConfigError
from fabricamp.gradients.memory import GradientMemory
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.precision.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp._utils.types import AnyBatch, StateDict, Step
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

    A training step calls ``forward`` and ``backward`` per micro-batch, then the :class:`~fabricamp.precision.OptimizerStep` that
    :meth:`step_of` has made for each optimizer.  If there are :attr:`verdicts`, their ``launch_end`` and ``note_end`` follow.

    Raises:
        ConfigError: for a subclass, or an object, that has a method by which earlier versions made the step.

    Example:
        >>> Precision().name
        'O0'
    """

    name: str = "O0"
    verdicts: StepResults | None = None
    """The statuses of past steps (applied or skipped); None if every step is applied."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _OLD_STEPS:
            if hasattr(cls, name):
                raise _nobody_calls(f"{cls.__name__}.{name}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OLD_STEPS:
            raise _nobody_calls(f"{name} of a {type(self).__name__}")
        super().__setattr__(name, value)

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
        """Returns the memory with this optimizer's gradients before its step; a strategy exchanges it.

        Its parameters are the tensors with a ``.grad`` from backward, such as the half copies of masters.  If the memory has
        sums, call its ``add`` after every micro-batch.
        """
        return GradientMemory(owned_parameters(optimizer))

    def step_of(self, optimizer: Optimizer, strategy: Strategy, clip: Clip | None) -> OptimizerStep:
        """Returns the step of ``optimizer``; called once a fit, after :meth:`setup_optimizers`.

        ``strategy`` exchanges the gradients, ``clip`` says how they are clipped; None: not at all, or as manual optimization asks
        before each step.  Override it to return a step of your own.
        """
        return OptimizerStep(self, optimizer, strategy, clip)

    def forward(self, step: Step, *args: Any) -> Any:
        """Runs the user's code: ``configure_model``, and the steps of training and evaluation."""
        return step(*args)

    def backward(
        self, loss: Tensor, loss_id: int = 0, run: Callable[..., object] = Tensor.backward, **options: Any
    ) -> None:
        """Runs ``run(loss, **options)`` on the scaled loss."""
        run(loss, **options)

    def notes(self) -> list[str]:
        """Returns lines for the summary of a fit, with the module converted."""
        return []

    def slowness(self, *, compiled: bool) -> str:
        """Returns why steps will be slow, or an empty string; ``compiled``: parts of them are compiled, here or by the user."""
        return ""

    def take_edits(self, *, look: bool = False) -> None:
        """Lets the masters take edits of the module's weights that version counters show, and the weights those of the masters.

        A step does so itself; called before anything else that reads masters, or replays a step.  ``look``: also compares the
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


_OLD_STEPS: Final = ("step", "plan", "prepare_step", "step_prepared", "splits_steps")


def _nobody_calls(what: str) -> ConfigError:
    return ConfigError(
        f"{what} is called by nobody: a precision makes its steps by step_of(optimizer, strategy, clip), which returns an "
        "OptimizerStep (fabricamp.precision); override run, run_shown or exchange of a subclass of that"
    )


PRECISIONS: Registry[Precision] = Registry("precision", "precision")
