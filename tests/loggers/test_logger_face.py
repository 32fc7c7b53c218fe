"""A user's logger derived from Logger alone: all ranks join the same run, and its folders are searched for checkpoints."""

from __future__ import annotations

import secrets

import pytest

from fabricamp import Callback, ConfigError
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.loggers import Logger
from tests.small import Classifier, loader, quiet_trainer


class Server(Logger):
    """Chooses an identifier for the run, and a folder of that name."""

    def __init__(self, root):
        self.root = root
        self.run = None
        self.given_back = 0

    def identity(self):
        self.run = self.run or secrets.token_hex(4)
        return {"run": self.run}

    def join(self, identity):
        self.run = identity["run"]

    @property
    def log_dir(self):
        return self.root / self.run

    def run_folders(self):
        return [self.log_dir, *(folder for folder in self.root.glob("*") if folder != self.log_dir)]

    def give_back(self):
        self.given_back += 1


class Notes(Callback):
    """Writes each rank's run identifier to a file."""

    def __init__(self, root):
        self.root = root

    def on_fit_start(self, trainer, module):
        (self.root.parent / f"rank{trainer.global_rank}").write_text(f"{trainer.loggers[1].run} {trainer.log_dir}")


def fit(root, *callbacks, **options):
    server = Server(root)
    trainer = quiet_trainer(
        max_epochs=1, enable_checkpointing=True, logger=[Logger(), server], callbacks=list(callbacks), **options
    )
    trainer.fit(Classifier(), loader(8))
    return server, trainer


def test_every_rank_and_who_started_them_have_rank_0s_run(tmp_path):
    root = tmp_path / "runs"
    server, trainer = fit(root, Notes(root), devices=2, start_method="fork", strategy="ddp")
    seen = {(tmp_path / f"rank{rank}").read_text() for rank in range(2)}
    assert seen == {f"{server.run} {root / server.run}"}
    assert trainer.log_dir == str(root / server.run)


def test_checkpoints_of_earlier_runs_are_found_in_its_folders(tmp_path):
    server, trainer = fit(tmp_path, ModelCheckpoint())
    assert trainer.checkpoint_callback.best_model_path.startswith(str(tmp_path / server.run))
    later = quiet_trainer(max_epochs=2, enable_checkpointing=True, logger=Server(tmp_path), callbacks=ModelCheckpoint())
    later.fit(Classifier(), loader(8), ckpt_path="last")
    assert later.ckpt_path == trainer.checkpoint_callback.best_model_path
    assert later.global_step == 4


def test_a_run_that_never_began_gives_back(tmp_path):
    class Broken(Classifier):
        def configure_optimizers(self):
            raise ConfigError("no")

    server = Server(tmp_path)
    with pytest.raises(ConfigError, match="no"):
        quiet_trainer(max_epochs=1, logger=server).fit(Broken(), loader(8))
    assert server.given_back == 1
    assert fit(tmp_path)[0].given_back == 0
