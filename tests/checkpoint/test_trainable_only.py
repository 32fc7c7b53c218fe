"""`ModelCheckpoint(trainable_only=True)`: files without a base model's parameters resume to the bit, and refuse another base."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import CheckpointError, ConfigError, TrainingModule
from fabricamp.callbacks import EMA, AsyncCheckpoint, BackboneFinetuning, ModelCheckpoint, StochasticWeightAveraging
from fabricamp.commands.export import export
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer


class Adapted(TrainingModule):
    """A frozen base with a buffer that changes, an adapter within it, and a head; the base comes from the constructor."""

    def __init__(self, base_seed=0, width=32):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(base_seed)
        self.base = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, width)
        )
        self.base.requires_grad_(False)
        self.down = torch.nn.Linear(width, 2)
        self.up = torch.nn.Linear(2, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.up(self.down(self.base(x))).float(), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


TRAINED = ["down.weight", "down.bias", "up.weight", "up.bias"]
BUFFERS = ["base.1.running_mean", "base.1.running_var", "base.1.num_batches_tracked"]


def data():
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(48, 8, generator=generator), torch.randint(4, (48,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def fit(module, epochs, folder, kind=ModelCheckpoint, *, ckpt_path=None, callbacks=(), **options):
    saves = kind(folder, filename="{epoch}", save_top_k=-1, trainable_only=True, **options.pop("saves", {}))
    trainer = quiet_trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=[saves, *callbacks], **options)
    trainer.fit(module, data(), ckpt_path=ckpt_path)
    return module.state_dict()


def saved(path):
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("kind", [ModelCheckpoint, AsyncCheckpoint])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5", "64-true"])
def test_a_resumed_run_has_the_bits_of_a_straight_one(level, kind, tmp_path):
    straight = fit(Adapted(), 3, tmp_path / "straight", kind, precision=level)
    fit(Adapted(), 1, tmp_path / "a", kind, precision=level)
    file = tmp_path / "a" / "epoch=0.ckpt"
    assert sorted(saved(file)["state_dict"]) == sorted([*TRAINED, *BUFFERS])
    resumed = fit(Adapted(), 3, tmp_path / "b", kind, precision=level, ckpt_path=file)
    assert all(torch.equal(value, straight[name]) for name, value in resumed.items())
    assert sorted(saved(tmp_path / "b" / "epoch=2.ckpt")["state_dict"]) == sorted([*TRAINED, *BUFFERS])


@pytest.mark.parametrize(
    ("before", "after"), [("O0", "O2"), ("O2", "O0"), ("O5", "O4"), ("O3", "O5"), ("64-true", "O2")]
)
def test_the_same_base_is_known_in_another_precision(before, after, tmp_path):
    fit(Adapted(), 1, tmp_path, precision=before)
    fit(Adapted(), 2, tmp_path, precision=after, ckpt_path=tmp_path / "epoch=0.ckpt")


@pytest.mark.parametrize("precision", ["O0", "O2", "O5"])
@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp", "fsdp"])
def test_two_ranks_resume_to_the_bit(strategy, precision, tmp_path):
    run_ranks(resume_on_ranks, 2, strategy, precision, tmp_path, backend=None)


def resume_on_ranks(strategy, precision, folder):
    options = {"strategy": strategy, "precision": precision, "devices": 2}
    straight = fit(Adapted(), 2, folder / "straight", **options)
    fit(Adapted(), 1, folder / "a", **options)
    file = folder / "a" / "epoch=0.ckpt"
    resumed = fit(Adapted(), 2, folder / "b", ckpt_path=file, **options)
    if not any(value.is_meta for value in resumed.values()):  # after fsdp rank 0 has the whole weights
        assert all(torch.equal(value, straight[name]) for name, value in resumed.items())
    with pytest.raises(CheckpointError, match=r"3 of 6 parameters|4 of 6 parameters"):
        fit(Adapted(base_seed=1), 2, folder / "c", ckpt_path=file, **options)


def test_a_file_of_two_ranks_resumes_in_one(tmp_path):
    run_ranks(write_sharded, 2, tmp_path, backend=None)
    fit(Adapted(), 2, tmp_path / "one", ckpt_path=tmp_path / "epoch=0.ckpt")
    module = Adapted.load_from_checkpoint(tmp_path / "epoch=0.ckpt")
    assert torch.equal(module.base[0].weight, Adapted().base[0].weight)


def write_sharded(folder):
    fit(Adapted(), 1, folder, strategy="fsdp", devices=2)


def test_another_base_is_refused_by_name(tmp_path):
    fit(Adapted(), 1, tmp_path)
    file = tmp_path / "epoch=0.ckpt"
    said = r"only what was trained.* have other values in this Adapted \(base.0.weight.*build the module with the base model"
    with pytest.raises(CheckpointError, match=said):
        fit(Adapted(base_seed=1), 2, tmp_path, ckpt_path=file)
    with pytest.raises(CheckpointError, match=said):
        Adapted.load_from_checkpoint(file, base_seed=1)
    with pytest.raises(CheckpointError, match="have other values in this Validated"):
        quiet_trainer().validate(Validated(base_seed=1), data(), ckpt_path=file)
    smaller = Adapted()
    del smaller.base[2]
    with pytest.raises(CheckpointError, match=r"has no base\.2\.weight, base\.2\.bias"):
        fit(smaller, 2, tmp_path, ckpt_path=file)


class Validated(Adapted):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.up(self.down(self.base(batch[0]))).mean())


def test_a_scaled_base_is_another_one(tmp_path):
    fit(Adapted(), 1, tmp_path)
    scaled = Adapted()
    scaled.base[2].weight.data.sub_(scaled.base[2].weight.mean()).mul_(1.1)
    with pytest.raises(CheckpointError, match="1 of 6 parameters"):
        fit(scaled, 2, tmp_path, ckpt_path=tmp_path / "epoch=0.ckpt")


def test_load_from_checkpoint_takes_the_base_of_the_constructor(tmp_path):
    state = fit(Adapted(base_seed=7), 1, tmp_path)
    module = Adapted.load_from_checkpoint(tmp_path / "epoch=0.ckpt")
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_what_was_thawed_once_is_saved_even_if_it_is_frozen_again(tmp_path):
    class Thaws(Adapted):
        def __init__(self):
            super().__init__()
            self.backbone = self.base

    class Refreezes(BackboneFinetuning):
        def on_train_epoch_start(self, trainer, module):
            super().on_train_epoch_start(trainer, module)
            if trainer.current_epoch == 2:
                module.base.requires_grad_(False)

    callbacks = [Refreezes(unfreeze_backbone_at_epoch=1)]
    state = fit(Thaws(), 3, tmp_path, callbacks=callbacks)
    assert "base.0.weight" not in saved(tmp_path / "epoch=0.ckpt")["state_dict"]
    for epoch in (1, 2):
        assert "base.0.weight" in saved(tmp_path / f"epoch={epoch}.ckpt")["state_dict"]
    assert torch.equal(saved(tmp_path / "epoch=2.ckpt")["state_dict"]["base.0.weight"], state["base.0.weight"])
    fit(
        Thaws(),
        4,
        tmp_path / "on",
        callbacks=[Refreezes(unfreeze_backbone_at_epoch=1)],
        ckpt_path=tmp_path / "epoch=2.ckpt",
    )
    assert "base.0.weight" in saved(tmp_path / "on" / "epoch=3.ckpt")["state_dict"]


def test_a_run_from_a_file_with_all_weights_saves_them_all(tmp_path, caplog):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Adapted(base_seed=1), data())
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    with caplog.at_level(logging.INFO, "fabricamp"):
        fit(Adapted(base_seed=2), 3, tmp_path, ckpt_path=tmp_path / "all.ckpt")
    assert caplog.text.count("trainable_only leaves nothing out") == 1
    assert "base.0.weight" in saved(tmp_path / "epoch=2.ckpt")["state_dict"]
    fit(Adapted(base_seed=3), 4, tmp_path, ckpt_path=tmp_path / "epoch=2.ckpt")


def test_weights_alone_and_the_last_file_leave_it_out_too(tmp_path):
    fit(Adapted(), 1, tmp_path, saves={"save_weights_only": True, "save_last": True})
    for name in ("epoch=0", "last"):
        state = saved(tmp_path / f"{name}.ckpt")
        assert sorted(state["state_dict"]) == sorted([*TRAINED, *BUFFERS])
        assert "optimizer_states" not in state
    Adapted.load_from_checkpoint(tmp_path / "last.ckpt")


def test_the_trainers_own_call_leaves_it_out(tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Adapted(), data())
    trainer.save_checkpoint(tmp_path / "small.ckpt", trainable_only=True)
    assert sorted(saved(tmp_path / "small.ckpt")["state_dict"]) == sorted([*TRAINED, *BUFFERS])


def test_a_file_loads_whichever_parts_are_compiled(tmp_path):
    fit(Adapted(), 1, tmp_path)
    module = Adapted()
    module.base = torch.compile(module.base, backend="eager")
    fit(module, 2, tmp_path / "compiled", ckpt_path=tmp_path / "epoch=0.ckpt")
    fit(Adapted(), 3, tmp_path / "plain", ckpt_path=tmp_path / "compiled" / "epoch=1.ckpt")


@pytest.mark.parametrize("callback", [EMA(), StochasticWeightAveraging(0.1)])
def test_with_an_average_it_is_refused_by_name(callback, tmp_path):
    with pytest.raises(ConfigError, match=rf"trainable_only=True\) with {type(callback).__name__}, whose average"):
        fit(Adapted(), 1, tmp_path, callbacks=[callback])
    assert not list(Path(tmp_path).glob("*.ckpt"))


def test_nothing_frozen_leaves_nothing_out(tmp_path):
    class Whole(Adapted):
        def __init__(self):
            super().__init__()
            self.requires_grad_(True)

    fit(Whole(), 1, tmp_path)
    fit(Whole(), 2, tmp_path, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert saved(tmp_path / "epoch=1.ckpt")["state_dict"].keys() == Whole().state_dict().keys()


class Callable(Adapted):
    def forward(self, x):
        return self.up(self.down(self.base(x)))


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_an_export_has_the_base_model_too_or_says_what_it_lacks(dtype, tmp_path):
    module = Callable()
    fit(module, 1, tmp_path)
    file = tmp_path / "epoch=0.ckpt"
    said = export(file, tmp_path / "weights.pt", dtype=dtype)
    assert said.endswith("(trained; the file leaves out 6 of the base model)")
    x = torch.randn(4, 8)
    export(file, tmp_path / "model.pt2", module=Callable, inputs=[x], dtype=dtype)
    given = getattr(torch, {None: "float32", "bf16": "bfloat16"}[dtype])
    found = torch.export.load(tmp_path / "model.pt2").module()(x.to(given))
    assert torch.equal(found, module.eval().to(given)(x.to(given)))
