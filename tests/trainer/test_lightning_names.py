"""Attributes of Trainer and module that modules and callbacks written for Lightning read in a run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fabricamp import ConfigError
from fabricamp.callbacks import EarlyStopping, ModelCheckpoint
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


class Asks(Classifier):
    """Records attributes of the Trainer in its first training, validation and test step."""

    NAMES = (
        "accumulate_grad_batches", "check_val_every_n_epoch", "current_epoch", "default_root_dir", "early_stopping_callback",
        "early_stopping_callbacks", "estimated_stepping_batches", "evaluating", "fast_dev_run", "global_rank", "global_step",
        "gradient_clip_algorithm", "gradient_clip_val", "interrupted", "is_global_zero", "is_last_batch", "limit_predict_batches",
        "limit_test_batches", "limit_train_batches", "limit_val_batches", "local_rank", "log_dir", "log_every_n_steps", "logger",
        "loggers", "max_epochs", "max_steps", "min_epochs", "min_steps", "node_rank", "num_devices", "num_nodes",
        "num_sanity_val_batches", "num_training_batches", "num_val_batches", "overfit_batches", "predicting", "sanity_checking",
        "should_stop", "testing", "training", "val_check_interval", "validating", "world_size",
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.seen = {}

    def _ask(self, step):
        self.seen.setdefault(step, {name: getattr(self.trainer, name) for name in self.NAMES})

    def training_step(self, batch, batch_idx):
        self._ask("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self._ask("sanity" if self.trainer.sanity_checking else "validate")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self._ask("test")
        super().test_step(batch, batch_idx)


def test_the_trainer_answers(tmp_path):
    module, stopping = Asks(), EarlyStopping("val_loss")
    trainer = quiet_trainer(
        max_epochs=2, min_steps=3, accumulate_grad_batches=2, gradient_clip_val=0.5, limit_train_batches=3, limit_val_batches=0.5,
        limit_test_batches=1, log_every_n_steps=7, callbacks=[stopping], default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, loader(32), loader(16))
    trainer.test(module, loader(8), verbose=False)
    expected = {
        "accumulate_grad_batches": 2, "check_val_every_n_epoch": 1, "current_epoch": 0, "default_root_dir": str(tmp_path),
        "early_stopping_callback": stopping, "early_stopping_callbacks": [stopping], "estimated_stepping_batches": 4,
        "evaluating": False, "fast_dev_run": 0, "global_rank": 0, "global_step": 0, "gradient_clip_algorithm": "norm",
        "gradient_clip_val": 0.5, "interrupted": False, "is_global_zero": True, "is_last_batch": False,
        "limit_predict_batches": 1.0, "limit_test_batches": 1, "limit_train_batches": 3, "limit_val_batches": 0.5,
        "local_rank": 0, "log_dir": str(tmp_path), "log_every_n_steps": 7, "logger": None, "loggers": [], "max_epochs": 2,
        "max_steps": -1, "min_epochs": 0, "min_steps": 3, "node_rank": 0, "num_devices": 1, "num_nodes": 1,
        "num_sanity_val_batches": [2], "num_training_batches": 3, "num_val_batches": [2], "overfit_batches": 0,
        "predicting": False, "sanity_checking": False, "should_stop": False, "testing": False, "training": True,
        "val_check_interval": 1.0, "validating": False, "world_size": 1,
    }  # fmt: skip
    assert module.seen["train"] == expected
    changed = {
        step: {name: value for name, value in seen.items() if value != expected[name]}
        for step, seen in module.seen.items()
        if step != "train"
    }
    assert changed == {
        "sanity": {"evaluating": True, "sanity_checking": True, "training": False},
        "validate": {
            "evaluating": True,
            "validating": True,
            "training": False,
            "global_step": 2,
            "is_last_batch": True,
        },
        "test": {
            "evaluating": True,
            "testing": True,
            "training": False,
            "current_epoch": 2,
            "global_step": 4,
        },
    }
    assert len(trainer.test_dataloaders) == 2
    assert trainer.predict_dataloaders is None


def test_without_limits_there_is_none_to_tell():
    trainer = quiet_trainer(overfit_batches=3)
    assert (trainer.gradient_clip_val, trainer.gradient_clip_algorithm) == (None, None)
    assert (trainer.overfit_batches, trainer.limit_train_batches, trainer.limit_val_batches) == (3, 3, 3)
    assert trainer.early_stopping_callbacks == []


def test_log_dict_takes_what_log_takes_in_its_order():
    class Both(Classifier):
        def training_step(self, batch, batch_idx):
            self.log_dict({"a": 1.0, "b": 2.0}, True, False, on_epoch=True, on_step=False)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Both(), loader(8))
    assert trainer.progress_bar_metrics == {"a": 1.0, "b": 2.0}
    assert not {"a", "b"} & set(trainer.logged_metrics)


def test_metric_attribute_changes_nothing():
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs the package torchmetrics")

    def logged(**options):
        class Counts(Classifier):
            def __init__(self):
                super().__init__()
                self.mean = torchmetrics.MeanMetric()

            def training_step(self, batch, batch_idx):
                self.mean(batch[1].float())
                self.log("mean", self.mean, on_step=True, on_epoch=True, **options)
                return super().training_step(batch, batch_idx)

        trainer = quiet_trainer(max_epochs=1)
        trainer.fit(Counts(), loader(8))
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    assert logged(metric_attribute="mean") == logged()
    assert {"mean_step", "mean_epoch"} <= logged().keys()


class Gathers(Classifier):
    def on_fit_start(self):
        rank = self.global_rank
        self.found = self.all_gather(
            {"x": torch.full((2,), float(rank), requires_grad=True), "more": [rank + 0.5, rank]}
        )
        with pytest.raises(ConfigError, match="sync_grads=True"):
            self.all_gather(torch.ones(1), sync_grads=True)
        if self.trainer.world_size > 1:
            with pytest.raises(
                ConfigError, match=r"of shape \(1, 4\) on rank 0 and \(2, 4\) on rank 1\..*DistributedSampler"
            ):
                self.all_gather(torch.ones(rank + 1, 4))


def gathered():
    module = Gathers()
    quiet_trainer(devices="auto", max_steps=1).fit(module, loader(8))
    return {"x": module.found["x"].tolist(), "more": [one.tolist() for one in module.found["more"]]}


def test_all_gather_takes_collections_and_numbers():
    assert gathered() == {"x": [[0, 0]], "more": [[0.5], [0]]}
    expected = {"x": [[0, 0], [1, 1]], "more": [[0.5, 1.5], [0, 1]]}
    assert run_ranks(gathered, 2) == [expected, expected]


def test_num_devices_are_those_of_the_node():
    def counted():
        trainer = quiet_trainer(devices="auto")
        return trainer.num_devices, trainer.world_size, dist.get_world_size()

    assert run_ranks(counted, 2) == [(2, 2, 2)] * 2


def test_the_first_of_several_callbacks_is_the_one():
    first, second = ModelCheckpoint(filename="a"), ModelCheckpoint(filename="b")
    trainer = quiet_trainer(
        enable_checkpointing=True, callbacks=[first, second, EarlyStopping("x"), EarlyStopping("y")]
    )
    assert trainer.checkpoint_callback is first
    assert trainer.checkpoint_callbacks == [first, second]
    assert [one.monitor for one in trainer.early_stopping_callbacks] == ["x", "y"]
    assert trainer.early_stopping_callback.monitor == "x"
