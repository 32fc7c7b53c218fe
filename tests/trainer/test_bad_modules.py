"""Mistakes in a module, its optimizers or its files that only show when a fit puts the parts together: one clear error each."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import Callback, CheckpointError, ConfigError
from fabricamp.callbacks import EarlyStopping, ModelCheckpoint
from tests.small import Classifier, data, loader, quiet_trainer


def variant(**members):
    return type("Variant", (Classifier,), members)()


def fit(module, *loaders, **options):
    trainer = quiet_trainer(**{"max_epochs": 1, **options})
    trainer.fit(module, *(loaders or (loader(8),)))
    return trainer


def test_the_class_instead_of_an_instance():
    with pytest.raises(ConfigError, match="fit got the class Classifier, not an instance"):
        fit(Classifier)


@pytest.mark.parametrize(
    ("name", "runs"),
    [("training_epoch_end", ["fit"]), ("validation_epoch_end", ["fit", "validate"]), ("test_epoch_end", ["test"])],
)
def test_a_hook_that_nothing_calls_any_more_is_refused_by_the_runs_that_called_it(name, runs):
    module = variant(**{name: lambda self, outputs: None})
    for run in ("fit", "validate", "test"):
        if run in runs:
            with pytest.raises(ConfigError, match=f"Variant has {name}.*on_"):
                getattr(quiet_trainer(max_steps=1), run)(module, loader(8))
        else:
            getattr(quiet_trainer(max_steps=1), run)(module, loader(8))


def test_a_scheduler_of_an_optimizer_that_was_not_returned():
    def configure_optimizers(self):
        optimizer, other = (torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2))
        return [optimizer], [torch.optim.lr_scheduler.StepLR(other, 1)]

    with pytest.raises(ConfigError, match="StepLR belongs to a SGD that configure_optimizers did not return"):
        fit(variant(configure_optimizers=configure_optimizers))


def test_everything_is_frozen():
    module = Classifier()
    module.net.requires_grad_(requires_grad=False)
    with pytest.raises(ConfigError, match="frozen parameters"):
        fit(module)


def test_manual_backward_under_automatic_optimization():
    module = variant(training_step=lambda self, batch, batch_idx: self.manual_backward(self.net(batch[0]).mean()))
    with pytest.raises(ConfigError, match="automatic_optimization=False"):
        fit(module)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0.5, "nrom"), "'norm'"), ((-1.0, "norm"), "positive"), ((float("nan"), None), "positive")],
)
def test_clip_gradients_with_what_it_does_not_know(arguments, message):
    module = variant(
        configure_gradient_clipping=lambda self, optimizer, **given: self.clip_gradients(optimizer, *arguments)
    )
    with pytest.raises(ConfigError, match=message):
        fit(module)


@pytest.mark.parametrize("arguments", ["self", "self, a, b, c", "self, *, batch"])
def test_a_training_step_with_a_signature_of_its_own(arguments):
    namespace = {}
    exec(f"def training_step({arguments}): return 1.0", namespace)
    with pytest.raises(ConfigError, match=r"training_step takes \(.*\); it gets \(batch\) or \(batch, batch_idx\)"):
        fit(variant(training_step=namespace["training_step"]))


def test_a_validation_step_with_a_signature_of_its_own():
    module = variant(validation_step=lambda self, a, b, c, d: None)
    with pytest.raises(ConfigError, match="takes 4 arguments"):
        fit(module, loader(8), loader(8))


@pytest.mark.parametrize("wrong", [data(8), torch.ones(3), "data.csv"])
@pytest.mark.parametrize("place", ["train", "val"])
def test_what_is_no_loader(place, wrong):
    loaders = (wrong,) if place == "train" else (loader(8), wrong)
    with pytest.raises(ConfigError, match=f"{place}_dataloaders"):
        fit(Classifier(), *loaders)


def test_less_than_one_batch():
    with pytest.raises(ConfigError, match=r"limit_train_batches=0.1 of 2 batches"):
        fit(Classifier(), limit_train_batches=0.1)
    with pytest.raises(ConfigError, match=r"limit_val_batches=0.1 of 2 batches"):
        fit(Classifier(), loader(8), loader(8), limit_val_batches=0.1)


def test_an_empty_validation_loader():
    with pytest.raises(ConfigError, match=r"val_dataloaders.*no batches"):
        fit(Classifier(), loader(8), DataLoader(data(0), 4))


def test_a_batch_that_does_not_tell_its_size():
    module = variant(validation_step=lambda self, batch, batch_idx: self.log("x", 1.0))
    with pytest.raises(ConfigError, match="batch_size="):
        fit(module, loader(8), [["no", "tensor"]])


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_file_that_is_no_checkpoint(content, tmp_path):
    path = tmp_path / "a.ckpt"
    if content is None:
        torch.save(Classifier().state_dict(), path)
    else:
        path.write_bytes(content)
    for run in (quiet_trainer(max_epochs=1).fit, quiet_trainer().validate):
        with pytest.raises(CheckpointError, match=r"a\.ckpt"):
            run(Classifier(), loader(8), ckpt_path=path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt"):
        Classifier.load_from_checkpoint(path)


def test_a_truncated_checkpoint(tmp_path):
    trainer = fit(Classifier())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    content = (tmp_path / "a.ckpt").read_bytes()
    (tmp_path / "a.ckpt").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"a\.ckpt"):
        quiet_trainer(max_epochs=2).fit(Classifier(), loader(8), ckpt_path=tmp_path / "a.ckpt")


def test_a_place_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        fit(Classifier()).save_checkpoint(tmp_path / "file" / "a.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("callback", [EarlyStopping("val_los"), ModelCheckpoint(monitor="val_los")])
def test_a_monitor_that_nobody_logs(callback):
    with pytest.raises(ConfigError, match=r"val_los.*did you mean 'val_loss'"):
        fit(Classifier(), loader(8), loader(8), callbacks=callback, enable_checkpointing=True)


def test_callbacks_with_one_key_for_two_states():
    class Keeps(Callback):
        def state_dict(self):
            return {"x": 1}

    with pytest.raises(ConfigError, match=r"state key 'test_callbacks_with_one_key_for_two_states.<locals>.Keeps'"):
        quiet_trainer(callbacks=[Keeps(), Keeps()])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_fit_where_nothing_trains_is_told_before_it_begins(mode):
    module = Classifier()
    with mode(), pytest.raises(ConfigError, match=r"within torch\.inference_mode\(\) or torch\.no_grad\(\)"):
        fit(module)


def test_a_failure_is_the_users_own_and_leaves_the_module_usable():
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise KeyError("the user's own")
            return super().training_step(batch, batch_idx)

    module, seen = Fails(), []

    class Sees(Callback):
        def on_exception(self, trainer, module, exception):
            seen.append(exception)

        def teardown(self, trainer, module, stage):
            seen.append("teardown")

    for precision in ("O0", "O5"):
        with pytest.raises(KeyError, match="the user's own"):
            fit(module, precision=precision, callbacks=Sees())
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
        assert not module.net[0]._forward_hooks
    assert [type(one) for one in seen] == [KeyError, KeyError]
    with pytest.raises(ConfigError, match="manual_backward works in training_step"):
        module.manual_backward(torch.zeros((), requires_grad=True))
    (result,) = quiet_trainer().validate(module, loader(8), verbose=False)
    assert result["val_loss"] > 0


def test_a_teardown_that_raises_leaves_the_module_usable_too():
    def teardown(self, stage):
        message = "the user's own"
        raise KeyError(message)

    module = variant(teardown=teardown)
    trainer = quiet_trainer(max_epochs=1, precision="O5")
    with pytest.raises(KeyError, match="the user's own"):
        trainer.fit(module, loader(8))
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert not module.net[0]._forward_hooks
    assert trainer.state.status == "interrupted"


def test_a_run_that_cannot_begin_leaves_no_folder_and_keeps_no_number(tmp_path):
    wrong = variant(configure_optimizers=lambda self: "sgd")
    options = {"logger": True, "enable_checkpointing": True, "default_root_dir": tmp_path}
    with pytest.raises(ConfigError, match="configure_optimizers returned str"):
        fit(wrong, **options)
    with pytest.raises(CheckpointError, match=r"no\.ckpt"):
        quiet_trainer(**options).fit(Classifier(), loader(8), ckpt_path=tmp_path / "no.ckpt")
    assert list(tmp_path.glob("*/*")) == []
    trainer = fit(Classifier(), **options)
    assert trainer.logger.version == 0

    def training_step(self, batch, batch_idx):
        self.logger.log_metrics({"x": 1.0}, 1)
        raise KeyError("after the first value was written")

    with pytest.raises(KeyError):
        fit(variant(training_step=training_step), **options)
    assert list((tmp_path / "fabricamp_logs" / "version_1").iterdir())
