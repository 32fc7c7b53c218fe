"""Trainer(compile="modules" | "blocks"): eager bits at every level, a module that stays as it is, and lines on what torch does.

Most backends here are those that generate no code: for torch's default one a C compiler has to be there.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import pickle
import re
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from fabricamp import Callback, Compile, ConfigError
from fabricamp.engine.compiled_calls import repeated_blocks
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, data, loader, quiet_trainer

PARTS = ("modules", "blocks")


@pytest.fixture(autouse=True)
def _no_code_of_earlier_tests():
    """torch keeps what it has compiled for a process."""
    torch.compiler.reset()


class Block(nn.Module):
    """A residual block; ``kind`` adds what a block may do beside products."""

    def __init__(self, index, kind=""):
        super().__init__()
        self.index = index
        self.kind = kind
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.2)

    def inner(self, x):
        return self.dropout(self.down(F.gelu(self.up(self.norm(x)))))

    def forward(self, x):
        if self.kind == "index":
            return x + self.inner(x) * (1.0 + 0.1 * self.index)
        if self.kind == "checkpoint within":
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


class Net(nn.Module):
    def __init__(self, blocks, kind):
        super().__init__()
        self.kind = kind
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(index, kind) for index in range(blocks))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.kind == "checkpoint around" else block(x)
        return self.head(x)


class Deep(Classifier):
    """Blocks of one class; ``kind``: what they do, "frozen" freezes the first half of them."""

    def __init__(self, kind="", blocks=2):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = Net(blocks, kind)
        if kind == "frozen":
            for block in self.net.blocks[: blocks // 2]:
                block.requires_grad_(False)


class Counts:
    """A backend without code of its own; counts what it gets to compile, and the calls."""

    def __init__(self):
        self.graphs = 0
        self.calls = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def run(*given):
            self.calls += 1
            return graph(*given)

        return run


def fit(module, compiled=False, *, samples=24, val=8, **options):
    """Fits two epochs; returns the bits of the weights."""
    torch.manual_seed(3)
    trainer = quiet_trainer(**{"max_epochs": 2, "compile": compiled, "num_sanity_val_steps": 0, **options})
    trainer.fit(module, loader(samples), loader(val))
    return [one.tolist() for one in module.parameters() if not one.is_meta]  # after fsdp all ranks but 0 have no values


def left_behind(module):
    return [name for one in module.modules() for name in vars(one) if name == "_compiled_call_impl"]


# -- bits --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O3", "O4", "O5", "bf16-true", "16-true", "64-true"])
def test_the_bits_are_those_of_eager_modules_at_every_level(precision, part):
    backend = Counts()
    options = {"precision": precision, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    eager = fit(Deep(), **options)
    module = Deep()
    found = fit(module, Compile(part, backend=backend, fullgraph=True), **options)
    assert found == eager
    assert backend.graphs == 1
    assert backend.calls == 12 * (1 if part == "modules" else 2)
    assert not left_behind(module)


def test_full_batches_run_the_same_code_before_and_after_a_short_one():
    ran = []

    def backend(graph, inputs):
        number = len(graphs)
        graphs.append(graph)
        return lambda *given: ran.append(number) or graph(*given)

    graphs = []
    fit(Deep(), Compile("modules", backend=backend), samples=26)
    assert ran == [0, 0, 0, 0, 0, 0, 1] * 2


@pytest.mark.parametrize("precision", ["O2", "O5"])
def test_true_takes_the_modules_where_a_level_casts(precision, caplog):
    backend = Counts()
    with caplog.at_level("INFO", "fabricamp"):
        found = fit(Deep(), {"backend": backend}, precision=precision, enable_model_summary=True)
    assert found == fit(Deep(), precision=precision)
    assert backend.graphs == 1
    assert f"compile takes the modules that the step calls: precision '{precision}' casts" in caplog.text


GRAPHS = {"index": 2, "frozen": 2, "checkpoint around": 1, "": 1}
"""What blocks do, and how many forms of them are compiled."""


@pytest.mark.parametrize("precision", ["O0", "O5"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_what_blocks_do(kind, precision):
    backend = Counts()
    eager = fit(Deep(kind), precision=precision)
    assert fit(Deep(kind), Compile("blocks", backend=backend, fullgraph=True), precision=precision) == eager
    assert backend.graphs == GRAPHS[kind]
    repeats = 2 if kind == "checkpoint around" else 1  # backward runs the same code again
    assert backend.calls == 12 * 2 * repeats


@pytest.mark.parametrize("part", PARTS)
def test_checkpoints_within_blocks_draw_the_same_numbers_again(part):
    # torch's backend "eager" draws other numbers for dropout in backward.
    compiled = Compile(part, backend="aot_eager", fullgraph=True)
    assert fit(Deep("checkpoint within"), compiled) == fit(Deep("checkpoint within"))


def test_a_step_that_calls_layers_and_the_module_itself():
    class Calls(Deep):
        def forward(self, x):
            return self.net.head(x)

        def training_step(self, batch, batch_idx):
            x = self.net.stem(batch[0])
            for block in self.net.blocks:
                x = block(x)
            loss = F.cross_entropy(self(x), batch[1])
            self.log("loss", loss)
            return loss

    for precision in ("O0", "O5"):
        backend = Counts()
        found = fit(Calls(), Compile("modules", backend=backend, fullgraph=True), precision=precision)
        assert found == fit(Calls(), precision=precision)
        assert backend.graphs == 4
        assert backend.calls == 12 * 4


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's default backend needs a C++ compiler")
@pytest.mark.parametrize(("precision", "tolerance"), [("O0", 1e-5), ("O5", 4e-2)])
def test_torchs_default_backend(precision, tolerance):
    class Plain(Deep):  # dropout would draw other numbers
        def __init__(self):
            super().__init__()
            for block in self.net.blocks:
                block.dropout.p = 0.0

    begun, eager, module = Plain(), Plain(), Plain()
    fit(eager, precision=precision)
    fit(module, Compile("blocks", fullgraph=True), precision=precision)

    def distance(one, other):
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return torch.cat([(a - b).double().flatten() for a, b in pairs]).norm()

    assert distance(module, eager) < tolerance * distance(eager, begun)


# -- the module stays as it is -----------------------------------------------------------------------------------------------------


class Looks(Callback):
    """Copies and pickles the module within a run, and adds hooks in it."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step != 2:
            return
        inside = left_behind(pl_module)
        assert inside  # something is compiled
        forwards = [name for one in pl_module.modules() for name in vars(one) if name == "forward"]
        assert not forwards
        self.state = list(pl_module.state_dict())
        copied = copy.deepcopy(pl_module.net)
        loaded = pickle.loads(pickle.dumps(pl_module.net))
        assert not left_behind(copied)
        assert not left_behind(loaded)
        # Outside of a step they run eagerly, in fp32 or half, and so does the module itself.
        x = batch[0].to(next(copied.parameters()).dtype)
        assert torch.equal(copied.eval()(x), loaded.eval()(x))


@pytest.mark.parametrize("precision", ["O0", "O5"])
@pytest.mark.parametrize("part", PARTS)
def test_copies_pickles_and_state_dicts_have_nothing_of_it(part, precision):
    module = Deep()
    looks = Looks()
    fit(module, Compile(part, backend="eager"), precision=precision, callbacks=[looks])
    assert looks.state == list(Deep().state_dict())
    assert not left_behind(module)


@pytest.mark.parametrize("part", ["step", *PARTS])
def test_nothing_stays_after_an_exception(part):
    class Fails(Deep):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise ValueError("third batch")
            return super().training_step(batch, batch_idx)

    before = dynamo_config.skip_nnmodule_hook_guards
    module = Fails()
    with pytest.raises(ValueError, match="third batch"):
        fit(module, Compile(part, backend="eager"))
    assert not left_behind(module)
    assert dynamo_config.skip_nnmodule_hook_guards is before


class Hooks(Callback):
    """Adds hooks of each kind in the middle of a run: on a block, and on a layer within another block."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step != 3:
            return
        blocks = pl_module.net.blocks
        blocks[0].register_forward_pre_hook(lambda module, args: self.note("before", module, args[0]))
        blocks[0].register_forward_hook(
            lambda module, args, kwargs, out: self.note("after", module, out), with_kwargs=True
        )
        blocks[1].up.register_forward_hook(lambda module, args, out: 1.5 * out)
        blocks[2].register_full_backward_hook(lambda module, before, after: self.note("back", module, after[0]))

    def note(self, kind, module, value):
        self.seen.append((kind, module.index, value.dtype, value.sum().item()))


@pytest.mark.parametrize("precision", ["O0", "O5"])
def test_hooks_of_the_middle_of_a_run_are_called(precision):
    found = []
    for compiled in (False, Compile("blocks", backend="eager")):
        hooks = Hooks()
        found.append((fit(Deep(blocks=3), compiled, precision=precision, callbacks=[hooks]), hooks.seen))
    assert found[0] == found[1]
    assert len(found[0][1]) == 9 * 3 + 4 * 2  # of training, and of validation, which has no backward


def test_hooks_for_all_modules_are_called_and_the_blocks_run_eagerly(caplog):
    seen = []
    backend = Counts()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module)))
    try:
        fit(Deep(), Compile("blocks", backend=backend))
    finally:
        handle.remove()
    assert seen.count(Block) == 2 * (12 + 4)
    assert not backend.graphs
    assert caplog.text.count("run eagerly while a hook is registered for all modules") == 1


def test_what_the_user_compiled_is_not_compiled_twice():
    own, ours = Counts(), Counts()
    module = Deep(blocks=4)
    module.net.blocks[0].compile(backend=own)
    module.net.blocks[1] = torch.compile(module.net.blocks[1], backend=own)
    found = fit(module, Compile("blocks", backend=ours))
    assert found == fit(Deep(blocks=4))
    assert own.graphs == 2
    assert ours.graphs == 1
    assert ours.calls == 12 * 2


def test_which_modules_are_blocks():
    stage = nn.Sequential(Block(0), Block(1))
    names = lambda root: [type(one).__name__ for one in repeated_blocks(root)]  # noqa: E731 - a word for below
    assert names(Deep()) == ["Block"] * 2
    assert names(nn.ModuleDict({"one": stage, "other": nn.Sequential(Block(0), Block(1), Block(2))})) == ["Block"] * 5
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    assert names(nn.Sequential(Block(0))) == []


# -- evaluation --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["step", *PARTS])
@pytest.mark.parametrize("evaluation", [False, True])
def test_evaluation_is_eager_unless_asked_for(part, evaluation):
    backend = Counts()
    module, eager = Deep(), Deep()
    options = Compile(part, evaluation=evaluation, backend=backend, fullgraph=True)
    trainer = quiet_trainer(max_epochs=2, compile=options, num_sanity_val_steps=0)
    plain = quiet_trainer(max_epochs=2, num_sanity_val_steps=0)
    for one, of in ((trainer, module), (plain, eager)):
        torch.manual_seed(3)
        one.fit(of, loader(24), loader(8))
    each = 2 if part == "blocks" else 1
    assert backend.calls == each * (12 + (4 if evaluation else 0))
    assert trainer.callback_metrics == plain.callback_metrics
    before = backend.calls
    assert trainer.test(module, loader(8), verbose=False) == plain.test(eager, loader(8), verbose=False)
    assert torch.equal(trainer.predict(module, loader(4))[0], plain.predict(eager, loader(4))[0])
    assert backend.calls == before + (3 * each if evaluation else 0)
    assert not left_behind(module)


# -- what torch does meanwhile -----------------------------------------------------------------------------------------------------


def test_a_recompilation_is_told_once_with_its_reason(caplog):
    sizes = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [11, 12]]
    batches = DataLoader(data(16), batch_sampler=sizes)
    with caplog.at_level("INFO", "fabricamp"):
        quiet_trainer(max_epochs=2, compile=Compile("blocks", backend="eager")).fit(Deep(), batches)
    lines = [one.message for one in caplog.records if "compiled again" in one.message]
    assert lines == [
        "compile: Block was compiled again in step 2: tensor 'args[0]' size mismatch at index 0. expected 4, actual 3"
    ]


@dynamo_config.patch(recompile_limit=3)  # eight by default
def test_too_many_forms_of_a_block_are_one_line_with_attribute_and_cure(caplog):
    eager = fit(Deep("index", blocks=5))
    assert fit(Deep("index", blocks=5), Compile("blocks", backend="eager")) == eager
    lines = [one.message for one in caplog.records if one.name == "fabricamp" and one.levelno == logging.WARNING]
    assert len(lines) == 1
    assert lines[0].startswith(
        "compile: Block has been compiled too often, and runs eagerly where its code does not fit"
    )
    assert "for each value of 'index': use the value in __init__, or keep it in a tensor" in lines[0]
    torch.compiler.reset()
    with pytest.raises(ConfigError, match="too often.*for each value of 'index'"):
        fit(Deep("index", blocks=5), Compile("blocks", backend="eager", fullgraph=True))


def test_a_block_that_cannot_be_compiled_is_one_line(caplog):
    class Opens(Block):
        def forward(self, x):
            with contextlib.closing(io.StringIO()):
                return super().forward(x)

    module = Deep()
    module.net.blocks = nn.ModuleList(Opens(index) for index in range(3))
    fit(module, Compile("blocks", backend="eager"))
    lines = [one.message for one in caplog.records if one.name == "fabricamp" and one.levelno == logging.WARNING]
    assert len(lines) == 1
    assert re.match(r"compile: Opens from line \d+ on runs eagerly, as torch cannot compile it", lines[0])
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=r"contextlib\.closing"):  # torch's own error, with the line of the block
        fit(module, Compile("blocks", backend="eager", fullgraph=True))


INEXACT = {
    "dynamic": ({"dynamic": None}, "dynamic=None: which code runs depends on the sizes of earlier batches"),
    "mode": ({"mode": "max-autotune-no-cudagraphs"}, "torch chooses kernels by their time"),
    "options": ({"options": {"coordinate_descent_tuning": True}}, "torch chooses kernels by their time"),
    "not deterministic": ({"options": {"deterministic": False}}, "torch chooses some kernels by their time"),
    "default": ({}, ""),
    "other options": ({"options": {"epilogue_fusion": True}}, ""),
    "backend": ({"backend": "aot_eager"}, ""),
}


@pytest.mark.parametrize("case", INEXACT)
def test_options_that_make_a_resume_inexact_say_so(case):
    options, words = INEXACT[case]
    found = Compile(**options).inexact()
    assert words in found
    assert bool(found) == bool(words)


@pytest.mark.parametrize("case", INEXACT)
def test_inductor_is_deterministic_where_it_can_be(case):
    given = Compile(**INEXACT[case][0]).for_torch().get("options") or {}
    assert given.get("deterministic") == {"not deterministic": False}.get(
        case, None if case in ("mode", "options", "backend") else True
    )


def test_the_line_on_an_inexact_resume(caplog):
    with caplog.at_level("INFO", "fabricamp"):
        fit(Deep(), Compile("blocks", backend="eager", dynamic=True))
        fit(torch.compile(Deep(), backend="eager"))
    lines = [one.message for one in caplog.records if "a resumed run may differ in bits" in one.message]
    assert [line.partition("cut: ")[2] for line in lines] == [
        "dynamic=True: which code runs depends on the sizes of earlier batches",
        "torch.compile(dynamic=None) compiles by the sizes of earlier batches",
    ]


# -- several ranks -----------------------------------------------------------------------------------------------------------------


def of_ranks():
    """By strategy and part, or "by the user": whether compiled modules leave the bits of eager ones; or the refusal."""
    found = {}
    for strategy in ("ddp", "delayed_ddp", "fsdp"):
        options = {
            "strategy": strategy,
            "devices": "auto",
            "max_epochs": 1,
            "accumulate_grad_batches": 2,
            "samples": 48,
        }
        eager = {precision: fit(Deep(), precision=precision, **options) for precision in ("O0", "O5")}
        for part in ("step", *PARTS):
            precision = "O0" if part == "step" else "O5"
            compiled = Compile(part, backend="eager", fullgraph=strategy != "fsdp")
            torch.compiler.reset()
            try:
                found[strategy, part] = fit(Deep(), compiled, precision=precision, **options) == eager[precision]
            except ConfigError as error:
                found[strategy, part] = str(error).partition(";")[2].strip()
        torch.compiler.reset()
        found[strategy, "by the user"] = fit(torch.compile(Deep(), backend="eager"), **options) == eager["O0"]
    return found


def test_two_ranks():
    works = {(strategy, part): True for strategy in ("ddp", "delayed_ddp") for part in ("step", *PARTS)}
    refused = {("fsdp", part): "give compile='blocks'" for part in ("step", "modules")}
    works.update({(strategy, "by the user"): True for strategy in ("ddp", "delayed_ddp", "fsdp")})
    assert run_ranks(of_ranks, 2) == [{**works, **refused, ("fsdp", "blocks"): True}] * 2
