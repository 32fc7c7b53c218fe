"""One run of everything: fit with validation, checkpoints and logs, resume, validate, test and predict."""

import contextlib

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fabricamp import TrainingModule, seed_everything
from fabricamp.callbacks import AsyncCheckpoint, EarlyStopping, LearningRateMonitor
from fabricamp.loggers import CSVLogger
from fabricamp.nn import FusedLayerNorm, FusedRMSNorm, SoftmaxCrossEntropyLoss, SyncBatchNorm
from fabricamp.optimizers import FusedAdam
from tests.allocations import NamedAllocations
from tests.small import data, quiet_trainer


class Net(TrainingModule):
    """Has fused and torch's layers, a fused loss, a fused optimizer or torch's SGD, a schedule, metrics by step and epoch."""

    def __init__(self, *, fused, dropout=0.1):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            SyncBatchNorm(16),
            torch.nn.ReLU(),
            FusedLayerNorm(16),
            torch.nn.Dropout(dropout),
            FusedRMSNorm(16),
            torch.nn.Linear(16, 3),
        )
        self.loss = SoftmaxCrossEntropyLoss()
        self.fused = fused

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("share", 0.1)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]).float(), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self.net(batch[0]).float(), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        optimizer = FusedAdam(self.parameters(), lr=0.01, eps=1e-3)
        if not self.fused:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def shuffled(rows):
    return DataLoader(rows, 4, shuffle=True)


def in_order(rows):
    return DataLoader(rows, 4)


def in_a_list(rows):
    x, y = rows.tensors
    return list(zip(x.split(4), y.split(4), strict=True))


def whole_run(folder, defaults, *, batches_of=shuffled, fused=True, dropout=0.1, **options):
    """Returns all results of the run as a dict of tensors and numbers; objects are made outside of ``defaults``, run inside."""
    seed_everything(0)
    module, batches = Net(fused=fused, dropout=dropout), batches_of(data(16))

    def trainer(epochs):
        callbacks = [AsyncCheckpoint(folder, every="2 steps", monitor="val_loss"), EarlyStopping("val_loss")]
        given = {
            "devices": "auto",
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.5,
            "log_every_n_steps": 2,
            **options,
        }
        return quiet_trainer(
            callbacks=[*callbacks, LearningRateMonitor()],
            enable_checkpointing=True,
            logger=CSVLogger(folder),
            max_epochs=epochs,
            default_root_dir=folder,
            **given,
        )

    with defaults, NamedAllocations():
        first = trainer(1)
        first.fit(module, batches, batches)
        first.save_checkpoint(folder / "first.ckpt")
        second = trainer(2)
        second.fit(module, batches, batches, ckpt_path=folder / "first.ckpt")
        second.save_checkpoint(folder / "second.ckpt")
        metrics = dict(second.callback_metrics)  # copied, because the next entry point replaces them
        results = [second.validate(module, batches, verbose=False), second.test(module, batches, verbose=False)]
        predictions = second.predict(module, batches)
    saved = torch.load(folder / "second.ckpt", weights_only=True)
    kept = {
        key: saved[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "amp", "rng") if key in saved
    }
    return flattened({**kept, "metrics": metrics, "results": results, "predictions": predictions})


def flattened(value, key=""):
    if isinstance(value, dict):
        return {name: item for k, one in value.items() for name, item in flattened(one, f"{key}.{k}").items()}
    if isinstance(value, list | tuple):
        return {name: item for k, one in enumerate(value) for name, item in flattened(one, f"{key}.{k}").items()}
    return {key: value}


def differences(one, other):
    """Returns the names of values that are not equal bit for bit."""
    return [
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not same(one[name], other[name])
    ]


def same(one, other):
    if not isinstance(one, torch.Tensor):
        return one == other
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(-7.0), other.nan_to_num(-7.0))


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
