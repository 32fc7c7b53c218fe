"""What a user subclasses to keep data, its preparation and its loaders in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.data.transfer import move_to_device
from fabricamp.errors import ConfigError
from fabricamp.hyperparameters import HyperparametersMixin

if TYPE_CHECKING:
    import torch


class DataModule(HyperparametersMixin):
    """Data with everything that it needs; override what is used, under Lightning's names.

    >>> class Numbers(DataModule):
    ...     def __init__(self, batch_size: int = 2) -> None:
    ...         super().__init__()
    ...         self.save_hyperparameters()
    ...     def train_dataloader(self):
    ...         return torch.utils.data.DataLoader(range(4), batch_size=self.hparams.batch_size)
    """

    trainer: Any = None
    """The Trainer that uses it, once one does."""

    def prepare_data(self) -> None:
        """Downloads; called on one process a machine before the others go on; nothing stays on ``self``."""

    def setup(self, stage: str) -> None:
        """Builds datasets, on every process; ``stage`` is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""

    def teardown(self, stage: str) -> None:
        """Gives back what :meth:`setup` took, on every process."""

    def on_exception(self, exception: BaseException) -> None:
        """Called on the way out where a run ends by an exception."""

    def train_dataloader(self) -> Any:
        """Returns what to train on: a loader, or a dict, list or tuple of loaders."""
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

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Returns the batch, changed while it is still on the host."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Returns the batch on ``device``; override it for types that :func:`move_to_device` does not know."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Returns the batch, changed on the device."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the data: tensors, numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""

    def _not_defined(self, method: str) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__} does not define {method}(), which this run needs; define it or pass the loader"
        )
