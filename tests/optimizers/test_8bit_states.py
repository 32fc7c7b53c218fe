"""States of eight bits in fused optimizers: which are, steps, state dicts of all formats, shards; bf16 in Lion and SGD."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fabricamp import CheckpointError
from fabricamp.apex.optimizers import FusedAdam as ApexAdam
from fabricamp.apex.optimizers import FusedSGD as ApexSGD
from fabricamp.ops import codes, remainders
from fabricamp.ops.shards import whole
from fabricamp.optimizers import FusedAdam, FusedLion, FusedSGD
from tests.cuda_on_cpu.compiler import one_order, references
from tests.distributed.ranks import run_ranks
from tests.optimizers.twins import gradients, same_bits

KINDS = {
    "adam": lambda own, **options: FusedAdam(own, lr=0.01, **options),
    "apex's adam": lambda own, **options: ApexAdam(own, lr=0.01, **options),
    "lion": lambda own, **options: FusedLion(own, lr=0.003, **options),
    "sgd": lambda own, **options: FusedSGD(own, lr=0.05, momentum=0.9, dampening=0.1, nesterov=False, **options),
    "apex's sgd": lambda own, **options: ApexSGD(own, lr=0.05, momentum=0.9, **options),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
three_kinds = pytest.mark.parametrize("kind", ["adam", "lion", "sgd"])
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def net(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 65), nn.ReLU(), nn.Linear(65, 5)).to(device, dtype)


def made(kind="adam", state="8bit", device="cpu", dtype=torch.float32):
    module = net(device, dtype)
    return module, KINDS[kind](module.parameters(), state=state)


def run(module, optimizer, steps):
    for step in steps:
        gradients(module, step)
        optimizer.step()
    return module


def tensors(module, optimizer):
    entries = [optimizer.state[one] for one in module.parameters()]
    return {
        (number, name): value
        for number, entry in enumerate(entries)
        for name, value in entry.items()
        if value is not None
    }


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def kinds_of(module, optimizer):
    return [value.dtype for (_, name), value in tensors(module, optimizer).items() if name in STATES]


@one_order
@every_kind
def test_matrices_of_4096_elements_have_codes(kernel_device, kind):
    module, optimizer = made(kind, device=kernel_device)
    run(module, optimizer, range(3))
    found = tensors(module, optimizer)
    coded = {key for key, value in found.items() if value.dtype is torch.uint8}
    assert {number for number, _ in coded} == {0}
    assert {name for _, name in coded} <= set(STATES)
    for number, name in coded:
        assert found[number, f"{name}_scales"].shape == (1, 18)
    others = {value.dtype for (number, name), value in found.items() if number and name in STATES}
    assert others == {torch.float32}


def test_what_keeps_fp32():
    matrix, images = torch.randn(64, 64), torch.randn(16, 16, 4, 4).to(memory_format=torch.channels_last)
    shapes = [
        matrix,
        torch.randn(4096),
        torch.randn(63, 65),
        images,
        matrix.double(),
        matrix.bfloat16(),
        matrix.t(),
        matrix,
    ]
    module = nn.ParameterList([nn.Parameter(one.clone(memory_format=torch.preserve_format)) for one in shapes])
    optimizer = FusedAdam(module, state="8bit")
    optimizer.names, optimizer.wide_names = {module[7]: "embedding"}, frozenset({"embedding"})
    run(module, optimizer, [0])
    kept = [optimizer.state[one]["exp_avg"].dtype for one in module]
    wide = torch.float32
    assert kept == [torch.uint8, wide, wide, wide, torch.float64, torch.uint8, wide, wide]


@one_order
@three_kinds
def test_weights_stay_near_those_of_fp32_states(kernel_device, kind):
    one, other = (run(*made(kind, state, kernel_device), range(40)) for state in ("fp32", "8bit"))
    first = net(kernel_device)
    near, exact, start = (each[0].weight for each in (other, one, first))
    assert 0 < (near - exact).norm() < 0.1 * (exact - start).norm()
    assert torch.equal(other[2].weight, one[2].weight)  # too small for codes


@pytest.mark.parametrize("state", ["8bit", "bf16"])
@every_kind
def test_a_resumed_run_has_the_same_bits(kind, state):
    straight = made(kind, state)
    run(*straight, range(3))
    buffer = io.BytesIO()
    torch.save((straight[0].state_dict(), straight[1].state_dict()), buffer)
    buffer.seek(0)
    weights, saved = torch.load(buffer, weights_only=True)
    resumed = made(kind, state)
    resumed[0].load_state_dict(weights)
    resumed[1].load_state_dict(saved)
    assert same(tensors(*straight), tensors(*resumed))
    for pair in (straight, resumed):
        run(*pair, range(3, 6))
    assert same_bits(straight[0], resumed[0])
    assert same(tensors(*straight), tensors(*resumed))


@three_kinds
def test_bf16_states_count_their_steps(kind):
    """Rounded up as often as down: the mean of a momentum is that of fp32 ones, which rounding to nearest would not move."""
    module, optimizer = made(kind, "bf16")
    run(module, optimizer, range(3))
    assert set(kinds_of(module, optimizer)) == {torch.bfloat16}
    assert {value.item() for (_, name), value in tensors(module, optimizer).items() if name == "step"} == {3.0}
    other = made(kind, "bf16")
    other[1].seed = 1
    run(*other, range(3))
    assert not same(tensors(module, optimizer), tensors(*other))
    run(*(full := made(kind, "fp32")), range(3))
    for (number, name), value in tensors(*full).items():
        if name in STATES:
            torch.testing.assert_close(tensors(module, optimizer)[number, name].float(), value, rtol=0.02, atol=0.02)


@three_kinds
def test_states_of_each_format_load_into_each_with_one_line(kind, caplog):
    caplog.set_level("INFO", "fabricamp")
    sources = {state: made(kind, state) for state in ("fp32", "bf16", "8bit")}
    for pair in sources.values():
        run(*pair, range(3))
    names = {"fp32": "fp32", "bf16": "bf16", "8bit": "8-bit"}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
    for source, pair in sources.items():
        for state, dtype in dtypes.items():
            target = made(kind, state)
            caplog.clear()
            target[1].load_state_dict(copy.deepcopy(pair[1].state_dict()))
            if source == state:
                assert not caplog.messages
                assert same(tensors(*pair), tensors(*target))
                continue
            (message,) = caplog.messages
            assert names[source] in message
            assert set(kinds_of(*target)) == ({dtype} if state != "8bit" else {torch.float32, dtype})
            for number, name in tensors(*pair):
                if name not in STATES:
                    continue
                before, after = values(pair, number, name), values(target, number, name)
                torch.testing.assert_close(after, before, rtol=0.12 if "8bit" in (source, state) else 0.005, atol=1e-3)
            run(*target, [3])


def values(pair, number, name):
    return decoded_state(pair[1].state[list(pair[0].parameters())[number]], name)


def decoded_state(entry, name):
    value = entry[name]
    if value.dtype is torch.uint8:
        return codes.decoded(value, entry[f"{name}_scales"], squares=name == "exp_avg_sq")
    return value.float()


def test_a_state_dict_takes_half_the_bytes():
    sizes = {}
    for state in ("fp32", "bf16", "8bit"):
        module = nn.Linear(512, 512)
        optimizer = FusedAdam(module.parameters(), state=state)
        run(module, optimizer, [0])
        sizes[state] = sum(one.nbytes for one in [*module.parameters(), *tensors(module, optimizer).values()])
    assert sizes["bf16"] <= 0.68 * sizes["fp32"]
    assert sizes["8bit"] <= 0.52 * sizes["fp32"]


def test_codes_without_scales_are_refused():
    module, optimizer = made()
    run(module, optimizer, [0])
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0]["exp_avg_scales"]
    with pytest.raises(CheckpointError, match="codes of 8 bits as 'exp_avg' and no 'exp_avg_scales'"):
        made()[1].load_state_dict(state)


def test_copies_and_pickles_keep_the_format():
    module, optimizer = made()
    run(module, optimizer, range(2))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.state_format == "8bit"
        own = nn.ParameterList([one for group in other.param_groups for one in group["params"]])
        run(own, other, [2])
        assert torch.uint8 in kinds_of(own, other)


@one_order
def test_a_parameter_that_gets_another_layout_goes_on_in_fp32(kernel_device):
    parameter = nn.Parameter(torch.randn(32, 8, 4, 4, device=kernel_device))
    module = nn.ParameterList([parameter])
    optimizer = FusedAdam(module, state="8bit")
    run(module, optimizer, range(2))
    before = codes.decoded(
        optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_scales"], squares=False
    )
    parameter.data = parameter.data.to(memory_format=torch.channels_last)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert "exp_avg_scales" not in optimizer.state[parameter]
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], 0.9 * before)


@pytest.mark.parametrize("rows", [64, 65])
def test_shards_have_blocks_of_their_own(rows, caplog):
    """Of 64 rows each shard is whole blocks, the same as of one rank; of 65 rows the second shard begins within one."""
    caplog.set_level("INFO", "fabricamp")
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(rows, 72, generator=generator) for _ in range(2))

    def of(parameter, gradient):
        optimizer = FusedAdam([parameter], state="8bit")
        parameter.grad = gradient
        optimizer.step()
        return optimizer

    def saved(optimizer):
        state = optimizer.state_dict()
        (entry,) = state["state"].values()
        full = {name: whole(value) if isinstance(value, DTensor) else value for name, value in entry.items()}
        return {**state, "state": {0: copy.deepcopy(full)}}

    alone = saved(of(nn.Parameter(weight.clone()), gradient.clone()))

    def on_rank():
        told = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        logging.getLogger("fabricamp").addHandler(handler)
        mesh = init_device_mesh("cpu", (2,))
        make = lambda: nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))  # noqa: E731
        optimizer = of(make(), distribute_tensor(gradient, mesh, [Shard(0)]))
        mine = saved(optimizer)
        results = []
        for state in (mine, alone):
            caplog.clear()
            parameter = make()
            other = FusedAdam([parameter], state="8bit")
            entry = dict(state["state"][0])  # as a resume hands it on: this rank's shard, and the scales of all
            for name in ("exp_avg", "exp_avg_sq"):
                entry[name] = distribute_tensor(entry[name], mesh, [Shard(0)], src_data_rank=None)
            other.load_state_dict({**state, "state": {0: entry}})
            results.append((saved(other), list(told)))
        return mine, results

    (mine, ((again, none), (from_one, lines))), _ = run_ranks(on_rank, 2)
    assert mine["state"][0]["exp_avg_scales"].shape == (2, -(-(-(-rows // 2) * 72) // 256))
    assert not none
    equal(mine, again)
    decoded = [
        [
            codes.decoded(each["state"][0][name], each["state"][0][f"{name}_scales"], squares=name == "exp_avg_sq")
            for name in STATES[:2]
        ]
        for each in (mine, alone, from_one)
    ]
    if rows == 64:
        equal(mine, from_one)
        assert not lines
        assert all(map(torch.equal, decoded[0], decoded[1]))
    else:
        assert lines == [
            "FusedAdam(state='8bit') rounds the 8-bit states of the checkpoint again: its shards begin at other elements"
        ]
        for each in decoded[1:]:
            for one, other in zip(each, decoded[0], strict=True):
                torch.testing.assert_close(one, other, rtol=0.1, atol=1e-3)
    caplog.clear()
    back = FusedAdam([nn.Parameter(weight.clone())], state="8bit")
    back.load_state_dict(mine)
    assert len(caplog.messages) == (rows == 65)


def equal(one, other):
    for name, value in one["state"][0].items():
        assert torch.equal(value, other["state"][0][name]), name


@one_order
@pytest.mark.parametrize("masters", ["fp32", "remainder"])
@pytest.mark.parametrize("state", ["bf16", "8bit"])
@pytest.mark.parametrize("kind", ["lion", "sgd"])
def test_kernels_step_as_the_references(kernel_device, kind, state, masters):
    dtype = torch.float32 if masters == "fp32" else torch.bfloat16
    results = []
    for runs in (contextlib.nullcontext(), references(kernel_device)):
        with runs:
            module = net(kernel_device, dtype)
            optimizer = KINDS[kind](module.parameters(), state=state, masters=masters)
            if masters == "remainder":
                optimizer.remainders = {one: torch.zeros_like(one, dtype=torch.int16) for one in module.parameters()}
            run(module, optimizer, range(4))
            results.append(
                (tensors(module, optimizer), [one.detach() for one in module.parameters()], optimizer.remainders)
            )
    (mine, own, bits), (theirs, other, other_bits) = results
    assert mine.keys() == theirs.keys()
    for (number, name), value in mine.items():
        if name in STATES:
            left, right = (
                decoded_state({part: each[number, part] for at, part in each if at == number}, name)
                for each in (mine, theirs)
            )
            assert ((left - right).abs() > 0.02 * right.abs() + 1e-6).float().mean() < 0.01
        else:
            torch.testing.assert_close(value, theirs[number, name])
    for left, right in zip(own, other, strict=True):
        torch.testing.assert_close(left, right, rtol=0.01, atol=1e-5)
    assert len(bits) == len(other_bits) == (4 if masters == "remainder" else 0)
    if bits:
        joined = [
            [remainders.joined(one, kept[one_of]) for one, one_of in zip(values, kept, strict=True)]
            for values, kept in ((own, bits), (other, other_bits))
        ]
        for left, right in zip(*joined, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
