"""A resume with other classes of optimizers and schedules is refused by name; states follow the names of their parameters."""

from __future__ import annotations

import copy
import inspect
import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import fabricamp.apex.optimizers as apex_optimizers
import fabricamp.optimizers as fused
from fabricamp import Callback, CheckpointError, TrainingModule
from fabricamp.checkpoint.identities import OPTIMIZERS
from fabricamp.checkpoint.identities import SCHEDULES as SCHEDULES_KEY
from fabricamp.checkpoint.record import Record
from fabricamp.checkpoint.sections import Optimizers, Schedules
from fabricamp.engine.optimizer_setup import SchedulerConfig
from fabricamp.strategies import Strategy
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer

# -- classes of optimizers


def _classes(module):
    found = [value for _, value in sorted(vars(module).items()) if inspect.isclass(value)]
    return [one for one in found if issubclass(one, torch.optim.Optimizer) and not inspect.isabstract(one)]


WITHOUT_A_STEP = (torch.optim.Optimizer, fused.FusedOptimizer, fused.LARC)
TORCHS = [one for one in _classes(torch.optim) if one not in WITHOUT_A_STEP]
FUSED = [one for one in _classes(fused) if one not in WITHOUT_A_STEP]
APEX = _classes(apex_optimizers)
FAMILIES = [
    {"Adam", "AdamW", "FusedAdam"},
    {"SGD", "FusedSGD"},
    {"Adagrad", "FusedAdagrad"},
    {"FusedLAMB", "FusedMixedPrecisionLamb"},
]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        self.b = nn.Parameter(torch.linspace(1, 2, 12).reshape(4, 3))


def built(kind, **options):
    """Returns a module and its optimizer, of one step."""
    module = Two()
    if "lr" in inspect.signature(kind).parameters:
        options = {"lr": 0.1, **options}
    if kind.__name__ in ("SGD", "FusedSGD"):
        options = {"momentum": 0.9, **options}
    if kind.__name__ == "AdamW":  # 0.01 by default, and no other class has any
        options = {"weight_decay": 0.0, **options}
    optimizer = kind(module.parameters(), **options)
    return module, optimizer


def step(module, optimizer, number=1):
    for parameter in module.parameters():
        gradient = torch.linspace(-number, 1, 12).reshape(parameter.shape)
        sparse = isinstance(optimizer, torch.optim.SparseAdam)
        parameter.grad = gradient.to_sparse() if sparse else gradient
    optimizer.step((lambda: torch.tensor(0.0)) if isinstance(optimizer, torch.optim.LBFGS) else None)


def record(sections):
    """Returns what the sections save, as in a checkpoint."""
    return copy.deepcopy(Record(Strategy(), sections).save())


def resumed(module, optimizer, other_module, other):
    """Loads module and optimizer into the other ones."""
    other_module.load_state_dict(copy.deepcopy(module.state_dict()))
    saved = record([Optimizers([optimizer], module)])
    Optimizers([other], other_module).restore(saved, "a.ckpt")


def _one_family(first, second):
    names = {first.__name__, second.__name__}
    return len(names) == 1 or any(names <= family for family in FAMILIES)


@pytest.mark.parametrize(
    "first", [*TORCHS, *FUSED, *APEX], ids=lambda kind: f"{kind.__module__.split('.')[1]}.{kind.__name__}"
)
def test_every_pair_of_classes_goes_on_alike_or_is_refused_by_name(first):
    module, optimizer = built(first)
    step(module, optimizer)
    for second in (*TORCHS, *FUSED, *APEX):
        other_module, other = built(second)
        if _one_family(first, second):
            resumed(module, optimizer, other_module, other)
            expected_module, expected = built(first)
            step(expected_module, expected)
            step(expected_module, expected, 2)
            step(other_module, other, 2)
            for parameter, wanted in zip(other_module.parameters(), expected_module.parameters(), strict=True):
                torch.testing.assert_close(parameter, wanted, rtol=1e-5, atol=1e-6)
        else:
            words = f"a.ckpt holds the state of {first.__name__}, and optimizer 0 of configure_optimizers is {second.__name__}, "
            with pytest.raises(CheckpointError, match=re.escape(words)):
                resumed(module, optimizer, other_module, other)


@pytest.mark.parametrize(
    ("first", "second", "decoupled"),
    [
        (torch.optim.AdamW, torch.optim.Adam, False),
        (torch.optim.Adam, torch.optim.AdamW, True),
        (fused.FusedAdam, torch.optim.Adam, False),
        (torch.optim.Adam, fused.FusedAdam, True),
    ],
)
def test_the_class_of_the_program_says_how_weight_decay_acts(first, second, decoupled, caplog):
    module, optimizer = built(first, weight_decay=0.5)
    step(module, optimizer)
    other_module, other = built(second, weight_decay=0.1)
    resumed(module, optimizer, other_module, other)
    (line,) = caplog.messages
    assert f"optimizer 0 is {second.__name__}: its weight decay of 0.5 acts as" in line
    # By hand: the moments of the first class, the rule of the second.
    rule = torch.optim.AdamW if decoupled else torch.optim.Adam
    by_hand_module, by_hand = built(rule, weight_decay=0.5)
    by_hand_module.load_state_dict(module.state_dict())
    for parameter, saved in zip(by_hand_module.parameters(), module.parameters(), strict=True):
        by_hand.state[parameter] = copy.deepcopy(dict(optimizer.state[saved]))
    step(other_module, other, 2)
    step(by_hand_module, by_hand, 2)
    for parameter, wanted in zip(other_module.parameters(), by_hand_module.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=1e-5, atol=1e-6)


def test_no_word_of_weight_decay_where_there_is_none(caplog):
    module, optimizer = built(torch.optim.AdamW, weight_decay=0.0)
    step(module, optimizer)
    other_module, other = built(torch.optim.Adam)
    resumed(module, optimizer, other_module, other)
    assert other.param_groups[0]["decoupled_weight_decay"] is False
    assert not caplog.messages


def test_a_state_without_bias_correction_is_refused_by_a_class_that_always_corrects():
    module, optimizer = built(fused.FusedAdam, bias_correction=False)
    step(module, optimizer)
    with pytest.raises(CheckpointError, match=r"bias_correction=False, which optimizer 0 \(AdamW\) does not have"):
        resumed(module, optimizer, *built(torch.optim.AdamW))
    resumed(module, optimizer, *built(fused.FusedAdam))


def test_wrappers_are_part_of_the_class():
    def wrapped(kind):
        module, optimizer = built(kind)
        return module, fused.LARC(optimizer)

    module, optimizer = wrapped(torch.optim.SGD)
    step(module, optimizer)
    resumed(module, optimizer, *wrapped(torch.optim.SGD))
    resumed(module, optimizer, *wrapped(fused.FusedSGD))
    for others in (built(torch.optim.SGD), wrapped(torch.optim.AdamW)):
        with pytest.raises(CheckpointError, match=r"holds the state of LARC\(SGD\)"):
            resumed(module, optimizer, *others)
    plain, its_optimizer = built(torch.optim.SGD)
    with pytest.raises(
        CheckpointError, match=r"the state of SGD, and optimizer 0 of configure_optimizers is LARC\(SGD\)"
    ):
        resumed(plain, its_optimizer, *wrapped(torch.optim.SGD))


class Rule:
    """A rule of the program's own."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["beta"])
                parameter.data.sub_(average.sign(), alpha=group["lr"])


class Signs(Rule, torch.optim.Optimizer):
    pass


class RenamedSigns(Rule, torch.optim.Optimizer):
    pass


class OwnFused(Rule, fused.FusedOptimizer):
    pass


class Own(torch.optim.AdamW):
    pass


class OwnToo(fused.FusedAdam):
    pass


def test_a_class_of_ones_own_may_be_renamed_or_derived(caplog):
    module, optimizer = built(Signs)
    step(module, optimizer)
    resumed(module, optimizer, *built(RenamedSigns))
    assert caplog.messages == [
        "optimizer 0 is RenamedSigns, and a.ckpt has the state of Signs, of the same form: it is loaded"
    ]
    for other in (torch.optim.AdamW, fused.FusedLion):
        with pytest.raises(
            CheckpointError, match=f"state of Signs, and optimizer 0 .* is {other.__name__}, which cannot"
        ):
            resumed(module, optimizer, *built(other))
    its_module, own = built(OwnFused)
    with pytest.raises(CheckpointError, match="state of OwnFused, and optimizer 0 .* is FusedLion"):
        resumed(its_module, own, *built(fused.FusedLion))
    for first, second in itertools.permutations([Own, OwnToo, torch.optim.AdamW, fused.FusedAdam], 2):
        module, optimizer = built(first, weight_decay=0.0)
        step(module, optimizer)
        resumed(module, optimizer, *built(second, weight_decay=0.0))
    assert len(caplog.messages) == 1


# -- classes of schedules


SCHEDULES = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 2]),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.2),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR(ConstantLR, StepLR)": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 2)], [3]
    ),
    "SequentialLR(ConstantLR, ExponentialLR)": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
}


def schedules(*schedulers):
    """The section of a fit with these schedules."""
    return Schedules([SchedulerConfig(one) for one in schedulers])


def scheduled(name):
    _, optimizer = built(torch.optim.SGD)
    return SCHEDULES[name](optimizer)


@pytest.mark.parametrize("first", SCHEDULES)
def test_every_pair_of_schedules_is_one_or_is_refused_by_name(first):
    saved = record([schedules(scheduled(first))])
    for second in SCHEDULES:
        section = schedules(scheduled(second))
        if first == second:
            section.restore(saved, "a.ckpt")
        else:
            words = f"a.ckpt holds the state of {first}, and schedule 0 of configure_optimizers is {second}, "
            with pytest.raises(CheckpointError, match=re.escape(words)):
                section.restore(saved, "a.ckpt")


class Slow(lr_scheduler.LRScheduler):
    def get_lr(self):
        return [rate / 2 for rate in self.base_lrs]


class RenamedSlow(lr_scheduler.LRScheduler):
    get_lr = Slow.get_lr


class OwnSteps(lr_scheduler.StepLR):
    pass


class NoTorch:
    """A schedule that is any object."""

    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_a_schedule_of_ones_own_may_be_renamed_or_derived():
    _, optimizer = built(torch.optim.SGD)
    saved = record([schedules(Slow(optimizer))])
    schedules(RenamedSlow(optimizer)).restore(saved, "a.ckpt")
    with pytest.raises(CheckpointError, match="state of Slow, and schedule 0 of configure_optimizers is StepLR"):
        schedules(scheduled("StepLR")).restore(saved, "a.ckpt")
    saved = record([schedules(scheduled("StepLR"), NoTorch(3))])
    own = [OwnSteps(optimizer, 2), NoTorch()]
    schedules(*own).restore(saved, "a.ckpt")
    assert own[1].count == 3


# -- in a run


class Net(Classifier):
    """Takes its optimizer from outside."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


def fit(module, path, steps=3, **options):
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, **options)
    trainer.fit(module, loader(32), ckpt_path=path)
    return trainer


class NoStep(Callback):
    """Fails at the first batch."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        raise AssertionError("a batch has begun")


@pytest.mark.parametrize("precision", ["O0", "O2", "bf16-mixed"])
def test_another_class_is_refused_before_the_first_batch(precision, tmp_path):
    trainer = fit(Net(torch.optim.AdamW), None, precision=precision)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = Net(lambda parameters: torch.optim.RMSprop(parameters, 0.1))
    with pytest.raises(CheckpointError, match=r"a\.ckpt holds the state of AdamW, and optimizer 0 .* is RMSprop"):
        fit(other, tmp_path / "a.ckpt", 6, precision=precision, callbacks=NoStep())

    def scheduled(kind):
        def make(parameters):
            optimizer = torch.optim.AdamW(parameters)
            return [optimizer], [kind(optimizer)]

        return make

    trainer = fit(Net(scheduled(lambda optimizer: lr_scheduler.StepLR(optimizer, 2))), None, precision=precision)
    trainer.save_checkpoint(tmp_path / "b.ckpt")
    other = Net(scheduled(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9)))
    with pytest.raises(CheckpointError, match=r"b\.ckpt holds the state of StepLR, and schedule 0 .* is ExponentialLR"):
        fit(other, tmp_path / "b.ckpt", 6, precision=precision, callbacks=NoStep())


def without_names(path):
    """Makes of a file one of an earlier version: without the classes and names beside the states."""
    content = torch.load(path, weights_only=True)
    for key in (OPTIMIZERS, SCHEDULES_KEY):
        content["loops"]["fit"].pop(key)
    del content["checksum"]
    torch.save(content, path)


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        (torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "momentum"),
        (torch.optim.AdamW, torch.optim.Adagrad, "sum"),
        (lambda p: torch.optim.RMSprop(p, 0.1), torch.optim.AdamW, "betas"),
        (torch.optim.AdamW, torch.optim.Adamax, "exp_inf"),
    ],
)
def test_a_key_that_a_file_without_names_lacks_is_an_error_of_the_checkpoint(first, second, key, tmp_path):
    fit(Net(first), None).save_checkpoint(tmp_path / "a.ckpt")
    without_names(tmp_path / "a.ckpt")
    fit(Net(first), tmp_path / "a.ckpt", 6)
    with pytest.raises(CheckpointError, match=rf"finds no '{key}' in the state that .*a\.ckpt has for it"):
        fit(Net(second), tmp_path / "a.ckpt", 6)


def test_a_hook_may_make_a_state_for_another_class(tmp_path):
    class Converted(Net):
        def on_load_checkpoint(self, checkpoint):
            del checkpoint["loops"]["fit"]["optimizer_identities"]
            (state,) = checkpoint["optimizer_states"]
            state["state"] = {key: {"momentum_buffer": entry["exp_avg"]} for key, entry in state["state"].items()}
            state["param_groups"][0].update(self.make(self.parameters()).defaults, lr=0.2)

    fit(Net(torch.optim.AdamW), None).save_checkpoint(tmp_path / "a.ckpt")
    trainer = fit(Converted(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)), tmp_path / "a.ckpt", 6)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.2


def test_a_fused_optimizer_reads_no_state_of_another_rule(tmp_path):
    fit(Net(torch.optim.Adagrad), None).save_checkpoint(tmp_path / "a.ckpt")
    without_names(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="has 'step', 'sum', and FusedAdam reads 'exp_avg', 'exp_avg_sq'"):
        fit(Net(fused.FusedAdam), tmp_path / "a.ckpt", 6)


def test_a_key_error_of_a_hook_stays_itself(tmp_path):
    class Fails(Callback):
        def on_train_batch_end(self, *_):
            raise KeyError("mine")

    fit(Net(torch.optim.AdamW), None).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(KeyError, match="mine"):
        fit(Net(torch.optim.AdamW), tmp_path / "a.ckpt", 6, callbacks=Fails())


# -- order of parameters


class Layers(TrainingModule):
    """Layers of one shape, defined in a given order, and used in the order of their names."""

    def __init__(self, order="abc", make=None, tied=False):
        super().__init__()
        for name in order:
            generator = torch.Generator().manual_seed(ord(name))
            layer = nn.Linear(8, 8)
            with torch.no_grad():
                layer.weight.copy_(torch.randn(8, 8, generator=generator) / 4)
                layer.bias.copy_(torch.randn(8, generator=generator) / 4)
            setattr(self, name, layer)
        if tied:
            self.twin = self.a
        self.make = make or (lambda module: torch.optim.AdamW(module.parameters(), 0.01))

    def training_step(self, batch, batch_idx):
        values = batch[0]
        for name in "abc":
            values = F.relu(getattr(self, name)(values))
        return F.cross_entropy(values, batch[1])

    def configure_optimizers(self):
        return self.make(self)


def moments(trainer, module):
    """Returns a value of each parameter's state by the parameter's name, for the optimizers that were given names."""
    found = {}
    for section in [trainer._runner.session.record.save("optimizers")]:
        identities = section["loops"]["fit"][OPTIMIZERS]
        for identity, state in zip(identities, section["optimizer_states"], strict=True):
            indices = [index for group in state["param_groups"] for index in group["params"]]
            for name, index in zip(identity["parameters"], indices, strict=True):
                found[name] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in state["state"].get(index, {}).items()
                }
    return found


def same(first, second):
    assert first.keys() == second.keys()
    for name, state in first.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(second[name][key])), (name, key)


class Look(Callback):
    """Keeps the moments, and what else a test asks for, when training begins and ends."""

    def __init__(self):
        self.begin = {}
        self.end = {}

    def on_train_start(self, trainer, module):
        self.begin = moments(trainer, module)

    def on_train_end(self, trainer, module):
        self.end = moments(trainer, module)


def continued(first, second, folder, **options):
    """Trains ``first``, resumes in ``second``; returns the moments at the end of the one, and at the beginning of the other."""
    looks = Look(), Look()
    trainer = fit(first, None, 3, callbacks=looks[0], **options)
    trainer.save_checkpoint(folder / "a.ckpt")
    fit(second, folder / "a.ckpt", 6, callbacks=looks[1], **options)
    return looks[0].end, looks[1].begin, looks[1].end


@given(order=st.permutations("abc"))
def test_moments_follow_the_names_in_any_order(order, tmp_path_factory):
    folder = tmp_path_factory.mktemp("order")
    before, after, end = continued(Layers(), Layers(order), folder)
    same(before, after)
    _, _, straight = continued(Layers(), Layers(), folder)
    same(straight, end)


@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O5", "bf16-mixed"])
@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.AdamW,
        fused.FusedAdam,
        fused.FusedNovoGrad,
        apex_optimizers.FusedNovoGrad,
        lambda parameters, lr: fused.LARC(torch.optim.SGD(parameters, lr, momentum=0.9)),
    ],
)
def test_moments_follow_the_names_at_every_level(precision, kind, tmp_path, caplog):
    def make(module):
        return kind(module.parameters(), lr=0.01)

    before, after, _ = continued(Layers("abc", make), Layers("cba", make), tmp_path, precision=precision)
    same(before, after)
    assert [line for line in caplog.messages if "have another place" in line and "follow their names" in line]


def test_one_order_says_nothing(tmp_path, caplog):
    continued(Layers(), Layers(), tmp_path)
    assert not [line for line in caplog.messages if "names" in line]


def test_names_of_a_compiled_part_and_of_a_tied_one_are_the_same(tmp_path, caplog):
    before, after, _ = continued(Layers("abc", tied=True), Layers("cab", tied=True), tmp_path)
    same(before, after)
    assert [line for line in caplog.messages if "follow their names" in line]
    module = Two()
    module.register_module("_orig_mod", Two())
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    (names,) = [one["parameters"] for one in record([Optimizers([optimizer], module)])["loops"]["fit"][OPTIMIZERS]]
    assert names == ["a", "b", "a", "b"]


class Compiled(Layers):
    def __init__(self, order):
        super().__init__(order)
        self.a = torch.compile(self.a, backend="eager")


@pytest.mark.parametrize(("first", "second"), [(Layers, Compiled), (Compiled, Layers)])
def test_names_are_as_without_compilation(first, second, tmp_path):
    before, after, _ = continued(first("abc"), second("cba"), tmp_path)
    same(before, after)


def by_layers(*rates):
    """Returns a maker of an optimizer with a group for each of the first two layers, and one for the rest."""

    def make(module):
        layers = list(module.children())
        return torch.optim.AdamW(
            [{"params": list(one.parameters()), "lr": rate} for one, rate in zip(layers, rates, strict=True)]
        )

    return make


def test_groups_with_equal_options_may_change_places_and_others_are_refused(tmp_path):
    before, after, _ = continued(
        Layers("abc", by_layers(0.1, 0.1, 0.1)), Layers("bac", by_layers(0.1, 0.1, 0.1)), tmp_path
    )
    same(before, after)
    words = r"the parameter \w\.weight in group \d of its optimizer, here it is in group \d, .* different options"
    with pytest.raises(CheckpointError, match=words):
        continued(Layers("abc", by_layers(0.1, 0.2, 0.1)), Layers("bac", by_layers(0.2, 0.1, 0.1)), tmp_path)


def test_frozen_parameters_and_several_optimizers(tmp_path):
    class Both(Layers):
        automatic_optimization = False

        def __init__(self, order):
            super().__init__(order)
            self.automatic_optimization = False
            self.b.requires_grad_(False)

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            weights = [parameter for parameter in trained if parameter.ndim == 2]
            biases = [parameter for parameter in trained if parameter.ndim == 1]
            return torch.optim.AdamW(weights, 0.01), fused.FusedSGD(biases, 0.01, momentum=0.9)

    before, after, _ = continued(Both("abc"), Both("cba"), tmp_path)
    same(before, after)
    assert set(after) == {"a.weight", "c.weight", "a.bias", "c.bias"}


@pytest.mark.parametrize("earlier", [False, True])
def test_names_given_to_torch_are_followed_and_stay_right(earlier, tmp_path):
    def make(module):
        return torch.optim.AdamW(list(module.named_parameters()), 0.01)

    seen = []

    class Names(Look):
        def on_train_start(self, trainer, module):
            super().on_train_start(trainer, module)
            seen.append(trainer.optimizers[0].param_groups[0]["param_names"])

    looks = Look(), Names()
    fit(Layers("abc", make), None, callbacks=looks[0]).save_checkpoint(tmp_path / "a.ckpt")
    if earlier:
        without_names(tmp_path / "a.ckpt")
    module = Layers("cba", make)
    fit(module, tmp_path / "a.ckpt", 6, callbacks=looks[1])
    same(looks[0].end, looks[1].begin)
    assert seen == [[name for name, _ in module.named_parameters()]]


def test_other_names_are_loaded_by_position_with_a_line(tmp_path, caplog):
    class Renamed(TrainingModule):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

        def on_load_checkpoint(self, checkpoint):
            names = {"a": "first", "b": "second", "c": "third"}
            checkpoint["state_dict"] = {
                names[key[0]] + key[1:]: value for key, value in checkpoint["state_dict"].items()
            }

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.third(F.relu(self.second(F.relu(self.first(batch[0]))))), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.01)

    before, after, _ = continued(Layers(), Renamed(), tmp_path)
    same(dict(zip(after, before.values(), strict=True)), after)
    (line,) = [line for line in caplog.messages if "by position" in line]
    assert "other names of the parameters of AdamW ('a.weight', here 'first.weight')" in line


def test_a_state_that_is_one_vector_is_refused_in_another_order(tmp_path):
    def make(module):
        return torch.optim.LBFGS(module.parameters(), 0.01)

    with pytest.raises(CheckpointError, match="parameters of LBFGS in another order, and its state is one vector"):
        continued(Layers("abc", make), Layers("cba", make), tmp_path)
    continued(Layers("abc", make), Layers("abc", make), tmp_path)


def test_sums_of_an_accumulation_in_another_order_are_computed_again_with_a_line(tmp_path, caplog):
    class Save(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    options = {"precision": "O2", "accumulate_grad_batches": 2}
    fit(Layers(), None, 3, callbacks=Save(), **options)
    fit(Layers(), tmp_path / "within.ckpt", 3, **options)
    assert not [line for line in caplog.messages if "are computed again" in line]
    fit(Layers("cba"), tmp_path / "within.ckpt", 3, **options)
    (line,) = [line for line in caplog.messages if "are computed again" in line]
    assert "the parameters of an optimizer have another order" in line


def test_a_folder_of_shards_follows_the_names(tmp_path):
    def work(strategies):
        path = tmp_path / "-".join(strategies)

        class Save(Callback):
            def on_fit_end(self, trainer, module):
                trainer.save_checkpoint(path)

        ends = []
        fit_ranks(Layers(), None, 3, strategies[0], Save())
        for order in ("abc", "cba"):
            look = Look()
            fit_ranks(Layers(order), path, 6, strategies[1], look)
            ends.append({name: full(state["exp_avg"]) for name, state in look.end.items()})
        same(
            {name: {"exp_avg": value} for name, value in ends[0].items()},
            {n: {"exp_avg": v} for n, v in ends[1].items()},
        )
        return True

    def fit_ranks(module, path, steps, strategy, *callbacks):
        trainer = quiet_trainer(max_steps=steps, max_epochs=-1, devices=2, strategy=strategy, callbacks=list(callbacks))
        trainer.fit(module, loader(64), ckpt_path=path)
        return trainer

    def full(tensor):
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    for strategies in (("fsdp", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp")):
        assert run_ranks(work, 2, strategies) == [True, True]
