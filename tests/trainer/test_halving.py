"""``on_out_of_memory="halve"``: a micro-batch that does not fit is run in parts, as if it had fitted; or refused by name.

Memory ends where a module of these tests says so, by torch's own error, in forward or in backward, for batches above a size.
"""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback, TrainingModule
from fabricamp.errors import ConfigError
from fabricamp.precision import OptLevel
from fabricamp.strategies import DDP, FSDP, DelayedDDP, FaultTolerant
from fabricamp.tuner import Tuner
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer

FP64 = torch.float64


class Wall(torch.autograd.Function):
    """Passes ``x`` on; runs out of memory in forward or backward if it has more than ``most`` samples."""

    @staticmethod
    def forward(ctx, x, most, where):
        ctx.fails = where == "backward" and len(x) > most
        if where == "forward" and len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (of a test)")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (of a test)")
        return gradient, None, None


class Net(TrainingModule):
    """A network of two layers with a wall between them; ``most`` None: it fits always.  Its loss is as ``form`` says."""

    def __init__(self, most=None, where="forward", form="mean"):
        super().__init__()
        self.most = 10**9 if most is None else most
        self.where = where
        self.form = form
        self.sizes = []
        self.first = nn.Linear(3, 4, dtype=FP64)
        self.last = nn.Linear(4, 1, dtype=FP64)
        self.register_buffer("seen", torch.zeros((), dtype=FP64))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.sizes.append(len(x))
        self.seen += len(x)
        hidden = self.first(x).tanh()
        losses = (self.last(Wall.apply(hidden, self.most, self.where)) - y).square()
        mean = losses.mean()
        self.log("loss", mean, on_step=True, on_epoch=True)
        self.log("samples", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("worst", losses.max(), on_step=False, on_epoch=True, reduce_fx="max")
        if self.form == "pair":
            return losses.sum(), torch.tensor(float(len(x)), dtype=FP64)
        if self.form == "dict":
            return {"loss": mean, "losses": losses[:, 0].detach(), "square": mean.detach() ** 2}
        return mean

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def data(samples=21):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(samples, size, dtype=FP64, generator=generator) for size in (3, 1)))


class Outputs(Callback):
    """Keeps what hooks after a batch get."""

    def __init__(self):
        self.outputs = []
        self.sizes = []
        self.samples = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.outputs.append(outputs)
        self.sizes.append(len(batch[0]))

    def on_train_epoch_end(self, trainer, module):
        self.samples.append(float(trainer.callback_metrics["samples"]))


def trained(most, *, where="forward", form="mean", batch_size=8, **options):
    torch.manual_seed(0)
    net = Net(most, where, form)
    outputs = Outputs()
    options = {"max_epochs": 2, "log_every_n_steps": 1, "on_out_of_memory": "halve", "callbacks": [outputs], **options}
    trainer = quiet_trainer(**options)
    trainer.fit(net, DataLoader(data(), batch_size=batch_size))
    if outputs in trainer.callbacks:
        assert max(outputs.sizes) == batch_size  # hooks get whole batches
        assert outputs.samples == [21.0, 21.0]
    return net, trainer, outputs.outputs


def assert_equal(net, other, tolerance=1e-12):
    for (name, one), two in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("most", "where", "form", "accumulate"),
    [(5, "forward", "mean", 1), (3, "backward", "dict", 1), (2, "backward", "pair", 2), (1, "forward", "dict", 3)],
)
def test_parts_have_the_gradients_values_and_counters_of_the_whole(most, where, form, accumulate):
    options = {"form": form, "accumulate_grad_batches": accumulate}
    cut, trainer, outputs = trained(most, where=where, **options)
    whole, expected, whole_outputs = trained(None, **options)
    assert max(cut.sizes) == 8
    assert min(cut.sizes) <= most
    assert_equal(cut, whole)
    assert trainer.global_step == expected.global_step
    assert trainer.state.batches_done == expected.state.batches_done
    assert trainer.logged_metrics.keys() == expected.logged_metrics.keys()
    for name, value in expected.logged_metrics.items():
        torch.testing.assert_close(trainer.logged_metrics[name], value)
    for got, wanted in zip(outputs, whole_outputs, strict=True):
        assert got.keys() == wanted.keys()
        torch.testing.assert_close(got["loss"], wanted["loss"])
        if form == "dict":
            torch.testing.assert_close(got["losses"], wanted["losses"])
    # A failed attempt has not counted: each sample was seen once an epoch.
    assert cut.seen == whole.seen == 42


def test_a_size_that_did_not_fit_is_cut_before_it_is_tried_again():
    net, _, _ = trained(4)
    # 8 fails once, then 4 + 4; the epoch's last batch has 5, for which a wall of 4 has to be met by itself.
    assert net.sizes == [8, 4, 4, 4, 4, 5, 3, 2, 4, 4, 4, 4, 3, 2]


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_half_levels_train_in_parts(level, accumulate):
    def run(most):
        torch.manual_seed(0)
        net = Net(most, "backward").to(torch.float32)
        loader = DataLoader(TensorDataset(*(one.float() for one in data(16).tensors)), batch_size=8)
        # A constant scale: halves of a loss overflow later than the whole.
        options = {"accumulate_grad_batches": accumulate, "on_out_of_memory": "halve"}
        quiet_trainer(max_epochs=2, precision=OptLevel(level, loss_scale=128.0), **options).fit(net, loader)
        return net

    cut, whole = run(4), run(None)
    assert 4 in cut.sizes
    assert_equal(cut, whole, 2e-2)


class Draws(Net):
    """Draws from the generators, replaces a buffer, and keeps what a failed attempt has drawn."""

    def __init__(self, most):
        super().__init__(most)
        self.drawn = []
        self.register_buffer("mean", torch.zeros((), dtype=FP64))

    def training_step(self, batch, batch_idx):
        self.drawn.append((len(batch[0]), float(torch.rand(())), float(self.mean)))
        self.mean = self.mean * 0.5 + len(batch[0])
        return super().training_step(batch, batch_idx)


def test_generators_and_replaced_buffers_are_as_before_the_attempt():
    torch.manual_seed(0)
    net = Draws(4)
    quiet_trainer(max_steps=1, on_out_of_memory="halve").fit(net, DataLoader(data(8), batch_size=8))
    whole, first, second = net.drawn
    assert (whole[0], first[0], second[0]) == (8, 4, 4)
    assert whole[1:] == first[1:]
    assert second[1] != first[1]
    assert second[2] == 4


def test_metrics_objects_are_as_before_the_attempt():
    pytest.importorskip("torchmetrics", reason="needs the package torchmetrics")
    from torchmetrics import CatMetric, MeanMetric

    class Measured(Net):
        def __init__(self, most):
            super().__init__(most)
            self.average, self.all = MeanMetric(), CatMetric()

        def training_step(self, batch, batch_idx):
            self.average.update(batch[0].mean(), len(batch[0]))
            self.all.update(batch[0][:, 0])
            self.log("average", self.average, on_step=False, on_epoch=True)
            self.log("all", self.all.compute().sum(), on_step=False, on_epoch=True, reduce_fx="max")
            return super().training_step(batch, batch_idx)

    def average(most):
        trainer = quiet_trainer(max_epochs=1, on_out_of_memory="halve")
        trainer.fit(Measured(most), DataLoader(data(16), batch_size=8))
        return trainer.callback_metrics

    cut, whole = average(4), average(None)
    torch.testing.assert_close(cut["average"], whole["average"])


def test_what_a_failed_attempt_held_is_free_before_the_next_begins():
    class Holding(Net):
        def training_step(self, batch, batch_idx):
            if len(self.sizes) == 1:
                self.alive = [one() is not None for one in self.held]
            activation = self.first(batch[0]) * 2
            self.held = [weakref.ref(activation)]
            activation.partner = activation  # a cycle
            loss = super().training_step(batch, batch_idx)
            return loss + 0 * activation.sum()

    net = Holding(4)
    gc.disable()
    try:
        quiet_trainer(max_steps=1, on_out_of_memory="halve").fit(net, DataLoader(data(8), batch_size=8))
    finally:
        gc.enable()
    assert net.sizes == [8, 4, 4]
    assert net.alive == [False]


# -- errors --------------------------------------------------------------------------------------------------------------------


def test_the_default_is_the_error_with_what_filled_the_memory():
    class Adam(Net):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

        def training_step(self, batch, batch_idx):
            logits = torch.zeros(1000, 8)
            return super().training_step(batch, batch_idx) + logits.sum()

    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
        quiet_trainer(max_epochs=1).fit(Adam(4), DataLoader(data(), batch_size=8))
    notes = notes_of(caught.value)
    assert "by what it is for: weights 168 B, buffers 8 B, activations and others" in notes
    assert "the largest tensors: logits (1000, 8) float32 in training_step (31.2 KiB); " in notes
    assert (
        'what helps most: on_out_of_memory="halve" (or accumulate_grad_batches=2 with half the batch size) (about '
        in notes
    )
    assert notes.count("less)") == 2
    with pytest.raises(ConfigError, match="on_out_of_memory='half' is not known; did you mean 'halve'"):
        quiet_trainer(on_out_of_memory="half")


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_evaluation_after_a_fit_is_told_of_too(level):
    class Evaluated(Net):
        def validation_step(self, batch, batch_idx):
            raise torch.OutOfMemoryError("out of memory in validation")

    net = Evaluated().float()
    batches = DataLoader(TensorDataset(*(one.float() for one in data(8).tensors)), batch_size=8)
    trainer = quiet_trainer(max_steps=1, precision=level, accumulate_grad_batches=2)
    trainer.fit(net, batches)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.validate(net, batches, verbose=False)
    assert "the largest tensors: " in notes_of(caught.value)


def notes_of(error):
    return " ".join(error.__notes__)


def test_one_sample_and_batches_without_samples_stay_errors():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trained(0)
    assert "one sample alone does not fit" in notes_of(caught.value)

    class Odd(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[:2], batch_idx)

    for extra, why in ((torch.zeros(3), "first dimensions of 3, 8"), (object(), "it holds a object"), (None, "")):
        batch = (*data(8).tensors, extra)
        if not why:
            quiet_trainer(max_epochs=1, on_out_of_memory="halve").fit(Odd(4), [batch])
            continue
        with pytest.raises(torch.OutOfMemoryError) as caught:
            quiet_trainer(max_epochs=1, on_out_of_memory="halve").fit(Odd(4), [batch])
        assert why in notes_of(caught.value)


def test_channels_are_not_taken_for_samples():
    class Images(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step((torch.ones(8, 3, dtype=FP64), torch.ones(8, 1, dtype=FP64)), batch_idx)

    images = [torch.zeros(3, 5, 5, dtype=FP64) for _ in range(16)]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet_trainer(max_epochs=1, on_out_of_memory="halve").fit(
            Images(4), DataLoader(images, batch_size=8, collate_fn=list)
        )
    assert "first dimension of 3, and the loader's batch_size is 8" in notes_of(caught.value)


def test_time_is_not_taken_for_samples_in_the_last_batch_either():
    class Sequences(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch[0].sum(0), batch[0].sum(0)[:, :1]), batch_idx)

    for last in (4, 3):
        whole = [torch.zeros(6, 3, dtype=FP64) for _ in range(last)]
        loader = DataLoader(whole, batch_size=4, collate_fn=lambda rows: (torch.stack(rows, 1),))
        with pytest.raises(torch.OutOfMemoryError) as caught:
            quiet_trainer(max_epochs=1, on_out_of_memory="halve").fit(Sequences(last - 1), loader)
        assert "first dimension of 6, and the loader's batch_size is 4" in notes_of(caught.value)


def test_as_many_numbers_as_samples_are_refused_and_texts_cut_with_the_whole():
    seen = []

    class Sized(Net):
        def training_step(self, batch, batch_idx):
            seen.append((tuple(batch["names"]), batch["hw"]))
            return super().training_step((batch["x"], batch["y"]), batch_idx)

    x, y = data(4).tensors
    batch = {"x": x, "y": y, "names": ["a", "b", "c", "d"], "hw": (224, 112)}
    quiet_trainer(max_epochs=1, on_out_of_memory="halve").fit(Sized(1), [batch])
    assert [names for names, _ in seen[-1:]] == [("d",)]
    assert {hw for _, hw in seen} == {(224, 112)}  # also in parts of two samples
    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet_trainer(max_epochs=1, on_out_of_memory="halve").fit(Sized(1), [{**batch, "hw": (1, 2, 3, 4)}])
    assert "a tuple of 4 values, as many as samples" in notes_of(caught.value)


def test_batch_norm_that_is_put_into_training_later_is_never_run_in_parts():
    class Late(Net):
        def __init__(self, most):
            super().__init__(most)
            self.norm = nn.BatchNorm1d(3, dtype=FP64).eval()

        def training_step(self, batch, batch_idx):
            self.norm.train(batch_idx > 0)
            self.norm(batch[0].detach())
            return super().training_step(batch, batch_idx)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet_trainer(max_epochs=1, on_out_of_memory="halve").fit(Late(4), DataLoader(data(24), batch_size=8))
    assert "a BatchNorm1d is in training" in notes_of(caught.value)


@pytest.mark.parametrize("change", ["values", "entries"])
def test_a_batch_that_a_failed_attempt_has_changed_is_not_run_again(change):
    class Scales(Net):
        def training_step(self, batch, batch_idx):
            if change == "values":
                batch["x"].mul_(2)
            else:
                batch["x"] = batch["x"] * 2
            return super().training_step((batch["x"], batch["y"]), batch_idx)

    x, y = data(8).tensors
    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet_trainer(max_epochs=1, on_out_of_memory="halve").fit(Scales(4), [{"x": x, "y": y}])
    assert "the batch was changed in place before memory ended" in notes_of(caught.value)


class Fails(torch.optim.SGD):
    def step(self, closure=None):
        raise torch.OutOfMemoryError("out of memory in the update")


def test_memory_that_ends_elsewhere_stays_an_error():
    class Elsewhere(Net):
        def configure_optimizers(self):
            return Fails(self.parameters(), lr=0.1)

        def validation_step(self, batch, batch_idx):
            raise torch.OutOfMemoryError("out of memory in validation")

    loader = DataLoader(data(8), batch_size=8)
    with pytest.raises(torch.OutOfMemoryError, match="in the update"):
        quiet_trainer(max_steps=1, on_out_of_memory="halve").fit(Elsewhere(), loader)
    with pytest.raises(torch.OutOfMemoryError, match="in validation"):
        quiet_trainer(max_steps=1, on_out_of_memory="halve", num_sanity_val_steps=1).fit(Elsewhere(), loader, loader)

    class AfterBackward(Net):
        def on_after_backward(self):
            raise torch.OutOfMemoryError("out of memory after backward")

    net = AfterBackward()
    with pytest.raises(torch.OutOfMemoryError, match="after backward"):
        quiet_trainer(max_steps=1, on_out_of_memory="halve").fit(net, loader)
    assert net.sizes == [8]


def test_an_error_of_another_kind_keeps_the_gradients_of_the_accumulation():
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    net = Breaks()
    with pytest.raises(ValueError, match="broken"):
        quiet_trainer(max_steps=1, accumulate_grad_batches=4, on_out_of_memory="halve").fit(
            net, DataLoader(data(32), batch_size=8)
        )
    assert net.first.weight.grad.abs().sum() > 0


class Normed(Net):
    def __init__(self):
        super().__init__(4)
        self.norm = nn.BatchNorm1d(3, dtype=FP64)


class Manual(Net):
    def __init__(self):
        super().__init__(4)
        self.automatic_optimization = False


class Closure(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Keeps(Net):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass


class Momentum(Net):
    def training_step(self, batch, batch_idx):
        self.last.weight.data.mul_(0.99)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (Normed, "'norm' (BatchNorm1d) in training"),
        (Manual, "automatic_optimization=False"),
        (Closure, "LBFGS"),
        (Keeps, "Keeps.optimizer_zero_grad"),
        (Momentum, "changed the parameter 'last.weight'"),
    ],
)
def test_what_cannot_be_run_in_parts_is_refused_by_name(net, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        quiet_trainer(max_steps=1, on_out_of_memory="halve").fit(net(), DataLoader(data(8), batch_size=8))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": FSDP()}, "strategy 'fsdp'"),
        ({"strategy": FaultTolerant(groups=2, group=0)}, "strategy 'fault_tolerant'"),
        ({"strategy": DelayedDDP(message_size=8)}, "message_size"),
        ({"strategy": DDP(static_graph=True)}, "DDP(static_graph)"),
        ({"cuda_graph": "auto"}, "cuda_graph"),
    ],
)
def test_other_arguments_are_refused_in_the_constructor(options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        quiet_trainer(on_out_of_memory="halve", **options)


def test_frozen_batch_norm_is_taken_and_the_search_for_a_batch_size_sees_the_error():
    class Frozen(Net):
        def __init__(self, batch_size=2):
            super().__init__(4)
            self.batch_size = batch_size
            self.norm = nn.BatchNorm1d(3, dtype=FP64).eval()

        def on_train_epoch_start(self):
            self.norm.eval()

        def train_dataloader(self):
            return DataLoader(data(32), batch_size=self.batch_size)

    module = Frozen()
    trainer = quiet_trainer(max_epochs=1, on_out_of_memory="halve")
    assert Tuner(trainer).scale_batch_size(module, mode="power", steps_per_trial=1) == 4
    module.batch_size = 8
    trainer.fit(module)
    assert module.sizes[-3:] == [4, 4, 4]


# -- several ranks -------------------------------------------------------------------------------------------------------------


def _rank(strategy, accumulate, form, buffers):
    import torch.distributed as dist

    rank = dist.get_rank()
    torch.manual_seed(0)
    # Rank 1 alone runs out of memory, in some steps.
    net = Net(3 if rank else None, "backward", form)
    if not buffers:
        del net._buffers["seen"]
        net.seen = 0
    trainer = quiet_trainer(
        max_epochs=2, strategy=strategy, devices=2, accumulate_grad_batches=accumulate, on_out_of_memory="halve"
    )
    trainer.fit(net, DataLoader(data(24), batch_size=6))
    return [one.detach().clone() for one in net.parameters()], net.sizes, float(net.seen)


def test_one_rank_of_two_runs_its_batches_in_parts():
    whole = {}
    for form in ("mean", "pair"):
        for accumulate in (1, 2):
            torch.manual_seed(0)
            net = Net(form=form)
            quiet_trainer(max_epochs=2, accumulate_grad_batches=accumulate).fit(
                net, DataLoader(data(24), batch_size=12)
            )
            whole[form, accumulate] = list(net.parameters())

    def all_of_them():
        kinds = [("ddp", 1, "mean", True), ("ddp", 2, "pair", False), ("delayed_ddp", 2, "mean", True)]
        kinds.append(("delayed_ddp", 1, "pair", True))
        return [_rank(*kind) for kind in kinds]

    first, second = run_ranks(all_of_them, 2)
    kinds = [("mean", 1), ("pair", 2), ("mean", 2), ("pair", 1)]
    for kind, (weights, sizes, _), (others, cut_sizes, _) in zip(kinds, first, second, strict=True):
        assert set(sizes) == {6}
        assert 3 in cut_sizes
        for one, other, expected in zip(weights, others, whole[kind], strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gpu_whose_memory_ends(accumulate):
    """A real limit of the allocator: a batch that does not fit, and the gradients of one that does."""

    class Wide(TrainingModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8)))

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    samples = TensorDataset(torch.randn(65536, 2048, generator=torch.Generator().manual_seed(1)))

    def run(fraction):
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(fraction)
        net = Wide()
        try:
            quiet_trainer(
                accelerator="gpu", max_steps=1, accumulate_grad_batches=accumulate, on_out_of_memory="halve"
            ).fit(net, DataLoader(samples, batch_size=32768))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return net

    whole = run(1.0)
    total = torch.cuda.get_device_properties(0).total_memory
    cut = run(4 * 2**30 / total)  # the whole takes 16 activations of 256 MiB, and their gradients
    for one, other in zip(cut.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
