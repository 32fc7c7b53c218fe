"""GradientMonitor: the norms of a loop by hand in every precision and strategy, and histograms in real files."""

from __future__ import annotations

import csv

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional as F

from fabricamp import Callback, ConfigError, OptLevel
from fabricamp.callbacks import GradientMonitor
from fabricamp.gradients.norms import histogram_of
from fabricamp.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from fabricamp.optimizers import FusedAdam
from fabricamp.utilities import grad_norm
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


class Fused(Classifier):
    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=0.01)


def by_hand(kind, steps, accumulate=1, size=4):
    """Returns the gradient norms of a loop in fp32, per parameter and in total."""
    module, batches, found = kind(), list(loader(32, size)), []
    optimizer = module.configure_optimizers()
    for step in range(steps):
        optimizer.zero_grad()
        for x, y in batches[step * accumulate : (step + 1) * accumulate]:
            (F.cross_entropy(module.net(x), y) / accumulate).backward()
        found.append({name: float(value) for name, value in grad_norm(module, 2).items()})
        optimizer.step()
    return found


def logged(folder, kind=Classifier, monitor=None, **options):
    """Returns the rows of a fit of four steps that logs every second step."""
    monitor = monitor or GradientMonitor(per_parameter=True)
    options = {"max_steps": 4, "log_every_n_steps": 2, "logger": CSVLogger(folder, name="", version="run"), **options}
    trainer = quiet_trainer(callbacks=[monitor], **options)
    trainer.fit(kind(), loader(32))
    rows = list(csv.DictReader((folder / "run" / "metrics.csv").read_text().splitlines()))
    named = [{name: float(value) for name, value in row.items() if value and "grad" in name} for row in rows]
    return {int(row["step"]): values for row, values in zip(rows, named, strict=True) if values}


def check(found, hand, tolerance):
    assert sorted(found) == [1, 3]
    for step, values in found.items():
        assert values == pytest.approx(hand[step], rel=tolerance, abs=tolerance)


CELLS = [
    ("O0", Classifier, 1, 1e-6),
    ("O1", Classifier, 2, 0.02),
    ("O2", Fused, 1, 0.02),
    ("O2", Classifier, 2, 0.02),
    ("O3", Classifier, 1, 0.05),
    ("O4", Fused, 2, 0.05),
    ("O5", Classifier, 1, 0.05),
]


@pytest.mark.parametrize(("precision", "kind", "accumulate", "tolerance"), CELLS)
def test_norms_are_those_of_a_loop_by_hand(tmp_path, precision, kind, accumulate, tolerance):
    options = {"precision": precision, "accumulate_grad_batches": accumulate}
    if kind is Classifier:
        options["gradient_clip_val"] = 1000.0  # before clipping
    found = logged(tmp_path, kind, **options)
    check(found, by_hand(kind, 4, accumulate), tolerance)


def on_a_rank(folder, strategy, precision):
    scale = {} if precision == "O0" else {"max_loss_scale": 2.0**8}  # a scale that does not overflow
    level = OptLevel(precision, **scale)
    options = {"strategy": strategy, "precision": level, "devices": "auto"}
    monitor = GradientMonitor(per_parameter=True)
    logger = CSVLogger(folder, name="", version="run")
    trainer = quiet_trainer(max_steps=4, log_every_n_steps=2, callbacks=[monitor], logger=logger, **options)
    trainer.fit(Fused(), loader(32, 2))


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "O1"), ("delayed_ddp", "O2"), ("fsdp", "O2")])
def test_norms_are_those_of_all_ranks(tmp_path, strategy, precision):
    run_ranks(on_a_rank, 2, tmp_path, strategy, precision)
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    hand = by_hand(Fused, 4)
    for row in rows:
        found = {name: float(value) for name, value in row.items() if "grad" in name}
        assert found == pytest.approx(hand[int(row["step"])], rel=0.02, abs=0.02)
    assert len(rows) == 2


def test_the_total_alone_of_another_order(tmp_path):
    found = logged(tmp_path, monitor=GradientMonitor(float("inf")))
    assert {name for values in found.values() for name in values} == {"grad_inf_norm_total"}


class Overflows(Callback):
    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == 1:
            pl_module.net[0].bias.grad.fill_(float("inf"))


def test_a_skipped_step_shows_what_it_was_skipped_for(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="run")
    callbacks = [GradientMonitor(histograms=True), Overflows()]
    events = TensorBoardLogger(tmp_path, name="events", version="run")
    options = {"max_steps": 4, "log_every_n_steps": 2, "logger": [logger, events], "precision": "O2"}
    trainer = quiet_trainer(callbacks=callbacks, **options)
    trainer.fit(Classifier(), loader(32))
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    totals = [float(row["grad_2.0_norm_total"]) for row in rows if row["grad_2.0_norm_total"]]
    assert totals[0] == float("inf")
    assert 0 < totals[1] < 10
    assert trainer.skipped_steps == 1
    read = EventAccumulator(str(tmp_path / "events" / "run"), size_guidance={"histograms": 0}).Reload()
    assert [one.step for one in read.Histograms("gradients/net.0.bias")] == [3]


class TwoByHand(Classifier):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(x), y))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]


def test_each_of_several_optimizers_has_its_own(tmp_path):
    found = logged(tmp_path, TwoByHand)
    first, second = ["net.0.weight", "net.0.bias"], ["net.2.weight", "net.2.bias"]
    for values in found.values():
        for total, names in (("grad_2.0_norm_total", first), ("grad_2.0_norm_total/1", second)):
            squares = sum(values[f"grad_2.0_norm/{name}"] ** 2 for name in names)
            assert values[total] == pytest.approx(squares**0.5, rel=1e-5)


class Critic(TwoByHand):
    """Steps its second optimizer twice a batch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        for number in (0, 1, 1):
            optimizer = self.optimizers()[number]
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(x), y))
            self.seen = self.net[2].weight.grad.norm()
            optimizer.step()


def test_the_last_of_several_steps_of_an_optimizer_is_logged(tmp_path):
    class Sees(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            norms.append(float(pl_module.seen))

    norms = []
    logger = CSVLogger(tmp_path, name="", version="run")
    callbacks = [GradientMonitor(per_parameter=True), Sees()]
    quiet_trainer(max_steps=2, log_every_n_steps=2, callbacks=callbacks, logger=logger).fit(Critic(), loader(32))
    (row,) = csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines())
    assert float(row["grad_2.0_norm/net.2.weight"]) == pytest.approx(norms[1], rel=1e-5)


def test_histograms_are_those_of_the_gradients(tmp_path):
    seen = {}

    class Notes(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if trainer.global_step == 1:
                seen.update({name: one.grad.clone() for name, one in pl_module.named_parameters()})

    logger = TensorBoardLogger(tmp_path, name="", version="run")
    options = {"max_steps": 2, "log_every_n_steps": 2, "precision": "O1"}
    trainer = quiet_trainer(callbacks=[GradientMonitor(histograms=True), Notes()], logger=logger, **options)
    trainer.fit(Classifier(), loader(32))
    read = EventAccumulator(str(tmp_path / "run"), size_guidance={"histograms": 0}).Reload()
    for name, gradient in seen.items():
        (event,) = read.Histograms(f"gradients/{name}")
        value = event.histogram_value
        assert (event.step, value.num, sum(value.bucket)) == (1, gradient.numel(), gradient.numel())
        assert value.sum == pytest.approx(float(gradient.double().sum()), abs=1e-9)
        assert (value.min, value.max) == pytest.approx((float(gradient.min()), float(gradient.max())), rel=1e-6)


@pytest.mark.parametrize("values", [[1.0, 2.0, 5.0], [3.0, 3.0], [0.0], [float("nan"), 1.0, float("inf"), 2.0]])
def test_histograms_leave_out_what_is_not_finite(values):
    tensor = torch.tensor(values)
    found, finite = histogram_of(tensor), tensor[tensor.isfinite()]
    assert (float(found.counts.sum()), float(found.low)) == (len(finite), float(finite.min()))
    assert (float(found.total), float(found.squares)) == (float(finite.sum()), float((finite**2).sum()))
    assert found.counts[0] >= 1


def test_sparse_gradients_and_none_at_all():
    embedding = torch.nn.Embedding(10, 2, sparse=True)
    assert grad_norm(embedding, 2) == {}
    embedding(torch.tensor([1, 1])).sum().backward()
    assert float(grad_norm(embedding, 2)["grad_2.0_norm_total"]) == pytest.approx(8**0.5)
    assert float(histogram_of(torch.full((2,), float("nan"))).counts.sum()) == 0


def test_weights_and_biases_takes_histograms(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the package wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # what an earlier test began has read W&B's variables
    logger = WandbLogger(save_dir=tmp_path, version="abc")
    _ = logger.experiment  # W&B's service may take longer to start on a busy machine than the end of a fit waits
    trainer = quiet_trainer(
        max_steps=2, log_every_n_steps=2, callbacks=[GradientMonitor(histograms=True)], logger=logger
    )
    trainer.fit(Classifier(), loader(32))
    summary = logger.experiment.summary
    assert sum(summary["gradients/net.0.weight"]["values"]) == 128
    wandb.finish()
    wandb.teardown()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GradientMonitor(0), "norm_type=0.*above 0"),
        (lambda: GradientMonitor("two"), "norm_type='two'.*give a number"),
        (lambda: GradientMonitor(histograms=1), "histograms=1.*True or False"),
        (lambda: logs_into(False), "needs a logger"),
        (lambda: logs_into(CSVLogger(".")), "CSVLogger takes no histograms; give a TensorBoardLogger or a WandbLogger"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def logs_into(logger):
    quiet_trainer(logger=logger, callbacks=GradientMonitor(histograms=True)).fit(Classifier(), loader())
