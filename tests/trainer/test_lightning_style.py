"""Typical modules for Lightning with a changed import: a classifier, a GAN, a language model."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import fabricamp as L
from fabricamp.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from fabricamp.loggers import CSVLogger, TensorBoardLogger
from tests.small import quiet_trainer

# -- an image classifier -----------------------------------------------------------------------------------------------


class Images(L.DataModule):
    """Images of 8 by 8 pixels; the class is the brighter half."""

    def __init__(self, data_dir: str = "./", batch_size: int = 16, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.train = self.val = self.test = None

    def prepare_data(self):
        self.prepared = True

    def setup(self, stage=None):
        if self.train is None:
            images = torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(0))
            labels = (images[:, 0, :4].mean((1, 2)) > images[:, 0, 4:].mean((1, 2))).long()
            images[:, 0, :4] += 0.5 * labels[:, None, None]
            parts = random_split(
                TensorDataset(images, labels), [120, 40, 40], generator=torch.Generator().manual_seed(42)
            )
            self.train, self.val, self.test = parts

    def train_dataloader(self):
        return DataLoader(
            self.train, batch_size=self.hparams.batch_size, num_workers=self.hparams.num_workers, shuffle=True
        )

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.hparams.batch_size)

    def predict_dataloader(self):
        return self.test_dataloader()


class ImageClassifier(L.TrainingModule):
    def __init__(self, hidden_dim: int = 16, lr: float = 0.05, num_classes: int = 2):
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(1, 1, 8, 8)
        self.model = nn.Sequential(
            nn.Conv2d(1, hidden_dim, 3, padding=1), nn.BatchNorm2d(hidden_dim), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(4 * hidden_dim, num_classes),
        )  # fmt: skip
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc = MulticlassAccuracy(num_classes)
        self.val_acc = MulticlassAccuracy(num_classes)
        self.test_acc = MulticlassAccuracy(num_classes)
        self.val_loss = MeanMetric()
        self.validation_step_outputs = []

    def forward(self, x):
        return self.model(x)

    def _shared_step(self, batch):
        x, y = batch
        logits = self(x)
        return self.criterion(logits, y), logits.argmax(dim=1), y

    def training_step(self, batch, batch_idx):
        loss, preds, y = self._shared_step(batch)
        self.train_acc(preds, y)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return {"loss": loss, "preds": preds}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["preds"].shape == batch[1].shape

    def validation_step(self, batch, batch_idx):
        loss, preds, y = self._shared_step(batch)
        self.val_acc.update(preds, y)
        self.val_loss(loss)
        self.log_dict({"val/loss": self.val_loss, "val/acc": self.val_acc}, prog_bar=True)
        self.validation_step_outputs.append(loss)
        return loss

    def on_validation_epoch_end(self):
        average = torch.stack(self.validation_step_outputs).mean()
        self.log("val/average", average)
        self.validation_step_outputs.clear()
        if not self.trainer.sanity_checking and self.logger is not None:
            self.logger.experiment.add_scalar("by_hand", float(average), self.global_step)

    def test_step(self, batch, batch_idx):
        loss, preds, y = self._shared_step(batch)
        self.test_acc(preds, y)
        self.log("test/loss", loss, on_step=False, on_epoch=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).softmax(dim=-1)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val/acc", "interval": "epoch", "frequency": 1},
        }


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", "O2", "O5"])
def test_an_image_classifier(precision, tmp_path):
    L.seed_everything(42, workers=True)
    checkpoint = ModelCheckpoint(
        monitor="val/acc", mode="max", filename="best-{epoch:02d}", auto_insert_metric_name=False, save_last=True
    )
    logger = TensorBoardLogger(tmp_path, name="run")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision=precision,
        max_epochs=4,
        logger=[logger, CSVLogger(tmp_path, name="csv")],
        callbacks=[checkpoint, EarlyStopping("val/loss", patience=5), LearningRateMonitor(logging_interval="epoch")],
        gradient_clip_val=1.0,
        log_every_n_steps=2,
        deterministic=True,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    datamodule, model = Images(batch_size=20), ImageClassifier(lr=0.05)
    trainer.fit(model, datamodule=datamodule)
    assert (trainer.current_epoch, trainer.global_step) == (4, 24)
    assert trainer.callback_metrics["val/acc"] > 0.8
    assert set(trainer.callback_metrics) >= {
        "train/loss",
        "train/loss_step",
        "train/loss_epoch",
        "train/acc",
        "val/average",
    }
    (result,) = trainer.test(model, datamodule=datamodule, ckpt_path="best", verbose=False)
    assert result["test/acc"] > 0.8
    predictions = torch.cat(trainer.predict(model, datamodule=datamodule))
    assert predictions.shape == (40, 2)
    assert torch.allclose(predictions.float().sum(1), torch.ones(40), atol=0.02)
    loaded = ImageClassifier.load_from_checkpoint(checkpoint.best_model_path)
    assert loaded.hparams == model.hparams == {"hidden_dim": 16, "lr": 0.05, "num_classes": 2}
    loaded.eval()
    with torch.no_grad():
        assert loaded(datamodule.test[0][0][None]).shape == (1, 2)


# -- a GAN -------------------------------------------------------------------------------------------------------------


class GAN(L.TrainingModule):
    def __init__(self, latent_dim: int = 4, lr: float = 0.01, b1: float = 0.5, b2: float = 0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.validation_z = torch.randn(8, latent_dim)

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        (points,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(points.shape[0], self.hparams.latent_dim).type_as(points)

        self.toggle_optimizer(optimizer_g)
        assert not any(parameter.requires_grad for parameter in self.discriminator.parameters())
        generated = self(z)
        valid = torch.ones(points.size(0), 1).type_as(points)
        g_loss = self.adversarial_loss(self.discriminator(generated), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(points), valid)
        fake = torch.zeros(points.size(0), 1).type_as(points)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        self.clip_gradients(optimizer_d, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        self.sample = self(self.validation_z.type_as(self.generator[0].weight))

    def configure_optimizers(self):
        betas = (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=betas)
        return [opt_g, opt_d], [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (opt_g, opt_d)]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "O2", "O5"])
def test_a_gan(precision):
    L.seed_everything(1)
    points = torch.randn(160, 2, generator=torch.Generator().manual_seed(0)) * 0.3 + torch.tensor([3.0, -2.0])
    model = GAN()
    trainer = quiet_trainer(max_epochs=20, precision=precision)
    trainer.fit(model, DataLoader(TensorDataset(points), 16), DataLoader(TensorDataset(points[:8]), 8))
    assert trainer.global_step == 200
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**20)
    with torch.no_grad():
        centre = model(torch.randn(200, 4)).mean(0)
    assert torch.dist(centre, torch.tensor([3.0, -2.0])) < 2.0
    assert model.sample.shape == (8, 2)
    assert set(trainer.callback_metrics) == {"g_loss", "d_loss"}


# -- a language model --------------------------------------------------------------------------------------------------


class LanguageModel(L.TrainingModule):
    def __init__(self, args):
        super().__init__()
        self.save_hyperparameters(args)
        width = self.hparams.width
        self.embedding = nn.Embedding(self.hparams.vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, self.hparams.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.size(1), device=tokens.device, dtype=self.head.weight.dtype
        )
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))

    def step(self, batch, name):
        tokens = batch["input_ids"]
        logits = self(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), tokens[:, 1:].reshape(-1))
        self.log(f"{name}_loss", loss, batch_size=tokens.size(0), prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        loss = self.step(batch, "train")
        self.log("lr", self.lr_schedulers().get_last_lr()[0])
        return OrderedDict(loss=loss)

    def validation_step(self, batch, batch_idx):
        self.log("perplexity", math.exp(float(self.step(batch, "val"))))

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        warm_up = int(0.1 * total)

        def rate(step):
            if step < warm_up:
                return (step + 1) / warm_up
            return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (total - warm_up)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1, "name": "lr"},
        }


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-true", "O2"])
def test_a_language_model(precision, tmp_path):
    L.seed_everything(3)
    tokens = (torch.arange(12) + torch.randint(0, 10, (96, 1))) % 10  # each token follows from the previous one
    dataset = [{"input_ids": row} for row in tokens]
    model = LanguageModel(Namespace(vocabulary=10, width=16, lr=0.02))
    trainer = quiet_trainer(
        max_epochs=5, accumulate_grad_batches=2, gradient_clip_val=1.0, precision=precision, val_check_interval=0.5,
        limit_val_batches=2, logger=CSVLogger(tmp_path), log_every_n_steps=5,
    )  # fmt: skip
    trainer.fit(model, DataLoader(dataset, 8, shuffle=True), DataLoader(dataset, 8))
    assert trainer.global_step == trainer.estimated_stepping_batches == 30
    assert trainer.callback_metrics["val_loss"] < 1.0
    assert trainer.callback_metrics["perplexity"] < 3.0
    assert model.head.weight is model.embedding.weight
    trainer.save_checkpoint(tmp_path / "lm.ckpt")
    loaded = LanguageModel.load_from_checkpoint(tmp_path / "lm.ckpt")
    assert torch.equal(loaded.head.weight, model.head.weight)
