"""The same by Lightning's callbacks: BaseFinetuning decides what trains when."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class MilestonesFinetuning(BaseFinetuning):
    """The last layer of the feature extractor trains from the first milestone on, all of it from the second."""

    def __init__(self, milestones=(1, 2), train_bn=False):
        super().__init__()
        self.milestones = milestones
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module):
        self.freeze(modules=pl_module.feature_extractor, train_bn=self.train_bn)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.milestones[0]:
            self.unfreeze_and_add_param_group(
                modules=pl_module.feature_extractor[-2:], optimizer=optimizer, train_bn=self.train_bn
            )
        elif epoch == self.milestones[1]:
            self.unfreeze_and_add_param_group(
                modules=pl_module.feature_extractor[:-2], optimizer=optimizer, train_bn=self.train_bn
            )


class TransferLearningModel(pl.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.feature_extractor = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU()
        )
        self.fc = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.binary_cross_entropy_with_logits(self.fc(self.feature_extractor(x)).squeeze(1), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        groups = [(len(group["params"]), group["lr"]) for group in self.optimizers().param_groups]
        loss = self.trainer.callback_metrics["train_loss"]
        print(self.current_epoch, f"{loss:.8f}", groups, sum(p.requires_grad for p in self.parameters()))

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(parameters, lr=self.hparams.lr)


torch.manual_seed(11)
x = torch.randn(96, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > x[:, 1]).float()), batch_size=16, shuffle=True)
trainer = pl.Trainer(
    max_epochs=3, accelerator="cpu", callbacks=[MilestonesFinetuning()], logger=False, enable_checkpointing=False
)
trainer.fit(TransferLearningModel(), loader)
