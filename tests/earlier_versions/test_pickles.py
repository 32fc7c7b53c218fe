"""Pickles of an earlier version load, hold what they held, and work: write_pickles.py wrote them at the commit of their name.

Whatever was computed on the machine that wrote them is compared with what stands beside it in the pickle, never with a computation
made here.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fabricamp import ConfigError, Trainer, TrainingModule
from fabricamp.callbacks import Callback
from fabricamp.loggers import Logger
from fabricamp.optimizers import FusedAdam, FusedOptimizer
from fabricamp.precision import Precision
from fabricamp.strategies import Strategy
from tests.earlier_versions import modules, plugins
from tests.earlier_versions.write_pickles import (
    FOLDER,
    GRADIENTS,
    OPTIMIZERS,
    described_optimizer,
    described_precision,
    described_strategy,
    plain_state,
    told_by,
)
from tests.small import data, quiet_trainer

FILE = Path(__file__).with_name("92a6732.pickle")
PICKLES = {name: zlib.decompress(value) for name, value in pickle.loads(FILE.read_bytes()).items()}
TOLD = json.loads(FILE.with_suffix(".json").read_text())


def named(*prefixes, without=()):
    """The names of pickles that begin so."""
    return [one for one in PICKLES if one.startswith(prefixes) and one not in without]


def load(name):
    return pickle.loads(PICKLES[name])


def assert_equal(value, expected):
    torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


def train(module, **options):
    """Trains a loaded module on; returns the Trainer."""
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=0, **options)
    trainer.fit(module, *modules.loaders())
    return trainer


def assert_moved(module, before):
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    assert all(value.isfinite().all() for value in after.values())


def test_the_file_is_small_and_every_pickle_loads():
    assert FILE.stat().st_size < 200_000
    assert len(PICKLES) >= 150
    assert [name for name in PICKLES if len(load(name)) != 2] == []
    covered = (*MODULES, *TRAINERS, *CALLBACKS, *LOGGERS, *STRATEGIES, *PRECISIONS, *OPTIMIZERS_OF_FITS, *OTHERS)
    assert set(covered) == set(PICKLES)


# -- modules --------------------------------------------------------------------------------------------------------------------

MODULES = named("module ", "hyper-parameters")


@pytest.mark.parametrize("name", [name for name in MODULES if name != "hyper-parameters"])
def test_a_module_holds_its_weights_and_trains_on(name):
    module, state = load(name)
    assert isinstance(module, TrainingModule)
    assert_equal(plain_state(module), state)
    half = any(value.dtype in (torch.float16, torch.bfloat16) for value in state.values())
    assert half == (name == "module during O2")
    double = any(value.dtype is torch.float64 for value in state.values())
    level = "64-true" if double else "O0"
    train(module, precision="bf16-true" if half else level, accumulate_grad_batches=1 if "Manual" in name else 2)
    assert_moved(module, state)


@pytest.mark.parametrize("name", ["module after O0", "module after O2", "module Normed after", "module Named after"])
def test_a_module_trains_on_at_o2(name):
    module, state = load(name)
    trainer = train(module, precision="O2")
    assert trainer.global_step == 4
    assert_moved(module, state)


def test_a_module_in_the_middle_of_a_fit():
    """At O2: its weights are half, and no run stands around it any more."""
    module, state = load("module during O2")
    assert {value.dtype for value in state.values()} == {torch.float16}
    with pytest.raises(ConfigError, match="is not attached to a Trainer"):
        _ = module.trainer
    assert_equal(module.net(torch.zeros(1, 8, dtype=torch.float16))[0].detach(), state["net.0.bias"])
    module.load_state_dict({key: value.float() * 2 for key, value in state.items()})
    assert_equal(plain_state(module), {key: value * 2 for key, value in state.items()})


def test_a_module_keeps_its_hyper_parameters():
    module, _ = load("module Hyper after")
    assert dict(module.hparams) == {"width": 4, "rates": (0.1, 0.2)}
    assert module.hparams.width == 4
    named_so, _ = load("module Named after")
    assert named_so.hparams.width == 4
    assert named_so.example_input_array.shape == (1, 8)
    hparams, expected = load("hyper-parameters")
    assert dict(hparams) == expected == {"width": 5, "rates": (0.5,), "other": {"a": [1, 2]}}
    assert hparams.width == 5
    hparams.width = 6
    assert hparams["width"] == 6


# -- trainers -------------------------------------------------------------------------------------------------------------------

TRAINERS = named("trainer ", "state of trainer ")
FITTED = [name for name in TRAINERS if name.startswith("trainer ") and name != "trainer before"]


@pytest.mark.parametrize("name", FITTED)
def test_a_trainer_tells_of_its_last_run(name):
    trainer, _ = load(name)
    assert isinstance(trainer, Trainer)
    assert json.loads(json.dumps(told_by(trainer))) == TOLD[name]


@pytest.mark.parametrize("name", FITTED)
def test_a_trainer_goes_on(name, tmp_path):
    trainer, _ = load(name)
    trainer.checkpoint_callback.dirpath = str(tmp_path)
    trainer.fit_loop.max_epochs = 3
    module = modules.Small()
    before = plain_state(module)
    trainer.fit(module, *modules.loaders())
    told = TOLD[name]
    assert (trainer.current_epoch, trainer.global_step) == (3, told["global_step"] + 2)
    assert_moved(module, before)
    assert trainer.strategy.name == told["strategy"]
    assert trainer.validate(module, modules.loaders()[1], verbose=False)[0].keys() == {"val_loss"}


def test_a_trainer_that_has_not_run_yet():
    trainer, _ = load("trainer before")
    told = TOLD["trainer before"]
    assert {name: getattr(trainer, name) for name in ("current_epoch", "global_step", "max_epochs")} == {
        name: told[name] for name in ("current_epoch", "global_step", "max_epochs")
    }
    assert (trainer.precision_plugin.name, str(trainer.state.status)) == (told["level"], told["status"])
    trainer.fit(modules.Small(), modules.loaders()[0])
    assert trainer.global_step == 12


@pytest.mark.parametrize("name", named("state of trainer "))
def test_the_state_of_a_run_is_read_by_name(name):
    state, expected = load(name)
    assert {key: getattr(state, key) for key in expected} == expected
    assert state.logger_step(4) == 3
    state.ask("enough")
    assert (state.should_stop, state.stop_reason) == (True, "enough")
    state.forget_stop()
    assert not state.should_stop


# -- callbacks ------------------------------------------------------------------------------------------------------------------

CALLBACKS = named("callback ")
ALONE = ("callback BaseFinetuning", "callback BackboneFinetuning")  # these want a module of their own
FINDERS = ("callback BatchSizeFinder", "callback LearningRateFinder")


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_holds_its_state(name):
    callback, described = load(name)
    assert isinstance(callback, Callback)
    for key, value in described["values"].items():
        found = getattr(callback, key)
        if isinstance(value, (torch.Tensor, dict)):
            # Scores are shown in fp32 since; before they were fp64.
            torch.testing.assert_close(found, value, rtol=1e-6, atol=0, equal_nan=True, check_dtype=False)
        else:
            assert str(found) == str(value)
    state = callback.state_dict()
    assert state.keys() - {"current_score"} == described["state"].keys()  # which states have since
    for key, value in described["state"].items():
        if key != "time_elapsed":
            assert_equal(state[key], value) if isinstance(value, torch.Tensor) else None
            assert isinstance(value, torch.Tensor) or str(state[key]) == str(value)
    assert callback.state_key == described["key"]
    if described["state"]:  # else a checkpoint has none
        callback.load_state_dict(described["state"])


def test_files_of_a_checkpoint_callback():
    callback, described = load("callback ModelCheckpoint")
    files = {Path(path).name for path in callback.best_k_models}
    assert files == {"epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt"}
    assert Path(callback.best_model_path).name in files
    assert Path(callback.last_model_path).name == "last.ckpt"
    assert callback.best_model_score == min(callback.best_k_models.values())
    assert callback.dirpath == str(FOLDER / "files")
    assert callback.known_files() == {*callback.best_k_models, callback.last_model_path}
    assert described["values"]["monitor"] == "val_loss"
    third, _ = load("callback of a third party")
    assert Path(third.best_model_path).name.startswith("run_")
    assert {call[1] for call in third.calls if call[0] == "on_save_checkpoint"} == {2, 4}


@pytest.mark.parametrize("name", [name for name in CALLBACKS if name not in (*ALONE, *FINDERS)])
def test_a_callback_goes_on_in_another_run(name, tmp_path):
    callback, _ = load(name)
    if hasattr(callback, "dirpath"):
        callback.dirpath = str(tmp_path / "files")
    options = {"logger": plugins.EveryLog(tmp_path), "log_every_n_steps": 1}
    trainer = train(modules.Small(), callbacks=[callback], enable_checkpointing=hasattr(callback, "dirpath"), **options)
    assert trainer.global_step == (2 if "Accumulation" in name else 4)


@pytest.mark.parametrize("name", ALONE)
def test_a_finetuning_callback_goes_on(name):
    callback, _ = load(name)
    module = modules.Backboned()
    before = plain_state(module)
    quiet_trainer(max_epochs=2, callbacks=[callback]).fit(module, modules.loaders()[0])
    frozen = module.net[0] if isinstance(callback, modules.Thaws) else module.backbone
    assert all(one.requires_grad for one in frozen.parameters())
    assert_moved(module, before)


# -- loggers and profilers ------------------------------------------------------------------------------------------------------

LOGGERS = named("logger ", "profiler ")
FILES = {
    "CSVLogger": "metrics.csv",
    "JSONLinesLogger": "metrics.jsonl",
    "TensorBoardLogger": "events.*",
    "of": "metrics.tsv",
}


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_and_a_profiler_hold_what_they_were_given(name):
    one, described = load(name)
    assert {key: getattr(one, key) for key in described} == described
    assert isinstance(one, Logger) or name.startswith("profiler ")


@pytest.fixture
def elsewhere():
    """A folder whose path is as long as the one that the pickles name, so that it can stand in their bytes."""
    folder = FOLDER.with_name(f"fabricamp-{os.getpid() % 10**7:07}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("name", [name for name in LOGGERS if name.split()[1] in FILES])
def test_a_logger_writes_on(name, elsewhere):
    logger, _ = pickle.loads(PICKLES[name].replace(FOLDER.name.encode(), elsewhere.name.encode()))
    train(modules.Small(), logger=logger, log_every_n_steps=1)
    assert Path(logger.log_dir).is_relative_to(elsewhere)
    (file,) = Path(logger.log_dir).glob(FILES[name.split()[1]])
    assert file.stat().st_size > 100


@pytest.mark.parametrize("name", ["profiler Profiler", "profiler PassThroughProfiler"])
def test_a_profiler_goes_on(name):
    profiler, _ = load(name)
    train(modules.Small(), profiler=profiler)


# -- strategies and precisions --------------------------------------------------------------------------------------------------

STRATEGIES = named("strategy ")
PRECISIONS = named("precision ")
IN_ONE_PROCESS = [
    name for name in STRATEGIES if name.split()[1] in ("Strategy", "SingleDeviceStrategy", "DDP", "DelayedDDP")
]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_holds_its_options(name):
    strategy, described = load(name)
    assert isinstance(strategy, Strategy)
    assert described_strategy(strategy) == described
    assert isinstance(strategy.refuses_graph(), str)
    assert strategy.lightning_module is None


@pytest.mark.parametrize("name", [*IN_ONE_PROCESS, "strategy third party after"])
def test_a_strategy_trains(name):
    strategy, _ = load(name)
    calls = len(getattr(strategy, "calls", []))
    module = modules.Small()
    before = plain_state(module)
    train(module, strategy=strategy, accumulate_grad_batches=2)
    assert_moved(module, before)
    if calls:
        assert len(strategy.calls) > calls


def test_options_of_strategies():
    delayed, _ = load("strategy DelayedDDP before")
    assert (delayed.message_size, delayed.transport.dtype, delayed.delay_allreduce) == (1000, torch.bfloat16, False)
    groups, _ = load("strategy FaultTolerant before")
    assert (groups.groups, groups.replica_group, groups.lighthouse) == (2, 1, "http://localhost:1")
    own, _ = load("strategy third party before")
    assert own.every == 3


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_holds_its_options_and_trains(name):
    precision, described = load(name)
    assert isinstance(precision, Precision)
    assert described_precision(precision) == described
    module = modules.Small()
    before = plain_state(module)
    trainer = train(module, precision=precision)
    assert trainer.precision_plugin is precision
    assert_moved(module, before)


def test_options_of_precisions():
    precision, _ = load("precision after O2")
    assert (precision.name, precision.level.dynamic, precision.level.master_weights) == ("O2", True, True)
    assert precision.verdicts is None  # what it knew stays behind
    static, _ = load("precision static before")
    assert (static.level.loss_scale, static.level.keep_batchnorm_fp32) == (128.0, False)
    third, _ = load("precision third party before")
    assert (third.name, third.calls[-1]) == ("O3", ("state_dict",))


# -- optimizers -----------------------------------------------------------------------------------------------------------------

OPTIMIZERS_OF_FITS = named("optimizer ", "fused ", *(f"state of {name}" for name in OPTIMIZERS))


@pytest.mark.parametrize("name", named("optimizer ", "fused "))
def test_an_optimizer_holds_its_state(name):
    optimizer, described = load(name)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert_equal(described_optimizer(optimizer), described)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_one_that_is_built_anew(name):
    optimizer, described = load(f"fused {name}")
    own = [one for group in optimizer.param_groups for one in group["params"]]
    parameters = [torch.nn.Parameter(one.clone()) for one in described["parameters"]]
    rebuilt = OPTIMIZERS[name](parameters)
    rebuilt.load_state_dict(optimizer.state_dict())
    assert_equal(described_optimizer(rebuilt)["state"], described["state"])
    for place in range(3):
        for each in (own, parameters):
            for one, gradient in zip(each, GRADIENTS, strict=True):
                one.grad = gradient.to(one.dtype) * (place + 1)
        optimizer.step()
        rebuilt.step()
    assert_equal([one.detach() for one in own], [one.detach() for one in parameters])
    assert not torch.equal(own[0].detach(), described["parameters"][0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_loads_by_itself(name):
    state, described = load(f"state of {name}")
    entries = {index: dict(entry) for index, entry in enumerate(state.values())}
    assert [sorted(entry) for entry in entries.values()] == [sorted(entry) for entry in described.values()]


@pytest.mark.parametrize(
    "name", ["optimizer during O0", "optimizer after O0", "optimizer during O2", "optimizer after O2"]
)
def test_an_optimizer_of_a_fit_steps(name):
    optimizer, described = load(name)
    assert isinstance(optimizer, FusedAdam)
    assert isinstance(optimizer, FusedOptimizer)
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.ones_like(one)
    optimizer.step()
    moved = described_optimizer(optimizer)["parameters"]
    assert all(not torch.equal(one, other) for one, other in zip(moved, described["parameters"], strict=True))
    assert optimizer.param_groups[0]["lr"] == described["lr"] == (0.0025 if "after" in name else 0.01)


# -- layers, data and values ----------------------------------------------------------------------------------------------------

OTHERS = named("layer ", "data ", "tuple ", "options ", "error ")


@pytest.mark.parametrize("name", named("layer "))
def test_a_layer_holds_its_weights_and_works(name):
    layer, state = load(name)
    assert_equal(plain_state(layer), state)
    x = torch.tensor([[1.0, 2.0, 4.0], [0.0, -1.0, 1.0]], requires_grad=True)
    if name == "layer SoftmaxCrossEntropyLoss":
        target = torch.tensor([0, 2])
        loss = layer(x, target)
        torch.testing.assert_close(loss, F.cross_entropy(x, target))
    else:
        loss = layer(x).square().sum()
    loss.backward()
    assert x.grad.isfinite().all()
    if name == "layer FusedLayerNorm":
        torch.testing.assert_close(layer(x), F.layer_norm(x, (3,)))
    if name == "layer SyncBatchNorm":
        assert layer.num_batches_tracked == 1
        torch.testing.assert_close(layer.eval()(x), F.batch_norm(x, layer.running_mean, layer.running_var).relu())


# A CombinedLoader of that version does not know how its loaders end.
NOT_IN_ORDER = ("data SeededDataset", "data CombinedLoader", *named("data module", "data wired"))


@pytest.mark.parametrize("name", named("data ", without=NOT_IN_ORDER))
def test_data_comes_in_its_order(name):
    loader, expected = load(name)
    found = [one.tolist() if isinstance(one, torch.Tensor) else one for one in loader]
    assert found == [one.tolist() if isinstance(one, torch.Tensor) else one for one in expected]


def test_a_dataset_with_seeds_draws_again():
    dataset, squares = load("data SeededDataset")
    assert [dataset[(0, 3), index][0] for index in range(len(dataset))] == squares
    assert dataset[(0, 3), 1] == dataset[(0, 3), 1] != dataset[(0, 4), 1]


def test_a_loader_that_was_wired_is_read_again():
    loader, length = load("data wired loader")
    assert isinstance(loader, DataLoader)
    assert len(loader) == length == 4
    x, _ = data(7).tensors
    seen = torch.cat([batch[0] for batch in loader])
    assert sorted(seen[:, 0].tolist()) == sorted(x[:, 0].tolist())
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(modules.Small(), loader)
    assert trainer.global_step == 4


@pytest.mark.parametrize("name", named("data module", without=("data module of loaders",)))
def test_a_data_module_gives_its_loaders(name):
    digits, hparams = load(name)
    assert dict(digits.hparams) == hparams
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(modules.Small(), datamodule=digits)
    assert trainer.global_step == {"data module": 8, "data module of a third party": 2}.get(name, 4)


@pytest.mark.parametrize("name", named("tuple ", "options ", "error "))
def test_a_value_is_what_it_was(name):
    value, expected = load(name)
    if name.startswith("error "):
        assert [type(value).__name__, str(value)] == expected
    elif name.startswith("tuple "):
        assert list(value) == expected
    else:
        assert {key: getattr(value, key) for key in expected} == expected


def test_a_value_is_equal_to_one_made_now():
    from fabricamp import CudaGraph
    from fabricamp.gradients.flat import IN_PLACE
    from fabricamp.precision import Clip, Verdict

    assert load("tuple Clip")[0] == Clip(0.5, "value")
    assert load("tuple Verdict")[0] == Verdict(True, 2.0, 0.5, 3, 1)
    assert load("tuple IN_PLACE")[0] == IN_PLACE
    assert load("options CudaGraph")[0] == CudaGraph(warmup=5, steps=2)
