"""Steps with sharded weights as CUDA graphs, on two ranks: the bits of eager ones, also after what happens between two steps."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import Activations, Callback, Compile, CudaGraph, Float8, OptLevel, TrainingModule, seed_everything
from fabricamp.optimizers import LARC, FusedAdam, FusedLAMB, FusedSGD
from fabricamp.strategies import FSDP, fsdp_collectives
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded import SaveAt, flat
from tests.gpu.test_cuda_graph_ranks import Watch
from tests.shared import once, shared_folder
from tests.small import quiet_trainer


def on_two_gpus(test):
    """Marks a test that needs two GPUs."""
    skips = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
    # A worker waits for what another one computes.
    return pytest.mark.gpu2(pytest.mark.timeout(900)(skips(test)))


OPTIMIZERS = {
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=1e-3, eps=1e-4),
    "FusedAdam in bf16": lambda parameters: FusedAdam(parameters, lr=1e-3, eps=1e-4, state="bf16"),
    "FusedAdam in 8 bits": lambda parameters: FusedAdam(parameters, lr=1e-3, eps=1e-4, state="8bit"),
    "FusedLAMB": lambda parameters: FusedLAMB(parameters, lr=0.01, eps=1e-3),
    "LARC": lambda parameters: LARC(FusedSGD(parameters, lr=0.5, momentum=0.9, weight_decay=0.01)),
    "torch's AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
    "capturable AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, capturable=True),
}
WIDTH, WARMUP = 64, 4


class Block(nn.Module):
    """A block whose shards are cast by a kernel."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Odd(Block):
    """A block with rows that two ranks cannot share equally."""

    def __init__(self):
        super().__init__()
        self.odd = nn.Linear(WIDTH, 33, bias=False)

    def forward(self, x):
        return super().forward(x) + self.odd(x).float().mean()


class Net(TrainingModule):
    """``waits``: captured steps wait for the device in the middle of their forward, which CUDA refuses."""

    def __init__(self, optimizer="FusedAdam", *, odd=True, waits=False):
        super().__init__()
        self.optimizer = optimizer
        self.waits = waits
        self.odd = odd
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Odd() if odd else Block(), Block(), Block()])
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.waits and number == 1:
                torch.cuda.synchronize()
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]).float(), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]).float(), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


def batches(count, rank, *, odd_at=None, spike_at=None):
    """Returns other batches for each rank; one of another size on rank 1, and one with values that overflow."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for number in range(count):
        size = 32 if number == odd_at and rank == 1 else 16
        x = torch.randn(size, WIDTH, generator=generator)
        found.append((x * (1e6 if number == spike_at else 1), torch.randint(0, 8, (size,), generator=generator)))
    return found


def fitted(
    graph,
    *,
    precision="O0",
    reshard=True,
    replicate=1,
    checkpointing=False,
    net=None,
    data=None,
    save=None,
    ckpt_path=None,
    callbacks=(),
    **options,
):
    """Returns the losses, the weights, the logged values, the number of replays, and whether ranks read each other's memory."""
    rank = int(os.environ.get("RANK", "0"))
    seed_everything(5, verbose=False)
    module = Net(**(net or {}))
    watch = Reads()
    callbacks = [*callbacks, watch] if save is None else [watch, SaveAt(save, 6)]
    trainer = quiet_trainer(
        accelerator="gpu",
        strategy=FSDP(
            [Block, Odd] if module.odd else [Block],
            reshard_after_forward=reshard,
            replicate=replicate,
        ),
        activations=Activations([Block], save="inputs") if checkpointing else "keep",
        precision=precision() if callable(precision) else precision,
        max_epochs=1,
        num_sanity_val_steps=1,
        use_distributed_sampler=False,
        cuda_graph=graph,
        callbacks=callbacks,
        **{"devices": "auto", **options},
    )
    torch.manual_seed(7 + rank)
    validation = batches(2, 5 + rank)
    trainer.fit(module, batches(14, rank, **(data or {})), validation, ckpt_path=ckpt_path)
    return {
        "losses": torch.stack(watch.losses).cpu(),
        "weights": None if rank else flat(module),
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "replays": watch.replays,
        "skipped": trainer.skipped_steps,
        "read": watch.read,
    }


class NoWaits(Callback):
    """Makes torch raise at a wait of the host in a replay, once the ranks no longer agree on captures."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("error" if batch_idx >= WARMUP + 4 else "default")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("default")


class Reads(Watch):
    """Also notes whether the ranks read each other's memory."""

    def on_train_start(self, trainer, module):
        self.read = bool(trainer.strategy._peers)


FAST = OptLevel("O1", scale_window=3)
CASES = {
    "O0": {"gradient_clip_val": 0.5},
    "O0 zero2": {"reshard": False},
    "O1 that skips": {"precision": FAST, "data": {"spike_at": 9}},
    "O2": {"precision": "O2", "gradient_clip_val": 0.5},
    "O2 zero2": {"precision": "O2", "reshard": False, "net": {"odd": False}},
    "O3": {"precision": "O3"},
    "O4": {"precision": "O4", "gradient_clip_val": 0.5, "net": {"odd": False}},
    "O5 with validations": {"precision": "O5", "val_check_interval": 3},
    "O5 zero2 with validations": {"precision": "O5", "reshard": False, "val_check_interval": 3, "net": {"odd": False}},
    "O5 states in bf16": {"precision": "O5", "net": {"optimizer": "FusedAdam in bf16"}},
    "O4 states in 8 bits": {"precision": "O4", "gradient_clip_val": 0.5, "net": {"optimizer": "FusedAdam in 8 bits"}},
    "O5 LAMB": {"precision": "O5", "net": {"optimizer": "FusedLAMB"}},
    "O5 LARC clipped by value": {
        "precision": "O5",
        "net": {"optimizer": "LARC", "odd": False},
        "gradient_clip_val": 0.1,
        "gradient_clip_algorithm": "value",
    },
    "O1 torch's optimizer after each replay": {"precision": "O1", "net": {"optimizer": "torch's AdamW"}},
    "O4 torch's optimizer in the graph": {"precision": "O4", "net": {"optimizer": "capturable AdamW"}},
    "O5 two copies": {"precision": "O5", "replicate": 2},
    "O5 compiled blocks": {"precision": "O5", "net": {"odd": False}, "compile": Compile("blocks", backend="aot_eager")},
    "FP8 gathers": {
        "precision": lambda: Float8("tensorwise", include=["blocks"], all_gather=True),
        "net": {"odd": False},
        "val_check_interval": 3,
        "gradient_clip_val": 0.5,
    },
    # Validations gather an odd number of times, so a rank may not come out of its step with another buffer than the other rank.
    "O5 a rank that runs one step eagerly": {
        "precision": "O5",
        "net": {"odd": False},
        "data": {"odd_at": 9},
        "val_check_interval": 2,
    },
    "O5 activation checkpointing": {"precision": "O5", "checkpointing": True},
}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
RUN = {name: case for name, case in CASES.items() if HOPPER or name != "FP8 gathers"}


def of_two_ranks(folder):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    fsdp_collectives._FEWEST = 32
    found = {}
    for name, case in RUN.items():
        eager = fitted(None, **case)
        found[name] = eager, fitted(CudaGraph(warmup=WARMUP), **case)
    path = folder / "sixth.ckpt"
    found["resumed"] = (
        fitted(CudaGraph(warmup=WARMUP), precision="O5", save=path),
        fitted(CudaGraph(warmup=WARMUP), precision="O5", ckpt_path=path),
    )
    case = {"precision": "O5", "net": {"odd": False}}
    found["checked"] = fitted(None, **case), fitted(CudaGraph(warmup=WARMUP, check_every=2), **case)
    found["without waits"] = fitted(
        CudaGraph(warmup=WARMUP), precision="O1", callbacks=[NoWaits()], gradient_clip_val=0.5
    )
    case = {"precision": "O5", "net": {"waits": True}}
    found["auto"] = fitted(None, **case), fitted(CudaGraph(warmup=WARMUP, required=False), **case)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = shared_folder(tmp_path_factory, "sharded-graphs")
    run = functools.partial(run_ranks, of_two_ranks, 2, folder, backend=None, start_method="spawn", timeout=400.0)
    return once(folder, run)


@on_two_gpus
@pytest.mark.parametrize("name", RUN)
def test_steps_have_the_bits_of_eager_ones(name, ranks):
    for rank in ranks:
        eager, replayed = rank[name]
        assert torch.equal(eager["losses"].nan_to_num(), replayed["losses"].nan_to_num())
        assert eager["logged"] == replayed["logged"]
        assert eager["skipped"] == replayed["skipped"]
        eager_one = "data" in CASES[name] and "odd_at" in CASES[name]["data"] and rank is ranks[1]
        assert replayed["replays"] == 14 - (WARMUP - 1) - eager_one
    eager, replayed = ranks[0][name]
    assert torch.equal(eager["weights"], replayed["weights"])
    # O0 gathers fp32, and two copies on two ranks are not sharded.
    assert replayed["read"] == (not name.startswith(("O0", "O5 two")))


@on_two_gpus
def test_a_step_that_overflows_is_skipped(ranks):
    assert ranks[0]["O1 that skips"][1]["skipped"] > 0


@on_two_gpus
def test_a_resumed_run_has_the_bits_of_the_straight_one(ranks):
    straight, resumed = ranks[0]["resumed"]
    assert torch.equal(straight["weights"], resumed["weights"])
    assert resumed["replays"] > 0


@on_two_gpus
def test_replays_that_are_compared_leave_the_bits_of_eager_steps(ranks):
    eager, checked = ranks[0]["checked"]
    assert checked["replays"] == 14 - (WARMUP - 1)
    assert torch.equal(eager["losses"], checked["losses"])
    assert torch.equal(eager["weights"], checked["weights"])


@on_two_gpus
def test_the_host_waits_for_nothing_in_a_replay(ranks):
    assert [one["without waits"]["replays"] for one in ranks] == [14 - (WARMUP - 1)] * 2


@on_two_gpus
def test_a_capture_that_fails_in_the_middle_of_a_step_leaves_an_eager_run(ranks):
    eager, automatic = ranks[0]["auto"]
    assert torch.equal(eager["losses"], automatic["losses"])
    assert torch.equal(eager["weights"], automatic["weights"])
    assert automatic["replays"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_one_gpu_and_an_evaluation_that_is_not_captured(caplog):
    """All weights are on one GPU, which gathers nothing."""
    for checkpointing in (False, True):
        case = {"precision": "O5", "checkpointing": checkpointing, "devices": 1}
        eager, replayed = (fitted(graph, **case) for graph in (None, CudaGraph(warmup=WARMUP)))
        assert torch.equal(eager["losses"], replayed["losses"])
        assert torch.equal(eager["weights"], replayed["weights"])
        assert replayed["replays"] == 14 - (WARMUP - 1)
    trainer = quiet_trainer(accelerator="gpu", devices=1, strategy=FSDP([Block, Odd]), cuda_graph=True)
    caplog.clear()
    trainer.validate(Net(), batches(2, 5))
    words = "the validation runs eagerly, without a CUDA graph: strategy 'fsdp' keeps gathered weights between"
    assert caplog.text.count(words) == 1
