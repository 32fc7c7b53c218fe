"""The user's modules and optimizers as one TrainingModule, whose training step is the function that ``Loop.step`` was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.errors import ConfigError
from fabricamp.module import TrainingModule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fabricamp._utils.types import Batch, StateDict


class Call:
    """The function that the next training step runs: outside of the module's attributes, as setting one of these takes longer."""

    __slots__ = ("function",)

    def __init__(self) -> None:
        self.function: Callable[[Batch], Any] = _unset


def _unset(_: Batch) -> Any:
    raise ConfigError("a Loop has no function to run; call step(fn, batch)")


class LoopModule(TrainingModule):
    """Holds ``modules`` by name, and gives their ``optimizers`` the parameters that a strategy or a precision has replaced."""

    def __init__(self, modules: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.call = Call()
        self.states: StateDict = {}
        """What the next checkpoint holds of the Loop itself."""
        self._given = list(optimizers)
        self._names = {id(one): name for name, one in self.named_parameters(remove_duplicate=False)}
        self._held = dict(self.named_parameters())  # so that no number of an object is given to another one

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Runs the function of ``Loop.step``."""
        return self.call.function(batch)

    def on_train_batch_end(self, outputs: object, batch: Batch, batch_idx: int) -> None:
        """Does nothing: an overridden hook after the batch makes each step return its outputs, which ``Loop.step`` returns."""

    def configure_optimizers(self) -> list[Optimizer]:
        """Returns the optimizers, over the parameters as they are now: placed, sharded, in the precision's dtypes."""
        present = dict(self.named_parameters(remove_duplicate=False))
        for optimizer in self._given:
            followed = [[present[self._names[id(one)]] for one in group["params"]] for group in optimizer.param_groups]
            before = [group["params"] for group in optimizer.param_groups]
            if any(
                now is not one for pair in zip(followed, before, strict=True) for now, one in zip(*pair, strict=True)
            ):
                self._replace(optimizer, followed)
        self._held = {}
        return self._given

    @staticmethod
    def _replace(optimizer: Optimizer, parameters: Sequence[Sequence[Tensor]]) -> None:
        """Gives the groups of ``optimizer`` other parameters, as its constructor does, which may look at their class."""
        if optimizer.state:
            raise ConfigError(
                f"{type(optimizer).__name__} has made steps already, and the strategy replaces its parameters; give prepare an "
                "optimizer without steps, and restore a checkpoint after it"
            )
        groups = list(optimizer.param_groups)
        optimizer.param_groups.clear()
        for group, tensors in zip(groups, parameters, strict=True):
            names = group.get("param_names")
            group["params"] = tensors if names is None else list(zip(names, tensors, strict=True))
            optimizer.add_param_group(group)

    def check_parameters(self) -> None:
        """Raises :class:`ConfigError` for an optimizer with parameters of a module that ``prepare`` was not given."""
        for optimizer in self._given:
            for group in optimizer.param_groups:
                if any(id(one) not in self._names for one in group["params"]):
                    raise ConfigError(
                        f"{type(optimizer).__name__} has parameters of a module that prepare was not given; give prepare all "
                        "modules whose parameters the optimizers step, in one call: prepare(generator, critic, first, second)"
                    )

    def on_save_checkpoint(self, checkpoint: StateDict) -> None:
        """Adds what the Loop keeps in its files."""
        checkpoint["loop"] = self.states
