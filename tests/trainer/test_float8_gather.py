"""Weights gathered in FP8 by FSDP, emulated on ranks over Gloo: the bits of bf16 gathers, plain shards, resumes, refusals."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabricamp import Compile, ConfigError, Float8, Trainer
from fabricamp.ops.shards import local
from fabricamp.precision.float8_linears import Float8Products
from fabricamp.strategies import FSDP
from tests.distributed.ranks import import_compiler, run_ranks
from tests.small import quiet_trainer
from tests.trainer.test_float8_in_the_loop import TAKEN, Block, Fails, SaveAt, Words, batches, weights

pytest.importorskip("torchao", reason="needs the package torchao")


@pytest.fixture(scope="module", autouse=True)
def _what_ranks_import():
    """torchao imports torch's inductor where it makes its first layer, which would take every forked rank a second."""
    quiet_trainer(precision=fp8(all_gather=False), max_steps=1, enable_model_summary=True).fit(Words(), batches())
    import_compiler()


def fp8(*, all_gather, base="O5"):
    return Float8("tensorwise", base=base, include=["blocks"], all_gather=all_gather)


class Seen(Words):
    """Words that note the classes of weights within a step, and the shards."""

    def __init__(self):
        super().__init__()
        self.within = set()
        self.outside = []
        self.shards = []

    def forward(self, words):
        hook = self.blocks[0].up.register_forward_hook(self.note) if not self.within else None
        result = super().forward(words)
        if hook is not None:
            hook.remove()
        return result

    def on_train_start(self):
        self.shards = [local(parameter) for parameter in self.parameters()]
        self.cast = sum(hasattr(shard, "fsdp_pre_all_gather") for shard in self.shards)

    def note(self, layer, inputs, output):
        self.within.add(type(layer.weight.data).__name__)


class After(Seen):
    """They also note what a block returns that is called after the update."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.call()

    @torch.no_grad()
    def call(self):
        self.outside.append(self.blocks[1](torch.ones(16, 32)).sum().item())


class Outside(After):
    """The block is called before the update too, and once more with other weights."""

    def on_before_optimizer_step(self, optimizer):
        self.call()

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        before = [shard.clone() for shard in self.shards]
        torch._foreach_mul_(self.shards, 1.5)
        self.call()
        torch._foreach_copy_(self.shards, before)


class Pair(nn.Module):
    """Two layers that belong to no unit of FSDP but the last one, which has the rest of the module."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, inputs):
        return inputs + self.down(self.up(inputs).relu())


class WithPair(Outside):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.blocks.append(Pair())


def trained(precision, *, module=None, ckpt_path=None, size=4, **options):
    module = module or Seen()
    fsdp = {name: options.pop(name) for name in ("reshard_after_forward", "replicate") if name in options}
    trainer = quiet_trainer(
        **{
            "max_epochs": 1,
            "precision": precision,
            "strategy": FSDP([Block], **fsdp),
            "devices": dist.get_world_size(),
            **options,
        }
    )
    trainer.fit(module, batches(size), ckpt_path=ckpt_path)
    return module


def whole(module):
    """Returns the weights of rank 0 after a run; empty on the others."""
    return {name: value for name, value in weights(module).items() if not value.is_meta}


def same(one, other):
    assert one.losses == other.losses
    assert one.outside == other.outside
    torch.testing.assert_close(whole(one), whole(other), rtol=0, atol=0)


def both(make=Outside, **options):
    """Runs with weights gathered in FP8 and, always eagerly, in bf16, and returns the former."""
    base = options.pop("base", "O5")
    torch.compiler.reset()
    module = trained(fp8(all_gather=True, base=base), module=make(), **options)
    options.pop("compile", None)
    same(module, trained(fp8(all_gather=False, base=base), module=make(), **options))
    assert module.outside
    return module


def of_two_ranks():
    module = both()
    assert module.kinds == TAKEN
    assert module.within == {"Float8TrainingTensor"}
    assert {type(shard) for shard in module.shards} == {torch.Tensor}
    assert {shard.dtype for shard in module.shards} == {torch.float32}
    assert module.cast == len(TAKEN)
    assert not any(vars(shard) for shard in module.shards)
    assert not any(isinstance(layer, Float8Products) for layer in module.modules())
    both(base="O4", gradient_clip_val=0.1, limit_train_batches=2)
    both(accumulate_grad_batches=2)
    # Without resharding a block that is called before the update keeps its weights, whatever they are gathered in.
    both(After, limit_train_batches=2, reshard_after_forward=False, compile=Compile("blocks", backend="aot_eager"))
    assert both(WithPair, limit_train_batches=2).kinds == TAKEN | {"blocks.2.up", "blocks.2.down"}


def test_the_bits_are_those_of_bf16_gathers():
    run_ranks(of_two_ranks, 2)


def of_four_ranks():
    both(replicate=2, limit_train_batches=2)


def test_copies_of_the_module_share_its_scales():
    run_ranks(of_four_ranks, 4)


class Uneven(Seen):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for block in self.blocks:
                block.up, block.down = nn.Linear(32, 48), nn.Linear(48, 32)


def of_three_ranks():
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("fabricamp").addHandler(handler)
    logging.getLogger("fabricamp").setLevel(logging.INFO)
    options = {"limit_train_batches": 2, "enable_model_summary": True}
    gathered = trained(fp8(all_gather=True), module=Uneven(), **options)
    same(gathered, trained(fp8(all_gather=False), module=Uneven(), **options))
    assert gathered.within == {"Float8TrainingTensor"}
    return messages


def test_weights_whose_rows_the_ranks_cannot_share_equally_are_gathered_in_bf16():
    messages = run_ranks(of_three_ranks, 3)[0]
    line = "float8 all-gather: the weights of 2 layers are gathered in FP8, of 2 in bf16, as the ranks cannot share their rows"
    assert sum(message.startswith(line) for message in messages) == 1


def with_a_reduction_for_each_step():
    reduce = dist.all_reduce
    largest = []

    def counted(tensor, op=dist.ReduceOp.SUM, *arguments, **options):
        if op == dist.ReduceOp.MAX:
            largest.append(tuple(tensor.shape))
        return reduce(tensor, op, *arguments, **options)

    dist.all_reduce = counted
    try:
        module = trained(fp8(all_gather=True))
    finally:
        dist.all_reduce = reduce
    assert largest.count((len(TAKEN),)) == len(module.losses) == 4


def test_all_scales_of_a_step_take_one_reduction():
    run_ranks(with_a_reduction_for_each_step, 2)


def resumed(folder):
    path = f"{folder}/cut.ckpt"
    straight = trained(fp8(all_gather=True), callbacks=[SaveAt(path, 2)], gradient_clip_val=1.0)
    again = trained(fp8(all_gather=True), ckpt_path=path, gradient_clip_val=1.0)
    assert again.losses == straight.losses[2:]
    torch.testing.assert_close(whole(again), whole(straight), rtol=0, atol=0)
    at_o5 = trained("O5", ckpt_path=path, gradient_clip_val=1.0)
    torch.testing.assert_close(torch.tensor(at_o5.losses), torch.tensor(again.losses), rtol=0.03, atol=0)


def test_a_resumed_run_has_the_same_bits(tmp_path):
    run_ranks(resumed, 2, str(tmp_path))


def failed():
    module = Seen()
    with pytest.raises(RuntimeError, match="as a test"):
        trained(fp8(all_gather=True), module=module, callbacks=[Fails()])
    assert module.cast == len(TAKEN)
    assert not any(vars(shard) for shard in module.shards)
    assert not any(isinstance(layer, Float8Products) for layer in module.modules())


def test_shards_are_plain_after_a_run_that_fails():
    run_ranks(failed, 2)


class Replaces(Seen):
    """A weight is to be replaced by another tensor: before the first gather, and after it."""

    def on_fit_start(self):
        self.refused = []
        self.replace()

    def on_after_backward(self):
        self.replace()

    def replace(self):
        layer = self.blocks[0].up
        with pytest.raises(ConfigError, match=r"assign=True\) would replace weight, .* load without assign"):
            layer.load_state_dict(layer.state_dict(), assign=True)
        layer.load_state_dict(layer.state_dict())
        layer.load_state_dict({"bias": layer.state_dict()["bias"]}, strict=False)
        self.refused.append(len(self.losses))


class Copied(Seen):
    """The weights of a copied layer may be replaced."""

    def on_train_start(self):
        super().on_train_start()
        layer = self.blocks[0].up
        copied = copy.deepcopy(layer)
        copied.load_state_dict(copied.state_dict(), assign=True)
        # The functions hold all shards, which a copy of one layer has no use for.
        shard, other = local(layer.weight), local(copy.deepcopy(layer.weight))
        assert other.fsdp_pre_all_gather is shard.fsdp_pre_all_gather
        assert other.data_ptr() != shard.data_ptr()


class ReplacesGathered(Seen):
    """States of before are put back after a validation, which leaves the weights gathered."""

    def val_dataloader(self):
        return batches()

    def validation_step(self, batch, batch_idx):
        self(batch[0])

    def on_train_start(self):
        super().on_train_start()
        self.saved = {name: value.detach().clone() for name, value in self.state_dict().items()}

    def on_validation_end(self):
        self.within.add(type(self.blocks[0].up.weight.data).__name__)
        part = {"weight": self.saved["blocks.0.up.weight"], "bias": self.saved["blocks.0.up.bias"]}
        with pytest.raises(ConfigError, match=r"assign=True\) would replace weight"):
            self.blocks[0].up.load_state_dict(part, assign=True)
        with pytest.raises(ConfigError, match=r"assign=True\) would replace blocks\.0\.up\.weight"):
            self.load_state_dict(self.saved, assign=True)


def replaced_while_gathered():
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 1, "val_check_interval": 2}
    strategy = FSDP([Block], reshard_after_forward=False)
    module = trained(fp8(all_gather=True), module=ReplacesGathered(), strategy=strategy, **options)
    assert "Float8TrainingTensor" in module.within
    assert all(map(math.isfinite, module.losses))


def test_replacing_weights_while_they_are_gathered_is_refused():
    run_ranks(replaced_while_gathered, 2)


def replaced():
    assert trained(fp8(all_gather=True), module=Replaces(), limit_train_batches=1).refused == [0, 0]
    module = trained(fp8(all_gather=True), module=Copied(), limit_train_batches=1)
    module.load_state_dict(module.state_dict(), assign=True)


def test_replacing_weights_that_are_gathered_in_fp8_is_refused():
    run_ranks(replaced, 2)


def short():
    """Batches of 5 windows have 40 rows, which 16 does not divide."""
    module = trained(fp8(all_gather=True), size=5)
    assert module.within == {"Float8TrainingTensor"}
    exact = trained("O5", size=5)
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(exact.losses), rtol=0.03, atol=0)


def test_rows_that_16_does_not_divide_have_products_with_the_rounded_weights():
    run_ranks(short, 2)


class Grows(Words):
    """Its weights are edited between the batches of an evaluation, past the largest value of before."""

    def __init__(self):
        super().__init__()
        self.values = []

    def validation_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.values.append(outputs.item())
        with torch.no_grad():
            for parameter in self.blocks.parameters():
                local(parameter).mul_(2)


def evaluated():
    found = []
    for all_gather in (False, True):
        module = Grows()
        trainer = quiet_trainer(
            precision=fp8(all_gather=all_gather), strategy=FSDP([Block]), devices=2, limit_val_batches=2
        )
        trainer.validate(module, batches())
        found.append(module.values)
    assert found[0] == found[1]
    assert found[0][0] < found[0][1]


def test_an_evaluation_takes_the_scales_of_the_weights_at_hand():
    run_ranks(evaluated, 2)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_other_recipes_are_refused(recipe):
    with pytest.raises(ConfigError, match=rf"Float8\('{recipe}', all_gather=True\) is not offered"):
        Float8(recipe, all_gather=True)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("ddp", "it gathers no weights in FP8; give strategy='fsdp'"),
        ("delayed_ddp", "it gathers no weights in FP8; give strategy='fsdp'"),
        (FSDP(offload=True), r"leave FSDP\(offload=True\) out"),
        (FSDP(parallelize=lambda module, mesh: None, tensor_parallel=2), r"leave FSDP\(parallelize=...\) out"),
        (FSDP(reshard_after_forward=2), r"FSDP\(reshard_after_forward=2\) keeps larger shards"),
    ],
    ids=["ddp", "delayed_ddp", "offload", "parallelize", "larger shards"],
)
def test_strategies_that_gather_no_weights_in_fp8_are_refused_before_processes_start(strategy, reason):
    with pytest.raises(ConfigError, match=reason):
        Trainer(precision=fp8(all_gather=True), strategy=strategy, accelerator="cpu", devices=2, logger=False)
