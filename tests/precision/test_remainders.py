"""``masters="remainder"`` at O5: the values of fp32 masters, in weights and 16 bits more; edits, loading, and what is refused."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import ConfigError
from fabricamp.apex import amp
from fabricamp.apex.fp16_utils import FP16_Optimizer
from fabricamp.ops.remainders import joined, parted
from fabricamp.optimizers import FusedAdam, UnsupportedError
from fabricamp.precision import Clip, OptLevel
from fabricamp.strategies.base import Strategy
from tests.cuda_on_cpu.compiler import in_pairs, kernel_device, one_order
from tests.windows import add_up, end_step, make_step

__all__ = ["kernel_device"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 40, bias=False), nn.BatchNorm1d(40), nn.Linear(40, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


class Run:
    """A network with its optimizer at O5, and the calls of a loop."""

    def __init__(self, masters, device="cpu", *, accumulate=1, nan_policy=None, clip=None, seed=0, **options):
        torch.manual_seed(seed)
        self.device, self.accumulate, self.clip = device, accumulate, clip
        self.module, self.precision = Net().to(device), OptLevel("O5")
        self.precision.take_nan_policy(nan_policy)
        self.conversion = self.precision.convert_module(self.module)
        self.optimizer = FusedAdam(
            self.module.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **options}, masters=masters
        )
        self.precision.setup_optimizers(self.module, [self.optimizer], Strategy(), accumulates=accumulate > 1)

    def step(self, index, *, bad=False, **how):
        for part in range(self.accumulate):
            generator = torch.Generator().manual_seed(index * 10 + part)
            x = torch.randn(8, 6, generator=generator).to(self.device)
            y = torch.randint(0, 3, (8,), generator=generator).to(self.device)
            loss = self.precision.forward(lambda x=x, y=y: F.cross_entropy(self.module(x).float(), y))
            self.precision.backward(loss / self.accumulate)
            if bad:
                self.module.last.weight.grad.view(-1)[5] = float("inf")
            add_up(self.precision, self.optimizer)
        make_step(self.precision, self.optimizer, clip=self.clip, loss=loss.detach(), **how)
        end_step(self.precision)
        self.optimizer.zero_grad()

    @property
    def values(self):
        """The fp32 values of all weights and buffers, as a checkpoint has them."""
        return {name: value.clone() for name, value in self.conversion.full_state(self.module.state_dict()).items()}


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name].to(value.device)) for name, value in one.items()
    )


WAYS = {
    "plain": {},
    "clip": {"clip": Clip(0.05)},
    "value": {"clip": Clip(0.01, "value")},
    "accumulation": {"accumulate": 2, "clip": Clip(0.05)},
    "skip": {"nan_policy": "skip", "clip": Clip(0.05)},
}


@in_pairs("way", WAYS)
def test_has_the_values_of_fp32_masters(kernel_device, way):
    runs = [Run(masters, kernel_device, **WAYS[way]) for masters in ("fp32", "remainder")]
    assert same(*[run.values for run in runs])
    for index in range(6):
        for run in runs:
            run.step(index, bad=way == "skip" and index == 2)
        assert same(*[run.values for run in runs])
    halves = [dict(run.module.named_parameters()) for run in runs]
    assert same(*halves)
    assert {value.dtype for value in halves[1].values()} == {torch.float32, torch.bfloat16}
    for run in runs:
        run.conversion.undo()
    assert same(*[dict(run.module.named_parameters()) for run in runs])
    assert not runs[1].optimizer.remainders
    assert next(runs[1].module.parameters()).dtype is torch.float32


def test_one_step_differs_from_rounding_to_even_at_ties_alone_by_one_unit():
    values = torch.arange(0x3F800000, 0x3F800000 + 0x40000, 0x4000, dtype=torch.int32).view(torch.float32)
    modules = [nn.Linear(len(values), 1, bias=False) for _ in range(2)]
    for module, masters in zip(modules, ("fp32", "remainder"), strict=True):
        with torch.no_grad():
            module.weight.copy_(values)
        precision = OptLevel("O5")
        precision.convert_module(module)
        optimizer = FusedAdam(module.parameters(), lr=0.0, masters=masters)
        precision.setup_optimizers(module, [optimizer], Strategy())
        precision.backward(precision.forward(lambda module=module: module(torch.ones(len(values))).sum()))
        make_step(precision, optimizer)
    even, up = (module.weight.detach().view(torch.int16).int() for module in modules)
    ties = (values.view(torch.int32) & 0xFFFF == 0x8000) & ((values.view(torch.int32) >> 16) % 2 == 0)
    assert ties.sum() == 2
    assert torch.equal(up - even, ties.int().unsqueeze(0))


def test_hooks_see_fp32_gradients_and_may_edit_them():
    runs = [Run(masters) for masters in ("fp32", "remainder")]
    for index in range(4):
        for run in runs:

            def look(run=run):
                weight = run.module.first.weight
                assert weight.grad.dtype is torch.float32
                weight.grad.mul_(1.0009765625)  # not a bf16 value of the gradient
                run.module.last.weight.grad = run.module.last.weight.grad * 0.5
                return Clip(0.05)

            run.step(index, look=look)
            assert run.module.first.weight.grad is None
        assert same(*[run.values for run in runs])
    for run in runs:
        run.step(9, run=run.optimizer.step)
    assert same(*[run.values for run in runs])


@one_order
def test_groups_that_come_later_get_remainders_too(kernel_device):
    runs = [Run(masters, kernel_device) for masters in ("fp32", "remainder")]
    for run in runs:
        run.step(0)
        torch.manual_seed(5)
        del run.optimizer.param_groups[0]["params"][-1]
        run.optimizer.state.clear()
        run.optimizer.add_param_group({"params": [run.module.unused.bias], "lr": 0.1})
        for index in range(3):
            run.step(index)
    assert same(*[run.values for run in runs])


# -- edits and loading -------------------------------------------------------------------------------------------------------------


def started():
    run = Run("remainder")
    for index in range(3):
        run.step(index)
    return run


@pytest.mark.parametrize("when", ["update", "replay"])
def test_an_edit_in_place_is_refused_by_name(when):
    run = started()
    with torch.no_grad():
        run.module.last.weight[0, 0] = 0.25
    with pytest.raises(ConfigError, match=r"'last.weight' was edited in place.*fp32_values.*refresh_masters"):
        run.step(4) if when == "update" else run.precision.take_edits()


def test_refresh_takes_an_edited_weight_whole():
    run = started()
    before, remainder = run.values, run.optimizer.remainders[run.module.last.weight]
    assert remainder.any()
    with torch.no_grad():
        run.module.last.weight[0, 0] = 0.25
    run.precision.refresh_masters()
    after = run.values
    assert not remainder.any()
    assert torch.equal(after["last.weight"], run.module.last.weight.float())
    assert after["last.weight"][0, 0] == 0.25
    del before["last.weight"], after["last.weight"]
    assert same(before, after)
    run.step(4)


def test_an_edit_after_the_last_update_stays_in_the_module():
    run = started()
    with torch.no_grad():
        run.module.last.weight[0, 0] = 0.25
    assert run.values["last.weight"][0, 0] == 0.25
    run.conversion.undo()
    assert run.module.last.weight[0, 0] == 0.25


def test_an_edit_through_data_keeps_the_weight_as_it_was_written():
    run = started()
    run.module.first.weight.data.zero_()
    run.precision.take_edits(look=True)  # there is no other copy to compare with
    value = run.values["first.weight"]
    assert value.isfinite().all()
    assert value.abs().max() < 1e-40
    run.step(4)


@pytest.mark.parametrize("raises", [False, True])
def test_fp32_values_are_edited_with_all_their_bits(raises):
    run = started()
    expected = run.values
    with pytest.raises(KeyError) if raises else torch.no_grad(), run.precision.fp32_values(run.module) as values:
        assert values["last.weight"].dtype is torch.float32
        assert torch.equal(values["last.weight"], expected["last.weight"])
        values["last.weight"].mul_(1.0001)
        if raises:
            raise KeyError
    expected["last.weight"] *= 1.0001
    assert same(run.values, expected)
    assert torch.equal(run.module.last.weight, parted(expected["last.weight"])[0])
    run.step(4)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_loading_sets_every_bit(kind):
    run, other = started(), Run("remainder", seed=7)
    for name, value in other.module.state_dict().items():
        assert not torch.equal(value, run.module.state_dict()[name]) or value.dim() != 2
    weights = {name: value.to(kind) if value.is_floating_point() else value for name, value in run.values.items()}
    weights["last.bias"][0] = torch.tensor(0x3F808000, dtype=torch.int32).view(torch.float32)  # a tie
    given = copy.copy(weights)
    other.module.load_state_dict(weights)
    assert all(weights[name] is value for name, value in given.items())
    assert same(
        other.values, {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}
    )
    other.step(0)


def test_masters_of_both_kinds_read_each_others_weights_and_states():
    runs = {masters: Run(masters, clip=Clip(0.1)) for masters in ("fp32", "remainder")}
    for index in range(3):
        for run in runs.values():
            run.step(index)
    for start, (one, other) in zip((3, 6), (("fp32", "remainder"), ("remainder", "fp32")), strict=True):
        buffer = io.BytesIO()
        torch.save((runs[one].values, runs[one].optimizer.state_dict()), buffer)
        buffer.seek(0)
        weights, state = torch.load(buffer, weights_only=True)
        resumed = Run(other, clip=Clip(0.1), seed=3)
        resumed.module.load_state_dict(weights)
        resumed.optimizer.load_state_dict(state)
        for index in range(start, start + 3):
            for run in (resumed, *runs.values()):
                run.step(index)
        assert same(resumed.values, runs[one].values)
    sizes = [
        sum(value.nbytes for entry in run.optimizer.state_dict()["state"].values() for value in entry.values())
        for run in runs.values()
    ]
    assert sizes[0] == sizes[1]  # the remainders are in the weights


# -- refusals ----------------------------------------------------------------------------------------------------------------------


def test_words_that_do_not_go_together_are_refused():
    weight = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ConfigError, match="masters='remainders' is not known; did you mean 'remainder'"):
        FusedAdam(weight, masters="remainders")
    with pytest.raises(ConfigError, match="masters='remainder' and master_weights=True"):
        FusedAdam(weight, masters="remainder", master_weights=True, capturable=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loop_without_a_precision_is_refused(dtype):
    weight = nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = FusedAdam([weight], masters="remainder")
    weight.sum().backward()
    with pytest.raises(UnsupportedError, match=r"no remainder of parameter 0 of group 0.*OptLevel\('O5'\)"):
        optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_apexs_scripts_keep_fp32_masters(level):
    module = Net()
    optimizer = FusedAdam(module.parameters(), masters="remainder")
    with pytest.raises(UnsupportedError, match="amp keeps fp32 masters"):
        amp.initialize(module, optimizer, opt_level=level, verbosity=0)
    assert {one.dtype for one in module.parameters()} == {torch.float32}
    with pytest.raises(UnsupportedError, match="FP16_Optimizer keeps fp32 masters"):
        FP16_Optimizer(optimizer)


def test_two_optimizers_with_other_masters_of_one_weight_are_refused():
    module, precision = Net(), OptLevel("O5")
    precision.convert_module(module)
    optimizers = [FusedAdam(module.parameters(), masters=masters) for masters in ("fp32", "remainder")]
    with pytest.raises(ConfigError, match="two optimizers update the same half weight"):
        precision.setup_optimizers(module, optimizers, Strategy())


def test_copies_and_pickles_have_no_remainders_of_another_module():
    run = started()
    other = copy.deepcopy(run.optimizer)
    assert other.masters == "remainder"
    assert not other.remainders
    for group in other.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    with pytest.raises(UnsupportedError, match="has no remainder"):
        other.step()


def test_values_are_joined_in_host_memory():
    run = started()
    weight = run.module.last.weight
    assert torch.equal(run.values["last.weight"], joined(weight, run.optimizer.remainders[weight]))
