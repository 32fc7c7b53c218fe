"""AsyncCheckpoint's later copies beside CUDA graphs (emulated), compiled code and shards: each waits where it first writes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from fabricamp import Callback, CheckpointError, Compile, CudaGraph, TrainingModule
from fabricamp.callbacks import EMA, AsyncCheckpoint, ModelCheckpoint, _checkpoint_files
from fabricamp.checkpoint import background
from fabricamp.checkpoint import folder as sharded_folder
from fabricamp.engine.graph.write_node import WriteNode
from fabricamp.ops import write_gate
from fabricamp.optimizers import FusedAdam
from tests.callbacks.test_async_snapshot import WIDTH, Net, check, contents, slow
from tests.cuda_on_cpu.fits import card
from tests.distributed.ranks import import_compiler, run_ranks
from tests.pairs import pairs
from tests.small import loader, quiet_trainer

__all__ = ["card", "slow"]


class Normed(TrainingModule):
    """Batch norm and spectral norm, whose vectors each forward writes."""

    def __init__(self, optimizer="FusedAdam", edit=""):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
            nn.ReLU(),
            nn.Linear(WIDTH, 3),
        )
        self.optimizer = optimizer
        self.edit = edit

    def training_step(self, batch, batch_idx):
        if self.edit == "data":
            self.net[0].weight.data.clamp_(-0.1, 0.1)
            self.net[2].parametrizations.weight.original.data.clamp_(-0.05, 0.05)
        elif self.edit == "foreach":
            with torch.no_grad():
                torch._foreach_mul_(list(self.parameters()), 0.99)
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        kinds = {"FusedAdam": FusedAdam, "AdamW": torch.optim.AdamW}
        return kinds[self.optimizer](self.parameters(), lr=0.01)


@pytest.fixture
def where(monkeypatch):
    """Where graphs waited, at each launch while a save was read: "begin", "write", or "nowhere" for one that writes nothing."""
    found = []
    real = WriteNode.let_write

    def let_write(node):
        real(node)
        place = "write" if node._waits else "begin"
        found.append("nowhere" if write_gate.WRITES.closed else place)

    monkeypatch.setattr(WriteNode, "let_write", let_write)
    return found


OPTIONS = (["FusedAdam", "AdamW"], ["O0", "O2", "O5"], [1, 2], ["", "data", "foreach"])


# Edits through .data are refused where weights have masters.
CASES = [case for case in pairs(*OPTIONS) if case[1] == "O0" or case[3] != "data"]


@pytest.mark.parametrize(("optimizer", "precision", "accumulate", "edit"), CASES)
def test_a_graph_waits_where_it_first_writes(
    optimizer, precision, accumulate, edit, tmp_path, monkeypatch, card, where, slow
):
    batches = 12
    check(
        tmp_path,
        monkeypatch,
        lambda: Normed(optimizer, edit),
        lambda: [EMA(0.9)],
        batches=batches * accumulate,
        saves=batches,
        precision=precision,
        accumulate_grad_batches=accumulate,
        cuda_graph=CudaGraph(warmup=3, compare=False),
    )
    assert card.replays >= 2 * (batches - 4) * accumulate
    assert slow
    assert set(where) <= ({"write"} if accumulate == 1 or edit else {"write", "nowhere"})
    assert where.count("write") >= batches - 6


def test_a_graph_that_is_captured_between_two_saves_waits_before_an_edit(tmp_path, monkeypatch, card, where, slow):
    check(
        tmp_path,
        monkeypatch,
        lambda: Normed(edit="data"),
        batches=30,
        saves=4,
        every=7,
        cuda_graph=CudaGraph(warmup=3, compare=False),
    )
    assert where.count("write") == 4
    assert slow


@pytest.mark.parametrize("device_memory", [0, 150_000])
def test_fifty_saves_beside_a_graph(device_memory, tmp_path, monkeypatch, card, where, slow):
    check(tmp_path, monkeypatch, Normed, lambda: [EMA(0.9)], device_memory, cuda_graph=True, val_check_interval=7)
    assert card.replays >= 80
    assert len(slow) >= 49 * 3
    assert where.count("write") >= (35 if device_memory == 0 else 30)


def test_a_graph_that_is_compared_waits_before_the_state_is_put_back(tmp_path, monkeypatch, card, slow):
    check(tmp_path, monkeypatch, Normed, batches=14, cuda_graph=CudaGraph(warmup=3, check_every=2))
    assert card.replays
    assert slow


def test_several_steps_a_launch_wait_at_the_first_write(tmp_path, monkeypatch, card, where, slow):
    check(
        tmp_path,
        monkeypatch,
        Normed,
        batches=24,
        saves=6,
        every=4,
        cuda_graph=CudaGraph(warmup=3, compare=False, steps=4),
    )
    assert "write" in where
    assert slow


def test_without_a_background_checkpoint_no_graph_has_a_node(card, monkeypatch):
    events = []
    monkeypatch.setattr(WriteNode, "_capture_wait", events.append)
    quiet_trainer(max_steps=10, cuda_graph=CudaGraph(warmup=3)).fit(Normed(), loader(40))
    assert card.replays
    assert not events


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "edit", "options"),
    [
        ("O0", "", {}),
        ("O0", "data", {}),
        ("O5", "foreach", {}),
        ("O2", "", {"accumulate_grad_batches": 2}),
        ("O5", "", {"compile": "modules"}),
    ],
)
@pytest.mark.parametrize("device_memory", [0, 150_000])
def test_on_a_gpu_a_graph_waits_where_it_first_writes(
    precision, edit, options, device_memory, tmp_path, monkeypatch, where, slow
):
    check(
        tmp_path,
        monkeypatch,
        lambda: Normed("FusedAdam", edit),
        lambda: [EMA(0.9)],
        device_memory,
        batches=60,
        saves=60 // options.get("accumulate_grad_batches", 1),
        accelerator="gpu",
        precision=precision,
        cuda_graph=CudaGraph(warmup=3, compare=False),
        **options,
    )
    assert slow
    assert where.count("write") >= 15


# -- compiled code -----------------------------------------------------------------------------------------------------------------


class Blocks(Net):
    """Three blocks of one class, compiled one by one under ``compile="blocks"``; the ``edit`` is in compiled code."""

    def __init__(self, edit=""):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, WIDTH), *[Block(edit) for _ in range(3)], nn.Linear(WIDTH, 3))


class Block(nn.Module):
    """One of them; a rank has half of its weight."""

    def __init__(self, edit=""):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.edit = edit

    def forward(self, x):
        if self.edit == "data":
            self.linear.weight.data.clamp_(-0.05, 0.05)
        elif self.edit == "in place":
            with torch.no_grad():
                self.linear.weight.mul_(0.99)
        return self.norm(self.linear(x)).relu()


@pytest.fixture
def frames():
    """Returns the number of frames that torch has compiled in the test."""
    import_compiler()
    counters.clear()
    yield lambda: counters["frames"]["total"]
    torch.compiler.reset()


@pytest.mark.parametrize("part", ["step", "modules", "blocks"])
@pytest.mark.parametrize("precision", ["O0", "O4"])
def test_compiled_code_runs_beside_the_copies_and_is_not_compiled_again(
    part, precision, tmp_path, monkeypatch, slow, frames
):
    options = {"compile": Compile(part, backend="aot_eager"), "precision": precision, "batches": 8}
    monkeypatch.setattr(background, "free_memory", lambda device: 0)
    one = contents(tmp_path, ModelCheckpoint, Blocks, **options)
    compiled = frames()
    torch.compiler.reset()
    counters.clear()
    other = contents(tmp_path, AsyncCheckpoint, Blocks, **options)
    assert one == other
    assert frames() == compiled > 0
    assert len(slow) >= 5 * 3


@pytest.mark.parametrize("edit", ["data", "in place"])
@pytest.mark.parametrize("part", ["step", "blocks"])
def test_weights_that_compiled_code_writes_are_copied_before_it(edit, part, tmp_path, monkeypatch, slow, frames):
    check(tmp_path, monkeypatch, lambda: Blocks(edit), batches=8, compile=Compile(part, backend="aot_eager"))
    assert not slow


def test_eager_hooks_beside_compiled_code_wait(tmp_path, monkeypatch, slow, frames):
    class Clamps(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            for parameter in module.parameters():
                parameter.data.clamp_(-0.05, 0.05)

    check(tmp_path, monkeypatch, Blocks, lambda: [Clamps()], batches=8, compile=Compile("blocks", backend="aot_eager"))
    assert slow


def test_a_function_that_the_user_compiled_is_not_compiled_again(tmp_path, monkeypatch, slow, frames):
    function = torch.compile(lambda x: x.sin().cos(), backend="aot_eager", dynamic=False)

    class Calls(Net):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(function(self.net(batch[0])), batch[1])

    monkeypatch.setattr(background, "free_memory", lambda device: 0)
    other = contents(tmp_path, AsyncCheckpoint, Calls, batches=8)
    compiled = frames()
    assert not slow  # what it writes would not be seen
    assert contents(tmp_path, ModelCheckpoint, Calls, batches=8) == other
    assert frames() == compiled > 0


def test_code_that_was_compiled_before_the_fit_has_the_same_bits_under_the_watch(tmp_path, monkeypatch, slow, frames):
    function = torch.compile(lambda x: x.sin().cos(), backend="aot_eager", dynamic=False)

    class Calls(Net):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(function(self.net(batch[0])), batch[1])

    contents(tmp_path, ModelCheckpoint, Calls, batches=8)
    check(tmp_path, monkeypatch, Calls, batches=8)
    assert not slow  # once it was compiled again, for the first look


@pytest.mark.parametrize("reads", ["beside", "before"])
def test_a_write_in_a_hook_of_autograd_is_never_in_a_file(reads, tmp_path, monkeypatch):
    """On a GPU such a hook runs in a thread of torch's that no watch sees; here the watch is left out in its place."""

    class Writes(Net):
        def training_step(self, batch, batch_idx):
            if reads == "before" or batch_idx == 5:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    self.net[2].weight.mul_(0.9)
            return super().training_step(batch, batch_idx)

    if reads == "before":  # each step writes, so the first look has seen it
        check(tmp_path, monkeypatch, Writes, batches=8)
        return
    monkeypatch.setattr(background, "free_memory", lambda device: 0)
    with pytest.raises(CheckpointError, match="cannot hold up .* use ModelCheckpoint"):
        contents(tmp_path, AsyncCheckpoint, Writes, batches=8)


def test_in_an_eager_step_the_update_is_the_first_to_wait(tmp_path, monkeypatch, slow):
    closed = []

    class Looks(Net):
        def on_after_backward(self):
            closed.append(write_gate.WRITES.closed)

    check(tmp_path, monkeypatch, Looks, batches=8)
    assert closed[8:] == [False] + 7 * [True]


def test_an_accumulation_is_watched_to_its_end(tmp_path, monkeypatch, slow):
    class Clamps(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx % 3 == 2:
                for parameter in self.parameters():
                    parameter.data.mul_(0.9)

    check(tmp_path, monkeypatch, Clamps, batches=30, saves=10, accumulate_grad_batches=3)
    assert slow


def test_a_mode_that_begins_beside_the_watch_stays():
    watch = write_gate.Watch()
    watch.begin()
    with torch.device("meta"):
        watch.end()
        assert torch.empty(2).is_meta
        watch.begin()
        assert write_gate.unwatched(torch._C._len_torch_function_stack)() == 1
        assert torch._C._len_torch_function_stack() == 2
        watch.end()
    assert torch._C._len_torch_function_stack() == 0


# -- shards ------------------------------------------------------------------------------------------------------------------------


def sharded(folder, kind, compiled):
    """Returns the bytes of each rank's part of the folders that a fit writes, and the number of later copies on this rank."""
    later = []
    take = background.HostCopy.take

    def taken(host_copy, *given):
        copied = take(host_copy, *given)
        later.extend(host_copy._rest)
        return copied

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background.HostCopy, "take", taken)
        patch.setattr(background, "free_memory", lambda device: 0)
        names = SimpleNamespace(token_hex=lambda size: "0" * 2 * size)
        patch.setattr(background, "SMALL", 1 << 14)
        patch.setattr(_checkpoint_files, "secrets", names)
        patch.setattr(sharded_folder, "secrets", names)
        kind = type("Named", (kind,), {"state_key": "checkpoint"})
        checkpoint = kind(folder, every_n_train_steps=1, save_top_k=-1, monitor="step", filename="{step}")
        torch.manual_seed(0)
        options = {"compile": Compile("blocks", backend="aot_eager")} if compiled else {}
        trainer = quiet_trainer(
            max_epochs=1, enable_checkpointing=True, callbacks=[checkpoint], strategy="fsdp", devices=2, **options
        )
        trainer.fit(Blocks(), loader(64), loader(8))
    return len(later)


@pytest.mark.parametrize("compiled", [False, True])
def test_shards_are_read_beside_the_next_step(compiled, tmp_path):
    for kind in (ModelCheckpoint, AsyncCheckpoint):
        later = run_ranks(sharded, 2, tmp_path / "run", kind, compiled)
        (tmp_path / "run").rename(tmp_path / kind.__name__)  # a file has its folder's path
        assert (min(later) >= 3 * 3 * 6) == (kind is AsyncCheckpoint)
    one, other = (
        {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (tmp_path / "ModelCheckpoint", tmp_path / "AsyncCheckpoint")
    )
    assert len(one) >= 8 * 2
    assert one.keys() == other.keys()
    # torch draws a number for the metadata of each save, whose digest is in the state.
    assert [name for name in one if name.suffix == ".distcp" and one[name] != other[name]] == []
    assert sum(name.suffix == ".distcp" for name in one) == 8 * 2
