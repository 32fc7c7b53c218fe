"""The step as one CUDA graph: the bits of eager steps, effects of Python code in a step, and the events of a run."""

from __future__ import annotations

import random
import re

import pytest
import torch
import torchmetrics
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback, ConfigError, CudaGraph, NonFiniteError, OptLevel, Trainer, TrainingModule
from fabricamp.callbacks import EMA, BaseFinetuning, ModelCheckpoint
from fabricamp.optimizers import LARC, FusedAdam, FusedLAMB, FusedSGD
from tests.inside import captured_evaluations, captured_steps, graph_update

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

OPTIMIZERS = {
    "fused": lambda parameters: FusedAdam(parameters, lr=1e-3, eps=1e-4, weight_decay=0.01),
    "sgd": lambda parameters: FusedSGD(parameters, lr=0.01, momentum=0.9),
    "lamb": lambda parameters: FusedLAMB(parameters, lr=1e-3),
    "larc": lambda parameters: LARC(FusedSGD(parameters, lr=0.01, momentum=0.9)),
    "torch": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(1e-3, device="cuda"), eps=1e-4, fused=True, capturable=True
    ),
}
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


class Net(TrainingModule):
    """Convolution, BatchNorm, dropout and noise that the step draws itself; the learning rate follows a schedule."""

    def __init__(self, optimizer="fused", schedule=True):
        super().__init__()
        torch.manual_seed(0)
        self.optimizer, self.schedule = optimizer, schedule
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(8 * 36, 10),
        )
        self.factor = 1.0

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x + 0.01 * torch.randn_like(x)), y) * self.factor
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.05 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def images(count, *, spikes=False, last=0):
    """Returns batches of 8, with a shorter last batch of an epoch; with ``spikes`` some batches overflow fp16."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * count + last, 1, 8, 8, generator=generator)
    if spikes:
        x[8 * (count // 2)] = 3e5
    return DataLoader(TensorDataset(x, torch.randint(0, 10, (len(x),), generator=generator)), batch_size=8)


class Seen(Callback):
    """Records what hooks get: outputs, gradients, logged values."""

    def __init__(self):
        self.losses, self.gradients, self.epochs = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(torch.zeros(()) if outputs is None else outputs["loss"])
        held = next(iter(module.parameters())).grad
        self.gradients.append(None if held is None else held.clone())

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append(dict(trainer.callback_metrics))


def trainer_of(graph, precision="O0", **options):
    given = {
        "accelerator": "gpu",
        "devices": 1,
        "precision": precision,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 7,
        "cuda_graph": graph,
    }
    return Trainer(**{**given, **options})


def fit(graph, precision="O0", module=None, loader=None, validation=None, seed=3, **options):
    seen = Seen()
    callbacks = [seen, *options.pop("callbacks", ())]
    trainer = trainer_of(graph, precision, callbacks=callbacks, **options)
    module = module or Net()
    torch.manual_seed(seed)
    trainer.fit(module, loader or images(30, last=3), validation or images(2))
    return trainer, module, seen


def captured(trainer):
    return graph_update(trainer)


def equal(one, other):
    """Returns whether two tensors have the same bits; any NaN equals any other."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def same(one, other):
    """Checks equal bits of two fits: weights, buffers, optimizer, scale, generators, outputs, gradients, logged values."""
    (first, own, seen), (second, others, watched) = one, other
    for (name, left), right in zip(own.state_dict().items(), others.state_dict().values(), strict=True):
        assert equal(left, right), name
    assert len(seen.losses) == len(watched.losses)
    for number, (left, right) in enumerate(zip(seen.losses, watched.losses, strict=True)):
        assert equal(left, right), number
    for left, right in zip(seen.gradients, watched.gradients, strict=True):
        assert (left is None) == (right is None)
        assert left is None or equal(left, right)
    for left, right in zip(seen.epochs, watched.epochs, strict=True):
        assert left.keys() == right.keys()
        for key in left:
            torch.testing.assert_close(left[key], right[key], rtol=0, atol=0, equal_nan=True)
    states = [[*one.optimizers[0].state.values()] for one in (first, second)]
    for left, right in zip(*states, strict=True):
        for key, value in left.items():
            assert not isinstance(value, torch.Tensor) or equal(value, right[key]), key
    assert first.optimizers[0].param_groups[0]["lr"] == second.optimizers[0].param_groups[0]["lr"]
    assert first.skipped_steps == second.skipped_steps
    assert first.global_step == second.global_step


@pytest.mark.parametrize("optimizer", ["fused", "torch"])
@pytest.mark.parametrize("precision", LEVELS)
def test_300_steps_have_the_bits_of_eager_ones(precision, optimizer):
    level = OptLevel(precision, scale_window=40) if precision in ("O1", "O2") else precision
    runs = []
    for graph in (False, True):
        module = Net(optimizer)
        loader = images(30, spikes=True, last=3)
        options = {"gradient_clip_val": 0.5, "max_epochs": 10, "val_check_interval": 13}
        runs.append(fit(graph, level, module, loader, **options))
        state = torch.cuda.get_rng_state()
        runs[-1][2].losses.append(state[:8].view(torch.int32).float())
    assert runs[1][0].global_step == 310
    same(*runs)


@pytest.mark.parametrize("optimizer", ["fused", "torch"])
@pytest.mark.parametrize("precision", LEVELS)
def test_windows_of_several_batches_have_the_bits_of_eager_ones(precision, optimizer):
    """Accumulates three batches, with one short batch at the end of an epoch: each position in a step has its own graph."""
    level = OptLevel(precision, scale_window=15) if precision in ("O1", "O2") else precision
    options = {"gradient_clip_val": 0.5, "max_epochs": 8, "accumulate_grad_batches": 3, "val_check_interval": 13}
    runs = [
        fit(graph, level, Net(optimizer), images(30, spikes=True, last=3), **options)
        for graph in (False, CudaGraph(warmup=6))
    ]
    assert runs[1][0].global_step == 88
    same(*runs)


@pytest.mark.parametrize("partial", ["carry", "drop"])
@pytest.mark.parametrize("precision", ["O0", "O2"])
def test_windows_that_an_epoch_leaves_open(precision, partial):
    options = {"accumulate_grad_batches": 4, "partial_window": partial, "max_epochs": 4}
    runs = [fit(graph, precision, loader=images(30), **options) for graph in (False, CudaGraph(warmup=4))]
    assert runs[1][0].global_step == {"carry": 30, "drop": 28}[partial]
    same(*runs)


def test_the_bar_says_how_steps_run(caplog):
    fit(CudaGraph(warmup=4), max_epochs=2, enable_progress_bar=True)
    fit("auto", module=Effect("counter"), max_epochs=1, enable_progress_bar=True)
    said = caplog.text
    assert re.search(r"CUDA graph: steps of batches \(8, 1, 8, 8\), \(8,\) are replayed .* with \d+\.\d\d GiB", said)
    lines = [line for line in caplog.messages if line.startswith("epoch")]
    assert ["graph" in line for line in lines] == [True, True, False]
    assert "eager" in lines[2]


class Shapes(torch.utils.data.Dataset):
    """Batches of three sizes, in random order."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        size = 4 + 2 * (int(torch.randint(3, (), generator=generator)))
        return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator)


class Poison(Callback):
    """Fills the free memory of the graphs' shared pool with NaN before each batch."""

    def __init__(self):
        self.graph, self.held, self.bytes = None, None, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        update = captured(trainer)
        if update is None or len(captured_steps(update)) < 9:
            return
        if self.graph is None:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=update.graphs.pool.id, stream=torch.cuda.current_stream()):
                self.held = [torch.full((2**18,), float("nan"), device="cuda") for _ in range(4)]
                self.held += [torch.full((64,), float("nan"), device="cuda") for _ in range(2000)]
                self.held.clear()
        self.graph.replay()


@pytest.mark.parametrize("precision", ["O1", "O2"])
def test_graphs_that_share_memory_leave_nothing_in_it(precision):
    poison = Poison()

    def run(graph, *callbacks):
        torch.manual_seed(0)
        loader = DataLoader(Shapes(), batch_size=None, shuffle=True)
        options = {"accumulate_grad_batches": 4, "callbacks": [*callbacks], "max_epochs": 8, "nan_policy": "skip"}
        return fit(graph, precision, Net(), loader, **options)

    same(run(False), run(CudaGraph(warmup=3), poison))
    assert poison.graph is not None


@pytest.mark.parametrize("graphs", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("precision", ["O0", "O2"])
def test_exact_resume_within_a_window(graphs, precision, tmp_path):
    first, second = (graph and CudaGraph(warmup=3) for graph in graphs)
    options = {"accumulate_grad_batches": 4, "max_epochs": 3}
    whole = fit(first, precision, **options)

    class Save(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 21:  # after two of four micro-batches
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    fit(first, precision, callbacks=[Save()], **options)
    trainer = trainer_of(second, precision, **options)
    module = Net()
    trainer.fit(module, images(30, last=3), images(2), ckpt_path=tmp_path / "middle.ckpt")
    for (name, left), right in zip(whole[1].state_dict().items(), module.state_dict().values(), strict=True):
        assert equal(left, right), name


@pytest.mark.parametrize("precision", ["O0", "O2"])
def test_parameters_that_take_no_part_in_windows(precision):
    """A parameter without a gradient, a parameter frozen for an epoch, and hooks that see the same as after eager steps."""

    class Partly(Net):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Linear(3, 3)

    class Freeze(Callback):
        def on_train_epoch_start(self, trainer, module):
            module.net[0].requires_grad_(trainer.current_epoch != 2)

    options = {"accumulate_grad_batches": 2, "max_epochs": 4}
    same(*(fit(graph, precision, Partly(), callbacks=[Freeze()], **options) for graph in (False, CudaGraph(warmup=4))))


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}])
@pytest.mark.parametrize("optimizer", ["sgd", "lamb", "larc"])
@pytest.mark.parametrize("precision", ["O0", "O2"])
def test_other_optimizers_and_clips(precision, optimizer, clip):
    same(*(fit(graph, precision, Net(optimizer), max_epochs=2, **clip) for graph in (False, True)))


def test_it_replays_and_gives_the_stream_and_memory_back():
    outer = torch.cuda.current_stream()
    steps, addresses = [], []

    class Look(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            (step,) = captured_steps(captured(trainer)).values() or (None,) if trainer.global_step > 10 else (None,)
            steps.append(step and step.replays)
            addresses.append([one.grad.data_ptr() for one in module.parameters()])

    trainer, *_ = fit(True, max_epochs=1, callbacks=[Look()])
    assert steps[10] == 1  # the eleventh batch is the first replay
    assert steps[-2] == 20
    assert addresses[10:-1] == [addresses[10]] * 20  # gradients stay where the graph writes them
    assert torch.cuda.current_stream() == outer
    assert not captured_steps(captured(trainer))


def test_an_attribute_that_hooks_rebind_is_captured_anew():
    class Warm(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            module.factor = 1.0 + batch_idx // 15

    same(*(fit(graph, max_epochs=2, callbacks=[Warm()]) for graph in (False, True)))


def test_an_attribute_that_changes_in_each_step_is_refused():
    class Count(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            module.factor = 1.0 + batch_idx

    with pytest.raises(ConfigError, match="the attribute 'factor' is replaced in each step"):
        fit(True, max_epochs=1, callbacks=[Count()])
    same(*(fit(graph, max_epochs=1, callbacks=[Count()]) for graph in (False, "auto")))


def test_freezing_in_an_epoch_is_captured_anew():
    class Freeze(Callback):
        def on_train_epoch_start(self, trainer, module):
            module.net[0].requires_grad_(trainer.current_epoch != 1)

    same(*(fit(graph, max_epochs=3, callbacks=[Freeze()]) for graph in (False, True)))


@pytest.mark.parametrize("precision", ["O0", "O2"])
def test_parameters_that_join_later(precision):
    class Later(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=1e-4)

    class Part(Net):
        def configure_optimizers(self):
            return FusedAdam([one for one in self.parameters() if one.requires_grad], lr=1e-3)

    runs = [fit(graph, precision, Part(), max_epochs=3, callbacks=[Later()]) for graph in (False, True)]
    assert len(runs[1][0].optimizers[0].param_groups) == 2
    same(*runs)


def test_averages_of_the_weights():
    averages = [EMA(decay=0.9), EMA(decay=0.9)]
    runs = [
        fit(graph, "O2", Net(), images(30, spikes=True), max_epochs=3, callbacks=[average])
        for graph, average in zip((False, True), averages, strict=True)
    ]
    same(*runs)


class Effect(Net):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.counter, self.outputs, self.nested = kind, 0, [], {"a": {"b": []}}
        self.hidden = [torch.Generator("cuda").manual_seed(5)]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.kind == "append":
            self.outputs.append(loss.detach())
        elif self.kind == "counter":
            self.counter += 1
        elif self.kind == "nested":
            self.nested["a"]["b"].append(1)
        elif self.kind == "number":
            self.log("number", 1.0)
        elif self.kind == "index":
            loss = loss * (1 + batch_idx % 2)
        elif self.kind == "step":
            loss = loss * (1 + self.global_step)
        elif self.kind == "random":
            loss = loss * random.random()
        elif self.kind == "item":
            loss = loss * (1 + loss.item())
        elif self.kind == "none":
            return None
        elif self.kind == "generator":
            loss = loss * torch.rand((), generator=self.hidden[0], device="cuda")
        elif self.kind == "broken" and torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
        return loss


WORDS = {
    "append": "changes Effect.outputs",
    "counter": "changes Effect.counter",
    "nested": "changes Effect.nested",
    "number": r"self.log\('number', ...\) with a float",
    "index": "uses batch_idx",
    "step": "reads global_step",
    "random": "draws from random",
    "item": r"waits for the device: .*test_cuda_graph.py:\d+",
    "none": "returned no loss",
    "broken": r"something that cannot be captured .*",
    "generator": r"something that cannot be captured .*",
}


@pytest.mark.parametrize("kind", WORDS)
def test_what_a_replay_would_not_do_is_refused_or_runs_eagerly(kind):
    random.seed(0)
    with pytest.raises(ConfigError, match=WORDS[kind]):
        fit(True, module=Effect(kind), max_epochs=1)
    runs = []
    for graph in (False, "auto"):
        random.seed(0)
        runs.append(fit(graph, module=Effect(kind), max_epochs=2))
    same(*runs)
    assert captured(runs[1][0]).why_eager
    assert runs[0][1].counter == runs[1][1].counter
    assert len(runs[0][1].outputs) == len(runs[1][1].outputs)


def test_after_a_failed_step_all_is_given_back():
    outer = torch.cuda.current_stream()
    with pytest.raises(ConfigError):
        fit(True, module=Effect("index"), max_epochs=1)
    assert torch.cuda.current_stream() == outer
    torch.rand(3, device="cuda")  # would raise if the generator were still part of a capture
    fit(True, max_epochs=1)


def test_after_a_failed_capture_memory_of_several_streams_is_free_again():
    """The allocator only reuses memory that several streams used if it does not take a capture to be running."""
    device, side = torch.device("cuda", 0), torch.cuda.Stream()
    with pytest.raises(ConfigError):
        fit(True, module=Effect("broken"), max_epochs=1)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    for _ in range(50):
        held = torch.empty(2**24, dtype=torch.uint8, device=device)
        held.record_stream(side)
        del held
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved(device) - before <= 2**26


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_an_overflow_names_the_parameter(policy, accumulate):
    options = {"nan_policy": policy, "max_epochs": 1, "accumulate_grad_batches": accumulate}

    def run(graph):
        loader = images(30, spikes=True)
        return fit(graph, "O2" if policy == "skip" else "O0", Net(), loader, **options)

    if policy == "skip":
        same(run(False), run(True))
        return
    words = []
    for graph in (False, True):
        loader = images(30)
        loader.dataset.tensors[0][8 * 20] = float("nan")
        with pytest.raises(NonFiniteError) as caught:
            fit(graph, "O0", Net(), loader, **options)
        words.append(str(caught.value))
    assert "net." in words[1]
    assert words[0] == words[1]


@pytest.mark.parametrize("graphs", [(False, True), (True, False), (True, True)])
def test_exact_resume_across_eager_and_graph(graphs, tmp_path):
    whole = fit(graphs[0], "O2", max_steps=60)
    keeper = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=25, save_top_k=-1)
    fit(graphs[0], "O2", max_steps=25, callbacks=[keeper], enable_checkpointing=True)
    (file,) = tmp_path.glob("*step=25*")
    seen = Seen()
    trainer = trainer_of(graphs[1], "O2", callbacks=[seen], max_steps=60)
    module = Net()
    trainer.fit(module, images(30, last=3), images(2), ckpt_path=file)
    for (name, left), right in zip(whole[1].state_dict().items(), module.state_dict().values(), strict=True):
        assert equal(left, right), name


def test_more_shapes_than_allowed_run_eagerly():
    def run(graph):
        return fit(graph, module=Net(), loader=DataLoader(Shapes(), batch_size=None), max_epochs=2)

    eager = run(False)
    for options in (CudaGraph(warmup=4, shapes=2), CudaGraph(warmup=4, check_every=3)):
        same(eager, run(options))


def test_a_second_fit_and_batches_of_dicts():
    class Dicts(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch["x"], batch["more"][0]), batch_idx)

    def collate(samples):
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        return {"x": x, "more": [y], "name": "digits"}

    def run(graph):
        seen = Seen()
        trainer = trainer_of(graph, "O1", callbacks=[seen], max_epochs=1)
        module = Dicts()
        torch.manual_seed(3)
        loader = DataLoader(images(20).dataset, batch_size=8, collate_fn=collate)
        trainer.fit(module, loader)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader)
        return trainer, module, seen

    same(run(False), run(True))


class Measured(Net):
    """torchmetrics objects in training and validation: by update, by forward, and as a collection with shared states."""

    def __init__(self, kind="accuracy"):
        super().__init__()
        options = {
            "num_classes": 10,
            "validate_args": False,
            "average": "micro",
        }  # other options use a call that waits for the device
        self.kind = kind
        self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(**options)
        self.scores = torchmetrics.MetricCollection(
            {
                "precision": torchmetrics.classification.MulticlassPrecision(**options),
                "recall": torchmetrics.classification.MulticlassRecall(**options),
            }
        )
        self.mean = torchmetrics.MeanSquaredError()
        self.curve = torchmetrics.classification.MulticlassAUROC(10, validate_args=False) if kind == "curve" else None

    def training_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        self.train_accuracy(scores, batch[1])
        self.log("accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        loss = F.cross_entropy(scores, batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        scores = self.net(batch[0])
        self.scores.update(scores, batch[1])
        if dataloader_idx == 0:
            self.log_dict(dict(self.scores.items()), add_dataloader_idx=False)
        self.mean.update(scores.softmax(-1).amax(-1), torch.ones_like(scores[:, 0]))
        if self.curve is not None:
            self.curve.update(scores, batch[1])
        loss = F.cross_entropy(scores, batch[1])
        self.log("val_loss", loss)
        return {"scores": scores, "loss": loss}

    def on_validation_epoch_end(self):
        self.log("mean", self.mean.compute())
        self.mean.reset()

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


class Validated(Callback):
    """Records what the hooks of an evaluation get, and its logged values."""

    def __init__(self):
        self.outputs, self.values = [], []

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.outputs.append(outputs["scores"])

    def on_validation_end(self, trainer, module):
        self.values.append({name: value.clone() for name, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize("precision", ["O0", "O1", "O2"])
def test_evaluation_and_torchmetrics_have_the_bits_of_eager_ones(precision):
    found = []
    for graph in (False, CudaGraph(warmup=4)):
        watch, module = Validated(), Measured()
        loaders = [images(12, last=3), images(7)]
        fitted = fit(
            graph, precision, module, validation=loaders, max_epochs=4, val_check_interval=10, callbacks=[watch]
        )
        trainer = fitted[0]
        results = trainer.validate(module, loaders)
        if graph:
            (evaluation,) = captured_evaluations(trainer)
            assert not evaluation.why_eager
        predictions = trainer.predict(module, images(12, last=3))
        found.append((fitted, watch, results, predictions))
    (one, first, results, predictions), (other, second, others, predicted) = found
    same(one, other)
    assert results == others
    for left, right in zip(predictions + first.outputs, predicted + second.outputs, strict=True):
        assert equal(left, right)
    assert len(first.values) == len(second.values) > 10
    for left, right in zip(first.values, second.values, strict=True):
        assert left.keys() == right.keys()
        assert {"val_loss/dataloader_idx_0", "precision", "mean"} <= left.keys()
        for name, value in left.items():
            assert equal(value, right[name]), name


class OtherwiseMeasured(Measured):
    """Computes something else in validation while it is captured."""

    def validation_step(self, batch, batch_idx):
        if not torch.cuda.is_current_stream_capturing():
            return super().validation_step(batch, batch_idx)
        x, y = batch
        return super().validation_step((x * 1.5, y), batch_idx)


def test_a_wrong_replay_of_an_evaluation_is_no_batch_of_the_run():
    """The eager call of the comparison replaces the wrong replay in outputs, logged values and torchmetrics objects."""
    with pytest.raises(ConfigError, match="a replay of validation_step differs bitwise from an eager call"):
        fit(CudaGraph(warmup=4), module=OtherwiseMeasured(), validation=images(12), max_epochs=1)
    found = []
    for graph in (False, "auto"):
        watch = Validated()
        fitted = fit(graph, module=OtherwiseMeasured(), validation=images(12), max_epochs=2, callbacks=[watch])
        found.append((fitted, watch))
    (one, first), (other, second) = found
    same(one, other)
    assert len(first.outputs) == len(second.outputs)
    for left, right in zip(first.outputs, second.outputs, strict=True):
        assert equal(left, right)
    for left, right in zip(first.values, second.values, strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert equal(value, right[name]), name


def test_an_evaluation_that_is_replayed():
    class Look(Callback):
        def on_validation_epoch_end(self, trainer, module):
            graphs = captured_evaluations(trainer)
            self.replays = sum(one.replays for each in graphs for one in each._graphs.values())

    look, module = Look(), Measured()
    fit(CudaGraph(warmup=4), module=module, validation=images(12), max_epochs=2, callbacks=[look])
    assert look.replays == 2 + 24 - 3  # the batches of the sanity check count too
    trainer = trainer_of(CudaGraph(warmup=4, check_every=2), callbacks=[look])
    trainer.validate(module, images(12))
    assert look.replays == 12 - 3


def test_what_an_evaluation_would_not_repeat_is_refused():
    class Appends(Measured):
        def __init__(self):
            super().__init__()
            self.seen = []

        def validation_step(self, batch, batch_idx):
            self.seen.append(super().validation_step(batch, batch_idx)["scores"])

    with pytest.raises(ConfigError, match=r"validation_step changes Appends.seen"):
        fit(True, module=Appends(), max_epochs=1)
    with pytest.raises(ConfigError, match=r"validation_step changes MulticlassAUROC.preds"):
        fit(True, module=Measured("curve"), max_epochs=1)
    runs = [fit(graph, module=Appends(), validation=images(14), max_epochs=2) for graph in (False, "auto")]
    same(*runs)
    assert captured(runs[1][0]).why_eager == ""
    assert len(runs[0][1].seen) == len(runs[1][1].seen) == 30


class Middle(Callback):
    def on_after_backward(self, trainer, module):
        pass


def test_refused_before_the_first_batch():
    with pytest.raises(ConfigError, match="on_after_backward runs in the middle of a step"):
        fit(True, max_epochs=1, callbacks=[Middle()])


def test_no_hidden_wait_in_replays():
    class ErrorOnWait(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 14:
                torch.cuda.set_sync_debug_mode("error")

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 28:
                torch.cuda.set_sync_debug_mode("default")

        def on_exception(self, trainer, module, exception):
            torch.cuda.set_sync_debug_mode("default")

    loader = DataLoader(images(30).dataset, batch_size=8, pin_memory=True)
    for precision in ("O0", "O2"):
        for accumulate in (1, 2):
            options = {"callbacks": [ErrorOnWait()], "accumulate_grad_batches": accumulate, "max_epochs": 2}
            fit(CudaGraph(warmup=5), precision, loader=loader, **options)
