"""Lightning 2.6's own files are loaded by classes with any signature, and our files have the keys that Lightning needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback, CheckpointError, TrainingModule, habits
from fabricamp.callbacks import EarlyStopping, EarlyStoppingReason
from fabricamp.checkpoint import read_checkpoint
from tests.checkpoint.lightning import rates
from tests.small import quiet_trainer

SPREAD, WHOLE = (Path(__file__).parent / "lightning" / f"{name}.ckpt" for name in ("spread", "whole"))
INNER = {"a": [1, 2]}


class Net(TrainingModule):
    """The same class as in lightning/write.py, which wrote the files."""

    def __init__(self, lr=0.5, **kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)
        self.got = (lr, kwargs)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, self.global_step))
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Few(Net):
    def __init__(self, lr=0.5):
        super().__init__(lr)


class ByKeyword(Net):
    def __init__(self, *, lr=0.5, inner=None):
        super().__init__(lr, inner=inner)


class All(Net):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


class Whole(Net):
    def __init__(self, config, lr=0.5):
        super().__init__(lr)
        self.got = config


def loader():
    return DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2) / 8), batch_size=2)


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        (Net, (0.1, {"width": 3, "inner": INNER})),
        (Few, (0.1, {})),
        (ByKeyword, (0.1, {"inner": INNER})),
        (All, (0.1, {"width": 3, "inner": INNER})),
    ],
)
def test_each_class_gets_the_arguments_that_it_takes(kind, got):
    module = kind.load_from_checkpoint(SPREAD)
    assert module.got == got
    assert torch.equal(module.layer.weight, torch.load(SPREAD, weights_only=True)["state_dict"]["layer.weight"])
    assert kind.load_from_checkpoint(SPREAD, lr=0.3).got == (0.3, got[1])


def test_one_argument_gets_them_whole():
    assert Whole.load_from_checkpoint(WHOLE).got == {"lr": 0.1, "inner": INNER}
    assert Whole.load_from_checkpoint(WHOLE).got.inner.a == [1, 2]
    assert Net.load_from_checkpoint(WHOLE).got == (0.1, {"inner": INNER})


def test_what_a_base_class_saved_is_left_out_of_our_files_too(tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(ByKeyword(lr=0.2, inner=INNER), loader())
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    assert Few.load_from_checkpoint(tmp_path / "ours.ckpt").got == (0.2, {})
    with pytest.raises(CheckpointError, match=r"\(rate=...\): Few has no argument of this name; leave it out"):
        Few.load_from_checkpoint(tmp_path / "ours.ckpt", rate=0.1)
    with pytest.raises(CheckpointError, match="Few has no argument of this name; did you mean 'lr'?"):
        Few.load_from_checkpoint(tmp_path / "ours.ckpt", lrr=0.1)


def test_fit_goes_on_from_it_with_its_callbacks():
    module, stopping = Net(lr=0.1), EarlyStopping("val_loss", patience=5)
    trainer = quiet_trainer(max_epochs=3, callbacks=stopping)
    trainer.fit(module, loader(), loader(), ckpt_path=SPREAD)
    assert module.seen == [(2, 0, 8), (2, 1, 9), (2, 2, 10), (2, 3, 11)]
    assert stopping.stopping_reason is EarlyStoppingReason.NOT_STOPPED
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3


def shape(value):
    """Returns the keys and types of nested dicts."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return type(value)


@pytest.mark.parametrize("weights_only", [False, True])
def test_ours_have_lightnings_keys(weights_only, tmp_path):
    trainer = quiet_trainer(max_epochs=2, callbacks=EarlyStopping("val_loss"))
    trainer.fit(Net(lr=0.1, width=3, inner=INNER), loader(), loader())
    trainer.save_checkpoint(tmp_path / "ours.ckpt", weights_only)
    ours, theirs = (torch.load(path, weights_only=True) for path in (tmp_path / "ours.ckpt", SPREAD))
    missing = theirs.keys() - ours.keys()
    # Without hparams_name each hyper-parameter is a separate argument.
    assert missing == {"hparams_name", *(("callbacks", "lr_schedulers", "optimizer_states") if weights_only else ())}
    for key in ("epoch", "global_step", "hyper_parameters", "pytorch-lightning_version"):
        assert ours[key] == theirs[key]
    own = ours["loops"].pop("fit")
    assert shape(ours["loops"]) == shape(theirs["loops"])
    assert own["epoch"] == 2
    if not weights_only:
        (key,) = theirs["callbacks"]
        assert shape(theirs["callbacks"][key]).items() <= {**shape(ours["callbacks"][key])}.items()


@pytest.mark.parametrize("automatic", [True, False])
def test_its_counters_are_those_of_the_run(automatic, tmp_path):
    class Manual(Net):
        automatic_optimization = automatic

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if not automatic:
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

    trainer = quiet_trainer(max_steps=6)
    trainer.fit(Manual(lr=0.1), loader())
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    saved = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    loop = saved["loops"]["fit_loop"]
    count = {"ready": 2, "started": 2, "processed": 2, "completed": 2}
    assert (saved["epoch"], saved["global_step"]) == (1, 6)
    assert loop["epoch_progress"]["current"] == {"ready": 2, "started": 2, "processed": 1, "completed": 1}
    assert loop["epoch_loop.batch_progress"]["current"] == count
    assert loop["epoch_loop.batch_progress"]["total"] == dict.fromkeys(count, 6)
    steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    by_hand = loop["epoch_loop.manual_optimization.optim_step_progress"]["total"]["completed"]
    assert (steps, by_hand) == ((6, 0) if automatic else (0, 6))
    assert "source" not in read_checkpoint(tmp_path / "ours.ckpt")


class Saves(Callback):
    """Saves in a hook of the second epoch, once ``done`` of its four batches are done."""

    def __init__(self, hook, path, done=4):
        setattr(self, hook, lambda trainer, *_: self.save(trainer) if trainer.current_epoch == 1 else None)
        self.path, self.done = path, done

    def save(self, trainer):
        if trainer.state.batch_idx == self.done:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("hook", "done", "first"),
    [
        ("on_train_batch_end", 4, (2, 0, 8)),
        ("on_train_batch_end", 3, (1, 3, 7)),
        ("on_train_batch_start", 3, (1, 3, 7)),
        ("on_validation_end", 4, (2, 0, 8)),
        ("on_train_epoch_end", 4, (2, 0, 8)),
    ],
)
# Lightning cannot resume its own loaders within an epoch; this test only shows that it reads our files.
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_lightning_goes_on_from_ours_behind_the_same_batch(hook, done, first, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="needs the package lightning")

    class Theirs(lightning.LightningModule):
        seen, training_step = (), Net.training_step

        def __init__(self):
            super().__init__()
            self.seen, self.layer = [], torch.nn.Linear(2, 1)

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    path = tmp_path / "ours.ckpt"
    quiet_trainer(max_epochs=2, callbacks=Saves(hook, path, done)).fit(Net(lr=0.1), loader(), loader())
    module = Theirs()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=3, enable_model_summary=False, **options)
    trainer.fit(module, loader(), ckpt_path=path, weights_only=True)
    assert module.seen[0] == first
    assert trainer.global_step == 12


# -- the rates that follow


Rates = rates.net_class(TrainingModule)
WRITTEN = rates.read()
PLATEAU = 4
"""The group of parameters whose rate follows the values of epochs, under automatic optimization."""


@pytest.mark.parametrize("program_for_lightning", [False, True])
@pytest.mark.parametrize(("kind", "place"), WRITTEN)
def test_the_next_rates_are_lightnings(kind, place, program_for_lightning, tmp_path, monkeypatch):
    monkeypatch.setattr(habits, "_present", habits.LIGHTNING if program_for_lightning else habits.NATIVE)
    written = WRITTEN[kind, place]
    torch.save(written["checkpoint"], tmp_path / "theirs.ckpt")
    module = Rates(kind)
    trainer = quiet_trainer(max_epochs=6, **rates.options_of(kind, place))
    validated = rates.loader() if "validation" in place else None
    trainer.fit(module, rates.loader(), validated, ckpt_path=tmp_path / "theirs.ckpt")
    assert len(module.rates) == written["batches"]
    theirs = [list(groups) for groups in written["resumed"]]
    if kind == "accumulated" and not program_for_lightning:
        # The frequency counts steps; in Lightning it counts the batches of an epoch.
        for ours, groups in zip(module.rates, theirs, strict=False):
            groups[3] = ours[3]
    if trainer.lightning_module.automatic_optimization and "end" not in place:
        # Lightning leaves out the value of the epoch in which it resumes.
        without_a_stop = written["straight"]
        lost = place in ("validation after an epoch", "last batch")
        for groups, straight in zip(theirs, without_a_stop, strict=True):
            groups[PLATEAU] = straight[PLATEAU] * (2 if lost else 1)
    assert module.rates[:10] == theirs


def test_an_epochs_end_without_its_values_decides_nothing(tmp_path):
    torch.save(WRITTEN["automatic", "validation after an epoch"]["checkpoint"], tmp_path / "theirs.ckpt")
    stopping = EarlyStopping("epoch", mode="max", check_on_train_epoch_end=True)
    trainer = quiet_trainer(max_epochs=3, callbacks=stopping)
    trainer.fit(Rates("automatic"), rates.loader(), rates.loader(), ckpt_path=tmp_path / "theirs.ckpt")
    assert stopping.best_score == 2.0  # of the epoch that follows
