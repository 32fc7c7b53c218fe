"""Where batches come from: finds and wires loaders, limits their lengths, prepares batches on their way to the device."""

from __future__ import annotations

import contextlib
import itertools
import logging
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

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
    release_workers,
    wire_loader,
)
from fabricamp.errors import ConfigError
from fabricamp.hooks import ModuleHooks, overrides
from fabricamp.lightning.given import own_loader
from fabricamp.module import TrainingModule
from fabricamp.precision.base import Precision
from fabricamp.rng import global_seed, seeded
from fabricamp.state import TrainerFn

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer.arguments import Settings


# ~~~ from engine.staged_hooks: The user's hooks that prefetch batches ahead of their steps, and what the hooks must not read then.


def reads(hook: Callable[..., Any], name: str) -> bool:
    """Whether the code of ``hook`` uses an attribute or a global called ``name``.

    >>> reads(lambda trainer: [trainer.global_step for _ in range(2)], "global_step")
    True
    """
    code = getattr(hook, "__code__", None)
    return isinstance(code, CodeType) and _names(code, name)


def watched(prepare: Callable[[Any], Any] | None, state: RunState) -> Callable[[Any], Any] | None:
    """Returns ``prepare``, wrapped to set ``state.ahead`` while it runs ahead of the step."""
    if prepare is None:
        return None

    def ahead(batch: Any) -> Any:
        state.ahead = True
        try:
            return prepare(batch)
        finally:
            state.ahead = False

    return ahead


def _names(code: CodeType, name: str) -> bool:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return name in code.co_names or any(_names(one, name) for one in inner)


logger = logging.getLogger("fabricamp")

_RUNS = {
    "train": (TrainerFn.FITTING,),
    "val": (TrainerFn.FITTING, TrainerFn.VALIDATING),
    "test": (TrainerFn.TESTING,),
    "predict": (TrainerFn.PREDICTING,),
}
"""The entry points that use the loaders of each name."""

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@dataclass(slots=True, kw_only=True)
class GivenData:
    """The data given to an entry point; given loaders take precedence over the DataModule's, and these over the module's."""

    train: Any = None
    evaluation: Any = None
    datamodule: DataModule | None = None
    fn: TrainerFn = TrainerFn.FITTING

    def given(self, name: str) -> Any:
        """Returns the loaders given for ``name`` ("train", "val", "test" or "predict"), or None."""
        kind = {TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}.get(self.fn, "val")
        return self.train if name == "train" else self.evaluation if name == kind else None


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
        self._asked_in = self._epoch_to_ask_in
        self._train_loader: Any = None
        self._asked_for_train: Any = None  # as it was given or made, before it is wired
        self._num_training_batches: float | None = None
        self._feeds: list[tuple[Any, Feed]] = []
        self.train_feed: Feed | None = None
        """The batches to train on; None before they are asked for, and after their loader was released for another one."""
        self._evaluation: dict[str, tuple[list[Any], list[float]]] = {}
        self._collections: dict[str, Any] = {}

    @property
    def train_loader(self) -> Any:
        """The training loader; raises on every rank if the number of batches differs over ranks."""
        if self._train_loader is None:
            loader = self._ask("train")
            if loader is None:
                raise ConfigError(f"there is nothing to train on: {self.what_to_write('train', 'train_dataloaders')}")
            self._asked_for_train = loader
            loader = self._wire(combine(loader), train=True)
            length = loader_length(loader, "train_dataloaders")
            length = limit_batches(length, self._settings.limit_train_batches, "limit_train_batches")
            check_equal_lengths(self._strategy, length, "train_dataloaders", loader)
            self._train_loader, self._num_training_batches = loader, length
        return self._train_loader

    @property
    def num_training_batches(self) -> float:
        """The micro-batches in an epoch on this rank."""
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
        feed, length = self.train_feed, self._num_training_batches
        return feed is not None and batches > 0 and (feed.is_over(batches) or batches == length)

    def lengths(self) -> dict[str, Any]:
        """Returns the known numbers of batches, for a caller whose worker processes had the loaders."""
        return {"train": self._num_training_batches, **{name: found[1] for name, found in self._evaluation.items()}}

    def take_lengths(self, lengths: dict[str, Any]) -> None:
        """Sets the numbers of batches that :meth:`lengths` returned in a worker process."""
        self._num_training_batches = lengths.pop("train")
        self._evaluation = {name: ([], own) for name, own in lengths.items()}

    def evaluation_loaders(self, name: str) -> list[Any]:
        """The loaders of ``name`` ("val", "test" or "predict")."""
        return self.evaluation(name)[0]

    def as_given(self, name: str) -> Any:
        """The loaders of ``name`` (or "train") in their original collection; None if this run does not use them.

        Loaders of other entry points are not asked for: the DataModule has not set up their data.
        """
        if self._source.fn not in _RUNS[name]:
            return None
        if name != "train":
            self.evaluation(name)
            return self._collections.get(name)
        return self.train_loader.iterables if isinstance(self.train_loader, CombinedLoader) else self.train_loader

    def evaluation_lengths(self, name: str) -> list[float]:
        """The numbers of batches of the loaders of ``name``, on this rank."""
        return self.evaluation(name)[1]

    def evaluation(self, name: str) -> tuple[list[Any], list[float]]:
        """The loaders of ``name``, and their numbers of batches on this rank."""
        if name not in self._evaluation:
            limit = getattr(self._settings, f"limit_{name}_batches")
            used = limit != 0 and (name != "val" or overrides(self._module, "validation_step", TrainingModule))
            found = self._ask(name) if used else None
            if not used and limit != 0 and self._source.given(name) is not None and self._strategy.rank == 0:
                logger.warning(
                    "val_dataloaders are given, but %s has no validation_step: nothing is validated",
                    type(self._module).__name__,
                )
            if found is not None and name == "val" and self.validates_on_training:
                self._evaluation[name] = self._training_again()
                return self._evaluation[name]
            label = "val_dataloaders" if name == "val" else "dataloaders"
            loaders, self._collections[name] = self._wired_apart(found, in_batches=name == "predict")
            lengths = [limit_batches(loader_length(one, label), limit, f"limit_{name}_batches") for one in loaders]
            self._evaluation[name] = loaders, lengths
        return self._evaluation[name]

    @property
    def validates_on_training(self) -> bool:
        """Whether validation within fit runs on training batches instead of its own loaders' (``overfit_batches``)."""
        return bool(self._settings.overfit_batches) and self._source.fn is TrainerFn.FITTING

    def _training_again(self) -> tuple[list[Any], list[float]]:
        """Returns a second training loader and its number of batches: validation makes a pass of its own."""
        length = self.num_training_batches  # creates the training loader if there is none yet
        loader = self._wire(combine(self._asked_for_train), train=True)
        self._collections["val"] = loader.iterables if isinstance(loader, CombinedLoader) else loader
        return [loader], [length]

    def _wired_apart(self, found: Any, *, in_batches: bool) -> tuple[list[Any], Any]:
        """Returns the evaluation loaders as a list, and in their original collection."""
        if found is None or (isinstance(found, dict | list | tuple) and not found):  # no loaders, as in Lightning
            return [], None
        wired = self._wire(combine(found, "sequential"), train=False, in_batches=in_batches)
        if not isinstance(wired, CombinedLoader):
            return [wired], wired
        return (wired.flattened if wired.mode == "sequential" else [wired]), wired.iterables

    def feed(self, loader: Any, limit: float, dataloader_idx: int = 0, *, begun: bool = False) -> Feed:
        """Returns a feed of the loader's batches on the device; on a GPU it prefetches them unless they are there already.

        ``begun``: the run had passes over the loader before it was resumed.
        """
        owners, own = self._transfer_hooks()
        device, lies_there = self._strategy.device, is_resident(loader)
        trains, hooked = loader is self._train_loader, own[0] or own[1]
        ahead = self._settings.prefetch_batches if device.type == "cuda" and not lies_there else 0
        prepare = self._preparation(owners, own, dataloader_idx, moves=device.type != "cpu" and not lies_there)
        if ahead and hooked and trains:
            ahead = self._ahead_of_steps(owners, own, ahead)
            prepare = watched(prepare, self._state) if ahead else prepare
        finish: Callable[[Any], Any] | None = None
        if own[2]:

            def finish(batch: Any) -> Any:
                return owners[2].on_after_batch_transfer(batch, dataloader_idx)

        feed = Feed(
            loader,
            limit=limit,
            prepare=prepare,
            finish=finish,
            device=device,
            prefetch=ahead,
            hooked=hooked,
            begun=begun,
        )
        self._feeds.append((loader, feed))
        if trains:
            self.train_feed = feed
        if self._settings.use_distributed_sampler:
            # No comparison among ranks in evaluation: a rank that was stopped in one loader does not come to the next.
            look_for_doubles(feed, loader, self._strategy, among_ranks=trains)
        return feed

    def _ahead_of_steps(self, owners: list[Any], own: list[bool], ahead: int) -> int:
        """Returns how many batches the user's hooks may prefetch: 0 if one of the hooks reads ``global_step``."""
        for name, owner in itertools.compress(zip(TRANSFER_HOOKS[:2], owners, strict=False), own):
            if reads(getattr(owner, name), "global_step"):
                if self._strategy.rank == 0:
                    say_once(
                        f"batches are not moved ahead: {type(owner).__name__}.{name} reads global_step; on_after_batch_transfer, "
                        "which runs right before the step, may read it"
                    )
                return 0
        return ahead

    def close(self) -> None:
        """Ends the passes in progress, and the workers that wait for the next pass."""
        self._let_go(self._train_loader, *(one for loaders, _ in self._evaluation.values() for one in loaders))

    def _let_go(self, *loaders: Any) -> None:
        for loader, feed in self._feeds:
            if any(loader is one for one in loaders):
                feed.close()
        self._feeds = [pair for pair in self._feeds if all(pair[0] is not one for one in loaders)]
        for loader in loaders:
            release_workers(loader)

    def renew(self) -> bool:
        """Releases loaders if this epoch reloads them (``reload_dataloaders_every_n_epochs``); returns whether it does.

        Loaders given to the entry point stay: nobody can be asked for others.
        """
        if self._asked_in == self._epoch_to_ask_in:
            return False
        self._asked_in = self._epoch_to_ask_in
        if self._source.given("train") is None:
            self._let_go(self._train_loader)
            self._train_loader = self._asked_for_train = self.train_feed = self._num_training_batches = None
        if self._source.given("val") is None or self._settings.overfit_batches:
            self._let_go(*self._evaluation.pop("val", ([], []))[0])
        return True

    @property
    def _epoch_to_ask_in(self) -> int:
        """The epoch in which the present epoch's loaders are asked for; -1 if loaders are never reloaded."""
        every = self._settings.reload_dataloaders_every_n_epochs if self._source.fn is TrainerFn.FITTING else 0
        return self._state.epoch // every * every if every else -1

    def _transfer_hooks(self) -> tuple[list[Any], list[bool]]:
        """Returns each hook's owner (the DataModule if it overrides the hook, else the module), and whether it is overridden."""
        owners: list[Any] = []
        own: list[bool] = []
        for name in TRANSFER_HOOKS:
            by_data = self._source.datamodule is not None and overrides(self._source.datamodule, name, DataModule)
            owners.append(self._source.datamodule if by_data else self._module)
            own.append(by_data or overrides(self._module, name, ModuleHooks))
        return owners, own

    def _preparation(
        self, owners: list[Any], own: list[bool], dataloader_idx: int, *, moves: bool
    ) -> Callable[[Any], Any] | None:
        device, convert = self._strategy.device, self._precision.convert_input
        steps: list[Callable[[Any], Any]] = []
        if own[0]:
            steps.append(lambda batch: owners[0].on_before_batch_transfer(batch, dataloader_idx))
        if own[1] or moves:
            steps.append(lambda batch: owners[1].transfer_batch_to_device(batch, device, dataloader_idx))
        if overrides(self._precision, "convert_input", Precision):
            steps.append(convert)
        if len(steps) <= 1:
            return steps[0] if steps else None

        def prepare(batch: Any) -> Any:
            for step in steps:
                batch = step(batch)
            return batch

        return prepare

    def defines(self, name: str) -> bool:
        """Whether loaders of ``name`` were given, or a method returns them; does not call the method."""
        owners = ((self._source.datamodule, DataModule), (self._module, ModuleHooks))
        written = any(one is not None and overrides(one, f"{name}_dataloader", base) for one, base in owners)
        return written or self._source.given(name) is not None

    def _ask(self, name: str) -> Any:
        given = self._source.given(name)
        if given is not None:
            return given
        epoch = self._epoch_to_ask_in
        # Seeded, since a resumed run asks with another RNG state than the run that was cut.
        with seeded(global_seed(), epoch) if epoch >= 0 else contextlib.nullcontext():
            return self._written(name)

    def _written(self, name: str) -> Any:
        """Returns the result of the DataModule's, or the module's, own method."""
        datamodule = self._source.datamodule
        if datamodule is not None and overrides(datamodule, f"{name}_dataloader", DataModule):
            return own_loader(getattr(datamodule, f"{name}_dataloader")())
        if not overrides(self._module, f"{name}_dataloader", ModuleHooks):
            return None  # Lightning's base method would raise
        return own_loader(getattr(self._module, f"{name}_dataloader")())

    def what_to_write(self, name: str, argument: str) -> str:
        """Returns advice for missing loaders of ``name``; ``argument`` is the entry point's name for them."""
        hook = f"{name}_dataloader"
        datamodule = self._source.datamodule
        for owner, base in ((datamodule, DataModule), (self._module, ModuleHooks)):
            if owner is not None and overrides(owner, hook, base):
                return f"{type(owner).__name__}.{hook}() returned no loader; return one"
        if datamodule is not None:
            return f"write {type(datamodule).__name__}.{hook}, or pass {argument} in place of the datamodule"
        return f"pass {argument} or a datamodule, or write {type(self._module).__name__}.{hook}"

    def _wire(self, loader: Any, *, train: bool, in_batches: bool = False) -> Any:
        strategy = self._strategy
        rank, world_size = strategy.train_share if train else (strategy.data_rank, strategy.data_ranks)
        return wire_loader(
            loader,
            train=train,
            rank=rank,
            world_size=world_size,
            seed=global_seed(),
            distributed_sampler=self._settings.use_distributed_sampler,
            overfit=self._settings.overfit_batches if train else 0,
            per_sample_seed=train and self._settings.per_sample_seed,
            device=self._strategy.device,
            in_batches=in_batches,
            at_once=1 if self._settings.cuda_graph is None else self._settings.cuda_graph.steps,
            from_first=self._strategy.broadcast if self._strategy.world_size > 1 else None,
        )
