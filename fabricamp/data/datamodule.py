"""The base class for a user's data: its preparation and its loaders in one place."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sized
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import torch
from torch.utils.data import DataLoader, IterableDataset

from fabricamp._utils.containers import own_containers
from fabricamp._utils.keywords import refuse_others
from fabricamp._utils.types import AnyBatch, Batch, StateDict
from fabricamp.checkpoint import read_checkpoint
from fabricamp.checkpoint.hyperparameters import DATA, HyperparametersMixin
from fabricamp.checkpoint.load_from_checkpoint import build
from fabricamp.checkpoint.reading import name_of_source
from fabricamp.checkpoint.sections import data_state
from fabricamp.data.transfer import move_to_device
from fabricamp.errors import ConfigError


class DataModule(HyperparametersMixin):
    """Groups loaders with the code that prepares their data; override the methods that you need, under Lightning's names.

    >>> class Numbers(DataModule):
    ...     def __init__(self, batch_size: int = 2) -> None:
    ...         super().__init__()
    ...         self.save_hyperparameters()
    ...     def train_dataloader(self):
    ...         return torch.utils.data.DataLoader(range(4), batch_size=self.hparams.batch_size)
    """

    trainer: Any = None
    """The Trainer that uses this DataModule; None before."""
    name: str | None = None
    """An optional name for the data."""
    CHECKPOINT_HYPER_PARAMS_KEY = DATA.values
    CHECKPOINT_HYPER_PARAMS_NAME = DATA.name
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> Self:
        """Returns a DataModule with loaders over these datasets; the training loader shuffles.

        A dict or list of datasets gives a dict or list of loaders.  ``datamodule_kwargs`` are passed to the class, with
        ``batch_size`` and ``num_workers`` if it accepts them.  Workers are persistent.

        >>> data = DataModule.from_datasets(train_dataset=range(8), batch_size=4)
        >>> len(data.train_dataloader())
        2
        """
        accepted = inspect.signature(cls).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        if not takes_any:
            own = [name for name in inspect.signature(cls.from_datasets).parameters if name != "datamodule_kwargs"]
            refuse_others(f"{cls.__name__}.from_datasets", datamodule_kwargs, [*own, *accepted])
        for name, value in (("batch_size", batch_size), ("num_workers", num_workers)):
            if takes_any or name in accepted:
                datamodule_kwargs.setdefault(name, value)
        data = cls(**datamodule_kwargs)
        of_kinds = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for kind, datasets in of_kinds.items():
            if datasets is not None:
                loaders = partial(_loaders, datasets, kind == "train", batch_size, num_workers)
                setattr(data, f"{kind}_dataloader", loaders)
        return data

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        types: Iterable[type] = (),
        **overrides: Any,
    ) -> Self:
        """Builds the DataModule from its hyper-parameters in a checkpoint, updated by ``overrides``, and loads its state.

        See ``TrainingModule.load_from_checkpoint``; raises :class:`CheckpointError` in the same cases.
        """
        device = "cpu" if map_location is None else map_location
        checkpoint = read_checkpoint(checkpoint_path, device, weights_only=weights_only)
        path = name_of_source(checkpoint_path)
        data = build(cls, checkpoint, DATA, path, overrides, types, hparams_file, weights_only=weights_only)
        if state := data_state(checkpoint, cls):
            data.load_state_dict(state)
        return data

    def prepare_data(self) -> None:
        """Downloads data, on one process per machine; the others wait for it.  Keep no state on ``self``."""

    def setup(self, stage: str) -> None:
        """Builds datasets, on every process; ``stage`` is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""

    def teardown(self, stage: str) -> None:
        """Releases the resources of :meth:`setup`, on every process."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception ends a run."""

    def train_dataloader(self) -> Any:
        """Returns a loader, or a dict, list or tuple of loaders, to train on."""
        raise self._not_defined("train_dataloader")

    def val_dataloader(self) -> Any:
        """Returns a loader, or a list of loaders, to validate on."""
        raise self._not_defined("val_dataloader")

    def test_dataloader(self) -> Any:
        """Returns a loader, or a list of loaders, to test on."""
        raise self._not_defined("test_dataloader")

    def predict_dataloader(self) -> Any:
        """Returns a loader, or a list of loaders, to predict on."""
        raise self._not_defined("predict_dataloader")

    def on_before_batch_transfer(self, batch: AnyBatch, dataloader_idx: int) -> AnyBatch:
        """Returns the batch, possibly changed, while it is still on the host."""
        return batch

    def transfer_batch_to_device(self, batch: AnyBatch, device: torch.device, dataloader_idx: int) -> AnyBatch:
        """Returns the batch on ``device``; override this method for types that :func:`move_to_device` does not know."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: AnyBatch, dataloader_idx: int) -> AnyBatch:
        """Returns the batch, possibly changed, on the device."""
        return batch

    def state_dict(self) -> StateDict:
        """Returns the state that a checkpoint keeps: tensors, numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restores the state that :meth:`state_dict` returned."""

    def __str__(self) -> str:
        """Returns a line for each kind of loader, with the lengths of its datasets; asks for the loaders.

        >>> print(DataModule.from_datasets(train_dataset=range(8)))
        {Train dataloader: size=8}
        {Validation dataloader: None}
        {Test dataloader: None}
        {Predict dataloader: None}
        """
        kinds = {"Train": "train", "Validation": "val", "Test": "test", "Predict": "predict"}
        return "\n".join(f"{{{word} dataloader: {self._sizes(kind)}}}" for word, kind in kinds.items())

    def _sizes(self, kind: str) -> str:
        try:
            loaders = getattr(self, f"{kind}_dataloader")()
            if isinstance(loaders, DataLoader):
                return _size(loaders)
            loaders = loaders.values() if isinstance(loaders, dict) else loaders
            return " ; ".join(f"{number}. {_size(loader)}" for number, loader in enumerate(loaders, start=1))
        except Exception:  # noqa: BLE001 - as in Lightning: a loader that cannot be made yet, as before setup, is none
            return "None"

    def _not_defined(self, method: str) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__} does not define {method}(), which this run needs; define it or pass the loader"
        )


def _size(loader: DataLoader[Batch]) -> str:
    """Returns the number of samples in words; a dataset without a length has none."""
    dataset = loader.dataset
    return f"size={len(dataset)}" if isinstance(dataset, Sized) else "size=NA"


def _loaders(datasets: Any, shuffle: bool, batch_size: int, num_workers: int) -> Any:
    """Returns a loader for a dataset, or a dict or list of loaders for several."""
    datasets = own_containers(datasets)
    if isinstance(datasets, dict):
        return {name: _loaders(dataset, shuffle, batch_size, num_workers) for name, dataset in datasets.items()}
    if isinstance(datasets, list | tuple):
        return [_loaders(dataset, shuffle, batch_size, num_workers) for dataset in datasets]
    shuffle = shuffle and not isinstance(datasets, IterableDataset)
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    return DataLoader(datasets, batch_size=batch_size, shuffle=shuffle, **options)
