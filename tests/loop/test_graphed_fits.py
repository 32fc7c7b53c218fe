"""Whole fits with CUDA graphs, emulated on a CPU: captures, comparisons with one and two copies of the state, wrong replays."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch import nn

from fabricamp import Callback, ConfigError, CudaGraph
from fabricamp.engine.graph import comparison
from fabricamp.engine.graph.memory_pool import OwnPool
from fabricamp.optimizers import LARC, FusedAdam, FusedLAMB, FusedSGD
from tests.cuda_on_cpu.fits import card
from tests.inside import graph_update
from tests.pairs import pairs
from tests.small import Classifier, loader, quiet_trainer

__all__ = ["card"]

OPTIMIZERS = {
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=0.01),
    "FusedLAMB": lambda parameters: FusedLAMB(parameters, lr=0.01),
    "FusedSGD": lambda parameters: FusedSGD(parameters, lr=0.05, momentum=0.9),
    "LARC": lambda parameters: LARC(FusedSGD(parameters, lr=0.05, momentum=0.9)),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
BATCHES = 24


class Net(Classifier):
    """Has running statistics, and a count of batches that each step writes."""

    def __init__(self, optimizer="FusedAdam", scheduler=False):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))
        self.register_buffer("seen", torch.zeros(()))
        self.optimizer = optimizer
        self.scheduler = scheduler

    def training_step(self, batch, batch_idx):
        self.seen.add_(1)
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "twice": 2 * loss.detach()}

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        if not self.scheduler:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Keeps(Callback):
    """Keeps the outputs of each step, and the state at the end."""

    def __init__(self):
        self.outputs = []

    def holds_at(self, global_step):
        return float("inf")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.outputs.append({name: value.clone() for name, value in outputs.items()})

    def on_train_end(self, trainer, module):
        states = (value for entry in trainer.optimizers[0].state.values() for value in entry.values())
        self.state = {name: value.clone() for name, value in module.state_dict().items()}
        self.state |= {
            f"state {number}": value.clone() for number, value in enumerate(states) if torch.is_tensor(value)
        }
        self.logged = dict(trainer.callback_metrics)
        self.why_eager = getattr(graph_update(trainer), "why_eager", "")


def fit(graph, module=None, *callbacks, **options):
    torch.manual_seed(0)
    keeps = Keeps()
    given = {
        "max_epochs": 1,
        "limit_val_batches": 0,
        "enable_model_summary": True,
        "num_sanity_val_steps": 0,
        **options,
    }
    trainer = quiet_trainer(cuda_graph=graph, callbacks=[keeps, *callbacks], **given)
    trainer.fit(module or Net(), loader(4 * BATCHES), loader(16))
    return keeps


def assert_same(one, other):
    assert len(one.outputs) == len(other.outputs)
    for left, right in zip(
        [*one.outputs, one.state, one.logged], [*other.outputs, other.state, other.logged], strict=True
    ):
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert torch.equal(value, right[name]), name


@pytest.fixture
def taken(monkeypatch):
    """The bytes of each copy that a comparison makes."""
    sizes = []
    empty = OwnPool.empty

    def recorded(self, size):
        sizes.append(size)
        return empty(self, size)

    monkeypatch.setattr(OwnPool, "empty", recorded)
    return sizes


@pytest.fixture
def fitting(card, taken):
    """Returns a function that lets a number of copies of the state of a fit with these arguments fit into the card's memory."""

    def limit(copies, make=Net, **options):
        fit(CudaGraph(warmup=4, required=False), make(), **options)
        card.free = comparison._SPARE + int((copies + 0.5) * max(taken))
        taken.clear()
        card.events.clear()

    return limit


COLUMNS = (list(OPTIMIZERS), ["O0", "O1", "O5"], [1, 3], [0, 3], [1, 2])


@pytest.mark.parametrize(("optimizer", "precision", "accumulate", "check_every", "copies"), pairs(*COLUMNS))
def test_a_graphed_fit_has_the_bits_of_an_eager_one(
    optimizer, precision, accumulate, check_every, copies, card, taken, fitting
):
    options = {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    fitting(copies, lambda: Net(optimizer), **options)
    eager = fit(None, Net(optimizer), **options)
    graphed = fit(CudaGraph(warmup=4, check_every=check_every), Net(optimizer), **options)
    assert_same(eager, graphed)
    assert card.replays >= BATCHES - 4 * accumulate - 3
    if check_every == 0:
        assert len(taken) == copies * card.events.count("capture")
    else:
        assert len(taken) > copies * card.events.count("capture")


@pytest.mark.parametrize(("steps", "copies", "precision"), pairs([2, 4], [1, 2], ["O0", "O1"]))
def test_several_steps_a_launch_under_a_schedule(steps, copies, precision, card, taken, fitting):
    options = {"precision": precision, "log_every_n_steps": 8}
    fitting(copies, **options)
    eager = fit(None, Net(scheduler=True), **options)
    for every in (0, 1):
        card.events.clear()
        assert_same(eager, fit(CudaGraph(warmup=4, steps=steps, check_every=every), Net(scheduler=True), **options))
        assert 2 < card.replays < BATCHES - 3
        assert card.events.count("capture") == 2


class Wrong(Net):
    """Computes something else while it is captured."""

    def __init__(self, card, *given):
        super().__init__(*given)
        self.card = [card]

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] * (1.5 if self.card[0].is_capturing else 1)}


# -- where no copy of the state fits ---------------------------------------------------------------------------------------------


class Deep(Net):
    """Has weights of about the same size."""

    def __init__(self, optimizer="FusedAdam"):
        super().__init__(optimizer)
        torch.manual_seed(1)
        middle = [nn.Linear(16, 16) for _ in range(6)]
        self.net = nn.Sequential(nn.Linear(8, 16), *middle, nn.BatchNorm1d(16), nn.Linear(16, 3))


@pytest.fixture
def sliced(card, taken):
    """Returns a function that leaves memory for a part of a copy of the state of such a fit."""

    def limit(part, make, **options):
        fit(CudaGraph(warmup=4, required=False), make(), **options)
        gradients = sum(one.nbytes for one in make().parameters()) * (1 + (options["accumulate_grad_batches"] > 1))
        card.free = comparison._SPARE + gradients + int(part * max(taken))
        taken.clear()
        card.events.clear()

    return limit


SLICED = (["FusedAdam", "FusedLAMB", "FusedSGD", "LARC", "AdamW"], ["O0", "O1", "O5"], [1, 3], [0, 3])


@pytest.mark.parametrize(("optimizer", "precision", "accumulate", "check_every"), pairs(*SLICED))
def test_an_update_is_compared_in_slices(optimizer, precision, accumulate, check_every, card, taken, sliced, caplog):
    caplog.set_level(logging.INFO, logger="fabricamp")
    options = {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    sliced(0.5 if accumulate == 1 else 0.9, lambda: Deep(optimizer), **options)
    whole = card.free - comparison._SPARE
    caplog.clear()
    eager = fit(None, Deep(optimizer), **options)
    graphed = fit(CudaGraph(warmup=4, check_every=check_every), Deep(optimizer), **options)
    assert_same(eager, graphed)
    assert "is not compared" not in caplog.text
    assert "was compared with" in caplog.text
    assert max(taken) < whole
    if optimizer == "AdamW":  # steps after the replay
        assert "parts of the update" not in caplog.text
        assert len(taken) >= card.events.count("capture")
    elif accumulate == 1:
        assert "parts of the update one by one, in" in caplog.text
        assert len(taken) > card.events.count("capture")


@pytest.mark.parametrize(("optimizer", "accumulate"), [("FusedAdam", 1), ("FusedSGD", 1), ("AdamW", 1), ("AdamW", 2)])
def test_a_wrong_replay_is_found_in_a_slice_before_any_weight_is_lost(optimizer, accumulate, card, sliced):
    class WrongDeep(Deep):
        def training_step(self, batch, batch_idx):
            outputs = super().training_step(batch, batch_idx)
            return {**outputs, "loss": outputs["loss"] * (1.5 if card.is_capturing else 1)}

    options = {"accumulate_grad_batches": accumulate}
    sliced(0.5 if accumulate == 1 else 0.9, lambda: Deep(optimizer), **options)
    eager = fit(None, WrongDeep(optimizer), **options)
    graphed = fit(CudaGraph(warmup=4, required=False), WrongDeep(optimizer), **options)
    assert_same(eager, graphed)
    assert "a replay differs bitwise from an eager step, first in" in graphed.why_eager


def test_several_steps_a_launch_are_compared_in_slices(card, taken, sliced, caplog):
    caplog.set_level(logging.INFO, logger="fabricamp")
    options = {"accumulate_grad_batches": 1, "log_every_n_steps": 8}
    sliced(0.5, Deep, **options)
    eager = fit(None, Deep(), **options)
    assert_same(eager, fit(CudaGraph(warmup=4, steps=4), Deep(), **options))
    assert caplog.text.count("parts of the update one by one") == 2


def test_an_update_that_cannot_be_left_out_is_told(card, sliced, caplog):
    sliced(0.5, lambda: Deep("SGD"), accumulate_grad_batches=1)
    assert_same(fit(None, Deep("SGD")), fit(CudaGraph(warmup=4), Deep("SGD")))
    (line,) = (record.message for record in caplog.records if "is not compared" in record.message)
    assert line.startswith(
        "the replay is not compared with an eager step: a copy of the state takes 0.00 GiB, and 0.00 GiB are free"
    )
    assert "no part of SGD's update can be left out of a replay; those of FusedAdam and its like can" in line
    assert line.endswith("CudaGraph(compare=False) leaves that out without this line")


def test_a_step_that_writes_weights_itself_is_an_error_where_no_copy_fits(card, sliced):
    class Clamps(Deep):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.net[2].weight.mul_(1.01)
            return super().training_step(batch, batch_idx)

    options = {"accumulate_grad_batches": 1}
    sliced(2.5, Clamps, **options)
    assert_same(fit(None, Clamps(), **options), fit(CudaGraph(warmup=4), Clamps(), **options))
    card.free -= int(2 * (card.free - comparison._SPARE) / 3)
    with pytest.raises(
        ConfigError, match=r"a step writes net.2.weight otherwise than by the optimizer, .*compare=False"
    ):
        fit(CudaGraph(warmup=4, required=False), Clamps(), **options)


def test_graphs_are_captured_again_if_their_memory_is_kept_between_slices(card, sliced, caplog):
    sliced(0.5, Deep, accumulate_grad_batches=1)
    eager = fit(None, Deep())
    card.keeps = True
    assert_same(eager, fit(CudaGraph(warmup=4), Deep()))
    assert card.events.count("capture") == 2


# -- wrong replays -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "accumulate", "copies"), pairs(["FusedAdam", "AdamW", "FusedSGD"], [1, 2], [1, 2])
)
def test_a_wrong_replay_is_found_and_taken_back(optimizer, accumulate, copies, card, fitting, caplog):
    options = {"accumulate_grad_batches": accumulate}
    fitting(copies, lambda: Net(optimizer), **options)
    eager = fit(None, Wrong(card, optimizer), **options)
    graphed = fit(CudaGraph(warmup=4, required=False), Wrong(card, optimizer), **options)
    assert_same(eager, graphed)
    name = "net.0.weight" if optimizer != "AdamW" and accumulate == 1 else "the gradient of parameter 0"
    assert graphed.why_eager == f"a replay differs bitwise from an eager step, first in {name}"
    with pytest.raises(ConfigError, match=f"first in {name}"):
        fit(CudaGraph(warmup=4), Wrong(card, optimizer), **options)


def test_without_the_comparison_a_wrong_replay_goes_on_and_a_changed_attribute_is_found(card, taken):
    found = fit(CudaGraph(warmup=4, compare=False), Wrong(card))
    assert not taken
    assert "lent" not in card.events[card.events.index("capture") :]
    assert not torch.equal(found.state["net.0.weight"], fit(None, Wrong(card)).state["net.0.weight"])

    class Factor(Net):
        def __init__(self):
            super().__init__()
            self.factor = 1.0

        def training_step(self, batch, batch_idx):
            return self.factor * super().training_step(batch, batch_idx)["loss"]

    class Rebinds(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 12:
                module.factor = 2.0

    runs = [fit(graph, Factor(), Rebinds()) for graph in (None, CudaGraph(warmup=4, compare=False))]
    assert_same(*runs)
    assert card.events.count("capture") == 3


class Counts(Net):
    """Notes the calls of its evaluation in an object that no watch sees."""

    def __init__(self, calls):
        super().__init__()
        self.calls = [[[calls]]]

    def validation_step(self, batch, batch_idx):
        self.calls[0][0][0].append(batch_idx)
        return super().validation_step(batch, batch_idx)


def test_without_the_comparison_no_evaluation_is_compared(card):
    options = {"limit_val_batches": 1.0, "check_val_every_n_epoch": 1, "max_epochs": 3}
    runs = []
    for graph in (None, CudaGraph(warmup=4), CudaGraph(warmup=4, compare=False)):
        card.events.clear()
        calls = []

        module = Counts(calls)
        runs.append((fit(graph, module, **options), len(calls)))
    for found, _ in runs[1:]:
        assert_same(runs[0][0], found)
    # 12 batches; eager 3, the capture, and for the comparison another eager one.
    assert [calls for _, calls in runs] == [12, 5, 4]


# -- kernels that are not deterministic --------------------------------------------------------------------------------------------

_CALLS = itertools.count()


@torch.library.custom_op("tests_graphed_fits::noise", mutates_args=())
def noise(values: torch.Tensor) -> torch.Tensor:
    """Returns other values in each call, of a replay too."""
    return torch.full_like(values, 1 + next(_CALLS) / 64)


class Noisy(Net):
    """Weights move by the noise that is logged as the loss."""

    def __init__(self):
        super().__init__("FusedSGD")
        self.net.requires_grad_(False)
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        drawn = noise(self.weight.detach())
        self.log("drawn", drawn)
        return {"loss": (self.weight * drawn).sum(), "drawn": drawn}

    def configure_optimizers(self):
        return FusedSGD([self.weight], lr=1.0)


class Moved(Callback):
    """Compares how the weight has moved in each step with what the step has logged."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.before = module.weight.detach().clone()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        moved = self.before - module.weight.detach()
        assert moved == outputs["drawn"] == trainer.callback_metrics["drawn"]


@pytest.mark.parametrize("copies", [1, 2])
def test_weights_belong_to_the_loss_that_is_logged(copies, card, fitting, caplog):
    """The first replay differs from the eager step, and eager steps from each other."""
    fitting(copies, Noisy)
    caplog.set_level(logging.INFO, logger="fabricamp")
    found = fit(CudaGraph(warmup=4), Noisy(), Moved())
    assert not found.why_eager
    assert card.replays == BATCHES - 3 + (copies == 1)
    # The replay, two eager steps; with one copy the replay again.
    after = card.events[card.events.index("capture") + 1 :]
    assert after[:5] == ["replay", "lent", "lent", "replay", "replay"]
    assert "the first replay was compared with 2 eager steps" in caplog.text


def test_graphs_are_captured_again_if_their_memory_is_kept_before_the_second_replay(card, fitting, caplog):
    fitting(1, Noisy)
    caplog.set_level(logging.INFO, logger="fabricamp")
    card.keeps = True
    found = fit(CudaGraph(warmup=4), Noisy(), Moved())
    assert not found.why_eager
    assert card.events.count("capture") == 2
    assert card.replays > BATCHES // 2
    assert "a tensor of an eager step is kept in the graphs' memory" in caplog.text


# -- what is told ------------------------------------------------------------------------------------------------------------------


def test_what_a_comparison_takes_is_told_once_a_graph(card, caplog):
    caplog.set_level(logging.INFO, logger="fabricamp")
    fit(CudaGraph(warmup=4, check_every=2), accumulate_grad_batches=2)
    lines = [record.message for record in caplog.records if "was compared" in record.message]
    assert len(lines) == 2
    words = "CUDA graph: the first replay that {} an accumulation of 2 was compared with an eager step, in "
    assert [line[: len(words) + 4] for line in lines] == [
        line[: len(words) + 4]
        for line in (
            words.format("begin") + lines[0].partition(", in ")[2],
            words.format("end") + lines[1].partition(", in ")[2],
        )
    ]
    assert "may take" not in caplog.text


def test_a_comparison_that_may_take_long_says_so_before_it_begins(card, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="fabricamp")
    monkeypatch.setattr("tests.cuda_on_cpu.fits.Event.elapsed_time", lambda self, end: 700.0)
    fit(CudaGraph(warmup=4))
    (line,) = (record.message for record in caplog.records if "may take" in record.message)
    assert line == (
        "CUDA graph: a replay is compared with eager steps now, which may take 7 s; CudaGraph(compare=False) leaves that out"
    )
    assert caplog.text.index("may take") < caplog.text.index("was compared")


def test_a_step_that_writes_on_another_device_is_found(card):
    """Not by the watch of attributes: the tensor stays the same object."""

    class Elsewhere(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("counted", torch.zeros((), device="cpu"))

        def training_step(self, batch, batch_idx):
            outputs = super().training_step(batch, batch_idx)
            self.counted.data = self.counted.data + 1  # not by a launch
            return outputs

    with pytest.raises(ConfigError, match="a replay differs bitwise from an eager step, first in counted"):
        fit(CudaGraph(warmup=4), Elsewhere())
