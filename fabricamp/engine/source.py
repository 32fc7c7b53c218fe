"""The source of batches: finds and wires loaders, limits their lengths, and prepares batches before the transfer.

:class:`GivenData` is what an entry point was called with.  :class:`DataSource` asks for the training loader and the evaluation
loaders, makes a feed of each, and replaces loaders in epochs that reload them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from fabricamp._utils.say_once import say_once
from fabricamp.data import (
    CombinedLoader,
    DataModule,
    Feed,
    batch_sizes,
    check_equal_lengths,
    combine,
    is_resident,
    limit_batches,
    loader_length,
    look_for_doubles,
    most_batches,
    release_workers,
    try_loaders,
    wire_loader,
)
from fabricamp.data.transfer import move_to_device
from fabricamp.errors import ConfigError
from fabricamp.hooks import ModuleHooks, overrides
from fabricamp.lightning.given import own_loader
from fabricamp.module import TrainingModule
from fabricamp.precision.base import Precision
from fabricamp.rng import global_seed, seeded
from fabricamp.state import TrainerFn

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp._utils.types import Batch, Loader, Step
    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer.arguments import Settings


_LOG = logging.getLogger("fabricamp")

_RUNS = {
    "train": (TrainerFn.FITTING,),
    "val": (TrainerFn.FITTING, TrainerFn.VALIDATING),
    "test": (TrainerFn.TESTING,),
    "predict": (TrainerFn.PREDICTING,),
}
"""The entry points that use the loaders of each name."""

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""The hooks that move a batch to the device, in their order; the first two may run ahead of the batch's step."""


@dataclass(slots=True, kw_only=True)
class GivenData:
    """The data given to an entry point; given loaders take precedence over the DataModule's, and these over the module's."""

    train: object = None
    evaluation: object = None
    datamodule: DataModule | None = None
    fn: TrainerFn = TrainerFn.FITTING
    compiler: Callable[[Step], Step] | None = None
    """The compiler that ``torch.compile`` attached to the given module; None: the module was not compiled."""

    def given(self, name: str) -> object:
        """Returns the loaders given for ``name`` ("train", "val", "test" or "predict"), or None."""
        if name == "train":
            return self.train
        evaluated = {TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}.get(self.fn, "val")
        return self.evaluation if name == evaluated else None


class DataSource:
    """The loaders of one session, each asked for once and wired to this rank's share."""

    def __init__(
        self,
        source: GivenData,
        module: TrainingModule,
        strategy: Strategy,
        precision: Precision,
        settings: Settings,
        state: RunState,
    ) -> None:
        self._source = source
        self._module = module
        self._strategy = strategy
        self._precision = precision
        self._settings = settings
        self._state = state
        self._loaded_in = self._reload_epoch
        self._train_loader: Loader | None = None
        self._unwired_train_loader: object = None  # as it was given or made
        self._num_training_batches: float | None = None
        self._sure_batches: float = 0  # that each rank has to have
        self._feeds: list[tuple[Loader, Feed]] = []
        self.train_feed: Feed | None = None
        """The batches to train on; None before their loader is created, and after it was released for another one."""
        self._evaluation: dict[str, tuple[list[Loader], list[float]]] = {}
        self._collections: dict[str, object] = {}  # the evaluation loaders in the collections that they were given in

    # -- the training loader -----------------------------------------------------------------------------------------------------

    @property
    def train_loader(self) -> Loader:
        """The training loader; raises on every rank if the number of batches differs over ranks."""
        if self._train_loader is None:
            loader = self._ask("train")
            if loader is None:
                raise ConfigError(f"there is nothing to train on: {self.what_to_write('train', 'train_dataloaders')}")
            self._unwired_train_loader = loader
            loader = combine(loader)
            try_loaders(loader)
            loader = self._wire(loader, train=True)
            length = loader_length(loader, "train_dataloaders")
            limit = self._settings.limit_train_batches
            sure = limit_batches(length, limit, "limit_train_batches")
            check_equal_lengths(self._strategy, sure, "train_dataloaders", loader)
            # Replicas that join and leave have no collective in which to agree on the end of an epoch.
            most = length if self._strategy.membership.heals else most_batches(loader)
            self._train_loader = loader
            self._sure_batches = sure
            self._num_training_batches = limit_batches(length, limit, "limit_train_batches", most=most)
        return self._train_loader

    @property
    def num_training_batches(self) -> float:
        """The micro-batches in an epoch on this rank; the most that there can be, if the samples of a stream decide."""
        # Computed once: a resumed epoch makes the loader shorter.
        if self._num_training_batches is None:
            _ = self.train_loader
        assert self._num_training_batches is not None
        return self._num_training_batches

    @property
    def batch_sizes(self) -> list[int] | None:
        """The batch size of each training loader; None if one is unknown, or before the loaders are asked for."""
        return None if self._train_loader is None else batch_sizes(self._train_loader)

    @property
    def is_last_batch(self) -> bool:
        """Whether the micro-batch being trained on is the epoch's last."""
        return self.train_feed is not None and self.train_feed.last

    def is_trained_on(self, batches: int) -> bool:
        """Whether ``batches`` micro-batches are all of an epoch."""
        feed = self.train_feed
        if feed is None or batches == 0:
            return False
        return feed.is_over(batches) or batches == self._num_training_batches

    # -- the evaluation loaders --------------------------------------------------------------------------------------------------

    def evaluation_loaders(self, name: str) -> list[Loader]:
        """The loaders of ``name`` ("val", "test" or "predict")."""
        return self.evaluation(name)[0]

    def evaluation_lengths(self, name: str) -> list[float]:
        """The numbers of batches of the loaders of ``name``, on this rank."""
        return self.evaluation(name)[1]

    def evaluation(self, name: str) -> tuple[list[Loader], list[float]]:
        """The loaders of ``name``, and their numbers of batches on this rank."""
        if name not in self._evaluation:
            self._evaluation[name] = self._make_evaluation(name)
        return self._evaluation[name]

    def _make_evaluation(self, name: str) -> tuple[list[Loader], list[float]]:
        limit = getattr(self._settings, f"limit_{name}_batches")
        has_step = name != "val" or overrides(self._module, "validation_step", TrainingModule)
        used = limit != 0 and has_step
        loaders = self._ask(name) if used else None
        if not has_step and limit != 0 and self._source.given(name) is not None and self._strategy.rank == 0:
            _LOG.warning(
                "val_dataloaders are given, but %s has no validation_step: nothing is validated",
                type(self._module).__name__,
            )
        if loaders is not None and name == "val" and self.validates_on_training:
            # Validation makes a pass of its own, over a second training loader.
            length = self.num_training_batches  # creates the training loader if there is none yet
            train_loader = self._wire(combine(self._unwired_train_loader), train=True)
            self._collections["val"] = train_loader
            if isinstance(train_loader, CombinedLoader):
                self._collections["val"] = train_loader.iterables
            return [train_loader], [length]
        wired, self._collections[name] = self._wire_evaluation(loaders, in_batches=name == "predict")
        label = "val_dataloaders" if self._source.fn is TrainerFn.FITTING else "dataloaders"
        lengths = [
            limit_batches(loader_length(loader, label), limit, f"limit_{name}_batches", most=most_batches(loader))
            for loader in wired
        ]
        return wired, lengths

    @property
    def validates_on_training(self) -> bool:
        """Whether validation within fit runs on training batches instead of its own loaders' (``overfit_batches``)."""
        return bool(self._settings.overfit_batches) and self._source.fn is TrainerFn.FITTING

    def _wire_evaluation(self, loaders: object, *, in_batches: bool) -> tuple[list[Loader], object]:
        """Returns the evaluation loaders as a list, and in their original collection."""
        if loaders is None or (isinstance(loaders, dict | list | tuple) and not loaders):  # none, as in Lightning
            return [], None
        loader: Loader = combine(loaders, "sequential")
        try_loaders(loader)
        wired = self._wire(loader, train=False, in_batches=in_batches)
        if not isinstance(wired, CombinedLoader):
            return [wired], wired
        if wired.mode == "sequential":
            return wired.flattened, wired.iterables
        return [wired], wired.iterables

    def as_given(self, name: str) -> object:
        """The loaders of ``name`` (or "train") in their original collection; None if this run does not use them.

        Loaders of other entry points are not asked for: the DataModule has not set up their data.
        """
        if self._source.fn not in _RUNS[name]:
            return None
        if name != "train":
            self.evaluation(name)
            return self._collections.get(name)
        return self.train_loader.iterables if isinstance(self.train_loader, CombinedLoader) else self.train_loader

    # -- asking for loaders ------------------------------------------------------------------------------------------------------

    def defines(self, name: str) -> bool:
        """Whether loaders of ``name`` were given, or a method returns them; does not call the method."""
        return self._source.given(name) is not None or self._owner(name) is not None

    def _owner(self, name: str) -> DataModule | TrainingModule | None:
        """Returns the DataModule or else the module, if it defines loaders of ``name``; None if neither does."""
        hook = f"{name}_dataloader"
        datamodule = self._source.datamodule
        if datamodule is not None and overrides(datamodule, hook, DataModule):
            return datamodule
        # Only an overridden method is called: that of Lightning's base class would raise.
        return self._module if overrides(self._module, hook, ModuleHooks) else None

    def _ask(self, name: str) -> object:
        given = self._source.given(name)
        owner = self._owner(name)
        if given is not None or owner is None:
            return given
        epoch = self._reload_epoch
        # Seeded, since a resumed run creates the loaders with another RNG state than the cut run did.
        with seeded(global_seed(), epoch) if epoch >= 0 else contextlib.nullcontext():
            return own_loader(getattr(owner, f"{name}_dataloader")())

    def what_to_write(self, name: str, argument: str) -> str:
        """Returns advice for missing loaders of ``name``; ``argument`` is the entry point's name for them."""
        hook = f"{name}_dataloader"
        owner = self._owner(name)
        if owner is not None:
            return f"{type(owner).__name__}.{hook}() returned no loader; return one"
        datamodule = self._source.datamodule
        if datamodule is not None:
            return f"write {type(datamodule).__name__}.{hook}, or pass {argument} in place of the datamodule"
        return f"pass {argument} or a datamodule, or write {type(self._module).__name__}.{hook}"

    def _wire(self, loader: Loader, *, train: bool, in_batches: bool = False) -> Loader:
        strategy = self._strategy
        settings = self._settings
        rank, world_size = strategy.train_share if train else (strategy.data_rank, strategy.data_ranks)
        return wire_loader(
            loader,
            train=train,
            rank=rank,
            world_size=world_size,
            seed=global_seed(),
            distributed_sampler=settings.use_distributed_sampler,
            overfit=settings.overfit_batches if train else 0,
            per_sample_seed=train and settings.per_sample_seed,
            device=strategy.device,
            in_batches=in_batches,
            at_once=1 if settings.cuda_graph is None else settings.cuda_graph.steps,
            from_first=strategy.broadcast if strategy.world_size > 1 else None,
            gather=strategy.all_gather_object,
        )

    # -- feeds: batches on the device --------------------------------------------------------------------------------------------

    def feed(self, loader: Loader, limit: float, dataloader_idx: int = 0, *, begun: bool = False) -> Feed:
        """Returns a feed of the loader's batches on the device; on a GPU it prefetches them unless they are there already.

        ``begun``: the run had passes over the loader before it was resumed.
        """
        before, transfer, after = (self._transfer_hook(name) for name in TRANSFER_HOOKS)
        hooked = before.overridden or transfer.overridden
        trains = loader is self._train_loader
        device = self._strategy.device
        resident = is_resident(loader)
        moves = transfer.overridden or (device.type != "cpu" and not resident)
        prepare = self._preparation(before, transfer if moves else None, dataloader_idx)
        prefetch = self._settings.prefetch_batches if device.type == "cuda" and not resident else 0
        if prefetch and hooked and trains:
            if self._may_run_ahead(before) and self._may_run_ahead(transfer):
                prepare = with_ahead_flag(prepare, self._state)
            else:
                prefetch = 0
        finish: Callable[[Batch], Batch] | None = None
        if after.overridden:

            def finish(batch: Batch) -> Batch:
                return after.owner.on_after_batch_transfer(batch, dataloader_idx)

        feed = Feed(
            loader,
            limit=limit,
            prepare=prepare,
            finish=finish,
            device=device,
            prefetch=prefetch,
            hooked=hooked,
            begun=begun,
            reach=self._reach if trains else 0,
            sure=self._sure_batches,
            go_on=self._all_go_on if trains and self._ends_may_differ else None,
        )
        self._feeds.append((loader, feed))
        if trains:
            self.train_feed = feed
        if self._settings.use_distributed_sampler:
            # No comparison among ranks in evaluation: a rank that was stopped in one loader does not come to the next.
            look_for_doubles(feed, loader, self._strategy, among_ranks=trains)
        return feed

    @property
    def _reach(self) -> int:
        """How many training batches may be out of the loader and not done: those of a step, or of a launch of several steps."""
        graph = self._settings.cuda_graph
        return max(self._settings.most_accumulated, 1 if graph is None else graph.steps)

    @property
    def _ends_may_differ(self) -> bool:
        """Whether a rank may have more training batches than another, each as many samples as its stream says."""
        return self._strategy.world_size > 1 and self.num_training_batches > self._sure_batches

    def _all_go_on(self, has_more: bool) -> bool:
        """Returns whether every rank has a further training batch; every rank has to call it."""
        ranks = self._strategy.all_gather_object(has_more)
        if any(ranks) and not all(ranks) and self._strategy.rank == 0:
            more, none = ([rank for rank, has in enumerate(ranks) if has is one] for one in (True, False))
            say_once(
                f"an epoch ends where the first rank's stream does: ranks {none} have no further batch, and what ranks {more} "
                "still have is left out; give each rank the same number of batches"
            )
        return all(ranks)

    def _transfer_hook(self, name: str) -> _TransferHook:
        datamodule = self._source.datamodule
        if datamodule is not None and overrides(datamodule, name, DataModule):
            return _TransferHook(name, datamodule, overridden=True)
        return _TransferHook(name, self._module, overridden=overrides(self._module, name, ModuleHooks))

    def _preparation(
        self, before: _TransferHook, transfer: _TransferHook | None, dataloader_idx: int
    ) -> Callable[[Batch], Batch] | None:
        """Returns a function that runs the hooks up to the transfer and converts inputs; None if nothing has to be done."""
        device = self._strategy.device
        steps: list[Callable[[Batch], Batch]] = []
        if before.overridden:
            steps.append(lambda batch: before.owner.on_before_batch_transfer(batch, dataloader_idx))
        if transfer is not None and not transfer.overridden:
            steps.append(functools.partial(move_to_device, device=device))
        elif transfer is not None:
            steps.append(lambda batch: transfer.owner.transfer_batch_to_device(batch, device, dataloader_idx))
        if overrides(self._precision, "convert_input", Precision):
            steps.append(self._precision.convert_input)
        if len(steps) <= 1:
            return steps[0] if steps else None

        def prepare(batch: Batch) -> Batch:
            for step in steps:
                batch = step(batch)
            return batch

        return prepare

    def _may_run_ahead(self, hook: _TransferHook) -> bool:
        """Returns whether a hook may run for batches ahead of their steps: not if it reads ``global_step``."""
        if not hook.overridden or not reads(getattr(hook.owner, hook.name), "global_step"):
            return True
        if self._strategy.rank == 0:
            say_once(
                f"batches are not prefetched to the device: {type(hook.owner).__name__}.{hook.name} reads global_step; "
                "on_after_batch_transfer, which runs right before the step, may read it"
            )
        return False

    # -- other loaders, and the end ----------------------------------------------------------------------------------------------

    def renew(self) -> bool:
        """Releases loaders if this epoch reloads them (``reload_dataloaders_every_n_epochs``); returns whether it does.

        Loaders given to the entry point stay: there is no method that returns new ones.
        """
        if self._loaded_in == self._reload_epoch:
            return False
        self._loaded_in = self._reload_epoch
        if self._source.given("train") is None:
            self._release(self._train_loader)
            self._train_loader = None
            self._unwired_train_loader = None
            self._num_training_batches = None
            self.train_feed = None
        if self._source.given("val") is None or self._settings.overfit_batches:
            loaders, _ = self._evaluation.pop("val", ([], []))
            self._release(*loaders)
        return True

    @property
    def reloads(self) -> bool:
        """Whether the present epoch is one that reloads the loaders."""
        return self._reload_epoch == self._state.epoch

    @property
    def _reload_epoch(self) -> int:
        """The epoch in which the present epoch's loaders are asked for; -1 if loaders are never reloaded."""
        every = self._settings.reload_dataloaders_every_n_epochs
        if not every or self._source.fn is not TrainerFn.FITTING:
            return -1
        return self._state.epoch // every * every

    def close(self) -> None:
        """Ends the passes in progress, and the workers that wait for the next pass."""
        evaluation_loaders = [loader for loaders, _ in self._evaluation.values() for loader in loaders]
        self._release(self._train_loader, *evaluation_loaders)

    def _release(self, *loaders: Loader | None) -> None:
        remaining = []
        for loader, feed in self._feeds:
            if any(loader is one for one in loaders):
                feed.close()
            else:
                remaining.append((loader, feed))
        self._feeds = remaining
        for released in loaders:
            release_workers(released)

    def lengths(self) -> dict[str, Any]:
        """Returns the known numbers of batches, for a caller whose worker processes had the loaders."""
        evaluation = {name: lengths for name, (_, lengths) in self._evaluation.items()}
        return {"train": self._num_training_batches, **evaluation}

    def take_lengths(self, lengths: dict[str, Any]) -> None:
        """Sets the numbers of batches that :meth:`lengths` returned in a worker process."""
        self._num_training_batches = lengths.pop("train")
        self._evaluation = {name: ([], numbers) for name, numbers in lengths.items()}


class _TransferHook(NamedTuple):
    """A hook that moves a batch: the DataModule's if it overrides it, else the module's."""

    name: str
    owner: Any
    overridden: bool


def reads(hook: Callable[..., Any], name: str) -> bool:
    """Whether the code of ``hook`` uses an attribute or a global called ``name``.

    >>> reads(lambda trainer: [trainer.global_step for _ in range(2)], "global_step")
    True
    """
    code = getattr(hook, "__code__", None)
    return isinstance(code, CodeType) and _names(code, name)


def _names(code: CodeType, name: str) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return name in code.co_names or any(_names(function, name) for function in inner)


def with_ahead_flag(prepare: Callable[[Batch], Batch] | None, state: RunState) -> Callable[[Batch], Batch] | None:
    """Returns ``prepare``, wrapped to set ``ahead`` while it runs ahead of the step."""
    if prepare is None:
        return None

    def ahead(batch: Batch) -> Batch:
        state.user_call.ahead = True
        try:
            return prepare(batch)
        finally:
            state.user_call.ahead = False

    return ahead
