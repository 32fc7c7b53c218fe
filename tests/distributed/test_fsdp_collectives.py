"""Casts where FSDP copies for its collectives, by kernels on CPUs, over Gloo: the bits of torch's copies, in fewer launches."""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import functools
import logging
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.nn import functional as F

from fabricamp import ConfigError, Float8, TrainingModule, seed_everything
from fabricamp.engine.graph.host_effects import CapturedConstantsGuard
from fabricamp.errors import DistributedError
from fabricamp.ops import bridge, peer_memory
from fabricamp.ops.peer_memory import PeerBuffers, Workspace, check_peers, workspace_of
from fabricamp.ops.shards import local
from fabricamp.optimizers import FusedAdam
from fabricamp.strategies import FSDP, fsdp, fsdp_collectives
from fabricamp.strategies.fsdp_collectives import VARIABLE, FlatGradients, ScatterCasts, ShardCast
from tests.cuda_on_cpu.compiler import compiler
from tests.cuda_on_cpu.shared_memory import map_words, use_kernels
from tests.distributed.ranks import import_compiler, run_ranks
from tests.small import loader, quiet_trainer


class Block(nn.Module):
    """A block with shards of each kind: cast by a kernel, too small for it (the biases), and of uneven sizes (``odd``)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.odd = nn.Linear(32, 33, bias=False)
        self.down = nn.Linear(33, 16)

    def forward(self, x):
        return x + self.down(self.odd(F.gelu(self.up(self.norm(x)))))


class EvenBlock(nn.Module):
    """A block whose gradients are cast by a kernel, as all ranks have equal shards."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(TrainingModule):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Block(), EvenBlock(), Block(), EvenBlock()])
        self.head = nn.Linear(16, 3)
        self.losses = []

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.detach().float())
        return loss

    def validation_step(self, batch, batch_idx):
        self.losses.append(self(batch[0]).detach().float().sum())

    def on_train_start(self):
        self.shards = [local(parameter) for parameter in self.parameters()]
        self.cast = [hasattr(shard, "fsdp_pre_all_gather") for shard in self.shards]

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=0.01)


@contextlib.contextmanager
def kernels_on_cpu(*, peers=False):
    """Runs kernels on the CPU, and notes their launches; ``peers``: ranks read each other's memory."""
    launches = []
    compile_it = compiler(reverse=False)

    def counting(text, function, device, *shared):
        run = compile_it(text, function, device, *shared)
        casts = "gather" if text.startswith("#define FROM float") else "scatter"

        def counted(*arguments):
            launches.append(casts if function == "flat_casts" else function)
            run(*arguments)

        return counted

    bridge.COMPILERS["cpu"] = counting
    peer_memory._workspaces.clear()  # a group is asked once whether its ranks share memory
    if peers:
        peer_memory.ALLOCATORS["cpu"] = map_words
    bridge.kernel.cache_clear()
    fewest, fsdp_collectives._FEWEST = fsdp_collectives._FEWEST, 32
    try:
        yield launches
    finally:
        del bridge.COMPILERS["cpu"]
        peer_memory.ALLOCATORS.pop("cpu", None)
        bridge.kernel.cache_clear()
        fsdp_collectives._FEWEST = fewest


@contextlib.contextmanager
def torchs_copies():
    """Leaves the copies to torch."""
    real = fsdp.replace_collectives
    fsdp.replace_collectives = lambda *_: lambda: None
    try:
        yield
    finally:
        fsdp.replace_collectives = real


def trained(precision, *, net=Net, strategy=None, **options):
    seed_everything(5, verbose=False)
    module = net()
    strategy = strategy or FSDP([Block, EvenBlock])
    options = {"devices": "auto", "max_epochs": 1, "num_sanity_val_steps": 1, **options}
    trainer = quiet_trainer(strategy=strategy, precision=precision, **options)
    trainer.fit(module, loader(16, 2), loader(8, 4))
    return module


def compared(precision, *, peers=False, **options):
    """Returns the module and the launches of a run, which has the bits of one with torch's collectives."""
    make = options.pop("make", lambda: None)
    with kernels_on_cpu(peers=peers) as launches:
        own = trained(precision, strategy=make(), **options)
        made = list(launches)
        launches.clear()
        with torchs_copies():
            torchs = trained(precision, strategy=make(), **options)
        # Gathers in FP8 have casts of their own.
        others = set(launches) & {"gather", "scatter", "peer_barrier", "rank_sums"}
        assert not others or (others == {"gather"} and isinstance(precision, Float8))
    assert torch.equal(torch.stack(own.losses), torch.stack(torchs.losses))
    if dist.get_rank() == 0:
        for (name, value), other in zip(own.state_dict().items(), torchs.state_dict().values(), strict=True):
            assert torch.equal(value, other), name
    assert not any(vars(shard) for shard in own.shards)
    return own, made


def of_two_ranks():
    module, launches = compared("O5", num_sanity_val_steps=0, limit_val_batches=0)
    names = [name for (name, _), cast in zip(Net().named_parameters(), module.cast, strict=True) if cast]
    layers = [f"blocks.{index}.{layer}.weight" for index in range(4) for layer in ("up", "down")]
    assert names == ["first.weight", *layers]
    # Each of four steps gathers five units for forward and four for backward, and scatters those two whose gradients are all even.
    assert launches.count("gather") == 4 * 9
    assert launches.count("scatter") == 4 * 2
    for precision, options in {
        "O5": {},
        "O2": {},
        "O4": {"gradient_clip_val": 0.1},
        "O1": {"accumulate_grad_batches": 2},
        "O3": {"make": lambda: FSDP([Block, EvenBlock], reshard_after_forward=False)},
    }.items():
        # At O3 shards have the dtype in which they are gathered, and gradients that were accumulated are in fp32.
        expected = {"O3": {"scatter"}, "O1": {"gather"}}.get(precision, {"gather", "scatter"})
        assert expected <= set(compared(precision, **options)[1]), precision
    assert "gather" not in compared("O0")[1]
    assert "gather" not in compared("O4", make=lambda: FSDP([Block, EvenBlock], offload=True))[1]


def test_the_bits_are_those_of_torchs_copies():
    run_ranks(of_two_ranks, 2)


def of_four_ranks():
    assert "gather" in compared("O5", make=lambda: FSDP([Block, EvenBlock], replicate=2))[1]
    assert "gather" not in compared("O5", make=lambda: FSDP([Block, EvenBlock], reshard_after_forward=2))[1]


def test_copies_of_the_module_and_larger_shards():
    run_ranks(of_four_ranks, 4)


def reading_peers():
    _, launches = compared("O5", peers=True, num_sanity_val_steps=0, limit_val_batches=0)
    # Each of the 4 * 9 gathers and of the 4 * 2 reduce-scatters has a barrier before the ranks read, and one after it.
    assert launches.count("peer_barrier") == 2 * (4 * 9 + 4 * 2)
    assert launches.count("rank_sums") == 4 * 2
    for precision, options in {
        "O5": {},
        "O2": {"gradient_clip_val": 0.1},
        "O1": {"accumulate_grad_batches": 2},
        "O3": {"make": lambda: FSDP([Block, EvenBlock], reshard_after_forward=False)},
    }.items():
        # Gradients that were accumulated are in fp32, and torch scatters them.
        assert ({"peer_barrier"} if precision == "O1" else {"rank_sums"}) <= set(
            compared(precision, peers=True, **options)[1]
        )


def test_ranks_that_read_each_others_memory_get_the_bits_of_collectives():
    run_ranks(reading_peers, 2)


class Interrupted(Net):
    """Before its second batch, forward or backward is cut in the middle: as in a capture that fails."""

    where = ""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx != 1 or not self.where:
            return
        before = traces(self)
        # Within a unit, which stays gathered.
        layer = self.blocks[1].up
        register = layer.register_forward_hook if self.where == "forward" else layer.register_full_backward_hook
        handle = register(self.cut)
        precision = self.trainer.precision_plugin
        cut = cut_in_a_gather() if self.where == "gather" else contextlib.nullcontext()
        caught = None
        try:
            with self.trainer.strategy.captured(), cut:
                precision.backward(precision.forward(self.training_step, batch, batch_idx))
        except RuntimeError as error:
            caught = error
        assert "in the middle" in str(caught)
        assert traces(self) == before
        handle.remove()
        if dist.get_rank() == 0:
            self.kept = caught  # with the frames of the step, and what they have gathered
        caught = None  # else the frame of this method keeps it on all ranks
        if self.where == "backward":
            self.losses.pop()
        for parameter in self.parameters():
            parameter.grad = None

    def cut(self, *_):
        if self.where != "gather":
            raise RuntimeError("in the middle")


def traces(module):
    """Returns what torch's FSDP remembers of a step that runs, and the classes of the parameters: gathered ones are plain."""
    root = module._get_fsdp_state()
    context, steps = root._comm_ctx, root._state_ctx
    states = [(state._training_state, state._fsdp_param_group) for state in steps.all_states]
    groups = [
        (group._training_state, group._all_gather_result, group._post_reduce_event, list(group._post_forward_indices))
        for _, group in states
        if group is not None
    ]
    of_steps = steps.iter_forward_root, steps.post_backward_final_callback_queued
    of_collectives = context.all_gather_state, list(context.post_forward_order)
    return states, groups, of_steps, of_collectives, [type(parameter) for parameter in module.parameters()]


@contextlib.contextmanager
def cut_in_a_gather():
    """Lets the third gather of a step fail where torch allocates the unit's weights."""
    real, calls = param_group.foreach_all_gather_copy_out, []

    def failing(*arguments):
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("in the middle")
        return real(*arguments)

    param_group.foreach_all_gather_copy_out = failing
    try:
        yield
    finally:
        param_group.foreach_all_gather_copy_out = real


def cut_steps():
    found = {}
    for where in ("", "forward", "backward", "gather"):
        for peers in (False, True):
            with kernels_on_cpu(peers=peers):
                Interrupted.where = where
                module = trained("O5", net=Interrupted)
            found[where, peers] = torch.stack(module.losses)
    for (_, peers), losses in found.items():
        assert torch.equal(losses, found["", peers])


def test_a_step_that_is_cut_in_the_middle_leaves_no_trace():
    run_ranks(cut_steps, 2)


def turns_of_steps():
    """A step gathers nine times: the first gather of each one has the first of the two buffers, also after a validation."""
    firsts = []
    real = PeerBuffers.next_turn

    class Noted(Net):
        def on_train_batch_start(self, batch, batch_idx):
            firsts.append(None)

    def noted(buffers):
        turn = real(buffers)
        if firsts and firsts[-1] is None:
            firsts[-1] = turn
        return turn

    PeerBuffers.next_turn = noted
    with kernels_on_cpu(peers=True):
        trained("O5", net=Noted, val_check_interval=2)
    assert firsts == [0, 0, 0, 0]


def test_ranks_that_run_a_step_differently_use_the_same_buffers():
    run_ranks(turns_of_steps, 2)


def of_four_that_read():
    losses = []
    for exchange in ("peer", "collective"):
        os.environ[VARIABLE] = exchange
        with kernels_on_cpu(peers=True) as launches:
            losses.append(torch.stack(trained("O5").losses))
        assert ("peer_barrier" in launches) is (exchange == "peer")
    # Four values are added up in another order.
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)
    os.environ[VARIABLE] = ""
    _, launches = compared("O5", peers=True, make=lambda: FSDP([Block, EvenBlock], replicate=2))
    assert "rank_sums" in launches


def test_four_ranks_that_read_each_others_memory():
    run_ranks(of_four_that_read, 4)


def test_an_unknown_exchange_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "per")
    with pytest.raises(ConfigError, match="FABRICAMP_FSDP_EXCHANGE='per' is not known .* did you mean 'peer'"):
        FSDP()


def asked_for_peers():
    """Ranks that do not reach each other's memory are asked for it, and ranks without memory for buffers are not."""
    os.environ[VARIABLE] = "peer"
    with (
        kernels_on_cpu(),
        pytest.raises(ConfigError, match="FSDP_EXCHANGE='peer' cannot work here: .*; use 'collective'"),
    ):
        trained("O5")
    os.environ[VARIABLE] = ""
    buffers, messages = Workspace.buffers, []
    Workspace.buffers = lambda *_: None
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("fabricamp").addHandler(handler)
    with kernels_on_cpu(peers=True) as launches:
        trained("O5")
    Workspace.buffers = buffers
    assert "peer_barrier" not in launches
    assert sum("no memory for buffers that the ranks read" in message for message in messages) == 1


def test_ranks_that_cannot_read_each_others_memory():
    run_ranks(asked_for_peers, 2)


def barriers():
    """Buffers of each rank that all read, and a rank that does not come to a barrier."""
    use_kernels()
    group = dist.new_group(timeout=dt.timedelta(seconds=100))
    workspace, reason = workspace_of(group, torch.device("cpu"))
    assert not reason
    buffers = workspace.buffers(100, 2)
    assert buffers.size == 128
    rank = dist.get_rank()
    turns = []
    for number in range(5):
        turn = buffers.next_turn()
        turns.append(turn)
        buffers.buffer(turn).fill_(10 * number + rank)
        buffers.barrier()
        for other in range(buffers.ranks):
            assert (buffers.buffer(turn, other) == 10 * number + other).all()
        buffers.barrier()
    assert turns == [0, 1, 0, 1, 0]
    check_peers()
    workspace.timeout = dt.timedelta(seconds=1)  # of the next buffers, to which a rank does not come
    lonely = workspace.buffers(100, 1)
    if rank == 0:
        lonely.barrier()  # waits, and returns
        with pytest.raises(
            DistributedError, match=r"rank 0 waited 1 s in a kernel \(of SyncBatchNorm or FSDP\) for rank 1"
        ):
            lonely.barrier()


def test_a_rank_that_does_not_come_to_a_barrier_is_named():
    run_ranks(barriers, 2)


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_an_evaluation_without_one_of_the_ranks_has_no_result(name, monkeypatch):
    class Missed:
        def check(self):
            raise DistributedError("rank 0 waited for rank 1")

    class Evaluated(Net):
        def test_step(self, batch, batch_idx):
            # As if a kernel had waited in vain in the last batch.
            monkeypatch.setitem(peer_memory._workspaces, ("a group", torch.device("cpu")), (None, Missed(), ""))

        validation_step = predict_step = test_step

    with pytest.raises(DistributedError, match="rank 0 waited"):
        getattr(quiet_trainer(), name)(Evaluated(), loader(8, 4))


class WideRoot(Net):
    """The root is larger than a buffer, and its gradients are all even."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(EvenBlock() for _ in range(3))
        self.wide = nn.Linear(16, 512)
        self.back = nn.Linear(512, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.back(self.wide(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Prefetching(Net):
    """Units are gathered long before they run."""

    def on_train_start(self):
        super().on_train_start()
        for number, block in enumerate(self.blocks):
            block.set_modules_to_forward_prefetch(list(self.blocks[number + 1 : number + 4]))
            block.set_modules_to_backward_prefetch(list(reversed(self.blocks[max(number - 3, 0) : number])))


class UnevenlyUsed(EvenBlock):
    """Leaves a layer out in every other call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 2:
            return super().forward(x)
        return x + self.down(self.norm(x).repeat(1, 2))


class Leaving(Net):
    """Some parameters of a unit have no gradient in some steps."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(UnevenlyUsed() for _ in range(3))


def kinds_of_modules():
    for net, units in ((WideRoot, [EvenBlock]), (Prefetching, [Block, EvenBlock]), (Leaving, [UnevenlyUsed])):
        for peers in (True, False):
            _, launches = compared("O5", peers=peers, net=net, make=functools.partial(FSDP, units))
            assert ("rank_sums" in launches) is peers, net


def test_large_roots_early_gathers_and_layers_that_are_left_out():
    run_ranks(kinds_of_modules, 2)


def tables_of_layouts():
    """A unit keeps what casts its gradients for each set of layers that have some: a CUDA graph reads the tables of one."""
    made = []
    real = fsdp_collectives._scatter_cast
    fsdp_collectives._scatter_cast = lambda *arguments: made.append(None) or real(*arguments)
    with kernels_on_cpu():
        trained("O5", net=Leaving, strategy=FSDP([UnevenlyUsed]), max_epochs=2)
    # Three blocks with two sets each, and the root.
    assert len(made) == 3 * 2 + 1


def test_tables_of_casts_stay():
    run_ranks(tables_of_layouts, 2)


def test_a_copy_that_fails_leaves_no_trace(monkeypatch):
    """As where a capture runs out of memory: the next allocation is an input again."""
    scatter = ScatterCasts(None)
    monkeypatch.setattr(scatter, "copy_in", lambda *_: 1 / 0)
    flat = scatter.allocate((8,), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ZeroDivisionError):
        torch.ops.fsdp.chunk_cat([torch.ones(8).bfloat16()], dim=0, num_chunks=2, out=flat.view(2, -1))
    assert isinstance(scatter.allocate((8,), dtype=torch.float32, device=torch.device("cpu")), FlatGradients)


class Guarded(Net):
    """Looks at what a CUDA graph would hold of the module."""

    def on_train_batch_start(self, batch, batch_idx):
        guard = CapturedConstantsGuard(self, {})
        assert guard.are_unchanged()
        weight = self.blocks[1].up.weight
        weight.requires_grad = False
        assert not guard.are_unchanged()
        weight.requires_grad = True
        shard = weight._local_tensor
        weight._local_tensor = shard.clone()
        assert not guard.are_unchanged()
        weight._local_tensor = shard
        assert guard.are_unchanged()


def guarded():
    trained("O5", net=Guarded, strategy=FSDP([Block, EvenBlock]))


def test_a_shard_that_is_frozen_or_replaced_is_noticed():
    run_ranks(guarded, 1)


def scattered_directly():
    """One reduce-scatter after the other, as FSDP makes it, of sums and averages: its results are those of exact sums."""
    use_kernels()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    workspace, reason = workspace_of(dist.group.WORLD, torch.device("cpu"))
    assert not reason
    for peers in (workspace.buffers(2 * 4 * 40, 1), workspace.buffers(100, 1), None):
        scatter = ScatterCasts(peers)
        for number, rows in enumerate((2, 2, 8, 2)):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                generator = torch.Generator().manual_seed(number)
                every = torch.randint(-8, 8, (ranks, 5, 4 * rows), generator=generator).bfloat16()
                # Not contiguous on one rank.
                own = every[rank].t() if rank else every[rank].t().contiguous()
                flat = scatter.allocate((own.numel(),), dtype=torch.float32, device=own.device)
                torch.ops.fsdp.chunk_cat([own], dim=0, num_chunks=ranks, out=flat.view(ranks, -1))
                output = scatter.allocate((own.numel() // ranks,), dtype=torch.float32, device=own.device)
                if peers is None and op == dist.ReduceOp.AVG:
                    continue  # Gloo has no averages
                if peers is not None and flat.place.halves is None and op == dist.ReduceOp.AVG:
                    continue
                scatter(output, flat, dist.group.WORLD, op)
                whole = every.float().sum(0).t().reshape(-1).chunk(ranks)[rank]
                assert torch.equal(output, whole / ranks if op == dist.ReduceOp.AVG else whole)


def test_sums_and_averages_of_gradients_of_any_size_and_strides():
    run_ranks(scattered_directly, 2)


def without_memory():
    """A rank has no memory left for a buffer: all get an error, and none waits for it."""
    rank = dist.get_rank()

    class Symmetric:
        def empty(self, *size, **options):
            if rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return torch.empty(*size, **options)

        def rendezvous(self, *_):
            raise AssertionError("the other rank does not come")

    peer_memory.symmetric_memory = Symmetric
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        peer_memory._symmetric_memory(16, dist.group.WORLD, torch.device("cpu"))


def test_a_rank_without_memory_for_buffers():
    run_ranks(without_memory, 2)


class Copied(Net):
    """A layer is copied, and gets its weights from the copy."""

    def on_train_start(self):
        super().on_train_start()
        layer = self.blocks[1].up
        copied = copy.deepcopy(layer)
        assert local(copied.weight).data_ptr() != local(layer.weight).data_ptr()
        layer.load_state_dict(copied.state_dict())


def copied():
    compared("O5", net=Copied)


def test_a_copied_layer():
    run_ranks(copied, 2)


def beside_fp8():
    def fp8():
        return Float8("tensorwise", include=["blocks.1", "blocks.3"], all_gather=True)

    module, launches = compared(fp8())
    assert {len(vars(shard)) for shard in module.shards} == {0}
    assert launches


def test_weights_in_fp8_and_bf16_are_gathered_together():
    pytest.importorskip("torchao", reason="needs the package torchao")
    import_compiler()
    run_ranks(beside_fp8, 2)


def test_torchs_operations_take_the_value():
    shard = torch.randn(4, 6)
    cast = ShardCast(shard, torch.bfloat16)
    assert cast.shape == (24,)
    assert cast.dtype == torch.bfloat16
    expected = shard.bfloat16().flatten()
    assert torch.equal(cast + 0, expected)
    assert torch.equal(torch.cat([cast, cast]), torch.cat([expected, expected]))
    assert torch.equal(cast.view(4, 6), shard.bfloat16())
    assert torch.equal(cast.view(torch.uint8).value(), expected.view(torch.uint8))
    scaled = ShardCast(shard, torch.bfloat16, torch.tensor([3.0]))
    assert scaled.dtype == torch.float8_e4m3fn
    assert torch.equal(scaled.value().float(), (expected.float() * 3).to(torch.float8_e4m3fn).float())
    target = torch.zeros(24, dtype=torch.bfloat16)
    torch._foreach_copy_([target], [cast])
    assert torch.equal(target, expected)
