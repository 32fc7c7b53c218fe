"""Predictions of three loaders, written by a callback of the program's own and returned as lists."""

from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __init__(self, start, number):
        self.values = torch.arange(start, start + number, dtype=torch.float32)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return {"x": torch.stack([self.values[index].sin(), self.values[index].cos()]), "id": index}


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.layer(x))

    def training_step(self, batch, batch_idx):
        loss = self(batch["x"]).square().mean()
        self.log("loss", loss)
        return loss

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"id": batch["id"], "scores": self(batch["x"]).softmax(dim=-1)}

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def setup(self, stage):
        self.stages = [*getattr(self, "stages", []), stage == "fit"]

    def train_dataloader(self):
        return DataLoader(Numbers(0, 32), batch_size=8, shuffle=True)

    def predict_dataloader(self):
        return [DataLoader(Numbers(start, number), batch_size=4) for start, number in ((0, 10), (10, 8), (18, 4))]

    def teardown(self, stage):
        self.stages.append(stage == "predict")


class Writer(Callback):
    """One file a batch, one line an epoch."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir()

    def on_predict_start(self, trainer, pl_module):
        print(
            "start", pl_module.training, torch.is_grad_enabled(), trainer.predicting, trainer.state.stage == "predict"
        )

    def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        torch.save(outputs, self.folder / f"{dataloader_idx}_{batch_idx}.pt")
        if batch_idx == 0:
            print(
                "batch",
                dataloader_idx,
                outputs["id"].tolist(),
                f"{outputs['scores'][0, 0]:.8f}",
                trainer.num_predict_batches,
            )

    def on_predict_epoch_end(self, trainer, pl_module):
        print("epoch", sorted(path.name for path in self.folder.iterdir()))


if __name__ == "__main__":
    pl.seed_everything(8)
    model, data = Model(), Data()
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, callbacks=[Writer("predictions")])
    trainer.fit(model, datamodule=data)
    print("loss", f"{trainer.callback_metrics['loss']:.8f}")
    print("weights", f"{sum(p.double().sum() for p in model.parameters()):.12f}")
    results = trainer.predict(model, datamodule=data)
    for loader in results:
        scores = torch.cat([batch["scores"] for batch in loader])
        print(len(loader), tuple(scores.shape), f"{scores[:, 0].double().sum():.9f}", scores.argmax(dim=1).tolist())
    print("same as written", torch.equal(torch.load("predictions/1_1.pt")["scores"], results[1][1]["scores"]))
    print("stages", data.stages)

    single = trainer.predict(model, DataLoader(Numbers(0, 6), batch_size=4))
    print("single", [batch["id"].tolist() for batch in single])
    nothing = trainer.predict(model, DataLoader(Numbers(0, 6), batch_size=4), return_predictions=False)
    print("nothing", nothing)
    trainer = pl.Trainer(limit_predict_batches=2, logger=False, accelerator="cpu")
    best = trainer.predict(model, data, ckpt_path="checkpoints/epoch=1-step=8.ckpt")
    print(
        "limited",
        [len(loader) for loader in best],
        f"{best[0][0]['scores'].double()[:, 0].sum():.9f}",
        trainer.interrupted,
    )
