"""A language model of one transformer block over made-up words: warm-up, accumulation, clipping, early stopping."""

import math
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks.early_stopping import EarlyStopping
from lightning.pytorch.callbacks.lr_monitor import LearningRateMonitor
from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint
from lightning.pytorch.loggers.tensorboard import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

WORDS = 12


class Sentences(Dataset):
    """Each word follows from the two before it; one in ten is another."""

    def __init__(self, number, length, seed):
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(0, WORDS, (number, length + 1), generator=generator)
        odd = torch.rand(number, length + 1, generator=generator) < 0.1
        for place in range(2, length + 1):
            follows = (words[:, place - 1] + 2 * words[:, place - 2]) % WORDS
            words[:, place] = torch.where(odd[:, place], words[:, place], follows)
        self.words = words

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return {"input_ids": self.words[index, :-1], "labels": self.words[index, 1:]}


class Transformer(pl.LightningModule):
    def __init__(
        self, width: int = 16, heads: int = 2, layers: int = 1, dropout: float = 0.1, lr: float = 0.01, warmup: int = 6
    ):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.zeros(1, 10, width))
        block = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids):
        length = input_ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=self.device)
        return self.head(self.blocks(self.embedding(input_ids) + self.places[:, :length], mask=mask, is_causal=True))

    def _shared_step(self, batch):
        logits = self(batch["input_ids"])
        return F.cross_entropy(logits.view(-1, WORDS), batch["labels"].reshape(-1))

    def training_step(self, batch, batch_idx):
        loss = self._shared_step(batch)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        loss = self._shared_step(batch)
        self.log_dict({"val/loss": loss, "val/perplexity": loss.exp()}, prog_bar=True, sync_dist=True)
        return loss

    def on_validation_epoch_end(self):
        metrics = self.trainer.callback_metrics
        stage = self.trainer.state.stage.value
        print(stage, self.current_epoch, self.global_step, f"{metrics['val/loss']:.8f} {metrics['val/perplexity']:.8f}")

    def on_before_optimizer_step(self, optimizer):
        if self.global_step % 5 == 0:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            print("gradient", self.global_step, f"{norm:.8f}", f"{optimizer.param_groups[0]['lr']:.8f}")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        decay = [p for p in self.parameters() if p.dim() >= 2]
        plain = [p for p in self.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], self.hparams.lr
        )
        total = self.trainer.estimated_stepping_batches

        def warmup_cosine(step):
            if step < self.hparams.warmup:
                return (step + 1) / self.hparams.warmup
            return 0.5 * (1 + math.cos(math.pi * (step - self.hparams.warmup) / max(1, total - self.hparams.warmup)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


def main():
    pl.seed_everything(7, workers=True)
    train = DataLoader(Sentences(72, 10, 0), batch_size=8, shuffle=True, num_workers=0)
    val = DataLoader(Sentences(24, 10, 1), batch_size=8)
    checkpoint = ModelCheckpoint(
        dirpath="checkpoints",
        monitor="val/loss",
        filename="step{step:03d}-{val/loss:.3f}",
        auto_insert_metric_name=False,
        save_last=True,
        mode="min",
    )
    stopping = EarlyStopping(monitor="val/loss", patience=2, min_delta=0.01, verbose=True)
    trainer = pl.Trainer(
        max_epochs=5,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=0.5,
        gradient_clip_algorithm="norm",
        log_every_n_steps=1,
        precision="32-true",
        enable_progress_bar=False,
        callbacks=[checkpoint, stopping, LearningRateMonitor(logging_interval="step")],
        logger=TensorBoardLogger("logs"),
    )
    model = Transformer()
    trainer.fit(model, train, val)
    print("weights", f"{sum(p.double().sum() for p in model.parameters()):.12f}")
    print(
        "ended",
        trainer.current_epoch,
        trainer.global_step,
        trainer.should_stop,
        stopping.stopped_epoch,
        stopping.wait_count,
    )
    print(
        "precision",
        trainer.precision,
        trainer.max_steps,
        trainer.estimated_stepping_batches,
        trainer.num_training_batches,
    )
    print(
        "files",
        Path(checkpoint.best_model_path).name,
        "last.ckpt" in [path.name for path in Path("checkpoints").iterdir()],
    )
    print("best", f"{checkpoint.best_model_score:.8f}", f"{trainer.callback_metrics['train/loss_epoch']:.8f}")
    best = Transformer.load_from_checkpoint(checkpoint.best_model_path, dropout=0.0)
    print(
        "loaded",
        [round(result["val/loss"], 8) for result in pl.Trainer(logger=False).validate(best, val, verbose=False)],
    )


if __name__ == "__main__":
    main()
