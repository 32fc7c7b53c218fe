"""callback_metrics with two ranks: a read waits for no other rank, epoch values cover all ranks, and all ranks decide the same."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.nn import functional as F
from torchmetrics import SumMetric

from fabricamp.callbacks import EarlyStopping, ModelCheckpoint
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


class Seen(Classifier):
    """Logs the rank and other numbers; only rank 0 reads the metrics, in every hook."""

    def __init__(self):
        super().__init__()
        self.total = SumMetric()
        self.seen = []

    def note(self, moment):
        if self.global_rank == 0:
            self.seen.append((moment, {key: float(value) for key, value in self.trainer.callback_metrics.items()}))

    def training_step(self, batch, batch_idx):
        self.log("now", self.global_rank * 100.0 + batch_idx)
        self.log("mean", self.global_rank * 100.0, on_step=False, on_epoch=True)
        self.total.update(1.0)
        self.log("total", self.total, on_step=False, on_epoch=True)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val", self.global_rank * 10.0)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note("batch")

    def on_validation_epoch_end(self):
        self.note("validation")
        self.log("hook", 4.0 * self.global_rank - self.current_epoch)
        self.note("validation, logged")

    def on_train_epoch_end(self):
        self.note("train epoch")
        if self.global_rank == 1:
            self.total.update(10.0)
            self.log("rank_1", 8.0)


def fit(folder):
    stopping = EarlyStopping("hook", mode="max", patience=2)
    best = ModelCheckpoint(folder, filename="{epoch}", monitor="hook", mode="max")
    module = Seen()
    trainer = quiet_trainer(
        strategy="ddp",
        devices="auto",
        max_epochs=5,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_checkpointing=True,
        callbacks=[stopping, best],
    )
    trainer.fit(module, loader(16), loader(16))
    known = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return module.seen, known, stopping.stopped_epoch, best.best_model_path, best.best_model_score.item()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return run_ranks(fit, 2, tmp_path_factory.mktemp("best"))


def test_a_hook_on_one_rank_looks_without_the_others(both):
    seen = both[0][0]
    assert [values["now"] for moment, values in seen if moment == "batch"][:2] == [0.0, 1.0]
    before, logged = (
        next(values for name, values in seen if name == moment) for moment in ("validation", "validation, logged")
    )
    assert (before["val"], "hook" in before) == (5.0, False)
    assert logged["hook"] == 0.0  # the rank's own value, until the ranks reduce it after the hooks
    epoch = next(values for name, values in seen if name == "train epoch")
    assert (epoch["mean"], epoch["total"], epoch["hook"], epoch["now"]) == (50.0, 4.0, 2.0, 51.0)
    assert both[1][0] == []


def test_what_hooks_logged_on_any_rank_is_known_to_all_and_decides(both, tmp_path):
    for _, known, stopped, path, score in both:
        assert known["hook"] == 2.0 - 2
        assert known["rank_1"] == 8.0
        assert known["total"] == 14.0  # computed again, because a hook on rank 1 updated it
        assert (stopped, score) == (2, 2.0)
        assert path.endswith("epoch=0.ckpt")
    assert both[0][1] == both[1][1]


class ByStep(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("now", self.global_rank + (10.0, 2.0, 6.0, 0.0)[batch_idx])
        return F.cross_entropy(self.net(batch[0]), batch[1])


def save_by_step(folder):
    best = ModelCheckpoint(folder, filename="{step}-{now:.1f}", monitor="now", every_n_train_steps=1, save_top_k=2)
    options = {"strategy": "ddp", "devices": "auto"} if dist.is_initialized() else {}
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[best], **options)
    trainer.fit(ByStep(), loader(16 * trainer.world_size))
    return sorted(path.rpartition("/")[2] for path in best.best_k_models)


def test_a_checkpoint_every_step_is_ranked_by_that_steps_value(tmp_path):
    assert save_by_step(tmp_path / "one") == ["step=2-now=2.0.ckpt", "step=4-now=0.0.ckpt"]
    assert run_ranks(save_by_step, 2, tmp_path / "two") == [["step=2-now=2.5.ckpt", "step=4-now=0.5.ckpt"]] * 2
