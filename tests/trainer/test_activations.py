"""``Trainer(activations=...)``: the bits of a run that keeps everything, with less of it on the device."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import noop_context_fn
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Activations, Callback, Compile, ConfigError, Float8, Loop, Trainer, TrainingModule
from fabricamp.engine import block_calls
from fabricamp.engine.offloading import LEAST_BYTES, HostMemory
from fabricamp.strategies import FSDP
from tests.distributed.ranks import run_ranks
from tests.pairs import pairs
from tests.small import Classifier, loader, quiet_trainer

WIDTH, ROWS = 64, 512  # a half activation has LEAST_BYTES
KINDS = {
    "recompute": "recompute",
    "products": Activations(save="products"),
    "offload": "offload",
    "a quarter": Activations(offload=0.25),
    "inputs elsewhere": Activations(save="inputs", offload=1.0),
}


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, *, scale):
        return x + scale * self.drop(self.down(self.act(self.up(self.norm(x)))))


class Deep(TrainingModule):
    def __init__(self, dropout=0.1):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(8, WIDTH)
            self.blocks = nn.ModuleList([Block(dropout) for _ in range(4)])
            self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=x.mean(dim=1, keepdim=True))
        return self.head(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(steps=3, rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps * rows, 8, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(dim=1) > 0).long()), batch_size=rows)


class Freed(Callback):
    """How many results of ``act`` have no memory between forward and backward; one of each block, in the last step."""

    def on_train_start(self, trainer, pl_module):
        self.seen, self.freed = [], 0
        self.handles = [block.act.register_forward_hook(self.note) for block in pl_module.blocks]

    def note(self, module, args, output):
        self.seen.append(StorageWeakRef(output.untyped_storage()))

    def on_before_backward(self, trainer, pl_module, loss):
        self.freed = [one.expired() for one in self.seen[-4:]].count(True)

    def on_after_backward(self, trainer, pl_module):
        assert all(one.expired() for one in self.seen)

    def on_train_end(self, trainer, pl_module):
        for handle in self.handles:
            handle.remove()


def fitted(activations="keep", *, dropout=0.1, watches=True, **options):
    """Returns the weights after three micro-batches, and how many of four activations had no memory before backward."""
    torch.manual_seed(3)
    module = Deep(dropout)
    watch = Freed()
    given = {"max_epochs": 1, "callbacks": [watch] if watches else [], "activations": activations}
    quiet_trainer(**{**given, **options}).fit(module, batches())
    assert not any("forward" in vars(block) for block in module.blocks)
    return torch.cat([one.detach().flatten() for one in module.parameters()]), watch.freed if watches else 0


FREED = {"recompute": 4, "products": 4, "offload": 3, "inputs elsewhere": 4}
"""What is not kept of the four: the last block's is used as it is."""


def differences(cells, strategy):
    """Returns the cells whose weights differ from those of a run that keeps everything, or that free too little."""
    found, kept = [], {}
    for level, accumulate, dropout, kind in cells:
        options = {"precision": level, "accumulate_grad_batches": accumulate, "dropout": dropout, **strategy()}
        if (level, accumulate, dropout) not in kept:
            kept[level, accumulate, dropout] = fitted(**options)
        expected, none = kept[level, accumulate, dropout]
        weights, freed = fitted(KINDS[kind], **options)
        enough = none == 0 and freed == FREED.get(kind, freed)
        # Shards come back to rank 0 alone, the others have weights on the meta device.
        if not enough or not (weights.is_meta or torch.equal(weights, expected)):
            found.append((level, accumulate, dropout, kind, freed))
    return found


CELLS = pairs(["O0", "O1", "O2", "O5"], [1, 2], [0.0, 0.1], KINDS)


def test_has_the_bits_of_a_run_that_keeps_everything():
    assert differences(CELLS, dict) == []


def split(module, mesh):
    for block in module.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


STRATEGIES = {
    "ddp": lambda: {"strategy": "ddp"},
    "delayed_ddp": lambda: {"strategy": "delayed_ddp"},
    "fsdp": lambda: {"strategy": FSDP([Block])},
}


def of_ranks():
    cells = list({kind: (*rest, kind) for *rest, kind in CELLS}.values())  # each once
    found = {}
    for name, strategy in STRATEGIES.items():
        rest = {"devices": "auto", "use_distributed_sampler": False}
        found[name] = differences(cells, lambda strategy=strategy, rest=rest: {**strategy(), **rest})
    layers = {"strategy": FSDP([Block], parallelize=split, tensor_parallel=2), **rest}
    split_ones = [cell for cell in cells if cell[-1] in ("recompute", "products")]
    found["split layers"] = differences(split_ones, lambda: layers)
    return found


def test_of_two_ranks_has_these_bits_too():
    assert run_ranks(of_ranks, 2, backend=None)[0] == {name: [] for name in (*STRATEGIES, "split layers")}


# -- what is refused ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"save": "nothing"}, r"save='nothing'\) is not allowed \(allowed: 'all', 'products', 'inputs'\)"),
        ({"save": "product"}, "did you mean 'products'"),
        ({"offload": 1.5}, r"offload=1.5\) is not allowed; give a share from 0 to 1"),
        ({"offload": True}, r"offload=True\) is not allowed"),
        ({"offload": float("nan")}, r"offload=nan\) is not allowed"),
        ({"memory_budget": -0.1}, r"memory_budget=-0.1\) is not allowed"),
        ({"save": "products", "offload": 0.5}, "torch keeps products in a table of its own"),
        (
            {"save": "inputs", "memory_budget": 0.5},
            "the compiler chooses what is computed again; leave one of them out",
        ),
        ({"blocks": [Block]}, "says which blocks, and they keep all of it"),
        ({"blocks": [Block], "memory_budget": 0.5}, "memory_budget is of compiled regions"),
        ({"blocks": [], "save": "inputs"}, "has to be 'auto', or a list of classes"),
        ({"blocks": Block, "save": "inputs"}, "has to be 'auto', or a list of classes"),
        ({"block": [Block]}, "did you mean 'blocks'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Activations(**options)


def test_the_argument_takes_words_options_and_their_keywords():
    with pytest.raises(ConfigError, match=r"activations='recomputed' is not allowed; did you mean 'recompute'"):
        quiet_trainer(activations="recomputed")
    with pytest.raises(
        ConfigError, match=r"activations=0.5 is not allowed; give 'keep', 'recompute', 'offload', an Act"
    ):
        quiet_trainer(activations=0.5)
    with pytest.raises(ConfigError, match=r"FSDP has no argument 'activation_checkpointing'.*activations='recompute'"):
        FSDP(activation_checkpointing=[Block])
    assert torch.equal(fitted({"save": "inputs"})[0], fitted(Activations())[0])


class Called(Block):
    """Counts its calls in an attribute, which compiled code cannot do in a part that it computes again."""

    calls = 0

    def forward(self, x, *, scale):
        self.calls += 1
        return super().forward(x, scale=scale)


class Counting(Block):
    """Changes its buffer in place."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, *, scale):
        self.count += 1
        return super().forward(x, scale=scale)


class Drawing(Block):
    def forward(self, x, *, scale):
        return super().forward(x, scale=scale) * random.random()


class Normed(Block):
    def __init__(self, dropout):
        super().__init__(dropout)
        self.norm = nn.BatchNorm1d(WIDTH)


def deep_with(kind, base=Deep):
    module = base()
    module.blocks = nn.ModuleList([kind(0.1) for _ in range(4)])
    return module


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (Classifier, {"activations": "recompute"}, "Classifier has no repeated blocks .* name them by Activations"),
        (Deep, {"activations": Activations([nn.Conv2d], save="inputs")}, r"blocks=\[Conv2d\]\): Deep has no submodule"),
        (
            Deep,
            {"activations": Activations(["blocks.9"], save="inputs")},
            r"blocks=\['blocks.9'\]\): Deep has no submodule",
        ),
        (Deep, {"activations": Activations(["blocks"], save="inputs")}, "is a ModuleList, which is never called"),
        (
            Deep,
            {"activations": Activations([Block, nn.Linear], offload=1.0)},
            r"is a block, and has another in it \(Linear\)",
        ),
        (Deep, {"activations": Activations(memory_budget=0.5)}, "nothing is compiled; give compile=True"),
        (
            Deep,
            {"activations": Activations(memory_budget=0.5), "compile": Compile(backend="aot_eager")},
            "code of the backend 'aot_eager' keeps what it keeps",
        ),
        (
            Deep,
            {"activations": "offload", "compile": "step"},
            r"compile='step': Activations\(offload=1.0\) .* compile='blocks'",
        ),
        (Deep, {"activations": "offload", "compile": "modules"}, "compile='modules': .* give compile='blocks'"),
        (
            lambda: deep_with(Normed),
            {"activations": "recompute"},
            "the running statistics of BatchNorm1d 'blocks.0.norm'",
        ),
        (lambda: deep_with(Counting), {"activations": "recompute"}, "change its buffer 'count' a second time"),
        (lambda: deep_with(Drawing), {"activations": "recompute"}, "change the state of random a second time"),
        (
            Deep,
            {"activations": "offload", "strategy": FSDP([Block]), "precision": Float8(all_gather=True)},
            "weights that are gathered in FP8 are freed",
        ),
        (
            Deep,
            {"activations": "offload", "strategy": FSDP([nn.Linear])},
            "strategy 'fsdp' gathers parameters within blocks.0, .* its class, Block",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_update(make, options, words):
    torch.manual_seed(0)
    module = make()
    before = copy.deepcopy(module.state_dict())
    data = loader(8, 4) if make is Classifier else batches(1)
    with pytest.raises(ConfigError, match=words):
        quiet_trainer(max_epochs=1, **options).fit(module, data)
    if "strategy" not in options:
        assert all(torch.equal(before[name], one) for name, one in module.named_parameters())
        assert not any("forward" in vars(one) for one in module.modules())
    torch.distributed.destroy_process_group() if torch.distributed.is_initialized() else None


def test_a_block_that_the_user_has_compiled_is_not_moved():
    module = Deep()
    for block in module.blocks:
        block.compile(backend="aot_eager")
    options = Activations([Block], offload=1.0)
    with pytest.raises(ConfigError, match=r"blocks\.0 is within code that you have compiled"):
        quiet_trainer(max_epochs=1, activations=options).fit(module, batches(1))


@pytest.mark.parametrize("kind", [Normed, Counting, Drawing])
def test_what_changes_in_forward_may_wait_in_host_memory(kind):
    def trained(activations):
        torch.manual_seed(0)
        random.seed(0)
        module = deep_with(kind)
        quiet_trainer(max_epochs=1, activations=activations).fit(module, batches())
        return torch.cat([one.flatten().double() for one in module.state_dict().values()])

    assert torch.equal(trained("offload"), trained("keep"))


# -- what is moved -----------------------------------------------------------------------------------------------------------------


class Twice(Block):
    """Saves one tensor in several products, one of them transposed, and a view of another's half."""

    def forward(self, x, *, scale):
        two = self.up(x)
        first, second = two.chunk(2, dim=1)
        return x + scale * (first * second + F.linear(x, self.down.weight[:, :WIDTH]) + (x.t() @ x)[0] / ROWS)


class TooLarge(Block):
    """Has no memory for a whole batch."""

    def forward(self, x, *, scale):
        if len(x) == ROWS:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (of a test)")
        return super().forward(x, scale=scale)


class Edited(Block):
    """Changes in place what a product has saved."""

    def forward(self, x, *, scale):
        two = self.up(x)
        out = self.down(two)
        with torch.no_grad():
            two.mul_(2)
        return x + scale * out


class Rewritten(Block):
    """Saves one memory twice, with other values; the first has no part in the loss."""

    def forward(self, x, *, scale):
        two = self.up(x)
        two.square()
        with torch.no_grad():
            two.mul_(2)
        return x + scale * self.down(two)


@pytest.mark.parametrize(("kind", "share"), [(Twice, 0.5), (Twice, 1.0), (Rewritten, 1.0)])
def test_views_of_one_memory_are_moved_together_and_its_versions_apart(kind, share):
    def trained(activations):
        torch.manual_seed(0)
        module = deep_with(kind)
        quiet_trainer(max_epochs=1, activations=activations).fit(module, batches())
        return torch.cat([one.detach().flatten() for one in module.parameters()])

    assert torch.equal(trained(Activations(offload=share)), trained("keep"))


@pytest.mark.parametrize("kind", ["recompute", "offload"])
def test_halves_of_a_batch_are_passes_of_their_own(kind):
    def trained(activations):
        torch.manual_seed(0)
        module = deep_with(TooLarge)
        options = {"max_epochs": 1, "on_out_of_memory": "halve", "activations": activations}
        quiet_trainer(**options).fit(module, batches())
        return torch.cat([one.detach().flatten() for one in module.parameters()])

    assert torch.equal(trained(KINDS[kind]), trained("keep"))


@pytest.mark.parametrize(("activations", "words"), [("keep", "inplace operation"), ("offload", r"shape \(512, 128\)")])
def test_a_change_in_place_of_what_was_saved_is_an_error(activations, words):
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match=words):
        quiet_trainer(max_epochs=1, activations=activations).fit(deep_with(Edited), batches(1))


def test_a_change_in_place_of_what_stays_is_an_error():
    torch.manual_seed(0)
    options = Activations(offload=0.01)
    with pytest.raises(RuntimeError, match=r"shape \(512, 128\).* changed in place"):
        quiet_trainer(max_epochs=1, activations=options).fit(deep_with(Edited), batches(1))


def test_host_memory_is_used_again_and_bounded():
    memory = HostMemory(pinned=False, most=1 << 20)
    first = memory.take(200_000)
    memory.give(first)
    assert memory.take(190_000) is first
    other = memory.take(200_000)
    assert other is not first
    memory.give(other)
    assert memory.take(100_000) is other  # a larger region before a new one
    with pytest.raises(ConfigError, match="of host memory are needed, and a process may take 1.0 MiB"):
        memory.take(900_000)


class Wide(Block):
    """Saves its input and a product's, of LEAST_BYTES each, and weights that are larger."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.wide = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.back = nn.Linear(8 * WIDTH, WIDTH, bias=False)

    def forward(self, x, *, scale):
        return self.back(self.wide(x))


@pytest.mark.parametrize(
    ("share", "rows", "moved"),
    [(1.0, 256, "2.2 MiB"), (0.25, 256, "640.0 KiB"), (1.0, 32, "256.0 KiB"), (1.0, 8, "0 B")],
)
def test_the_share_is_of_tensors_of_some_size_and_not_of_weights(share, rows, moved, caplog):
    caplog.set_level("INFO", "fabricamp")
    options = {"activations": Activations(offload=share), "enable_model_summary": True, "max_epochs": 1}
    quiet_trainer(**options).fit(deep_with(Wide), batches(2, rows=rows))
    assert f"activations: 4 Wide keep all of it, {share:.0%} of it in host memory" in caplog.text
    total = {256: "2.2 MiB", 32: "256.0 KiB", 8: "0 B"}[rows]  # four blocks, of 64 KiB and 512 KiB at 256 rows
    assert caplog.text.count("that blocks keep of a micro-batch") == 1
    assert f"activations: {moved} of {total} that blocks keep of a micro-batch" in caplog.text
    assert LEAST_BYTES == 64 << 10


# -- a module in a run -------------------------------------------------------------------------------------------------------------


class Manual(Deep):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Closures(Deep):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize(("make", "kind"), [(Manual, "inputs elsewhere"), (Closures, "offload")])
def test_backwards_of_ones_own(make, kind):
    def trained(activations):
        torch.manual_seed(3)
        module = make()
        quiet_trainer(max_epochs=1, activations=activations).fit(module, batches())
        return torch.cat([one.detach().flatten() for one in module.parameters()])

    assert torch.equal(trained(KINDS[kind]), trained("keep"))


class Copying(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            block = pl_module.blocks[0]
            self.copies = [copy.deepcopy(block), pickle.loads(pickle.dumps(block))]
            x, scale = torch.randn(4, WIDTH), torch.ones(4, 1)
            with torch.no_grad():
                pl_module.eval()
                self.outputs = [one.eval()(x, scale=scale) for one in (block, *self.copies)]
                pl_module.train()


@pytest.mark.parametrize("kind", ["recompute", "offload"])
def test_copies_and_pickles_of_a_block_have_its_own_forward(kind):
    watch = Copying()
    quiet_trainer(max_epochs=1, activations=kind, callbacks=[watch]).fit(Deep(), batches())
    for one, output in zip(watch.copies, watch.outputs[1:], strict=True):
        assert one.forward.__func__ is Block.forward
        assert one.forward.__self__ is one
        assert torch.equal(output, watch.outputs[0])


def test_calls_are_counted_and_evaluation_calls_once():
    class Validated(Deep):
        def validation_step(self, batch, batch_idx):
            self(batch[0])

    module = deep_with(Called, Validated)
    quiet_trainer(max_epochs=1, activations="recompute", num_sanity_val_steps=0).fit(module, batches(2), batches(1))
    assert [block.calls for block in module.blocks] == [2 * 2 + 1] * 4


def test_checkpoints_do_not_depend_on_it(tmp_path):
    def run(activations, steps, resume=None):
        torch.manual_seed(3)
        trainer = quiet_trainer(max_steps=steps, activations=activations, precision="O2")
        module = Deep()
        trainer.fit(module, batches(4), ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / f"{activations}-{steps}.ckpt")
        return torch.cat([one.detach().flatten() for one in module.parameters()])

    expected = run("keep", 4)
    run("recompute", 2)
    assert torch.equal(run("offload", 4, tmp_path / "recompute-2.ckpt"), expected)
    kept, again = (torch.load(tmp_path / f"{name}.ckpt") for name in ("keep-4", "recompute-2"))
    assert list(kept["state_dict"]) == list(again["state_dict"])


def test_a_loop_of_ones_own_takes_it():
    def trained(activations):
        run = Loop(accelerator="cpu", seed=0, activations=activations)
        torch.manual_seed(0)
        module = deep_with(Called)
        model, _ = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for x, y in batches():
            run.step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), [x, y])
        run.close()
        calls = module.blocks[0].calls
        return torch.cat([one.detach().flatten() for one in module.parameters()]), calls

    (again, twice), (kept, once) = trained("recompute"), trained("keep")
    assert torch.equal(again, kept)
    assert (once, twice) == (3, 6)


def test_a_plan_counts_what_is_computed_again_and_says_what_it_does_not():
    def plan(activations, compiled=None):
        trainer = quiet_trainer(max_epochs=1, activations=activations, compile=compiled)
        return trainer.plan(Deep(), batches(1), card="h200")

    kept, again, moved = plan("keep"), plan("recompute"), plan(KINDS["inputs elsewhere"])
    assert again.parts["activations and others"] < kept.parts["activations and others"] / 2
    assert moved.peak_allocated == again.peak_allocated
    assert "offload=1.0" in moved.notes[-1]
    assert "is counted as kept" in moved.notes[-1]
    assert not any("counted as kept" in note for note in again.notes)
    budget = plan(Activations(memory_budget=0.5), "blocks")
    assert "memory_budget=0.5" in budget.notes[-1]


class Failing(Block):
    fails = False

    def forward(self, x, *, scale):
        x = super().forward(x, scale=scale)
        if self.fails:
            raise ArithmeticError("of the block")
        return x


def checkpoint_before_2_13(function, *args, use_reentrant, context_fn=noop_context_fn):
    rest = torch.utils.checkpoint._checkpoint_without_reentrant_generator(
        function, True, context_fn, "default", False, True, *args
    )
    next(rest)
    output = function(*args)
    with pytest.raises(StopIteration):
        next(rest)
    return output


@pytest.mark.parametrize("kind", ["recompute", "products", "inputs elsewhere"])
def test_an_error_in_a_block_leaves_nothing_behind(kind, monkeypatch):
    """Its traceback lives on, as in a notebook."""
    monkeypatch.setattr(block_calls, "checkpoint", checkpoint_before_2_13)
    module = Deep(dropout=0.0)
    module.blocks = nn.ModuleList([Failing(0.0) for _ in range(4)])
    module.blocks[2].fails = True
    with pytest.raises(ArithmeticError, match="of the block") as caught:
        quiet_trainer(activations=KINDS[kind], max_steps=2).fit(module, loader())
    module.first(torch.ones(512, 8)).tanh().sum().backward()
    module.blocks[2].fails = False
    assert caught.value.__traceback__ is not None
    quiet_trainer(activations=KINDS[kind], max_steps=2).fit(module, loader())


def test_the_default_leaves_modules_alone():
    class Looking(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert not any("forward" in vars(one) for one in pl_module.modules())

    quiet_trainer(max_epochs=1, callbacks=[Looking()]).fit(Deep(), batches(1))
    assert Trainer.__init__.__wrapped__.__kwdefaults__["activations"] == "keep"
