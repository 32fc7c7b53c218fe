"""Checkpoints of a module with compiled parts (``_orig_mod`` in names) load into one without, and the other way round."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import Callback, CheckpointError, TrainingModule
from fabricamp.callbacks import EMA, BaseFinetuning, WeightAveraging
from fabricamp.checkpoint import fit_names, read_checkpoint, write_checkpoint
from fabricamp.checkpoint.compiled_names import with_names_of
from tests.distributed.ranks import import_compiler, run_ranks
from tests.small import loader, quiet_trainer

WAYS = [(True, False), (False, True)]


class Parts(TrainingModule):
    """Three parts, of which ``body`` may be compiled; BatchNorm has buffers and a version in the state dict's metadata."""

    def __init__(self, compiled=False):
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
            self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.body = torch.compile(body, backend="eager") if compiled else body

    def forward(self, x):
        return self.head(self.body(self.stem(x)))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        named = [(name, one) for name, one in self.named_parameters() if one.requires_grad]
        return torch.optim.AdamW(named, lr=0.05)


class FromTheSecondEpoch(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.body, train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            parameters = [*pl_module.body.parameters()]
            self.make_trainable(pl_module.body)
            names = [name for name, one in pl_module.named_parameters() if any(one is other for other in parameters)]
            optimizer.add_param_group({"params": list(zip(names, parameters, strict=True)), "lr": 0.01})


class SaveAt(Callback):
    def __init__(self, path, batches):
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.state.batches_done == self.batches:
            trainer.save_checkpoint(self.path)


def fit(module, *callbacks, ckpt_path=None, **options):
    trainer = quiet_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=list(callbacks), **options)
    trainer.fit(module, loader(32), loader(8), ckpt_path=ckpt_path)
    return trainer


def values(module):
    return [value.detach().clone() for value in module.state_dict().values()]


def assert_equal(one, other):
    assert all(torch.equal(*pair) for pair in zip(values(one), values(other), strict=True))


RUNS = {
    "plain": ([], {}),
    "accumulation": ([], {"accumulate_grad_batches": 4}),
    "masters and accumulation": ([], {"accumulate_grad_batches": 4, "precision": "O5"}),
    "EMA": ([lambda: EMA(0.8)], {}),
    "WeightAveraging": ([WeightAveraging], {}),
    "finetuning": ([FromTheSecondEpoch], {}),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("first", "second"), WAYS)
def test_a_run_resumes_with_other_parts_compiled(run, first, second, tmp_path):
    makers, options = RUNS[run]
    straight = Parts(second)
    fit(straight, *(make() for make in makers), **options)
    path = tmp_path / "saved.ckpt"
    fit(Parts(first), *(make() for make in makers), SaveAt(path, 10), **options)
    assert any("_orig_mod" in name for name in read_checkpoint(path)["state_dict"]) == first
    resumed = Parts(second)
    trainer = fit(resumed, *(make() for make in makers), ckpt_path=path, **options)
    assert_equal(resumed, straight)
    loaded = Parts.load_from_checkpoint(path, compiled=second)
    other_way = Parts.load_from_checkpoint(path, compiled=first)
    assert_equal(loaded, other_way)
    again = Parts.load_from_checkpoint(path, compiled=second)
    evaluated = [
        quiet_trainer(callbacks=[make() for make in makers]).validate(module, loader(8), ckpt_path=path, verbose=False)
        for module in (again, other_way)
    ]
    assert evaluated[0] == evaluated[1]
    assert trainer.global_step > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_may_rename_too(compiled, tmp_path):
    path = tmp_path / "saved.ckpt"
    source = Parts(not compiled)
    fit(source, SaveAt(path, 2), max_steps=2)

    class Renames(Parts):
        def on_load_checkpoint(self, checkpoint):
            marked = checkpoint["state_dict"].items()
            if compiled:
                marked = [(name.replace("body.", "body._orig_mod."), value) for name, value in marked]
            else:
                marked = [(name.replace("_orig_mod.", ""), value) for name, value in marked]
            checkpoint["state_dict"] = dict(marked)

    assert_equal(Renames.load_from_checkpoint(path, compiled=compiled), Parts.load_from_checkpoint(path))


def test_a_whole_module_that_was_compiled(tmp_path):
    """As Lightning writes it: the prefix stands before all names."""
    path = tmp_path / "saved.ckpt"
    source = Parts()
    fit(source, SaveAt(path, 2), max_steps=2)
    content = read_checkpoint(path)
    content["state_dict"] = {f"_orig_mod.{name}": value for name, value in content["state_dict"].items()}
    content.pop("checksum", None)
    write_checkpoint(tmp_path / "whole.ckpt", content)
    for compiled in (False, True):
        assert_equal(Parts.load_from_checkpoint(tmp_path / "whole.ckpt", compiled=compiled), source)


def test_other_differences_are_still_told(tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(Parts(compiled=True), SaveAt(path, 2), max_steps=2)

    class Deeper(Parts):
        def __init__(self, compiled=False):
            super().__init__(compiled)
            self.extra = nn.Linear(8, 8)

    with pytest.raises(CheckpointError, match="missing extra.bias, extra.weight; give"):
        Deeper.load_from_checkpoint(path, compiled=False)


def test_names_that_are_both_there_stay():
    module = nn.ModuleDict({"net": nn.Linear(2, 2)})
    both = {"state_dict": {"net.weight": 1, "net._orig_mod.weight": 2}}
    assert with_names_of(both, module) == both
    plain = {"state_dict": {"net.weight": 1}, "hyper_parameters": {"_orig_mod.net": 1}}
    assert with_names_of(plain, module) is plain


def test_the_versions_of_modules_follow_their_names():
    state = Parts(compiled=True).state_dict()
    renamed = with_names_of({"state_dict": state}, Parts())["state_dict"]
    assert renamed._metadata["body.1"] == state._metadata["body._orig_mod.1"]
    assert list(renamed) == list(Parts().state_dict())


def test_a_network_of_an_apex_script_may_be_compiled():
    assert fit_names({"module._orig_mod.w": 1}, {"net.w"}) == {"net.w": 1}
    assert fit_names({"w": 1}, {"net._orig_mod.w"}) == {"net._orig_mod.w": 1}
    assert fit_names({"_orig_mod.w": 1}, {"net._orig_mod.w"}) == {"net._orig_mod.w": 1}


def folders(folder):
    found = []
    options = {"strategy": "fsdp", "devices": 2}
    for first, second in WAYS:
        for accumulate in (1, 4):
            straight = Parts(second)
            fit(straight, EMA(0.8), accumulate_grad_batches=accumulate, **options)
            path = folder / f"{first}{accumulate}"
            fit(Parts(first), EMA(0.8), SaveAt(path, 6), accumulate_grad_batches=accumulate, **options)
            resumed = Parts(second)
            trainer = fit(resumed, EMA(0.8), accumulate_grad_batches=accumulate, ckpt_path=path, **options)
            if trainer.is_global_zero:  # the other rank has no weights after the fit
                assert_equal(resumed, straight)
                found.append((first, accumulate))
    return found


def test_sharded_folders(tmp_path):
    import_compiler()
    assert len(run_ranks(folders, 2, tmp_path)[0]) == 4
    one = Parts.load_from_checkpoint(tmp_path / "True1", compiled=False)
    assert_equal(one, Parts.load_from_checkpoint(tmp_path / "True1", compiled=True))
    resumed = Parts()
    trainer = fit(resumed, EMA(0.8), ckpt_path=tmp_path / "True1")
    assert trainer.current_epoch == 2
