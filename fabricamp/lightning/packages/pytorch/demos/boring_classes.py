"""Modules and data for tests: a linear layer of 32 inputs, and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from fabricamp import LightningDataModule, LightningModule


class RandomDataset(Dataset[Any]):
    """``length`` random vectors of ``size`` numbers."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(RandomDataset):
    """A :class:`RandomDataset` with dicts of two vectors: "b" is "a" plus 2."""

    def __getitem__(self, index: int) -> Any:
        vector = self.data[index]
        return {"a": vector, "b": vector + 2}


class RandomIterableDataset(IterableDataset[Any]):
    """Yields ``count`` new random vectors of ``size`` numbers in each pass."""

    def __init__(self, size: int, count: int) -> None:
        self.count = count
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield torch.randn(self.size)


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """The base class with a length."""

    def __len__(self) -> int:
        return self.count


class BoringModel(LightningModule):
    """A linear layer of 32 inputs and 2 outputs, trained to output ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs."""
        outputs: Tensor = self.layer(x)
        return outputs

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns the mean square difference from ``labels``, by default from ones."""
        return F.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        """Returns the loss of a batch."""
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the loss."""
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the loss as "x"."""
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the loss as "y"."""
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        """Returns SGD at a rate of 0.1, and its schedule, which multiplies it by 0.1 in each epoch."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        """Returns 64 vectors."""
        return DataLoader(RandomDataset(32, 64))

    def val_dataloader(self) -> Any:
        """Returns 64 vectors."""
        return DataLoader(RandomDataset(32, 64))

    def test_dataloader(self) -> Any:
        """Returns 64 vectors."""
        return DataLoader(RandomDataset(32, 64))

    def predict_dataloader(self) -> Any:
        """Returns 64 vectors."""
        return DataLoader(RandomDataset(32, 64))


class ManualOptimBoringModel(BoringModel):
    """The base class with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Makes a step; returns the loss."""
        optimizer: Any = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class _DataForEachStage(LightningDataModule):
    """Loaders over ``random_train``, ``random_val``, ``random_test`` and ``random_predict``, which ``setup`` makes."""

    random_train: Any
    random_val: Any
    random_test: Any
    random_predict: Any

    def train_dataloader(self) -> Any:
        """Returns a loader of the training data."""
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Any:
        """Returns a loader of the validation data."""
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Any:
        """Returns a loader of the test data."""
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Any:
        """Returns a loader of the data to predict on."""
        return DataLoader(self.random_predict)


class BoringDataModule(_DataForEachStage):
    """256 random vectors of 32 numbers, a quarter for each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(32, 64 * 4)

    def setup(self, stage: str) -> None:
        """Selects the stage's quarter of the data."""
        if stage == "fit":
            self.random_train = self._quarter(0)
        if stage in ("fit", "validate"):
            self.random_val = self._quarter(1)
        if stage == "test":
            self.random_test = self._quarter(2)
        if stage == "predict":
            self.random_predict = self._quarter(3)

    def _quarter(self, number: int) -> Any:
        return Subset(self.random_full, range(64 * number, 64 * (number + 1)))


class BoringDataModuleNoLen(_DataForEachStage):
    """Random vectors of 32 numbers without a length."""

    def setup(self, stage: str) -> None:
        """Makes the datasets of the stage."""
        if stage == "fit":
            self.random_train = RandomIterableDataset(32, 512)
        if stage in ("fit", "validate"):
            self.random_val = RandomIterableDataset(32, 128)
        if stage == "test":
            self.random_test = RandomIterableDataset(32, 256)
        if stage == "predict":
            self.random_predict = RandomIterableDataset(32, 64)


class IterableBoringDataModule(LightningDataModule):
    """Two loaders in each stage, the first over data with a length, the second over data without."""

    def setup(self, stage: str) -> None:
        """Makes the datasets of the stage."""
        if stage == "fit":
            self.train_datasets = self._pair(16)
        if stage in ("fit", "validate"):
            self.val_datasets = self._pair(32)
        if stage == "test":
            self.test_datasets = self._pair(64)
        if stage == "predict":
            self.predict_datasets = self._pair(128)

    @staticmethod
    def _pair(length: int) -> list[Dataset[Any]]:
        return [RandomDataset(4, length), RandomIterableDataset(4, length)]

    def train_dataloader(self) -> Any:
        """Returns the loaders of the training data."""
        return [DataLoader(one) for one in self.train_datasets]

    def val_dataloader(self) -> Any:
        """Returns the loaders of the validation data."""
        return [DataLoader(one) for one in self.val_datasets]

    def test_dataloader(self) -> Any:
        """Returns the loaders of the test data."""
        return [DataLoader(one) for one in self.test_datasets]

    def predict_dataloader(self) -> Any:
        """Returns the loaders of the data to predict on."""
        return [DataLoader(one) for one in self.predict_datasets]


class DemoModel(LightningModule):
    """A linear layer with a ReLU; its loss is the sum of the outputs."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs."""
        return torch.relu(self.l1(x.flatten(1)))

    def training_step(self, batch: Any, batch_nb: int) -> Any:
        """Returns the sum of the outputs."""
        return self(batch).sum()

    def configure_optimizers(self) -> Any:
        """Returns Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class Net(nn.Module):
    """Two convolutions and two linear layers, for images of 28 by 28 in ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logarithms of the classes' probabilities."""
        features = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        hidden = F.relu(self.fc1(self.dropout1(features).flatten(1)))
        return F.log_softmax(self.fc2(self.dropout2(hidden)), dim=1)
