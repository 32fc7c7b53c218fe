"""Lightning's names of a strategy: for callbacks and scripts written for Lightning."""

from __future__ import annotations

import weakref
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from fabricamp.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fabricamp._utils.types import StateDict
    from fabricamp.strategies.base import Environment


class _Run(Protocol):
    """What the names ask of a run (``engine/session.py``): its parts, None or empty before they are made."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def optimizers(self) -> list[Optimizer]: ...

    @property
    def precision(self) -> object: ...


@dataclass
class _Connected:
    """A module that stands for a run until the next one begins."""

    module: nn.Module
    optimizers: list[Optimizer] = field(default_factory=list)
    precision: None = None


class LightningNames:
    """The properties of Lightning's strategies, over those of :class:`~fabricamp.strategies.Strategy`."""

    name: ClassVar[str]
    environment: Environment
    device: torch.device

    _session: Callable[[], _Run | None] = staticmethod(lambda: None)

    def attach(self, session: _Run) -> None:
        """Stores a weak reference to the run, for the properties with module and optimizers; the Trainer calls it."""
        self._session = weakref.ref(session)

    @property
    def strategy_name(self) -> str:
        """The strategy's name."""
        return self.name

    # -- the ranks -----------------------------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """The number of this process among all."""
        return self.environment.rank

    @property
    def local_rank(self) -> int:
        """The number of this process on its node."""
        return self.environment.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this node."""
        return self.environment.node_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.environment.rank == 0

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self.device

    # -- parts of the run ----------------------------------------------------------------------------------------------------------

    @property
    def lightning_module(self) -> Any:
        """The module of the running, or last, fit, validate, test or predict; None before the first."""
        run = self._session()
        return None if run is None else run.module

    def connect(self, model: nn.Module) -> None:
        """Makes ``model`` the Trainer's module until the next run: called by darts for a module that it has loaded."""
        connected = _Connected(model)
        self._session = lambda: connected

    @property
    def model(self) -> Any:
        """The module."""
        return self.lightning_module

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that ``configure_optimizers`` returned."""
        run = self._session()
        return [] if run is None else run.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        # rl4co's active search and pina's SwitchOptimizer assign it; masters, buckets and states belong to the old optimizers.
        raise ConfigError(
            "strategy.optimizers cannot be replaced in a run; return all optimizers from configure_optimizers and step the one "
            "in use by hand (automatic_optimization = False), or start a second fit"
        )

    @property
    def precision_plugin(self) -> Any:
        """The precision."""
        run = self._session()
        return None if run is None else run.precision

    @property
    def launcher(self) -> None:
        """None: the Trainer starts processes (``start_method``), and has no object for it that a program could call."""
        return None

    def backward(self, closure_loss: Tensor, optimizer: object = None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs backward in manual optimization, as ``module.manual_backward`` does; returns the loss."""
        self.lightning_module.manual_backward(closure_loss, *args, **kwargs)
        return closure_loss

    def load_checkpoint(self, checkpoint_path: str, weights_only: bool | None = None) -> StateDict:
        """Returns a checkpoint file's content; objects only with ``weights_only=False``.  Read by pytorch-forecasting's Tuner."""
        if zipfile.is_zipfile(checkpoint_path):  # torch compares no checksums
            with zipfile.ZipFile(checkpoint_path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise CheckpointError(f"{checkpoint_path} is damaged (the checksum of {damaged} is wrong)")
        content: StateDict = torch.load(checkpoint_path, "cpu", weights_only=weights_only is not False)
        return content
