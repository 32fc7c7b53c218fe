"""Every option of every strategy, at every opt level, with and without accumulation: it has its effect, or is refused by name.

One table: a row for each argument of a strategy's constructor, in cells of (level, micro-batches of a step).  The two ranks run all
cells of a strategy in the same processes.  At O2 and O5 the fp32 sums of an accumulation are exchanged, in place of gradients.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from fabricamp import Callback, ConfigError, TrainingModule
from fabricamp.gradients.buckets import RankSums
from fabricamp.strategies import DDP, FSDP, DelayedDDP, SingleDeviceStrategy
from tests.distributed import sharded
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded import Block
from tests.small import data, quiet_trainer

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
HALF = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
"""The dtype of gradients where it is not fp32."""
CELLS = list(itertools.product(LEVELS, [1, 2]))
STEPS = 5
"""The overlapped exchange knows the order of accumulated gradients from the fourth step on."""


class Small(TrainingModule):
    """A network with BatchNorm's buffers, which differ between ranks, and a layer that every second batch leaves out."""

    def __init__(self, *, sometimes=False, rate=0.1):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.extra = nn.Linear(3, 3) if sometimes else None
        self.rate = rate
        self.buffers_seen = []

    def training_step(self, batch, batch_idx):
        self.buffers_seen.append(self.net[1].running_mean.float().clone())
        scores = self.net(batch[0])
        if self.extra is not None and batch_idx % 2:
            scores = self.extra(scores)
        return F.cross_entropy(scores, batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Even(Block):
    """A block whose layers can be split over two ranks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 34), nn.Linear(34, 16)


class Blocks(sharded.Net):
    """The sharded tests' network: three blocks, and what the weights of a block are after the forward."""

    def __init__(self):
        torch.manual_seed(3)
        super().__init__()
        self.after_forward = []

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.after_forward.append(type(self.blocks[0].up.weight))
        return loss


@dataclass
class Seen:
    """What a fit has shown."""

    level: str
    accumulate: int
    strategy: object = None
    module: object = None
    refusal: str = ""
    sent: list = field(default_factory=list)
    """(elements, dtype, group, largest value, whether backward was running) of each of our own sums over the ranks."""
    within: dict = field(default_factory=dict)
    """What :class:`Looks` has found, at the end of the last step."""

    @property
    def sums(self):
        """Whether fp32 sums of micro-batches are exchanged."""
        return self.accumulate > 1 and self.level in ("O2", "O5")

    @property
    def exchanged(self):
        """The dtype of what is exchanged, if no option changes it."""
        return torch.float32 if self.sums else HALF.get(self.level, torch.float32)

    @property
    def weights(self):
        return torch.cat([one.detach().float().flatten() for one in self.module.parameters()])


class Looks(Callback):
    """Looks at the strategy's objects while they are there."""

    def __init__(self, seen):
        self.seen = seen
        self.backward = False

    def on_before_backward(self, trainer, pl_module, loss):
        self.backward = True

    def on_after_backward(self, trainer, pl_module):
        self.backward = False
        if isinstance(trainer.strategy, DDP):
            trained = [one for one in pl_module.parameters() if one.grad is not None]
            # No gradients: the sums have taken them.
            self.seen.within["memory"] = {one.grad.untyped_storage().data_ptr() for one in trained}, len(trained)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        strategy, within = trainer.strategy, self.seen.within
        if isinstance(strategy, DDP):
            within["static"] = strategy._wrapper.static_graph
        if isinstance(strategy, DelayedDDP) and trainer.global_step == STEPS:
            retained = [one.clone() for one in strategy.allreduce_buffers]
            storages = {one.untyped_storage().data_ptr() for one in strategy.allreduce_buffers}
            of_gradients = {
                one.grad.untyped_storage().data_ptr() for one in pl_module.parameters() if one.grad is not None
            }
            within["retained"] = retained, bool(of_gradients) and of_gradients <= storages
        if isinstance(strategy, FSDP):
            within["units"] = sum(isinstance(one, FSDPModule) for one in pl_module.modules())
            within["mesh"] = strategy._mesh.mesh_dim_names
            weight = pl_module.blocks[0].up.weight
            within["shard"] = weight.to_local().numel() / weight.numel()
            state = pl_module.blocks[0]._get_fsdp_state() if isinstance(pl_module.blocks[0], FSDPModule) else None
            group = None if state is None else state._fsdp_param_group
            within["offload"] = group is not None and group.fsdp_params[0].offload_to_cpu
        group = dist.group.WORLD
        if group is not None:
            within["timeout"] = group._get_backend(torch.device("cpu")).options._timeout


def fit(level, accumulate, strategy, make=Small, precision=None):
    """Returns what a fit shows; every rank has samples of its own."""
    seen = Seen(level, accumulate)
    looks = Looks(seen)
    start = RankSums.start

    def recorded(self, flat, group=None, *, wait=False):
        largest = float(flat.detach().float().abs().max()) if flat.numel() else 0.0
        seen.sent.append((flat.numel(), flat.dtype, group, largest, looks.backward))
        return start(self, flat, group, wait=wait)

    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        RankSums.start = recorded
        stack.callback(setattr, RankSums, "start", start)
        try:
            seen.strategy = strategy() if callable(strategy) else strategy
            seen.module = make()
            trainer = quiet_trainer(
                devices="auto", strategy=seen.strategy, precision=precision or at(level),
                accumulate_grad_batches=accumulate, callbacks=[looks], max_steps=STEPS,
            )  # fmt: skip
            # Four samples a rank and micro-batch, in order.
            trainer.fit(seen.module, torch.utils.data.DataLoader(data(8 * STEPS * accumulate), batch_size=4))
        except ConfigError as error:
            seen.refusal = str(error)
    return seen


def at(level):
    """Returns the precision with a scale that never overflows here: a skipped step would hide an option."""
    from fabricamp.precision import OptLevel

    return OptLevel(level, loss_scale=128.0) if level in ("O1", "O2", "O3") else level


def over_ranks(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def equal_weights(seen):
    return len({str(one.tolist()) for one in over_ranks(seen.weights)}) == 1


# -- the rows: each returns what is wrong, or an empty text ----------------------------------------------------------------------


def shares_buffers(option, strategy):
    """Whether ranks begin a step with rank 0's buffers."""

    def row(level, accumulate):
        seen = fit(level, accumulate, lambda: strategy(broadcast_buffers=option))
        if seen.refusal or not equal_weights(seen):
            return f"ranks differ {seen.refusal}"
        first = [seen.module.buffers_seen[step * accumulate] for step in range(1, STEPS)]
        equal = [len({str(one.tolist()) for one in over_ranks(buffer)}) == 1 for buffer in first]
        return "" if equal == [option] * len(equal) else f"buffers equal: {equal}"

    return row


def waits(strategy, make=Small):
    """Whether the collectives of a run have the timeout; the run makes its process group itself."""

    def row(level, accumulate):
        seen = fit(level, accumulate, lambda: strategy(timeout=77), make)
        return seen.refusal or ("" if seen.within["timeout"] == timedelta(seconds=77) else str(seen.within["timeout"]))

    return row


def unused_parameters(level, accumulate):
    seen = fit(level, accumulate, lambda: DDP(find_unused_parameters=True), lambda: Small(sometimes=True))
    return seen.refusal or ("" if equal_weights(seen) else "ranks differ")


def static_graph(level, accumulate):
    seen = fit(level, accumulate, lambda: DDP(static_graph=True))
    if accumulate > 1:
        return (
            ""
            if "strategy=DDP(static_graph=True) cannot leave gradients local" in seen.refusal
            else seen.refusal or "taken"
        )
    return seen.refusal or ("" if seen.within["static"] and equal_weights(seen) else "not static")


def bucket_views(level, accumulate):
    seen = fit(level, accumulate, lambda: DDP(gradient_as_bucket_view=True))
    if seen.refusal or not equal_weights(seen):
        return f"ranks differ {seen.refusal}"
    memory, gradients = seen.within["memory"]
    return "" if seen.sums or len(memory) < gradients else f"{gradients} gradients in {len(memory)} places"


def with_counted_buckets(calls, **options):
    """Returns a DDP strategy that notes the dtype of each bucket which torch's wrapper exchanges."""

    def counted(state, bucket):
        calls.append(bucket.buffer().dtype)
        return default_hooks.allreduce_hook(state, bucket)

    return DDP(comm_hook=(None, counted), **options)


def bucket_size(level, accumulate):
    option = {"bucket_cap_mb": 20 * 4 / 2**20}  # 20 numbers in fp32, of 227
    plain, seen = fit(level, accumulate, DDP), fit(level, accumulate, lambda: DDP(**option))
    if seen.refusal or not torch.allclose(plain.weights, seen.weights, atol=1e-3):
        return f"other weights {seen.refusal}"
    if seen.sums:
        sizes = [one[0] for one in seen.sent]
        wrong = len(plain.sent) != STEPS or len(sizes) <= STEPS or sum(size >= 20 for size in sizes) < STEPS
        return f"sums in pieces of {sizes}" if wrong else ""
    few, many = [], []
    fit(level, accumulate, lambda: with_counted_buckets(few))
    fit(level, accumulate, lambda: with_counted_buckets(many, **option))
    return "" if len(many) > len(few) else f"{len(many)} buckets, without the option {len(few)}"


def comm_hook(level, accumulate):
    calls = []
    plain, seen = fit(level, accumulate, DDP), fit(level, accumulate, lambda: with_counted_buckets(calls))
    if seen.sums:
        named = (
            f"precision {level!r} sums" in seen.refusal and "DDP(comm_hook=...) would never be called" in seen.refusal
        )
        return "" if named and not calls and not seen.module.buffers_seen else f"{calls} {seen.refusal}"
    if seen.refusal or not torch.equal(plain.weights, seen.weights):
        return f"other weights {seen.refusal}"
    return "" if calls and len(calls) % STEPS == 0 and seen.exchanged in calls else f"called with {calls}"


def delayed(level, accumulate):
    seen = fit(level, accumulate, lambda: DelayedDDP(delay_allreduce=True))
    if seen.refusal or not equal_weights(seen):
        return f"ranks differ {seen.refusal}"
    per_step = len(seen.sent) / STEPS
    kinds = len({dtype for _, dtype, *_ in seen.sent})  # BatchNorm's gradients stay fp32 at O2 and O5
    late = not any(backward for *_, backward in seen.sent)
    return "" if late and per_step == kinds else f"{per_step} messages a step, all late: {late}"


def same_as_delayed(option):
    """Returns what is wrong with an overlapped mode: other weights than the delayed one, or what ``check`` says."""

    def decorate(check):
        def row(level, accumulate):
            plain, seen = fit(level, accumulate, DelayedDDP), fit(level, accumulate, lambda: DelayedDDP(**option()))
            if seen.refusal or not torch.allclose(plain.weights, seen.weights, atol=1e-3):
                return f"other weights {seen.refusal}"
            overlaps = any(backward for *_, backward in seen.sent)
            if overlaps == seen.sums:  # the sums are complete after the last backward only
                return f"overlaps: {overlaps}"
            return check(plain, seen)

        return row

    return decorate


@same_as_delayed(lambda: {"message_size": 40})
def message_size(plain, seen):
    more = len(seen.sent) > len(plain.sent)
    large = sum(elements >= 40 for elements, *_ in seen.sent) >= len(seen.sent) / 2
    return "" if more and large else f"messages of {[one[0] for one in seen.sent]}"


@same_as_delayed(lambda: {"allreduce_trigger_params": ["net.3.weight", "net.0.weight"]})
def triggers(plain, seen):
    return "" if len(plain.sent) < len(seen.sent) <= 4 * STEPS else f"messages of {[one[0] for one in seen.sent]}"


@same_as_delayed(lambda: {"message_size": 40, "num_allreduce_streams": 2})
def streams(plain, seen):
    # On a CPU a stream is a process group.
    return "" if len({id(group) for _, _, group, *_ in seen.sent[-3:]}) == 2 else "one group"


def communicators(level, accumulate):
    groups = [dist.new_group(), dist.new_group()]
    option = {"message_size": 40, "num_allreduce_streams": 2, "allreduce_communicators": (groups, [None, None])}
    seen = fit(level, accumulate, lambda: DelayedDDP(**option))
    used = {id(group) for _, _, group, *_ in seen.sent if group is not None}
    return seen.refusal or ("" if used == set(map(id, groups)) else f"{len(used)} groups")


def retained(level, accumulate):
    seen = fit(level, accumulate, lambda: DelayedDDP(retain_allreduce_buffers=True))
    plain = fit(level, accumulate, DelayedDDP)
    if seen.refusal or not torch.allclose(plain.weights, seen.weights, atol=1e-3):
        return f"other weights {seen.refusal}"
    buffers, in_grad = seen.within["retained"]
    if plain.within["retained"][0] or not buffers or not any(one.abs().max() > 0 for one in buffers):
        return f"buffers {buffers}"
    if seen.sums:
        return "" if {one.dtype for one in buffers} == {torch.float32} and not in_grad else "not the sums"
    return "" if in_grad else "not in .grad"


def exchanged_in(option, dtype):
    def row(level, accumulate):
        seen = fit(level, accumulate, lambda: DelayedDDP(**option))
        if seen.refusal or not equal_weights(seen):
            return f"ranks differ {seen.refusal}"
        return "" if {one[1] for one in seen.sent} == {dtype} else f"in {[one[1] for one in seen.sent]}"

    return row


def gradient_sum(level, accumulate):
    summed = fit(level, accumulate, lambda: DelayedDDP(gradient_average=False), lambda: Small(rate=0.05))
    averaged = fit(level, accumulate, DelayedDDP)
    close = torch.allclose(summed.weights, averaged.weights, atol=2e-3 if level in HALF else 1e-6)
    return summed.refusal or ("" if close else "not twice the average")


def predivided(level, accumulate):
    plain = fit(level, accumulate, DelayedDDP)
    seen = fit(level, accumulate, lambda: DelayedDDP(gradient_predivide_factor=8.0))
    if seen.refusal or not torch.allclose(plain.weights, seen.weights, atol=1e-2):
        return f"other weights {seen.refusal}"
    # Half gradients are divided by 8 before the sum, not by 2; others completely.
    ratios = [one[3] / other[3] for one, other in zip(seen.sent, plain.sent, strict=True) if one[1] in HALF.values()]
    halves = seen.exchanged in HALF.values()
    first = ratios[0] if ratios else None
    return "" if (first == pytest.approx(2 / 8, rel=0.02) if halves else first is None) else f"ratios {ratios}"


def marked(level, accumulate):
    with torch.autograd.profiler.profile() as profile:
        seen = fit(level, accumulate, lambda: DelayedDDP(prof=True))
    count = sum(event.name == "exchange of gradients" for event in profile.function_events)
    return seen.refusal or ("" if count == STEPS else f"{count} marks")


def sharding(options, check, refused=(), words="", make=Blocks):
    """``check(seen)`` for a fit with FSDP's ``options``; at the levels ``refused`` an error has these ``words``."""

    def row(level, accumulate):
        seen = fit(level, accumulate, lambda: FSDP(**options), make, precision=level if refused else None)
        if level in refused:
            return "" if words in seen.refusal else seen.refusal or "taken"
        return seen.refusal or check(seen)

    return row


def units(seen):
    return "" if seen.within["units"] == 4 else f"{seen.within['units']} units"


def copies(seen):
    found = seen.within["mesh"], seen.within["shard"]
    return "" if found == (("replicate", "shard"), 1.0) else str(found)


def resharded(wanted):
    def check(seen):
        sharded_after = {issubclass(kind, DTensor) for kind in seen.module.after_forward}
        return (
            "" if sharded_after == {wanted} and seen.within["shard"] < 1 else f"sharded after forward: {sharded_after}"
        )

    return check


def offloaded(seen):
    return "" if seen.within["offload"] else "on the device"


def split(module, mesh):
    for block in module.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class EvenBlocks(Blocks):
    block = Even


def is_split(seen):
    return (
        "" if seen.within["shard"] == pytest.approx(0.5, abs=0.1) else f"a rank has {seen.within['shard']} of a layer"
    )


def one_device(level, accumulate):
    taken = fit(level, accumulate, lambda: SingleDeviceStrategy(device="cpu"), Small)
    other = fit(level, accumulate, lambda: SingleDeviceStrategy(device="meta"), Small)
    if "SingleDeviceStrategy(device='meta'), but the Trainer runs on 'cpu'" not in other.refusal:
        return other.refusal or "another device is taken"
    return taken.refusal


def of_fabric(level, accumulate):
    """Arguments of Lightning's class that choose nothing here."""
    taken = fit(level, accumulate, lambda: SingleDeviceStrategy(accelerator="cpu", precision=object()), Small)
    return taken.refusal


def plug_in(level, accumulate):
    taken = fit(level, accumulate, lambda: SingleDeviceStrategy(checkpoint_io=object()), Small)
    return "" if "give Trainer(plugins=[...])" in taken.refusal else taken.refusal or "a plug-in is taken"


ROWS = {
    SingleDeviceStrategy: {
        "device": one_device,
        "accelerator": of_fabric,
        "checkpoint_io": plug_in,
        "precision": of_fabric,
    },
    DDP: {
        "find_unused_parameters": unused_parameters,
        "static_graph": static_graph,
        "gradient_as_bucket_view": bucket_views,
        "bucket_cap_mb": bucket_size,
        "comm_hook": comm_hook,
        "broadcast_buffers": shares_buffers(True, DDP),
        "broadcast_buffers=False": shares_buffers(False, DDP),
        "timeout": waits(DDP),
    },
    DelayedDDP: {
        "delay_allreduce": delayed,
        "message_size": message_size,
        "allreduce_trigger_params": triggers,
        "num_allreduce_streams": streams,
        "allreduce_communicators": communicators,
        "retain_allreduce_buffers": retained,
        "allreduce_always_fp32": exchanged_in({"allreduce_always_fp32": True}, torch.float32),
        "allreduce_dtype": exchanged_in({"allreduce_dtype": torch.bfloat16}, torch.bfloat16),
        "gradient_average": gradient_sum,
        "gradient_predivide_factor": predivided,
        "broadcast_buffers": shares_buffers(True, DelayedDDP),
        "broadcast_buffers=False": shares_buffers(False, DelayedDDP),
        "prof": marked,
        "timeout": waits(DelayedDDP),
    },
    FSDP: {
        "units": sharding({"units": [Block]}, units),
        "replicate": sharding({"replicate": 2}, copies),
        "reshard_after_forward": sharding({"units": [Block]}, resharded(True)),
        "reshard_after_forward=False": sharding({"units": [Block], "reshard_after_forward": False}, resharded(False)),
        "reshard_after_forward=2": sharding(
            {"reshard_after_forward": 2}, str, LEVELS, "FSDP(reshard_after_forward=2) has to divide the number of ranks"
        ),
        "offload": sharding({"units": [Block], "offload": True}, offloaded, ["O1", "O2"], "offload=True"),
        "parallelize": sharding({"parallelize": split, "tensor_parallel": 2}, is_split, make=EvenBlocks),
        "tensor_parallel": sharding(
            {"parallelize": split, "tensor_parallel": 2, "units": [Even]}, is_split, make=EvenBlocks
        ),
        "timeout": waits(FSDP, Blocks),
    },
}


@pytest.mark.parametrize("strategy", ROWS, ids=lambda one: one.__name__)
def test_every_argument_has_a_row(strategy):
    arguments = set(inspect.signature(strategy).parameters)
    assert {row.split("=")[0] for row in ROWS[strategy]} == arguments


def problems(rows):
    """Returns what is wrong in each cell of a strategy's rows."""
    found = {}
    for (name, row), (level, accumulate) in itertools.product(rows.items(), CELLS):
        wrong = row(level, accumulate)
        if wrong:
            found[name, level, accumulate] = wrong[:300]
    return found


@pytest.mark.parametrize("strategy", [DDP, DelayedDDP, FSDP], ids=lambda one: one.__name__)
def test_options_on_two_ranks(strategy):
    rows = {name: row for name, row in ROWS[strategy].items() if name != "timeout"}
    assert run_ranks(problems, 2, rows, timeout=280.0) == [{}, {}]


@pytest.mark.parametrize("strategy", [DDP, DelayedDDP, FSDP], ids=lambda one: one.__name__)
def test_timeouts_on_two_ranks(strategy):
    """The run makes its process group itself: a group that is there already has the program's timeout."""
    rows = {"timeout": ROWS[strategy]["timeout"]}
    assert run_ranks(problems, 2, rows, backend=None, timeout=280.0) == [{}, {}]


def test_options_of_one_process():
    assert problems(ROWS[SingleDeviceStrategy]) == {}
