"""What leaves a run: the state dict, hyper-parameters in files, a plain torch module without the trainer."""

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2 * inputs, hidden), nn.GELU()
        )
        self.head = nn.Linear(hidden, outputs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.head(self.body(x[:, None]))


class Exported(L.LightningModule):
    def __init__(self, inputs: int = 6, hidden: int = 10, outputs: int = 3, lr: float = 0.01, note: str = "none"):
        super().__init__()
        self.save_hyperparameters()
        self.net = Net(inputs, hidden, outputs)
        self.example_input_array = torch.ones(1, inputs)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)}


def main():
    torch.manual_seed(21)
    x = torch.randn(64, 6)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(dim=1)), batch_size=8, shuffle=True)
    model = Exported(note="exported")
    every = ModelCheckpoint(dirpath="files", filename="{epoch}-{train_loss_epoch:.4f}", save_top_k=-1, every_n_epochs=1)
    logger = CSVLogger("logs", name="export", version="first")
    trainer = L.Trainer(max_epochs=3, accelerator="cpu", callbacks=[every], logger=logger)
    trainer.fit(model, loader)

    with open("logs/export/first/hparams.yaml") as file:
        print("hparams.yaml", yaml.safe_load(file))
    saved = torch.load(every.best_model_path, map_location="cpu", weights_only=True)
    print("file", every.best_model_path.split("/")[-1], saved["epoch"], saved["global_step"])
    print("hyper_parameters", dict(sorted(saved["hyper_parameters"].items())))
    print("state_dict", list(saved["state_dict"]))
    print("optimizer", f"{saved['optimizer_states'][0]['param_groups'][0]['lr']:.8f}", len(saved["lr_schedulers"]))

    plain = Net(6, 10, 3)
    plain.load_state_dict(
        {name.removeprefix("net."): value for name, value in saved["state_dict"].items()}, strict=True
    )
    plain.eval()
    with torch.inference_mode():
        outputs = plain(x[:2])
    print("weights", *(f"{value:.12f}" for value in saved["state_dict"]["net.head.bias"].tolist()))
    print("plain", int(plain.calls), [f"{value:.8f}" for value in outputs.flatten().tolist()])

    loaded = Exported.load_from_checkpoint(every.best_model_path, lr=0.5)
    loaded.eval()
    print(
        "loaded",
        loaded.hparams.lr,
        loaded.hparams["note"],
        torch.equal(loaded(x[:2]), outputs),
        loaded.example_input_array.shape,
    )
    torch.save(loaded.state_dict(), "weights.pt")
    fresh = Exported()
    print("strict", fresh.load_state_dict(torch.load("weights.pt")), fresh.hparams.note)
    traced = torch.jit.trace(loaded.net, x[:2])
    traced.save("net.pt")
    print("traced", torch.equal(torch.jit.load("net.pt")(x[2:6]), loaded(x[2:6])))
    smaller = {
        name: value
        for name, value in saved.items()
        if name in ("state_dict", "hyper_parameters", "pytorch-lightning_version")
    }
    torch.save(smaller, "smaller.ckpt")
    print("smaller", Exported.load_from_checkpoint("smaller.ckpt").hparams.hidden)


if __name__ == "__main__":
    main()
