"""FP8 as a level in whole runs, emulated on a CPU: resumes, levels before and after, ways of running, two ranks."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback, ConfigError, Float8, OptLevel, TrainingModule
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.loggers import TensorBoardLogger
from fabricamp.optimizers import FusedAdam
from fabricamp.precision.float8_linears import RECIPES, Float8Products
from fabricamp.strategies import FSDP
from fabricamp.tuner import Tuner
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer

pytest.importorskip("torchao", reason="needs the package torchao")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Words(TrainingModule):
    """Learns to repeat a word; the poisoned batch has a loss that is not finite."""

    def __init__(self, poisoned=None, blocks=2):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(16, 32)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))
            self.head = nn.Linear(32, 16)
        self.poisoned = poisoned
        self.losses = []
        self.kinds = set()

    def forward(self, words):
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1).float(), batch[0].flatten())
        return loss * float("inf") if batch_idx == self.poisoned else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.kinds = {name for name, module in self.named_modules() if isinstance(module, Float8Products)}

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=0.01)


TAKEN = {f"blocks.{number}.{layer}" for number in range(2) for layer in ("up", "down")}


def fp8(recipe="tensorwise", base="O5"):
    return Float8(recipe, base=base, include=["blocks"])


def batches(size=4):
    words = torch.randint(0, 16, (32, 8), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(words), batch_size=size)


def trained(precision, *, module=None, ckpt_path=None, **options):
    module = module or Words()
    trainer = quiet_trainer(**{"max_epochs": 1, "precision": precision, **options})
    trainer.fit(module, batches(), ckpt_path=ckpt_path)
    return module, trainer


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("base", ["O4", "O5"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], ids=str)
def test_it_learns_nearly_what_bf16_learns(base, options):
    module, _ = trained(fp8(base=base), **options)
    assert module.kinds == TAKEN
    assert not any(isinstance(layer, Float8Products) for layer in module.modules())
    exact, _ = trained(base, **options)
    assert module.losses != exact.losses
    assert module.losses[-1] < 0.95 * module.losses[0]
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(exact.losses), rtol=0.03, atol=0)


def by_hand(recipe):
    """Returns the losses of a loop with torchao's layers, bf16 weights, fp32 masters and torch's AdamW."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    module = Words().to(torch.bfloat16)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name != "head")
    masters = [parameter.detach().float() for parameter in Words().parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01, weight_decay=0.0)
    losses = []
    for number, batch in enumerate(batches()):
        loss = module.training_step(batch, number)
        loss.backward()
        for master, parameter in zip(masters, module.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(module.parameters()), masters)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_losses_are_those_of_a_loop_by_hand_with_the_same_layers(recipe):
    module, _ = trained(fp8(recipe))
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(by_hand(recipe)), rtol=1e-4, atol=0)


class SaveAt(Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("base", ["O4", "O5"])
def test_a_resumed_run_has_the_same_bits(tmp_path, base):
    path = str(tmp_path / "cut.ckpt")
    straight, _ = trained(fp8("rowwise", base), callbacks=[SaveAt(path, 3)], gradient_clip_val=1.0)
    resumed, _ = trained(fp8("rowwise", base), ckpt_path=path, gradient_clip_val=1.0)
    assert resumed.losses == straight.losses[3:]
    torch.testing.assert_close(weights(resumed), weights(straight), rtol=0, atol=0)


def test_checkpoints_are_those_of_the_base_level_and_resume_at_either(tmp_path):
    """At the point of the change of levels the fp32 values are the same bits, and so is the step that follows at each level."""
    paths = {name: str(tmp_path / f"{name}.ckpt") for name in ("fp8", "O5")}
    for name, path in paths.items():
        trained("O5" if name == "O5" else fp8(), callbacks=[SaveAt(path, 4)])
    files = {name: torch.load(path, weights_only=True) for name, path in paths.items()}
    assert {name: (value.shape, value.dtype) for name, value in files["fp8"]["state_dict"].items()} == {
        name: (value.shape, value.dtype) for name, value in files["O5"]["state_dict"].items()
    }
    assert all(type(value) is torch.Tensor for value in files["fp8"]["state_dict"].values())
    assert files["fp8"].keys() == files["O5"].keys()
    for name, path in paths.items():
        found = []

        class Look(Callback):
            def on_train_start(self, trainer, pl_module):
                found.append(weights(pl_module))

        for precision in ("O5", fp8()):
            module, _ = trained(precision, ckpt_path=path, callbacks=[Look()])
            assert len(module.losses) == 4
        for state in found:
            assert state.keys() == files[name]["state_dict"].keys()
            expected = {key: value.to(state[key].dtype) for key, value in files[name]["state_dict"].items()}
            torch.testing.assert_close(state, expected, rtol=0, atol=0)


@pytest.mark.parametrize("saved", ["O5", "fp8"])
def test_an_accumulation_in_progress_goes_on_at_the_other_level(tmp_path, saved, caplog):
    """The gradient of the micro-batches before the file was written is part of the first step after it."""
    path = str(tmp_path / "cut.ckpt")
    levels = {"O5": "O5", "fp8": fp8()}
    options = {"accumulate_grad_batches": 2, "limit_train_batches": 4}

    class SaveWithin(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(path)

    trained(levels.pop(saved), callbacks=[SaveWithin()], **options)
    (other,) = levels.values()
    resumed, trainer = trained(other, ckpt_path=path, **options)
    assert len(resumed.losses) == 1
    assert trainer.global_step == 2
    assert "computed again" not in caplog.text


def test_a_step_without_finite_gradients_is_skipped():
    module, trainer = trained(fp8(), module=Words(poisoned=2), nan_policy="skip")
    assert trainer.skipped_steps == 1
    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert not torch.equal(module.head.weight, Words().head.weight)


@pytest.mark.parametrize(("base", "part"), [("O4", "step"), ("O5", "blocks"), ("O5", "modules")])
def test_compiled_steps_have_the_bits_of_eager_ones(base, part):
    # torch takes a second to trace a layer: there is one where the whole network is traced.
    number, include = (2, ["blocks"]) if part == "blocks" else (1, ["blocks.0.up"])
    precision = Float8("tensorwise", base=base, include=include)
    eager, _ = trained(precision, module=Words(blocks=number), limit_train_batches=3)
    assert eager.kinds == {name for name in TAKEN if name.startswith(tuple(include))}
    torch.compiler.reset()
    compiled, _ = trained(
        precision,
        module=Words(blocks=number),
        limit_train_batches=3,
        compile={"part": part, "backend": "aot_eager"},
    )
    assert compiled.losses == eager.losses
    torch.testing.assert_close(weights(compiled), weights(eager), rtol=0, atol=0)


class Fails(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        raise RuntimeError("as a test")


def test_layers_are_plain_after_a_run_that_fails():
    module = Words()
    with pytest.raises(RuntimeError, match="as a test"):
        trained(fp8(), module=module, callbacks=[Fails()])
    assert not any(isinstance(layer, Float8Products) for layer in module.modules())
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


class Exports(Callback):
    """Exports the module in a run; torch.jit compiles no layer with FP8 products, and ONNX has no such products."""

    def __init__(self, folder):
        self.path = folder / "words.onnx"

    def on_train_end(self, trainer, pl_module):
        words = torch.zeros(2, 8, dtype=torch.int64)
        self.script = pl_module.to_torchscript(method="trace", example_inputs=words)
        pl_module.to_onnx(self.path, words, dynamo=True)
        assert isinstance(pl_module.blocks[0].up, Float8Products)


def test_a_layer_parametrised_within_a_run_works_after_it():
    class Halved(nn.Module):
        def forward(self, weight):
            return weight / 2

    class Parametrised(Words):
        def configure_optimizers(self):
            parametrize.register_parametrization(self.blocks[0].up, "weight", Halved())
            return super().configure_optimizers()

    module, _ = trained(fp8(base="O4"), module=Parametrised(), limit_train_batches=2)
    assert module.kinds == TAKEN
    up = module.blocks[0].up
    assert not isinstance(up, Float8Products)
    torch.testing.assert_close(up.weight, up.parametrizations.weight.original / 2, rtol=0, atol=0)
    assert module(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 16)


def test_exports_within_a_run_have_plain_layers(tmp_path):
    onnx = pytest.importorskip("onnx", reason="needs the package onnx")
    pytest.importorskip("onnxscript", reason="needs the package onnxscript")
    exports = Exports(tmp_path)
    trained(fp8(base="O4"), callbacks=[exports], limit_train_batches=1)
    text = str(exports.script.inlined_graph)
    assert text.count("aten::linear") == 5
    assert "Float8Linear" not in text
    operators = Counter(node.op_type for node in onnx.load(str(exports.path)).graph.node)
    assert operators["Gemm"] + operators["MatMul"] == 5
    assert not {"Cast", "Clip", "ReduceMax"} & operators.keys()


@pytest.mark.parametrize("base", ["O4", "O5"])
def test_the_graph_on_tensorboard_has_plain_layers(tmp_path, base):
    """Within a trace, each operation of a cast to FP8 would be a node of its own."""
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    module = Words()
    module.example_input_array = torch.zeros(2, 8, dtype=torch.int64)
    trained(fp8(base=base), module=module, logger=logger, limit_train_batches=1)
    events = EventAccumulator(str(logger.folder))
    events.Reload()
    kinds = Counter(node.op for node in events.Graph().node)
    assert kinds["aten::linear"] == 5
    assert not {"aten::amax", "aten::max", "aten::clamp"} & kinds.keys()


class SaysSlow(OptLevel):
    def slowness(self, *, compiled):
        return f"slow unless compiled: {compiled}"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_slow_level_says_so_without_bar_and_summary(caplog, compiled):
    module = Words()
    if compiled:
        module.blocks[0].compile(backend="eager")
    with caplog.at_level(logging.INFO, logger="fabricamp"):
        trained(SaysSlow("O4"), module=module, limit_train_batches=1)
    assert f"slow unless compiled: {compiled}" in caplog.messages


def test_trials_of_the_tuner_do_not_repeat_that_a_level_is_slow(caplog):
    with caplog.at_level(logging.INFO, logger="fabricamp"):
        Tuner(quiet_trainer(precision=SaysSlow("O4"))).lr_find(Words(), batches(), num_training=3, update_attr=False)
    assert not any(message.startswith("slow unless") for message in caplog.messages)


def test_the_summary_counts_the_layers(caplog):
    with caplog.at_level(logging.INFO, logger="fabricamp"):
        trained(fp8(), enable_model_summary=True)
    assert "float8 (tensorwise): 4 of 5 linear layers, 94% of their FLOPs; in bf16: 1 head" in caplog.messages


def test_evaluation_runs_at_the_level():
    class Looks(Words):
        def validation_step(self, batch, batch_idx):
            self.kinds = {name for name, module in self.named_modules() if isinstance(module, Float8Products)}
            self.log("val_loss", F.cross_entropy(self(batch[0]).flatten(0, 1), batch[0].flatten()))

    module = Looks()
    quiet_trainer(precision=fp8()).validate(module, batches())
    assert module.kinds == TAKEN
    assert type(module.blocks[0].up) is nn.Linear


def two_ranks(strategy, folder, accumulate=1):
    """Returns losses, the layers in FP8, the classes of their weights within the run, and the weights of the module after it."""
    seen = set()

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.add(type(pl_module.blocks[0].up.weight.data).__name__)

    saves = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1, save_top_k=0)
    module, _ = trained(
        fp8(),
        strategy=strategy(),
        devices=2,
        accumulate_grad_batches=accumulate,
        callbacks=[Look(), saves],
        enable_checkpointing=True,
    )
    return module.losses, module.kinds, seen, weights(module)


def layers_as_units():
    with pytest.raises(ConfigError, match="counted as 'that are units of FSDP'"):
        trained(fp8(), strategy=FSDP([nn.Linear]), devices=2)


def test_layers_that_are_units_of_fsdp_are_named_as_such():
    run_ranks(layers_as_units, 2)


@pytest.mark.parametrize("name", ["ddp", "delayed_ddp", "fsdp"])
def test_two_ranks_learn_alike_and_their_checkpoint_has_plain_fp32_weights(tmp_path, name):
    strategy = (lambda: FSDP([Block])) if name == "fsdp" else (lambda: name)
    first, second = run_ranks(two_ranks, 2, strategy, str(tmp_path), 2 if name == "delayed_ddp" else 1)
    for losses, kinds, seen, state in (first, second):
        assert kinds == TAKEN
        assert seen == {"DTensor" if name == "fsdp" else "Tensor"}
        assert losses[-1] < losses[0]
        assert {type(value) for value in state.values()} == {torch.Tensor}
    path = str(tmp_path / "last.ckpt")
    found = []

    class Look(Callback):
        def on_train_start(self, trainer, pl_module):
            found.append(weights(pl_module))

    trained("O5", ckpt_path=path, callbacks=[Look()])
    assert found[0].keys() == first[3].keys()
    for name, value in first[3].items():
        torch.testing.assert_close(found[0][name], value.to(found[0][name].dtype), rtol=0, atol=0)
