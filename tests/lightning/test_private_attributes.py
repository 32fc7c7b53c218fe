"""Private attributes of Lightning that libraries read; each test names the library."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import Callback, CheckpointError, ConfigError, Trainer, TrainingModule
from tests.small import Classifier, quiet_trainer
from tests.small import loader as batches


class Line(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def loader():
    return DataLoader(torch.ones(4, 1), batch_size=2)


def trainer(tmp_path, *callbacks, **options):
    return quiet_trainer(default_root_dir=tmp_path, callbacks=[*callbacks], **{"max_epochs": 1, **options})


class Reader(Callback):
    """Keeps the result of ``read`` in a hook of the fit."""

    def __init__(self, read):
        self.read, self.found = read, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.found.append(self.read(trainer))


@pytest.mark.parametrize("loaders", [(loader(),), (loader(), loader())])
def test_gluonts_asks_whether_there_is_a_validation(tmp_path, loaders):
    reader = Reader(lambda trainer: trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined())
    trainer(tmp_path, reader).fit(Line(), *loaders)
    assert reader.found == [len(loaders) == 2] * 2


def test_pina_reads_the_devices_and_optuna_whether_there_are_several(tmp_path):
    one = trainer(tmp_path)
    assert one._accelerator_connector._parallel_devices == [torch.device("cpu")]
    assert not one._accelerator_connector.is_distributed
    several = trainer(tmp_path, devices=2, strategy="ddp")
    assert several._accelerator_connector._parallel_devices == [torch.device("cpu")] * 2
    assert several._accelerator_connector.is_distributed


class SteppedByItself(Line):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.trainer.optimizers[0]
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed += 1


def test_pina_counts_its_own_steps(tmp_path):
    run = trainer(tmp_path, max_epochs=3)
    run.fit(SteppedByItself(), loader())
    assert run.global_step == run.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed == 6


def test_a_callback_logs_at_the_number_of_the_step(tmp_path):
    reader = Reader(lambda trainer: trainer.fit_loop.epoch_loop._batches_that_stepped)
    trainer(tmp_path, reader, max_epochs=2).fit(Line(), loader())
    assert reader.found == [0, 1, 2, 3]


def test_a_loop_says_whether_its_run_was_resumed_just_now(tmp_path):
    class Start(Callback):
        def on_train_start(self, trainer, pl_module):
            found.append((trainer.fit_loop.restarting, trainer.fit_loop.epoch_loop.restarting))

    found = []
    run = trainer(tmp_path, Start())
    run.fit(Line(), loader())
    found.append(
        (run.fit_loop.restarting, run.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer_steps)
    )
    run.save_checkpoint(tmp_path / "a.ckpt")
    trainer(tmp_path, Start(), max_epochs=2).fit(Line(), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert found == [(False, False), (False, 2), (True, True)]


def test_darts_and_neuralforecast_look_for_the_trainer_of_a_module(tmp_path):
    module, run = Line(), trainer(tmp_path)
    assert module._trainer is None
    module._trainer = run
    assert module._trainer is module.trainer is run
    run.fit(module, loader())
    assert pickle.loads(pickle.dumps(module))._trainer is copy.deepcopy(module)._trainer is None


def test_darts_connects_a_module_that_it_has_loaded(tmp_path):
    module, run = Line(), trainer(tmp_path)
    run.strategy.connect(module)
    assert run.lightning_module is run.model is run.strategy.lightning_module is module
    other = Line()
    run.fit(other, loader())
    assert run.lightning_module is run.strategy.lightning_module is other


def test_the_tuner_of_pytorch_forecasting_wraps_the_loading_of_checkpoints(tmp_path):
    run = trainer(tmp_path)
    load = run.strategy.load_checkpoint
    run.strategy.load_checkpoint = None
    run.strategy.load_checkpoint = load
    run.fit(Line(), loader())
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt")["global_step"] == 2


def test_a_checkpoint_with_objects_loads_only_if_that_was_allowed(tmp_path):
    torch.save({"object": Reader(None)}, tmp_path / "a.ckpt")
    load = trainer(tmp_path).strategy.load_checkpoint
    for allowed in (None, True):
        with pytest.raises(pickle.UnpicklingError):
            load(tmp_path / "a.ckpt", weights_only=allowed)
    assert isinstance(load(tmp_path / "a.ckpt", weights_only=False)["object"], Reader)


def test_a_damaged_checkpoint_is_seen_before_its_objects_are_rebuilt(tmp_path):
    torch.save({"object": Reader(None), "w": torch.full((8,), 3.0)}, tmp_path / "a.ckpt")
    content = (tmp_path / "a.ckpt").read_bytes()
    (tmp_path / "a.ckpt").write_bytes(content.replace(torch.tensor([3.0]).numpy().tobytes(), b"ruin", 1))
    with pytest.raises(CheckpointError, match="is damaged"):
        trainer(tmp_path).strategy.load_checkpoint(tmp_path / "a.ckpt", weights_only=False)


def test_freezing_returns_the_module():
    module = Line()
    assert module.freeze() is module.unfreeze() is module


def test_anomalib_asks_for_barebones(tmp_path):
    assert not trainer(tmp_path).barebones
    assert Trainer(barebones=True, accelerator="cpu").barebones


def test_replacing_the_optimizers_of_a_strategy_says_what_to_write(tmp_path):
    with pytest.raises(ConfigError, match="configure_optimizers"):
        trainer(tmp_path).strategy.optimizers = []


def test_other_names_are_missing_as_before(tmp_path):
    run = trainer(tmp_path)
    for owner, name in ((run, "_data_connector"), (run.fit_loop, "_results"), (run, "globl_step")):
        assert not hasattr(owner, name)
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'globl_step'") as raised:
        run.globl_step  # noqa: B018 - the name is what is tested
    assert raised.value.obj is run


def test_another_value_of_that_name_is_the_programs_own():
    class Mine(Classifier):
        def __init__(self, helper):
            super().__init__()
            self._trainer = helper

    for helper in (None, "a name", torch.nn.Linear(1, 1)):
        module = Mine(helper)
        quiet_trainer(max_epochs=1).fit(module, batches(8))
        assert module._trainer is helper
        assert module.trainer.global_step == 2
