"""A search by optuna: learning rate and width are tried, and a callback ends what is worse than the others."""

import lightning.pytorch as pl
import optuna
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class PruningCallback(Callback):
    """Tells the trial of each validation, and ends it where optuna says so."""

    def __init__(self, trial, monitor):
        super().__init__()
        self.trial, self.monitor = trial, monitor

    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking:
            return
        score = trainer.callback_metrics.get(self.monitor)
        self.trial.report(score.item(), step=trainer.current_epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned(f"Trial was pruned at epoch {trainer.current_epoch}.")


class Regression(pl.LightningModule):
    def __init__(self, lr, width, dropout):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(1), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x).squeeze(1), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


def data(number, seed):
    x = torch.randn(number, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, 0] * x[:, 1] + x[:, 2])


def objective(trial):
    pl.seed_everything(2)
    model = Regression(
        lr=trial.suggest_float("lr", 1e-4, 0.3, log=True),
        width=trial.suggest_int("width", 4, 32),
        dropout=trial.suggest_categorical("dropout", [0.0, 0.2]),
    )
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PruningCallback(trial, "val_loss"), EarlyStopping("val_loss", patience=2)],
    )
    trainer.fit(model, DataLoader(data(96, 0), batch_size=16, shuffle=True), DataLoader(data(32, 1), batch_size=16))
    return trainer.callback_metrics["val_loss"].item()


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
    study = optuna.create_study(direction="minimize", pruner=pruner, sampler=optuna.samplers.TPESampler(seed=3))
    study.optimize(objective, n_trials=6)
    for trial in study.trials:
        values = " ".join(f"{value:.8f}" for value in trial.intermediate_values.values())
        print(trial.number, trial.state.name, values)
    print("best", study.best_trial.number, f"{study.best_value:.8f}", study.best_params["width"])
    print("rate", f"{study.best_params['lr']:.8f}")
