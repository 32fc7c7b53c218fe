"""A session whose loop is the user's: the parts of a fit, without the Trainer's loop over them."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from fabricamp.engine.checks.optimizer_states import check_states, keeps_others
from fabricamp.engine.loop import FitParts, accumulate_grad_nodes
from fabricamp.engine.manual_update import ManualUpdate
from fabricamp.engine.optimizer_setup import check_optimization
from fabricamp.engine.run_parts import RunParts
from fabricamp.engine.saved.checkpoint_sections import POSITION, TRAINING
from fabricamp.engine.session import Session
from fabricamp.engine.update import Update
from fabricamp.optimizers import modes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor
    from torch.autograd.graph import GradientEdge
    from torch.optim import Optimizer

    from fabricamp._utils.types import Batch, Loader, StateDict
    from fabricamp.data import Feed
    from fabricamp.engine.update import StepRunner


class NoFeed:
    """Stands for the feed of a run whose batches the program makes itself: there is no position to save."""

    last = False
    length = math.inf
    hooks_between = False
    read_past: tuple[str, ...] = ()

    def state_dict(self, batches: int, *, within: bool) -> StateDict:
        """Returns nothing: the random numbers of the resume point are all that such batches depend on."""
        return {}


class ApartUpdate(ManualUpdate):
    """Manual optimization whose backward and update the program may also call outside of a step."""

    def backward_apart(self, loss: Tensor, *, loss_id: int, **options: Any) -> None:
        """Runs backward; a checkpoint may follow before the update, so it has to hold these gradients."""
        self.backward(loss, loss_id=loss_id, **options)
        self._batch_complete = True
        self._accumulates = True

    def update_apart(self, optimizers: Sequence[Optimizer]) -> None:
        """Steps the optimizers as one step of the run, and clears their gradients."""
        for optimizer in optimizers:
            self.step(optimizer, None)
            optimizer.zero_grad()
        self.end_step()
        self.stepped = False
        self._not_stepped = set(self._parts.optimizers)
        self._accumulates = len(optimizers) < len(self._parts.optimizers)


class LoopSession(Session):
    """Opens the parts of a run; :meth:`begin` makes its update, once it is known whether steps are made whole or in parts."""

    loader: Loader | None = None
    feed: Feed | None = None
    update: Update
    steps: StepRunner
    nodes: Sequence[GradientEdge] = ()
    """Keeps the AccumulateGrad nodes of the parameters alive."""

    def _wrap_step(self) -> None:
        """Nothing yet: the strategy's wrapper depends on how steps are made, which :meth:`begin` knows."""

    def use_loader(self, loader: object) -> None:
        """Makes ``loader`` the run's training data: shares it out over the ranks, and moves its batches to the device."""
        self.source.train = loader
        self.loader = self.data.train_loader
        self.feed = self._train_feed()

    def begin(self, *, automatic: bool, checkpoint: StateDict | None = None, path: str = "") -> None:
        """Makes the update: ``automatic`` makes whole steps; restores what a ``checkpoint`` has beside weights and counters."""
        self.module.automatic_optimization = automatic
        check_optimization(self.optimizers, self.module, self.settings, self.strategy.world_size)
        if others := [one for one in self.optimizers if keeps_others(one)]:
            check_states(others)
        super()._wrap_step()
        parts = self._loop_parts()
        self.update, self.steps = self._update(parts)
        self.resume_point.begin(parts.feed, self.update)
        if checkpoint is not None:
            self.record.restore(checkpoint, path, *TRAINING, *POSITION)
            self.update.take_over_schedules(checkpoint.get("amp", {}))
            self.resumed = True
        modes.train(self.optimizers, self.precision)
        self.follow_freezing()
        self.steps.begin_epoch(0)

    def follow_freezing(self) -> None:
        """Lets the strategy rewrap the step if parameters were frozen or unfrozen since the last call."""
        step = self.strategy.rewrap_module(self.step)
        if step is not self.step:
            self.step = step
            self.steps.use(step)
        self.nodes = accumulate_grad_nodes(self.module)

    def _loop_parts(self) -> FitParts:
        shared = {one.name: getattr(self, one.name) for one in fields(RunParts)}
        return FitParts(
            **shared,
            requests=self.watchdog.requests,
            feed=cast("Feed", NoFeed() if self.feed is None else self.feed),
            loader=() if self.loader is None else self.loader,
            step=self.step,
            length=math.inf,
            validate=None,
            together=_as_they_come,
            meet_at_end_of_data=_no_meeting,
            say=None,
            monitors=None,
            states=None,
            renew=_nothing_to_renew,
        )

    def _update(self, parts: FitParts) -> tuple[Update, StepRunner]:
        if self.module.automatic_optimization:
            return super()._update(parts)
        self._captures(parts)  # raises if a graph is required: the program makes the steps
        manual = ApartUpdate(parts)
        for optimizer in self.run_context.optimizers:
            optimizer.update = manual.step
        return manual, manual


def _as_they_come(batches: Iterable[Batch]) -> Iterator[Batch]:
    return iter(batches)


def _no_meeting(_: int) -> None:
    """The program's loop has no watch over the other ranks."""


def _nothing_to_renew(_: FitParts) -> None:
    """Loaders are given once."""
