"""``Trainer.plan``: the memory that an H200 has taken, by a trace without values; what it leaves as it was, and what it refuses."""

from __future__ import annotations

import gc
import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from examples.gpt.gpt import GPT
from fabricamp import Trainer, TrainingModule, cli
from fabricamp.engine.planning.allocator import CachingAllocator
from fabricamp.engine.planning.cards import CARDS
from fabricamp.errors import ConfigError
from fabricamp.optimizers import LARC, FusedAdam, FusedLion, FusedSGD
from fabricamp.optimizers.state_sizes import states_of
from fabricamp.precision import OptLevel
from tests.small import QUIET, Classifier, loader, quiet_trainer

GIB = 2**30
MIB = 2**20
RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def stored_logits(logits, targets):
    """The loss of the loops that benchmarks/end_to_end.py has measured."""
    scores = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    return F.nll_loss(scores.flatten(0, 1), targets.flatten())


class Words(TrainingModule):
    def __init__(self, make, optimizer):
        super().__init__()
        with torch.device("meta"):
            self.net = make()
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        return self.net(batch[0][:, :-1], batch[0][:, 1:])

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def words(batch, length, classes):
    return DataLoader(TensorDataset(torch.randint(classes, (batch, length + 1))), batch_size=batch)


@pytest.mark.parametrize(("level", "run"), [("O0", "torch fp32 (TF32 products)"), ("O4", "torch autocast bf16")])
def test_the_peak_is_what_an_h200_has_taken(level, run):
    measured = json.loads((RESULTS / "end_to_end-h200.json").read_text())
    sizes = measured["sizes"]
    peak = next(row["peak_gib"] for row in measured["rows"] if row["run"] == run)
    names = ("context", "layers", "width", "heads")
    make = partial(GPT, sizes["vocabulary"], loss=stored_logits, **{name: sizes[name] for name in names})
    module = Words(make, partial(torch.optim.AdamW, lr=1e-4, fused=True))
    batches = words(sizes["batch"], sizes["context"], sizes["vocabulary"])
    plan = quiet_trainer(precision=level, max_steps=1, gradient_clip_val=1.0).plan(module, batches, card="H200")
    assert plan.peak_allocated / GIB == pytest.approx(peak, rel=0.001)
    assert plan.peak_allocated <= plan.peak_reserved < 1.15 * plan.peak_allocated
    assert sum(plan.parts.values()) == plan.peak_allocated


def tiny(**more):
    return GPT(96, context=32, layers=2, width=32, heads=2, **more)


def requests(run, *inputs, autocast=True):
    """Returns the bytes that ``run`` leaves in memory for its backward, and its output."""
    from fabricamp.engine.planning.tracing import FakeTensorMode, Recorder, as_on_a_gpu

    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point) for shape, dtype in inputs]
        recorder = Recorder(tensors)
        with as_on_a_gpu(), recorder, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = run(*tensors)
        return sum(dict(recorder.events).values()), output


@pytest.mark.parametrize(
    "run",
    [
        lambda x: F.layer_norm(x, (32,)),
        lambda x: x.softmax(-1),
        lambda x: x.pow(2),
        lambda x: x.sum(0),
        lambda x: F.group_norm(x, 4),
        lambda x: F.rms_norm(x, (32,)),
        lambda x: F.interpolate(x.view(4, 4, 4, 8), scale_factor=2.0, mode="nearest"),
        lambda x: F.mse_loss(x, x.detach(), reduction="none"),
    ],
)
def test_autocast_widens_what_a_gpus_does(run):
    _, output = requests(run, ((16, 32), torch.bfloat16))
    assert output.dtype is torch.float32


def test_operations_keep_what_they_keep_on_a_gpu():
    half = torch.bfloat16
    elements = 4 * 8 * 64 * 32
    kept, _ = requests(lambda x: F.dropout(x, 0.1), ((4, 8, 64, 32), half))
    assert kept == 2 * elements + elements  # the output, and a mask of bytes
    attend = partial(F.scaled_dot_product_attention, is_causal=True, dropout_p=0.1)
    kept, _ = requests(attend, *[((4, 8, 64, 32), half)] * 3)
    assert kept == 2 * elements + 4 * 4 * 8 * 64  # the output, and a number a row
    biased = F.scaled_dot_product_attention
    kept, output = requests(biased, *[((4, 8, 64, 32), half)] * 3, ((1, 8, 64, 64), half))
    assert kept == 2 * elements + 4 * 4 * 8 * 64
    kept, _ = requests(lambda x: F.rms_norm(x, (32,)), ((4, 8, 64, 32), torch.float32))
    assert kept == 4 * elements + 4 * 4 * 8 * 64

    def recurrent(x):
        return nn.LSTM(32, 48, 2, batch_first=True)(x)  # made without values, as all of a plan

    kept, (output, _) = requests(recurrent, ((4, 64, 32), torch.float32))
    assert output.shape == (4, 64, 48)
    assert kept > 6 * 2 * 4 * 64 * 48 * 2  # gates of two layers, in half precision


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_norm_of_two_dtypes_keeps_its_parts_as_torchs_does():
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x, weight = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True), torch.ones(32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = F.rms_norm(x, (32,), weight)
    for one in (x, weight):
        kept.pop(one.untyped_storage().data_ptr(), None)
    planned, _ = requests(
        lambda x, weight: F.rms_norm(x, (32,), weight), ((64, 32), x.dtype), ((32,), weight.dtype), autocast=False
    )
    assert planned == sum(kept.values()) + output.nbytes


class Cached(nn.Module):
    """A block that keeps its input in an object among its arguments, as caches of keys do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(32, 32)

    def forward(self, x, cache=None, scale=1.0):
        cache.kept = x if cache.kept is None else cache.kept + x
        return self.net(cache.kept) * scale


class Cache:
    kept = None


class Stack(TrainingModule):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = block(x, cache=Cache(), scale=2.0)
        return x.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_blocks_take_objects_among_their_arguments():
    batches = DataLoader(TensorDataset(torch.zeros(8, 32)), batch_size=8)
    plan = quiet_trainer(max_steps=1, compile="blocks").plan(Stack(Cached), batches, card="T4")
    assert plan.notes == []
    assert any("compiled" in name for name, _ in plan.largest)


def test_blocks_take_less_than_eager_ones_and_a_second_micro_batch_takes_gradients_more():
    def peak(**options):
        module = Words(partial(GPT, 96, context=256, layers=4, width=256, heads=4), partial(FusedAdam, lr=1e-3))
        return quiet_trainer(max_steps=1, precision="O4", **options).plan(module, words(32, 256, 96), card="H100")

    eager, blocks, accumulating = peak(), peak(compile="blocks"), peak(accumulate_grad_batches=2)
    assert blocks.parts["activations and others"] < 0.95 * eager.parts["activations and others"]
    assert blocks.parts["weights"] == eager.parts["weights"]
    gradients = sum(4 * one.numel() for one in GPT(96, context=256, layers=4, width=256, heads=4).parameters())
    assert accumulating.peak_allocated - eager.peak_allocated == pytest.approx(gradients, rel=0.2)


def test_blocks_that_compute_again_keep_their_inputs():
    def plan(**options):
        module = Words(partial(GPT, 96, context=256, layers=4, width=256, heads=4), partial(FusedAdam, lr=1e-3))
        return quiet_trainer(max_steps=1, precision="O4", **options).plan(module, words(32, 256, 96), card="H100")

    kept, again, compiled = plan(), plan(activations="recompute"), plan(activations="recompute", compile="blocks")
    assert again.parts["activations and others"] < 0.5 * kept.parts["activations and others"]
    assert 'activations="recompute"' in [word.text for word in kept.words]
    assert 'activations="recompute"' not in [word.text for word in again.words]
    assert compiled.parts == again.parts
    assert compiled.notes == ["compile: blocks that compute activations again are planned as eager ones"]


# -- the allocator -------------------------------------------------------------------------------------------------------------


def test_blocks_and_segments_are_those_of_torchs_allocator():
    allocator = CachingAllocator()
    small = allocator.take(1)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    large = allocator.take(3 * MIB)  # from a segment of 20 MiB
    assert allocator.reserved == 22 * MIB
    whole = allocator.take(11 * MIB)  # the rest of that segment
    assert allocator.reserved == 22 * MIB
    allocator.take(15 * MIB + 1)  # a segment of its own, in steps of 2 MiB
    assert allocator.reserved == 38 * MIB
    assert allocator.allocated == 512 + 14 * MIB + 16 * MIB  # less than 1 MiB is not split off
    for block in (large, whole, small):
        allocator.give(block)
    again = allocator.take(
        19 * MIB + 512 * 1024
    )  # the joined blocks; half a MiB is left to it, as it is too little to split off
    assert again.size == 20 * MIB
    assert (allocator.reserved, allocator.peak_reserved) == (38 * MIB, 38 * MIB)


def test_the_best_block_is_taken():
    allocator = CachingAllocator()
    blocks = [allocator.take(size * MIB) for size in (30, 50, 40)]
    for block in blocks:
        allocator.give(block)
    assert allocator.take(35 * MIB).place == blocks[2].place
    assert allocator.take(45 * MIB).place == blocks[1].place
    assert allocator.reserved == 120 * MIB


# -- the optimizer -------------------------------------------------------------------------------------------------------------


def parameters():
    return [nn.Parameter(torch.randn(shape)) for shape in ((80, 96), (17,), (3, 5))]


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        partial(torch.optim.AdamW, amsgrad=True),
        torch.optim.SGD,
        partial(torch.optim.SGD, momentum=0.9),
        torch.optim.Adagrad,
        partial(torch.optim.RMSprop, momentum=0.9),
        FusedAdam,
        partial(FusedAdam, state="bf16"),
        partial(FusedAdam, state="8bit"),
        FusedLion,
        partial(FusedSGD, momentum=0.9),
        lambda own: LARC(torch.optim.SGD(own, lr=0.1, momentum=0.9)),
    ],
)
def test_states_are_told_before_the_first_step(make):
    optimizer = (
        make(parameters()) if not isinstance(make, partial) or "lr" in make.keywords else make(parameters(), lr=0.1)
    )
    told = states_of(optimizer)
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.randn_like(one)
    optimizer.step()
    inner = getattr(optimizer, "optim", optimizer)
    made = [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert sum(told) == sum(value.numel() * value.element_size() for value in made if value.numel() > 1)


def test_states_of_another_library_are_not_known():
    class Own(torch.optim.Optimizer):
        def step(self, closure=None):
            raise AssertionError

    assert states_of(Own(parameters(), {})) is None
    assert states_of(torch.optim.LBFGS(parameters())) is None

    class Module(Classifier):
        def configure_optimizers(self):
            return Own(self.parameters(), {})

    plan = quiet_trainer(max_steps=1).plan(Module(), loader(), card="T4")
    assert "Own: states of twice its parameters are assumed" in plan.notes


# -- what a plan leaves, tells and refuses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["O1", "O5", OptLevel("O5")])
def test_a_fit_after_a_plan_is_the_fit_without_it(precision):
    def trained(*, plans):
        random.seed(1)
        torch.manual_seed(1)
        module = Classifier()
        trainer = quiet_trainer(max_epochs=1, precision=precision)
        if plans:
            before = {name: (id(one), one.clone()) for name, one in module.named_parameters()}
            trainer.plan(module, loader(shuffle=True), card="A100")
            assert all(id(one) == before[name][0] for name, one in module.named_parameters())
            assert all(torch.equal(one, before[name][1]) for name, one in module.named_parameters())
        trainer.fit(module, loader(shuffle=True))
        return [one.detach() for one in module.parameters()], torch.rand(()), random.random(), trainer.strategy.name

    for one, other in zip(trained(plans=False), trained(plans=True), strict=True):
        assert one == other if not isinstance(one, list) else all(map(torch.equal, one, other))


def test_modules_built_in_configure_model_and_ties_have_no_memory():
    class Late(TrainingModule):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_model(self):
            if self.net is None:
                self.net = nn.Sequential(nn.Linear(40000, 40000), nn.Linear(40000, 40000))  # 12.8 GB
                self.net[1].weight = self.net[0].weight

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).sum()

        def configure_optimizers(self):
            return FusedAdam(self.parameters())

    module = Late()
    batches = DataLoader(TensorDataset(torch.zeros(2, 40000)), batch_size=2)
    plan = quiet_trainer(max_steps=1).plan(module, batches, card="L4")
    assert plan.parts["weights"] / 4 == pytest.approx(40000 * 40000, rel=1e-3)
    assert not plan.fits
    assert any("8bit" in word.text for word in plan.words)
    assert "what would make it fit: " in str(plan)
    assert module.net is None


def test_cards():
    with pytest.raises(ConfigError, match="card='H2O0' is not known; did you mean 'H20.*RTX-4090"):
        quiet_trainer().plan(Classifier(), loader(), card="H2O0")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"give card= \(--card on the command line\), one of H200, H100"):
            quiet_trainer().plan(Classifier(), loader())
    assert 139 < CARDS["H200"].memory / GIB < 140.5


class ReadsValues(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else loss * 2


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(("make", "words"), [(ReadsValues, "without values, and it needs one"), (Manual, "automatic")])
def test_what_cannot_be_planned_is_refused(make, words):
    module = make()
    with pytest.raises(ConfigError, match=words):
        quiet_trainer(max_steps=1).plan(module, loader(), card="L4")
    assert type(module.net[0].weight) is nn.Parameter
    quiet_trainer(max_steps=1).fit(Classifier(), loader())  # nothing of the plan is left in torch


def test_processes_share_what_fsdp_shards():
    def plan(**options):
        trainer = Trainer(**{**QUIET, "max_steps": 1, **options})
        return trainer.plan(Words(tiny, FusedAdam), words(4, 32, 96), card="H100")

    one, sharded, both = plan(), plan(strategy="fsdp", devices=4), plan(strategy="ddp", devices=2)
    assert sharded.parts["optimizer states"] == pytest.approx(one.parts["optimizer states"] / 4, rel=0.5)
    assert any("fsdp: shards are exact" in note for note in sharded.notes)
    assert both.parts["exchange of gradients"] > 0


def test_the_command(tmp_path, capsys):
    config = tmp_path / "train.yaml"
    config.write_text(
        "trainer: {accelerator: cpu, devices: 1, max_steps: 1, precision: O4}\n"
        "module: {_target_: tests.trainer.test_plan.WithData}\n"
    )
    assert cli.main(["plan", str(config), "--card", "L40S"]) == 0
    assert "Planned peak: " in capsys.readouterr().out
    assert cli.main(["plan", str(config), "--card", "L40S", "--json", "trainer.precision=O0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["card"] == "L40S"
    assert found["parts"]["weights"] > 0


class WithData(Classifier):
    def train_dataloader(self):
        return loader()


@pytest.mark.gpu
@pytest.mark.parametrize(("level", "compiled"), [("O0", False), ("O4", False), ("O5", False), ("O4", "blocks")])
def test_a_fit_on_this_gpu_takes_what_was_planned(level, compiled):
    def make():
        return GPT(8192, context=512, layers=4, width=512, heads=8)

    def trainer(accelerator):
        return quiet_trainer(max_steps=3, precision=level, accelerator=accelerator, compile=compiled)

    batches = DataLoader(TensorDataset(torch.randint(8192, (64, 513))), batch_size=16)
    plan = trainer("cpu").plan(Words(make, partial(FusedAdam, lr=1e-4)), batches)
    module = Words(lambda: None, partial(FusedAdam, lr=1e-4))
    module.net = make()
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer("gpu").fit(module, batches)
    took = torch.cuda.max_memory_allocated() - before
    assert plan.peak_allocated == pytest.approx(took, rel=0.05)
