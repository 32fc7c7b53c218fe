"""Programs from Lightning's own test suite: each ends as under Lightning 2.6."""

from __future__ import annotations

import pickle
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
import torch

from fabricamp import Callback, ConfigError, DataModule, NonFiniteError, TrainingModule
from fabricamp.callbacks import AmpState, ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint, write_checkpoint
from fabricamp.data import CombinedLoader
from fabricamp.loggers import CSVLogger, Logger
from fabricamp.profilers import SimpleProfiler
from fabricamp.tuner import Tuner
from tests.small import Classifier, loader, quiet_trainer

HOOKS = (
    "prepare_data",
    "setup",
    "teardown",
    "configure_model",
    "configure_callbacks",
    "on_fit_start",
    "on_validation_model_zero_grad",
    "on_validation_model_train",
    "on_train_batch_start",
    "on_save_checkpoint",
    "on_load_checkpoint",
)


class Hooked(Classifier):
    def on_fit_start(self):
        raise AssertionError

    def val_dataloader(self):
        raise AssertionError


# -- methods that are set to None


@pytest.mark.parametrize("where", ["instance", "class"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_is_none_is_left_out(name, where, tmp_path):
    kind = type("Without", (Hooked,), {"on_fit_start": None, "val_dataloader": None})
    module = kind()
    setattr(kind if where == "class" else module, name, None)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, loader(8), loader(4))
    assert trainer.callback_metrics["val_loss"] > 0
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    quiet_trainer(max_epochs=2).fit(module, loader(8), ckpt_path=tmp_path / "a.ckpt")
    kind.load_from_checkpoint(tmp_path / "a.ckpt")


def test_a_module_whose_validation_mode_hook_is_none_validates_in_its_own_mode():
    modes = []

    class Notes(Classifier):
        def validation_step(self, batch, batch_idx):
            modes.append(self.training)

    module = Notes()
    module.on_validation_model_eval = None
    quiet_trainer(max_epochs=1, num_sanity_val_steps=0).fit(module, loader(4), loader(4))
    assert modes == [True]


def test_without_a_validation_step_or_loader_nothing_is_validated():
    module = Classifier()
    module.validation_step = None
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, loader(8), loader(4))
    assert "val_loss" not in trainer.callback_metrics
    module = Hooked()
    module.on_fit_start = module.val_dataloader = None
    quiet_trainer(max_epochs=1).fit(module, loader(8))


@pytest.mark.parametrize("name", ["training_step", "configure_optimizers"])
def test_a_method_that_fit_needs_may_not_be_none(name):
    module = Classifier()
    setattr(module, name, None)
    with pytest.raises(ConfigError, match=f"has no {name}"):
        quiet_trainer(max_epochs=1).fit(module, loader(8))


def test_hooks_of_callbacks_and_data_may_be_none():
    class Data(DataModule):
        def train_dataloader(self):
            return loader(8)

        def val_dataloader(self):
            raise AssertionError

        def setup(self, stage):
            raise AssertionError

    class Fails(Callback):
        def on_fit_start(self, trainer, module):
            raise AssertionError

    data = Data()
    data.setup = data.prepare_data = data.val_dataloader = None
    fails = Fails()
    fails.on_fit_start = None
    quiet_trainer(max_epochs=1, callbacks=[fails]).fit(Classifier(), datamodule=data)


# -- numbers of NumPy


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_a_rate_of_numpy_is_saved_and_resumed_exactly(kind, tmp_path):
    class Scheduled(Classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=kind(0.01), weight_decay=kind(0.1))
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    whole, half, rest = Scheduled(), Scheduled(), Scheduled()
    quiet_trainer(max_epochs=2).fit(whole, loader(12))
    first = quiet_trainer(max_epochs=1)
    first.fit(half, loader(12))
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = quiet_trainer(max_epochs=2)
    second.fit(rest, loader(12), ckpt_path=tmp_path / "a.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters(), strict=True))
    assert type(second.optimizers[0].param_groups[0]["lr"]) is kind


def test_a_rate_of_numpy_that_a_hook_sets_is_saved(tmp_path):
    class Sets(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            self.optimizers().param_groups[0]["lr"] = np.logspace(-3, -1, 3)[1]

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Sets(), loader(4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert read_checkpoint(tmp_path / "a.ckpt")["optimizer_states"][0]["param_groups"][0]["lr"] == 0.01


# -- a training_step that returns None


class Silent(Classifier):
    """Has no loss in step ``silent_at``; if that step did not count, no later step would have a loss."""

    def __init__(self, silent_at):
        super().__init__()
        self.silent_at = silent_at

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.trainer.global_step == self.silent_at else loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Interrupted(Classifier):
    """Batch 3 has a nan loss; some batches have no loss."""

    def __init__(self, without_loss):
        super().__init__()
        self.without_loss = without_loss

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx in self.without_loss:
            return None
        return loss * float("nan") if batch_idx == 3 else loss


@pytest.mark.parametrize("without_loss", [(), (1,), (4,), (4, 5)])
def test_an_overflow_is_of_its_own_step_whatever_steps_without_a_loss_follow(without_loss):
    with pytest.raises(NonFiniteError, match=r"not finite at step 3 \("):
        quiet_trainer(max_steps=10, nan_policy="raise").fit(Interrupted(without_loss), loader(40))


def test_a_step_without_a_loss_is_not_an_applied_one():
    logger = Rows()
    trainer = quiet_trainer(
        max_epochs=1, precision="O5", nan_policy="skip", logger=logger, log_every_n_steps=1, callbacks=[AmpState()]
    )
    trainer.fit(Interrupted((1, 2, 5)), loader(32))
    assert trainer.global_step == 8
    assert logger.rows[-1] == {"amp/loss_scale": 1.0, "amp/applied_steps": 4.0, "amp/skipped_steps": 1.0}


class Rows(Logger):
    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step):
        self.rows.append({name: value for name, value in metrics.items() if name.startswith("amp/")})


def test_a_step_without_a_loss_counts():
    trainer = quiet_trainer(max_epochs=-1, max_steps=4)
    trainer.fit(Silent(1), loader(8))
    assert (trainer.global_step, trainer.current_epoch) == (4, 2)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1 / 2**4


@pytest.mark.parametrize("threshold", [None, 4.0])
def test_lr_find_ends_with_a_step_without_a_loss(threshold):
    finder = Tuner(quiet_trainer(max_epochs=2)).lr_find(
        Silent(5), loader(80), num_training=20, early_stop_threshold=threshold
    )
    assert len(finder.results["lr"]) == len(finder.results["loss"]) == 20
    assert [index for index, loss in enumerate(finder.results["loss"]) if loss != loss] == [5]


# -- loaders


def test_a_nested_collection_that_has_ended_gives_none_for_each_loader():
    loaders = {"a": [range(2), range(1)], "b": [range(1), (range(1),)]}
    batches = [batch for batch, _, _ in CombinedLoader(loaders, "max_size")]
    assert batches == [{"a": [0, 0], "b": [0, (0,)]}, {"a": [1, None], "b": [None, (None,)]}]


def test_a_limit_of_no_batches_gives_no_results():
    none = {"limit_val_batches": 0, "limit_test_batches": 0, "limit_predict_batches": 0}
    trainer = quiet_trainer(**none)
    assert trainer.test(Classifier(), loader(4)) == trainer.validate(Classifier(), loader(4)) == []
    assert trainer.predict(Classifier(), loader(4)) is None


def test_before_a_run_the_trainer_has_no_loaders():
    trainer = quiet_trainer()
    loaders = (trainer.train_dataloader, trainer.val_dataloaders, trainer.test_dataloaders, trainer.predict_dataloaders)
    assert loaders == (None, None, None, None)


class Data(DataModule):
    def train_dataloader(self):
        return loader(8)

    def val_dataloader(self):
        return [loader(4), loader(6)]

    def predict_dataloader(self):
        raise AttributeError("before setup")


def test_printed_a_data_module_shows_the_sizes_of_its_data():
    lines = [
        "{Train dataloader: size=8}",
        "{Validation dataloader: 1. size=4 ; 2. size=6}",
        "{Test dataloader: None}",
        "{Predict dataloader: None}",
    ]
    assert str(Data()).splitlines() == lines


# -- profilers, TorchScript


def test_a_profiler_goes_to_worker_processes(tmp_path):
    profiler = pickle.loads(pickle.dumps(SimpleProfiler(dirpath=tmp_path, filename="p")))
    quiet_trainer(max_epochs=1, profiler=profiler).fit(Classifier(), loader(4))
    assert "run_training_epoch" in "".join(path.read_text() for path in tmp_path.iterdir())


class ByHand(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False
        self.example_input_array = torch.zeros(1, 8)

    def forward(self, x):
        return self.net(x)


class Outer(TrainingModule):
    def __init__(self):
        super().__init__()
        self.inner = ByHand()

    def forward(self, x):
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("kind", [ByHand, Outer])
def test_modules_that_step_by_hand_or_hold_modules_become_torchscript(kind):
    module, x = kind(), torch.randn(2, 8)
    assert torch.equal(module.to_torchscript()(x), module(x))
    assert not any("_attachment" in vars(part) for part in module.modules())


# -- checkpoints over HTTP, hyper-parameters, other details


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_a_checkpoint_of_a_server_that_sends_no_ranges_is_read(tmp_path):
    pytest.importorskip("aiohttp")
    # Larger than fsspec's read size of 5 MiB.
    write_checkpoint(tmp_path / "a.ckpt", {"state_dict": {"weight": torch.ones(1_500_000)}, "epoch": 3})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        state = read_checkpoint(f"http://127.0.0.1:{server.server_port}/a.ckpt")
        server.shutdown()
    assert (state["epoch"], float(state["state_dict"]["weight"].sum())) == (3, 1_500_000)


def test_hyper_parameters_with_numbers_for_names_are_named_in_the_message(tmp_path):
    class Keeps(Classifier):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({1: "a"})

    class KeepsToo(Data):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({1: "b"})

    with pytest.raises(ConfigError, match=r"same names: 1\. .*ignore=\[1\]"):
        quiet_trainer(max_epochs=1, logger=CSVLogger(tmp_path)).fit(Keeps(), datamodule=KeepsToo())


@pytest.mark.parametrize(("name", "value"), [("SUM", 6.0), ("avg", 2.0), ("Mean", 2.0)])
def test_a_reduction_has_more_than_one_name(name, value):
    class Logs(Classifier):
        def training_step(self, batch, batch_idx):
            self.log("x", float(batch_idx + 1), on_step=False, on_epoch=True, reduce_fx=name)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Logs(), loader(12))
    assert trainer.callback_metrics["x"] == value


def test_the_best_path_can_be_set(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path)
    checkpoint.best_model_path = "x"
    assert checkpoint.best_model_path == "x"
    trainer = quiet_trainer(max_epochs=1, callbacks=[checkpoint], enable_checkpointing=True)
    trainer.fit(Classifier(), loader(4))
    assert checkpoint.best_model_path.startswith(str(tmp_path))


def test_an_error_of_a_step_is_raised_as_it_is_where_a_hook_for_errors_is_none():
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            raise KeyError("mine")

    class Data(DataModule):
        on_exception = None

        def train_dataloader(self):
            return loader(8)

    with pytest.raises(KeyError, match="mine"):
        quiet_trainer(max_epochs=1).fit(Fails(), datamodule=Data())
