"""``FusedAdam(state="bf16")``: steps, state dicts of both formats, names of parameters, shards, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fabricamp import ConfigError
from fabricamp.apex.optimizers import FusedAdam as ApexAdam
from fabricamp.ops.shards import first_element
from fabricamp.optimizers import FusedAdam, refusals
from tests.distributed.ranks import run_ranks
from tests.optimizers.twins import gradients, net

KINDS = pytest.mark.parametrize("kind", [FusedAdam, ApexAdam])


def made(device="cpu", state="bf16", kind=FusedAdam, dtype=torch.float32, **options):
    module = net(device, dtype)
    return module, kind(module.parameters(), lr=0.01, state=state, **options)


def run(module, optimizer, steps):
    for step in steps:
        gradients(module, step)
        optimizer.step()
    return module


def moments(module, optimizer):
    return [optimizer.state[one][name] for one in module.parameters() for name in ("exp_avg", "exp_avg_sq")]


def same(one, other):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_moments_are_bf16_except_of_fp64(kernel_device, kind, dtype):
    module, optimizer = made(kernel_device, kind=kind, dtype=dtype)
    run(module, optimizer, range(3))
    wanted = torch.float64 if dtype is torch.float64 else torch.bfloat16
    assert {one.dtype for one in moments(module, optimizer)} == {wanted}


def test_weights_stay_near_those_of_fp32_states(kernel_device):
    one, other = (run(*made(kernel_device, state), range(60)) for state in ("fp32", "bf16"))
    first = net(kernel_device)
    for near, exact, start in zip(other.parameters(), one.parameters(), first.parameters(), strict=True):
        moved = (exact - start).norm()
        assert 0 < (near - exact).norm() < 0.05 * moved


@KINDS
def test_a_resumed_run_has_the_same_bits(kernel_device, kind):
    straight = made(kernel_device, kind=kind)
    run(*straight, range(3))
    buffer = io.BytesIO()
    torch.save((straight[0].state_dict(), straight[1].state_dict()), buffer)
    buffer.seek(0)
    weights, state = torch.load(buffer, weights_only=True)
    resumed = made(kernel_device, kind=kind)
    resumed[0].load_state_dict(weights)
    resumed[1].load_state_dict(state)
    for pair in (straight, resumed):
        run(*pair, range(3, 6))
    assert same(straight[0].parameters(), resumed[0].parameters())
    assert same(moments(*straight), moments(*resumed))
    assert {one.dtype for one in moments(*resumed)} == {torch.bfloat16}


def test_states_of_either_format_load_into_the_other_with_one_line(kernel_device, caplog):
    caplog.set_level("INFO", "fabricamp")
    full, compact = made(kernel_device, "fp32"), made(kernel_device, "bf16")
    run(*full, range(3))
    run(*compact, range(3))
    states = copy.deepcopy(full[1].state_dict()), copy.deepcopy(compact[1].state_dict())
    compact[1].load_state_dict(states[0])
    full[1].load_state_dict(states[1])
    assert [record.message for record in caplog.records] == [
        "FusedAdam(state='bf16') rounds the fp32 states of the checkpoint to bf16, to nearest",
        "FusedAdam goes on in fp32 from bf16 states of the checkpoint, with the same values",
    ]
    assert {one.dtype for one in moments(*full)} == {torch.float32}
    run(*full, [3])
    run(*compact, [3])
    assert {one.dtype for one in moments(*compact)} == {torch.bfloat16}
    caplog.clear()
    compact[1].load_state_dict(copy.deepcopy(compact[1].state_dict()))
    assert not caplog.records


def test_a_state_dict_takes_half_the_bytes():
    full, compact = made(state="fp32"), made()
    run(*full, [0])
    run(*compact, [0])
    bytes_of = lambda pair: sum(one.nbytes for one in moments(*pair))  # noqa: E731
    assert 2 * bytes_of(compact) == bytes_of(full)


def test_bits_follow_names_and_the_seed(kernel_device):
    """The same parameters in another order draw the same, by the names that a Trainer gives; without names by their places."""

    def moments_of(names, seed=0, reverse=False):
        module = net(kernel_device)
        own = list(module.parameters())
        optimizer = FusedAdam(own[::-1] if reverse else own, state="bf16")
        if names:
            optimizer.names = {parameter: name for name, parameter in module.named_parameters()}
        optimizer.seed = seed
        return moments(run(module, optimizer, range(2)), optimizer)

    assert same(moments_of(True), moments_of(True, reverse=True))
    assert not same(moments_of(True), moments_of(True, seed=1))
    assert not same(moments_of(False), moments_of(False, reverse=True))


def test_torchs_names_of_a_group_are_used():
    module = net("cpu")
    named = FusedAdam(module.named_parameters(), state="bf16")
    run(module, named, range(2))
    other = net("cpu")
    by_hand = FusedAdam(other.parameters(), state="bf16")
    by_hand.names = {parameter: name for name, parameter in other.named_parameters()}
    run(other, by_hand, range(2))
    assert same(moments(module, named), moments(other, by_hand))


def test_copies_and_pickles_keep_the_format():
    module, optimizer = made()
    run(module, optimizer, range(2))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.state_format == "bf16"
        own = nn.ParameterList([one for group in other.param_groups for one in group["params"]])
        run(own, other, [2])
        assert {one.dtype for one in moments(own, other)} == {torch.bfloat16}


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="state='bf61' is not known; did you mean 'bf16'"):
        FusedAdam([nn.Parameter(torch.ones(1))], state="bf61")


def test_shards_are_numbered_within_the_whole_and_strided_ones_refused():
    def on_rank():
        mesh = init_device_mesh("cpu", (2,))
        value = torch.arange(15.0).view(5, 3)
        shards = {
            name: nn.Parameter(distribute_tensor(value, mesh, [one]))
            for name, one in (("rows", Shard(0)), ("columns", Shard(1)), ("copy", Replicate()))
        }
        firsts = {name: first_element(one) for name, one in shards.items()}
        local = shards["rows"].to_local()
        refusals.refuse_strided_states(FusedAdam([shards["rows"], shards["copy"]], state="bf16"))
        refusals.refuse_strided_states(FusedAdam([shards["columns"]]))
        for state in ("bf16", "8bit"):
            with pytest.raises(
                ConfigError,
                match=r"numbers the elements of whole parameters, and parameter 0 of group 0 is sharded as \(Shard\(dim=1\),\)",
            ):
                refusals.refuse_strided_states(FusedAdam([shards["columns"]], state=state))
        return firsts, local.flatten()[:1].tolist()

    found = run_ranks(on_rank, 2)
    assert [firsts for firsts, _ in found] == [
        {"rows": 0, "columns": -1, "copy": 0},
        {"rows": 9, "columns": -1, "copy": 0},
    ]
    assert [number for _, number in found] == [[0.0], [9.0]]
