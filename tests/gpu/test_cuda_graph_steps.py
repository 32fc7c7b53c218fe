"""Several steps in one launch: the bits of eager steps, also in what hooks see after each step, and the events of a run."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import Callback, ConfigError, CudaGraph, NonFiniteError, OptLevel
from fabricamp.callbacks import AmpState, ModelCheckpoint
from fabricamp.data import ResidentLoader
from fabricamp.optimizers import FusedAdam
from tests.gpu.test_cuda_graph import (
    LEVELS,
    Measured,
    Net,
    Seen,
    Shapes,
    captured,
    equal,
    images,
    trainer_of,
)
from tests.inside import captured_groups

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

STEPS = 8
GROUPED = CudaGraph(steps=STEPS)


class Late(Callback):
    """Records the values that late hooks see unchanged for each step, and the number of launches."""

    def __init__(self):
        self.rows, self.epochs, self.launches = [], [], 0

    def holds_at(self, global_step):
        return math.inf

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        logged = trainer.callback_metrics
        values = [outputs["loss"], batch[0].sum(), logged["loss"], logged.get("accuracy_step", logged["loss"])]
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        rate = lr.clone() if isinstance(lr, torch.Tensor) else lr
        self.rows.append((trainer.global_step, batch_idx, rate, trainer.skipped_steps, [one.clone() for one in values]))

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append({name: value.clone() for name, value in trainer.callback_metrics.items()})
        self.launches = max(self.launches, sum(one.replays for one in captured_groups(captured(trainer)).values()))


class Scheduled(Net):
    """Has another kind of schedule, of learning rates or of momentum too."""

    def __init__(self, optimizer="fused", kind="cycle", steps=320):
        super().__init__(optimizer, schedule=False)
        self.kind, self.steps = kind, steps

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        make = {
            "cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.003, total_steps=self.steps),
            "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8),
        }[self.kind]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(), "interval": "step", "frequency": 1}}


def fit(graph, precision="O0", module=None, loader=None, *callbacks, **options):
    late = Late()
    given = {"log_every_n_steps": 50, "max_epochs": 3, **options}
    trainer = trainer_of(graph, precision, callbacks=[late, *callbacks], **given)
    module = module or Net()
    torch.manual_seed(3)
    trainer.fit(module, loader or images(30, last=3), images(2))
    late.generator = torch.cuda.get_rng_state()
    return trainer, module, late


def same(one, other, launches=1):
    """Checks that two fits have the same bits, that their hooks saw the same, and that the second launched steps together."""
    (first, own, seen), (second, others, watched) = one, other
    assert watched.launches >= launches
    assert len(seen.rows) == len(watched.rows)
    for left, right in zip(seen.rows, watched.rows, strict=True):
        assert left[:4] == right[:4]
        assert all(map(equal, left[4], right[4])), left[0]
    for left, right in zip(seen.epochs, watched.epochs, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
    for (name, left), right in zip(own.state_dict().items(), others.state_dict().values(), strict=True):
        assert equal(left, right), name
    states = [[*each.optimizers[0].state.values()] for each in (first, second)]
    for left, right in zip(*states, strict=True):
        for key, value in left.items():
            assert not isinstance(value, torch.Tensor) or equal(value, right[key]), key
    assert equal(seen.generator.float(), watched.generator.float())
    assert (first.global_step, first.skipped_steps) == (second.global_step, second.skipped_steps)


@pytest.mark.parametrize("optimizer", ["fused", "torch"])
@pytest.mark.parametrize("precision", LEVELS)
def test_300_steps_have_the_bits_of_eager_ones(precision, optimizer):
    level = OptLevel(precision, scale_window=20) if precision in ("O1", "O2") else precision
    options = {"gradient_clip_val": 0.5, "max_epochs": 10, "val_check_interval": 16}
    runs = [fit(graph, level, Net(optimizer), images(30, spikes=True, last=3), **options) for graph in (False, GROUPED)]
    assert runs[1][0].global_step == 310
    if precision in ("O1", "O2"):
        assert runs[1][0].skipped_steps > 9
    same(*runs, launches=25)


@pytest.mark.parametrize("kind", ["cycle", "step"])
@pytest.mark.parametrize("optimizer", ["fused", "torch"])
@pytest.mark.parametrize("precision", ["O0", "O2"])
def test_schedules_by_steps(precision, optimizer, kind):
    """OneCycle also changes betas, which are constants in torch's captured optimizers: these get a schedule of rates only."""
    if (optimizer, kind) == ("torch", "cycle"):
        kind = "step"
    level = OptLevel(precision, scale_window=6) if precision == "O2" else precision
    runs = [
        fit(graph, level, Scheduled(optimizer, kind, 96), images(30, spikes=True, last=1)) for graph in (False, GROUPED)
    ]
    same(*runs, launches=5)


@pytest.mark.parametrize("optimizer", ["sgd", "lamb", "larc"])
@pytest.mark.parametrize("precision", ["O0", "O2"])
def test_other_optimizers_and_policies(precision, optimizer):
    options = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "nan_policy": "skip"}
    runs = [
        fit(graph, precision, Net(optimizer, schedule=False), images(30, spikes=True), **options)
        for graph in (False, CudaGraph(steps=5, check_every=2))
    ]
    same(*runs, launches=8)


@pytest.mark.parametrize("precision", ["O0", "O1", "O2"])
def test_data_on_the_gpu_metrics_and_no_hidden_wait(precision):
    class ErrorOnWait(Callback):
        def holds_at(self, global_step):
            return math.inf

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 40:
                torch.cuda.set_sync_debug_mode("error")

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 76:
                torch.cuda.set_sync_debug_mode("default")

        def on_exception(self, trainer, module, exception):
            torch.cuda.set_sync_debug_mode("default")

    def run(graph):
        loader = ResidentLoader(*images(40).dataset.tensors, batch_size=8, shuffle=True, transform=lambda one: one)
        return fit(graph, precision, Measured(), loader, ErrorOnWait(), log_every_n_steps=80)

    same(run(False), run(GROUPED), launches=10)


@pytest.mark.parametrize("policy", ["raise", "stop"])
def test_an_overflow_names_the_parameter(policy):
    words = []
    for graph in (False, GROUPED):
        loader = images(30)
        loader.dataset.tensors[0][8 * 20] = float("nan")
        if policy == "stop":
            trainer, module, _ = fit(graph, "O0", Net(), loader, nan_policy=policy)
            words.append((trainer.state.stop_explanation, [one.clone() for one in module.parameters()]))
            continue
        with pytest.raises(NonFiniteError) as caught:
            fit(graph, "O0", Net(), loader, nan_policy=policy)
        words.append((str(caught.value), []))
    (first, weights), (second, others) = words
    assert "net." in first
    assert first == second
    assert all(map(equal, weights, others))


@pytest.mark.parametrize("graphs", [(False, GROUPED), (GROUPED, False), (GROUPED, CudaGraph(steps=3))])
def test_exact_resume_within_what_would_be_a_launch(graphs, tmp_path):
    """Saves at step 45; the resumed run's launches begin at other steps."""
    level = OptLevel("O2", scale_window=7)
    loaders = [images(30, spikes=True, last=3) for _ in range(2)]
    whole = fit(graphs[0], level, Net(), loaders[0], AmpState(), max_steps=90, max_epochs=-1)
    keeper = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=45, save_top_k=-1)
    fit(graphs[0], level, Net(), loaders[0], keeper, max_steps=45, max_epochs=-1, enable_checkpointing=True)
    (file,) = tmp_path.glob("*step=45*")
    late = Late()
    trainer = trainer_of(graphs[1], level, callbacks=[late], max_steps=90, max_epochs=-1, log_every_n_steps=50)
    module = Net()
    trainer.fit(module, loaders[1], images(2), ckpt_path=file)
    assert late.launches > 0 or not graphs[1]
    assert [row[:4] for row in whole[2].rows[45:]] == [row[:4] for row in late.rows]
    for (name, left), right in zip(whole[1].state_dict().items(), module.state_dict().values(), strict=True):
        assert equal(left, right), name


def test_batches_of_several_shapes_and_layers_that_freeze():
    class Freeze(Callback):
        def on_train_epoch_start(self, trainer, module):
            module.net[0].requires_grad_(trainer.current_epoch != 2)

    runs = [
        fit(graph, "O2", Net(), DataLoader(Shapes(), batch_size=None), Freeze(), max_epochs=4)
        for graph in (False, CudaGraph(steps=4, warmup=4))
    ]
    same(*runs, launches=0)
    runs = [fit(graph, "O2", Net(), images(30), Freeze(), max_epochs=4) for graph in (False, GROUPED)]
    same(*runs, launches=3)


def test_it_launches_together_what_it_can():
    launches = []

    class Look(Callback):
        def holds_at(self, global_step):
            return math.inf

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            launches.append(sum(one.replays for one in captured_groups(captured(trainer)).values()))

    _, _, late = fit(GROUPED, "O0", Net(), images(40), Look(), max_epochs=1)
    # Eleven batches run one by one, the last of them as the first replay; a launch is made at the first of its batches.
    assert launches == [*[0] * 11, *[1] * 8, *[2] * 8, *[3] * 8, *[3] * 5]
    assert late.launches == 3


def test_what_is_refused_or_launched_step_by_step(caplog):
    with pytest.raises(
        ConfigError, match=r"CudaGraph\(steps=8\): Seen.on_train_batch_end may look at each step's weights"
    ):
        fit(GROUPED, "O0", Net(), None, Seen())
    optional = CudaGraph(steps=8, required=False)
    runs = [
        fit(graph, "O0", Net(), None, Seen(), max_epochs=1, enable_model_summary=True) for graph in (False, optional)
    ]
    same(*runs, launches=0)
    assert "launches each step by itself: Seen.on_train_batch_end" in caplog.text

    class LogsToo(Callback):
        def holds_at(self, global_step):
            return math.inf

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            module.log("loss", outputs["loss"], on_step=True, on_epoch=True)

    with pytest.raises(ConfigError, match="a batch hook logs a name that training_step logs too"):
        fit(GROUPED, "O0", Net(), None, LogsToo())


def test_a_schedule_that_reads_the_run_is_an_error():
    class Reads(Net):
        def configure_optimizers(self):
            optimizer = FusedAdam(self.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + self.trainer.global_step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    with pytest.raises(ConfigError, match="a schedule gave other learning rates than its copy"):
        fit(GROUPED, "O0", Reads())
