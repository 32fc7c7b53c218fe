"""Files of other libraries: Lightning 2's, built here from the documented layout, and apex's three keys; fit resumes from them."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch

from fabricamp import Callback, CheckpointError
from fabricamp.checkpoint import fit_names, read_checkpoint
from tests.small import Classifier, loader, quiet_trainer


class Scheduled(Classifier):
    """AdamW and a schedule by epochs."""

    interval = "epoch"

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": self.interval}
        ]


class Positions(Classifier):
    """Records the position of every batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, self.global_step))
        return super().training_step(batch, batch_idx)


def trained(steps=6, module=None, **options):
    module = module or Scheduled()
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, **options)
    trainer.fit(module, loader(16))  # four batches an epoch
    return module, trainer


def progress(ready, processed, completed):
    return {"ready": ready, "started": ready, "processed": processed, "completed": completed}


def lightning_file(path, module, trainer, *, epochs, batches, total, last, extra=()):
    """Writes a file in Lightning 2.6's layout, whose progress objects count ready, started, processed and completed."""
    content = {
        "epoch": epochs["completed"],
        "global_step": trainer.global_step,
        "pytorch-lightning_version": "2.6.1",
        "state_dict": OrderedDict(module.state_dict()),
        "loops": {
            "fit_loop": {
                "state_dict": {},
                "epoch_loop.state_dict": {"_batches_that_stepped": trainer.global_step},
                "epoch_loop.batch_progress": {
                    "total": progress(total, total, total),
                    "current": progress(batches, batches, batches),
                    "is_last_batch": last,
                },
                "epoch_loop.scheduler_progress": {"total": {"ready": 1, "completed": 1}},
                "epoch_loop.automatic_optimization.state_dict": {},
                "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
            },
            "validate_loop": {"state_dict": {}},
        },
        "callbacks": {"ModelCheckpoint{'monitor': None, 'mode': 'min'}": {"best_model_score": torch.tensor(1.0)}},
        "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.1},
        **dict(extra),
    }
    torch.save(content, path)
    return path


def positions_from(path):
    module = Positions()
    module.configure_optimizers = Scheduled.configure_optimizers.__get__(module)
    module.interval = "epoch"
    trainer = quiet_trainer(max_epochs=4)
    trainer.fit(module, loader(16), ckpt_path=path)
    return module, trainer


def test_lightning_s_file_of_the_middle_of_an_epoch(tmp_path):
    module, trainer = trained(6)
    path = lightning_file(
        tmp_path / "a.ckpt", module, trainer, epochs=progress(2, 1, 1), batches=2, total=6, last=False
    )
    assert read_checkpoint(path)["hyper_parameters"] == {"lr": 0.1}
    resumed, after = positions_from(path)
    assert resumed.seen[:3] == [(1, 2, 6), (1, 3, 7), (2, 0, 8)]
    assert after.global_step == 16
    assert after.lr_scheduler_configs[0].scheduler.last_epoch == 4


@pytest.mark.parametrize("precision", ["O0", "O2"])
@pytest.mark.parametrize("scaling", ["amp_scaling_state", "native_amp_scaling_state", "neither"])
def test_lightning_16149_a_file_of_lightning_1_with_the_state_of_apexs_amp(tmp_path, precision, scaling):
    module, trainer = trained(6)
    content = {
        "epoch": 1,
        "global_step": 6,
        "pytorch-lightning_version": "1.4.9",
        "state_dict": OrderedDict(module.state_dict()),
        "callbacks": {},
        "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }
    if scaling == "amp_scaling_state":
        content[scaling] = OrderedDict(loss_scaler0={"loss_scale": 4096.0, "unskipped": 17})
    elif scaling == "native_amp_scaling_state":
        content[scaling] = {"scale": 4096.0, "growth_factor": 2.0, "growth_interval": 2000, "_growth_tracker": 17}
    torch.save(content, tmp_path / "a.ckpt")
    resumed = quiet_trainer(max_steps=8, max_epochs=-1, precision=precision)
    resumed.fit(Scheduled(), loader(16), ckpt_path=tmp_path / "a.ckpt")
    assert resumed.global_step == 8
    if precision == "O2":
        scaler = resumed.precision_plugin.state_dict()["scaler"]["scalers"][0]
        expected = (65536.0, 2) if scaling == "neither" else (4096.0, 19)
        assert (float(scaler["scale"]), int(scaler["growth"])) == expected


def test_what_lightning_wrote_goes_on_as_if_fabricamp_had_written_it(tmp_path):
    module, trainer = trained(6)
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    theirs = lightning_file(
        tmp_path / "theirs.ckpt", module, trainer, epochs=progress(2, 1, 1), batches=2, total=6, last=False
    )
    ends = []
    for path in (tmp_path / "ours.ckpt", theirs):
        end, last = positions_from(path)
        ends.append((end, last.optimizers[0].state_dict(), last.lr_scheduler_configs[0].scheduler.state_dict()))
    for (name, one), other in zip(ends[0][0].state_dict().items(), ends[1][0].state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    for index, state in ends[0][1]["state"].items():
        assert all(torch.equal(value, ends[1][1]["state"][index][name]) for name, value in state.items())
    assert ends[0][2] == ends[1][2]


@pytest.mark.parametrize(
    ("epochs", "begins"),
    [
        (progress(2, 2, 1), (2, 0, 8)),  # ModelCheckpoint's at the second epoch's end
        (progress(2, 1, 1), (2, 0, 8)),  # ModelCheckpoint's after the second epoch's last validation
    ],
)
def test_lightning_s_file_of_the_end_of_an_epoch(tmp_path, epochs, begins):
    module, trainer = trained(8)
    path = lightning_file(tmp_path / "a.ckpt", module, trainer, epochs=epochs, batches=4, total=8, last=True)
    rates = []

    class Rates(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    resumed = Positions()
    resumed.configure_optimizers = Scheduled.configure_optimizers.__get__(resumed)
    resumed.interval = "epoch"
    quiet_trainer(max_epochs=3, callbacks=Rates()).fit(resumed, loader(16), ckpt_path=path)
    assert resumed.seen[0] == begins
    assert rates == [0.0025] * 4


def test_lightning_s_file_of_after_the_last_epoch(tmp_path):
    module, trainer = trained(8)
    path = lightning_file(tmp_path / "a.ckpt", module, trainer, epochs=progress(2, 2, 2), batches=4, total=8, last=True)
    resumed, after = positions_from(path)
    assert resumed.seen[0] == (2, 0, 8)
    assert after.lr_scheduler_configs[0].scheduler.last_epoch == 4


def test_lightning_s_loss_scale_goes_on(tmp_path):
    module, trainer = trained(6, precision="O1")
    scaler = {
        "scale": 512.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 7,
    }
    path = lightning_file(
        tmp_path / "a.ckpt",
        module,
        trainer,
        epochs=progress(2, 1, 1),
        batches=2,
        total=6,
        last=False,
        extra={"MixedPrecision": scaler},
    )
    resumed = quiet_trainer(max_steps=6, max_epochs=-1, precision="O1")
    resumed.fit(Scheduled(), loader(16), ckpt_path=path)
    state = resumed.precision_plugin.state_dict()["scaler"]["scalers"][0]
    assert (resumed.precision_plugin.verdicts.scale, float(state["scale"]), int(state["growth"])) == (512.0, 512.0, 7)


def test_a_lightning_file_with_another_layout_is_refused(tmp_path):
    module, trainer = trained(2)
    path = lightning_file(
        tmp_path / "a.ckpt", module, trainer, epochs=progress(1, 0, 0), batches=2, total=2, last=False
    )
    content = torch.load(path, weights_only=True)
    del content["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="does not have its library's layout"):
        quiet_trainer(max_epochs=1).fit(Scheduled(), loader(16), ckpt_path=path)


# -- apex


def apex_file(path, model, optimizer, scalers):
    """Writes a file as in apex's README: model.state_dict(), optimizer.state_dict(), amp.state_dict()."""
    amp = OrderedDict(
        (f"loss_scaler{index}", {"loss_scale": scale, "unskipped": count})
        for index, (scale, count) in enumerate(scalers)
    )
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp}, path)
    return path


@pytest.mark.parametrize("precision", ["O0", "O1", "O2"])
@pytest.mark.parametrize("wrapped", ["net", "whole", "parallel"])
def test_fit_goes_on_from_apex_s_file(tmp_path, precision, wrapped):
    module, trainer = trained(5)
    model = {"net": module.net, "whole": module, "parallel": torch.nn.ModuleDict({"module": module.net})}[wrapped]
    path = apex_file(tmp_path / "amp_checkpoint.pt", model, trainer.optimizers[0], [(1024.0, 30)])
    seen = {}

    class Looks(Callback):
        def on_fit_start(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
            parts = {
                "weights": torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"],
                "optimizer": trainer.optimizers[0].state_dict(),
                "scale": getattr(trainer.precision_plugin.verdicts, "scale", None),
                "amp": trainer.precision_plugin.state_dict(),
            }
            seen.update(copy.deepcopy(parts))

    resumed = quiet_trainer(max_steps=5, max_epochs=1, precision=precision, callbacks=Looks())
    resumed.fit(Scheduled(), loader(16), ckpt_path=path)
    for name, value in module.state_dict().items():
        assert torch.equal(seen["weights"][name], value), name
    for index, state in trainer.optimizers[0].state_dict()["state"].items():
        assert torch.equal(seen["optimizer"]["state"][index]["exp_avg_sq"], state["exp_avg_sq"])
    if precision != "O0":
        assert seen["scale"] == 1024.0
        assert int(seen["amp"]["scaler"]["scalers"][0]["growth"]) == 30


def test_an_apex_file_of_something_else_is_refused(tmp_path):
    other = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    path = apex_file(tmp_path / "a.pt", other, optimizer, [(1.0, 0)])
    with pytest.raises(CheckpointError, match="does not fit the model"):
        quiet_trainer(max_epochs=1).fit(Scheduled(), loader(4), ckpt_path=path)
    torch.save({"model": {}, "optimizer": {}, "amp": {"loss_scaler0": 3}}, path)
    with pytest.raises(CheckpointError, match="does not have its library's layout"):
        read_checkpoint(path)


def test_names_are_fitted_only_where_all_of_them_fit():
    assert fit_names({"module.w": 1}, {"w"}) == {"w": 1}
    assert fit_names({"w": 1}, {"net.w"}) == {"net.w": 1}
    assert fit_names({"w": 1}, {"net.w", "head.w"}) == {"w": 1}
