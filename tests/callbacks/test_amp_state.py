"""AmpState: its logged values, the parameter it names after an overflow, and a round trip of apex's file."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from fabricamp import Callback, CheckpointError, ConfigError
from fabricamp.callbacks import AmpState
from fabricamp.loggers import CSVLogger
from tests.small import Classifier, loader, quiet_trainer

HALF = ["O1", "O2"]


class Adam(Classifier):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Overflows(Callback):
    """Makes the gradient of one parameter infinite in some steps."""

    def __init__(self, name, *steps):
        self.name = name
        self.steps = steps

    def on_after_backward(self, trainer, module):
        if trainer.global_step in self.steps:
            module.get_parameter(self.name).grad.fill_(float("inf"))


class Fits(Callback):
    """Calls a function before the first step."""

    def __init__(self, call):
        self.call = call

    def on_fit_start(self, trainer, module):
        self.call(trainer)


@pytest.mark.parametrize("precision", HALF)
def test_scale_and_steps_are_logged_with_the_trainer_s_values(tmp_path, precision):
    trainer = quiet_trainer(
        max_steps=10,
        max_epochs=-1,
        precision=precision,
        log_every_n_steps=3,
        logger=CSVLogger(tmp_path, "run"),
        callbacks=[AmpState(), Overflows("net.0.bias", 1, 2, 6)],
    )
    trainer.fit(Adam(), loader(40))
    header, *lines = (trainer.log_dir and (tmp_path / "run" / "version_0" / "metrics.csv").read_text()).splitlines()
    columns = header.split(",")
    rows = [dict(zip(columns, line.split(","), strict=True)) for line in lines]
    seen = {
        int(row["step"]): tuple(float(row[f"amp/{name}"]) for name in ("loss_scale", "applied_steps", "skipped_steps"))
        for row in rows
        if row["amp/loss_scale"]
    }
    # The values are two steps old; at the end of the run they are up to date.
    assert seen[5] == (2.0**14, 4.0, 2.0)
    assert seen[8] == (2.0**13, 6.0, 3.0)
    assert set(seen) == {2, 5, 8, 9}


@pytest.mark.parametrize("precision", HALF)
def test_an_overflow_is_told_with_the_parameter_s_name(caplog, precision):
    trainer = quiet_trainer(
        max_steps=10,
        max_epochs=-1,
        precision=precision,
        callbacks=[AmpState(), Overflows("net.2.weight", 1, 2, 6)],
    )
    with caplog.at_level(logging.WARNING, "fabricamp"):
        trainer.fit(Adam(), loader(40))
    told = [record.getMessage() for record in caplog.records if "a step was skipped" in record.getMessage()]
    assert len(told) == 2, "one line a run of overflows"
    assert all("net.2.weight" in line for line in told)
    assert "at step 1 " in told[0]
    assert "at step 6 " in told[1]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_fit_counts_the_first_ones_skips(tmp_path, processes):
    overflows, options = Overflows("net.0.bias", 1, 2, 6), {}
    if processes > 1:
        options = {"devices": processes, "strategy": "ddp", "start_method": "fork"}
    logger = CSVLogger(tmp_path, "run", version="second")
    trainer = quiet_trainer(max_steps=4, max_epochs=-1, precision="O2", callbacks=[AmpState(), overflows], **options)
    trainer.fit(Adam(), loader(80))
    assert trainer.skipped_steps == 2
    trainer.fit_loop.epoch_loop.max_steps, trainer.logger = 8, logger
    trainer.fit(Adam(), loader(80))
    assert (trainer.global_step, trainer.skipped_steps) == (8, 3)
    header, *rows = (tmp_path / "run" / "second" / "metrics.csv").read_text().splitlines()
    logged = dict(zip(header.split(","), rows[-1].split(","), strict=True))
    assert (float(logged["amp/applied_steps"]), float(logged["amp/skipped_steps"])) == (5, 3)
    if processes == 1:
        trainer.save_checkpoint(tmp_path / "file.ckpt")
        resumed = quiet_trainer(max_steps=9, max_epochs=-1, precision="O2", callbacks=Overflows("net.0.bias", 8))
        resumed.fit(Adam(), loader(80), ckpt_path=tmp_path / "file.ckpt")
        assert resumed.skipped_steps == 4
    trainer.reset()
    assert trainer.skipped_steps == 0


def test_nothing_is_told_where_nothing_overflows(caplog):
    with caplog.at_level(logging.WARNING, "fabricamp"):
        quiet_trainer(max_steps=6, max_epochs=-1, precision="O0", callbacks=AmpState()).fit(Adam(), loader(40))
    assert not caplog.records


@pytest.mark.parametrize("precision", ["O0", *HALF])
@pytest.mark.parametrize("part", ["whole", "net"])
def test_apex_s_file_there_and_back(tmp_path, precision, part):
    module, amp_state = Adam(), AmpState()
    path = tmp_path / "amp_checkpoint.pt"

    class Saves(Callback):
        def on_train_end(self, trainer, module):
            amp_state.save(path, module.net if part == "net" else None)

    overflow = Overflows("net.0.bias", *([1] if precision in HALF else []))
    trainer = quiet_trainer(max_steps=7, max_epochs=-1, precision=precision, callbacks=[amp_state, overflow, Saves()])
    trainer.fit(module, loader(40))
    content = torch.load(path, weights_only=True)
    assert set(content) == {"model", "optimizer", "amp"}
    assert list(content["amp"]) == ["loss_scaler0"]
    assert ("0.weight" in content["model"]) == (part == "net")
    assert {value.dtype for value in content["model"].values()} == {torch.float32}
    if precision != "O0":
        assert content["amp"]["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 5}
    again, seen = AmpState(), {}

    def load(trainer):
        again.load(path)
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        seen["weights"] = torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"]
        seen["optimizer"] = trainer.optimizers[0].state_dict()
        seen["amp"] = trainer.precision_plugin.state_dict()
        seen.update(copy.deepcopy(seen))
        again.save(tmp_path / "again.pt", trainer.module.net if part == "net" else None)

    fresh = quiet_trainer(max_steps=1, max_epochs=-1, precision=precision, callbacks=[again, Fits(load)])
    fresh.fit(Adam(lr=0.5, seed=3), loader(40))
    for name, value in module.state_dict().items():
        assert torch.equal(seen["weights"][name], value), name
    for index, state in content["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(seen["optimizer"]["state"][index][name], value)
    assert torch.load(tmp_path / "again.pt", weights_only=True)["amp"] == content["amp"]


def test_what_cannot_be_loaded_or_called_is_said(tmp_path):
    with pytest.raises(ConfigError, match="needs a run"):
        AmpState().save(tmp_path / "a.pt")
    trainer = quiet_trainer(max_steps=1, max_epochs=-1)
    trainer.fit(Adam(), loader(4))
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    torch.save({"model": Adam().state_dict(), "optimizer": [], "amp": {}}, tmp_path / "none.pt")
    amp_state = AmpState()
    for name, words in (("own.ckpt", "not an apex file"), ("none.pt", "holds 0 optimizers")):
        with pytest.raises(CheckpointError, match=words):
            quiet_trainer(
                max_steps=1,
                max_epochs=-1,
                callbacks=[amp_state, Fits(lambda _, name=name: amp_state.load(tmp_path / name))],
            ).fit(Adam(), loader(4))
    with pytest.raises(ConfigError, match="not a submodule"):
        amp_state.save(tmp_path / "a.pt", torch.nn.Linear(1, 1))
