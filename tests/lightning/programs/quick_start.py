"""The quick start: an autoencoder over sixteen-pixel pictures, saved, loaded and used."""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
encoder = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
decoder = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 16))


class LitAutoEncoder(L.LightningModule):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = nn.functional.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        self.log("val_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x), prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        self.log("test_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def pictures(number):
    """Blurred stripes, and the column in which each begins."""
    columns = torch.randint(0, 4, (number,))
    images = torch.zeros(number, 1, 4, 4)
    images[torch.arange(number), 0, :, columns] = 1.0
    return TensorDataset(images + 0.1 * torch.randn(images.shape), columns)


train_loader = DataLoader(pictures(256), batch_size=16, shuffle=True)
valid_loader = DataLoader(pictures(64), batch_size=16)
test_loader = DataLoader(pictures(64), batch_size=16)

autoencoder = LitAutoEncoder(encoder, decoder)
trainer = L.Trainer(
    limit_train_batches=10, max_epochs=3, accelerator="cpu", devices=1, default_root_dir="runs", logger=True
)
trainer.fit(model=autoencoder, train_dataloaders=train_loader, val_dataloaders=valid_loader)
print("weights", f"{sum(p.double().sum() for p in autoencoder.parameters()):.12f}")
print("trained", trainer.global_step, trainer.current_epoch, trainer.state.fn == "fit", trainer.state.finished)
print("train_loss", f"{trainer.callback_metrics['train_loss']:.9f}")
print("val_loss", f"{trainer.callback_metrics['val_loss']:.9f}")

(result,) = trainer.test(model=autoencoder, dataloaders=test_loader)
print("test", {name: f"{value:.9f}" for name, value in result.items()})
(result,) = trainer.validate(model=autoencoder, dataloaders=valid_loader)
print("validate", {name: f"{value:.9f}" for name, value in result.items()})

checkpoint = trainer.checkpoint_callback.best_model_path
print("checkpoint", os.path.basename(checkpoint))
autoencoder = LitAutoEncoder.load_from_checkpoint(checkpoint, encoder=encoder, decoder=decoder)
encoder = autoencoder.encoder
encoder.eval()

fake_image_batch = torch.rand(4, 16, device=autoencoder.device)
embeddings = encoder(fake_image_batch)
print("embeddings", [f"{value:.8f}" for value in embeddings.flatten().tolist()])
