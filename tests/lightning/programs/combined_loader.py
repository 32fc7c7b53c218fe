"""Several loaders at once: labelled and unlabelled batches for a small LSTM, and validation one loader after the other."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def waves(number, seed, labelled=True):
    """Sines of two frequencies; which one is the label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (number,), generator=generator)
    times = torch.linspace(0, 3, 12)[None] + torch.rand(number, 1, generator=generator)
    signals = torch.sin(times * (1 + labels[:, None])) + 0.2 * torch.randn(number, 12, generator=generator)
    return TensorDataset(signals[..., None], labels) if labelled else TensorDataset(signals[..., None])


class SemiSupervised(pl.LightningModule):
    def __init__(self, hidden=12, weight=0.2):
        super().__init__()
        self.save_hyperparameters()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.classifier = nn.Linear(hidden, 2)
        self.forecast = nn.Linear(hidden, 1)
        self.seen = {"validation": [], "test": [], "predict": []}

    def features(self, signal):
        return self.lstm(signal)[0]

    def training_step(self, batch, batch_idx):
        signal, labels = batch["labelled"]
        (free,) = batch["unlabelled"]
        supervised = F.cross_entropy(self.classifier(self.features(signal)[:, -1]), labels)
        future = F.mse_loss(self.forecast(self.features(free[:, :-1])), free[:, 1:])
        loss = supervised + self.hparams.weight * future
        self.log_dict(
            {"loss": loss, "supervised": supervised, "future": future},
            on_step=False,
            on_epoch=True,
            batch_size=len(labels),
        )
        return loss

    def evaluation(self, stage, batch, batch_idx, dataloader_idx):
        signal, labels = batch
        self.seen[stage].append((batch_idx, dataloader_idx, len(labels)))
        logits = self.classifier(self.features(signal)[:, -1])
        self.log(f"{stage}_loss", F.cross_entropy(logits, labels))
        self.log(f"{stage}_acc", (logits.argmax(1) == labels).float().mean(), prog_bar=True)
        return logits

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.evaluation("validation", batch, batch_idx, dataloader_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.evaluation("test", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen["predict"].append((batch_idx, dataloader_idx, len(batch[0])))
        return self.classifier(self.features(batch[0])[:, -1]).argmax(1)

    def on_train_epoch_end(self):
        metrics = self.trainer.callback_metrics
        print("epoch", self.current_epoch, *(f"{name} {value:.8f}" for name, value in sorted(metrics.items())))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def train_loaders(mode):
    loaders = {
        "labelled": DataLoader(waves(40, 0), batch_size=8, shuffle=True),
        "unlabelled": DataLoader(waves(72, 1, labelled=False), batch_size=12, shuffle=True),
    }
    return CombinedLoader(loaders, mode)


if __name__ == "__main__":
    val = {"near": DataLoader(waves(24, 2), batch_size=8), "far": DataLoader(waves(20, 3), batch_size=8)}
    settings = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_epochs": 2}
    for mode in ("max_size_cycle", "min_size"):
        pl.seed_everything(10)
        model = SemiSupervised()
        trainer = pl.Trainer(**settings)
        trainer.fit(model, train_loaders(mode), CombinedLoader(val, "sequential"))
        print("weights", f"{sum(p.double().sum() for p in model.parameters()):.12f}")
        print(mode, trainer.num_training_batches, trainer.num_val_batches, trainer.global_step)
    print("validation", model.seen["validation"][:8])

    results = trainer.test(model, list(val.values()), verbose=False)
    print(
        "test",
        [{name: round(value, 7) for name, value in sorted(result.items())} for result in results],
        len(model.seen["test"]),
    )
    predictions = trainer.predict(model, list(val.values()))
    print("predictions", [sum(int(batch.sum()) for batch in loader) for loader in predictions], model.seen["predict"])

    combined = CombinedLoader([range(3), tuple("abcde")], "max_size")
    print("by itself", [batch for batch, _, _ in iter(combined)])
    combined = CombinedLoader({"a": range(2), "b": range(10, 13)}, "sequential")
    print("one by one", list(combined))
