"""Every argument of the Trainer is checked in the constructor: errors say what was given, what is allowed, what to change."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from fabricamp import Callback, ConfigError, Trainer
from fabricamp.arguments.migration import meanings
from fabricamp.callbacks import ModelCheckpoint
from tests.small import QUIET

WRONG = {
    "checkpoint_objects": ["yes", 1],
    "accelerator": ["cup", 3],
    "devices": [0, -2, "many", [0, 0], 1.5],
    "num_nodes": [0, "2", 1.0],
    "strategy": ["dpp", 3],
    "precision": ["O7", "01", 17],
    "max_epochs": [-2, 1.5, "3", True],
    "max_steps": [-2, "3"],
    "max_time": ["1:00", 5, {"hour": 1}, "0:0:0:x"],
    "min_epochs": [-1, 0.5],
    "min_steps": [-1, "1"],
    "limit_train_batches": [-1, 1.5, "all", True, float("nan")],
    "limit_val_batches": [-0.1, "all"],
    "limit_test_batches": [2.5],
    "limit_predict_batches": [-3],
    "fast_dev_run": [-1, "yes", 0.5],
    "overfit_batches": [-1, 1.5],
    "val_check_interval": [0, -1, 1.5, "00:10:00"],
    "check_val_every_n_epoch": [0, -1, 0.5],
    "num_sanity_val_steps": [-2, 0.5],
    "log_every_n_steps": [-1, 1.0],
    "accumulate_grad_batches": [0, -1, 2.0, {0: 2}],
    "partial_window": ["cary", 1],
    "on_world_change": ["keep", 2, True],
    "gradient_clip_val": [-1, "1", float("inf")],
    "gradient_clip_algorithm": ["nrom", 2],
    "profiler": ["simpel", 3, True],
    "nan_policy": ["sotp", True, 1],
    "on_out_of_memory": ["half", True, 1],
    "logger": ["tensorboard", 3, [None]],
    "callbacks": [Callback, 3, "no_such_callback", [None]],
    "enable_checkpointing": ["yes", 2],
    "enable_progress_bar": ["on"],
    "enable_model_summary": ["no"],
    "start_method": ["popen"],
    "compile": ["yes", 1, {"backends": "eager"}],
    "activations": ["keeping", 0.5, True],
    "cuda_graph": ["always", 2, True],  # True is wrong on a CPU
    "deterministic": ["yes", 1],
    "benchmark": ["yes"],
    "detect_anomaly": ["yes"],
    "use_distributed_sampler": [2],
    "per_sample_seed": [1],
    "performance": ["maximum", 3, {"tf23": True}, {"tf32": 1}, {"matmul_precision": "low"}, {"matmul_precision": True}],
    "prefetch_batches": [-1, 3, True, "1"],
    "sync_batchnorm": ["yes"],
    "inference_mode": [0],
    "plugins": ["ddp", 3, [None]],
    "reload_dataloaders_every_n_epochs": [-1, 1.5, "2"],
    "enable_autolog_hparams": ["yes"],
    "barebones": ["yes", 1],
    "default_root_dir": [3],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_an_error_that_names_the_argument_and_the_value(name, value):
    with pytest.raises(ConfigError) as error:
        Trainer(**{**QUIET, "enable_checkpointing": True, name: value})
    message = str(error.value)
    assert name in message
    assert len(message) > len(name) + 20


def test_the_list_of_wrong_values_misses_no_argument():
    parameters = inspect.signature(Trainer.__init__).parameters.values()
    assert {one.name for one in parameters if one.kind is one.KEYWORD_ONLY} == set(WRONG)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("max_epoch", "max_epochs"),
        ("precison", "precision"),
        ("gradient_clip", "gradient_clip_val"),
        ("callback", "callbacks"),
    ],
)
def test_a_misspelt_argument_gets_the_nearest_name(typo, meant):
    with pytest.raises(ConfigError, match=f"no argument '{typo}'; did you mean '{meant}'"):
        Trainer(**QUIET, **{typo: 1})


@pytest.mark.parametrize("name", [*meanings("Trainer")])
def test_what_others_have_gets_the_way_it_is_done_here_and_no_guess_by_letters(name):
    arguments = inspect.signature(Trainer.__init__).parameters
    with pytest.raises(ConfigError, match=f"no argument '{name}'; ") as error:
        Trainer(**QUIET, **{name: 3})
    message = str(error.value)
    assert "did you mean" not in message
    assert "known:" not in message
    assert len(message) < 200
    assert name not in arguments
    assert all(one in arguments for one in re.findall(r"write (\w+)=", message))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"amp_backend": "apex"}, "leave it out: apex's opt levels are precision='O1' or 'O2'"),
        ({"amp_level": "O2"}, "write precision='O2'"),
        ({"epochs": 3}, "write max_epochs=3"),
        ({"gpus": 2}, "write accelerator='gpu', devices=2"),
        ({"num_processes": 2}, "write devices=2"),
        ({"tpu_cores": 8}, "TPUs are not offered"),
        ({"stochastic_weight_avg": True}, "give callbacks=StochasticWeightAveraging(swa_lrs=...)"),
        ({"track_grad_norm": 2}, "give callbacks=GradientMonitor()"),
        ({"auto_lr_find": True}, "call Tuner(trainer).lr_find(model)"),
        ({"resume_from_checkpoint": "x.ckpt"}, "call fit(..., ckpt_path='x.ckpt')"),
        ({"replace_sampler_ddp": False}, "write use_distributed_sampler=False"),
        ({"distributed_backend": "ddp"}, "write strategy='ddp'"),
        ({"terminate_on_nan": True}, "write nan_policy='raise'"),
        ({"loss_scale": 128.0}, "write precision=OptLevel('O2', loss_scale=128.0)"),
        ({"precision": "fp16"}, "write '16-mixed' (autocast over fp32 weights) or '16-true'"),
        ({"precision": "Half"}, "write '16-mixed'"),
        ({"precision": torch.float16}, "write '16-mixed'"),
        ({"precision": "bfloat16"}, "write 'bf16-mixed'"),
        ({"strategy": "fsdp_cpu_offload"}, "write strategy='fsdp', or FSDP(units=[...])"),
        ({"strategy": "deepspeed_stage_2"}, "write strategy='fsdp', which shards"),
        ({"accelerator": "tpu"}, "TPUs are not offered"),
        ({"accelerator": "mps"}, "a Mac runs accelerator='cpu'"),
        (
            {"accumulate_grad_batches": {0: 2}},
            "give callbacks=[GradientAccumulationScheduler({0: 2})]",
        ),
        (
            {"callbacks": "early_stopping"},
            "write callbacks=[EarlyStopping(...)], in a configuration _target_: fabricamp",
        ),
        ({"callbacks": ModelCheckpoint}, "give an instance: ModelCheckpoint(...)"),
    ],
)
def test_what_was_meant_is_told_and_the_list_of_names_is_not(given, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        Trainer(**{**QUIET, **given})
    assert "known:" not in str(error.value)


@pytest.mark.parametrize("argument", ["precision", "strategy", "accelerator", "profiler"])
def test_names_of_others_name_what_there_is(argument):
    for pattern, words in meanings(argument).items():
        with pytest.raises(ConfigError, match=re.escape(words.partition("{")[0])):
            Trainer(**{**QUIET, argument: pattern.rstrip("*")})
        for name in re.findall(r"write '([\w-]+)'", words):
            Trainer(**{**QUIET, argument: name}) if name != "gpu" else None


@pytest.mark.parametrize(
    ("name", "typo", "meant"), [("precision", "01", "O1"), ("strategy", "dpp", "ddp"), ("accelerator", "gppu", "gpu")]
)
def test_a_misspelt_name_gets_the_nearest_one(name, typo, meant):
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        Trainer(**{**QUIET, name: typo})


def test_more_devices_than_there_are():
    with pytest.raises(ConfigError, match="devices=99|needs a CUDA GPU"):
        Trainer(**{**QUIET, "accelerator": "gpu", "devices": 99})


def test_several_nodes_need_a_starter():
    with pytest.raises(ConfigError, match="torchrun"):
        Trainer(**{**QUIET, "num_nodes": 2})


def test_a_checkpoint_callback_contradicts_enable_checkpointing_false():
    with pytest.raises(ConfigError, match="enable_checkpointing=False"):
        Trainer(**QUIET, callbacks=ModelCheckpoint())


def test_single_cannot_have_two_processes():
    with pytest.raises(ConfigError, match="single"):
        Trainer(**{**QUIET, "devices": 2}, strategy="single")


def test_defaults_are_accepted_and_limits_are_whole_numbers(tmp_path):
    trainer = Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path)
    assert trainer.max_epochs == 1000
    assert Trainer(**QUIET, max_steps=5).max_epochs == -1
    assert Trainer(**QUIET, max_epochs=-1).max_epochs == -1
    assert list(tmp_path.iterdir()) == []


def test_completion_shows_beside_fit_what_is_the_users():
    shown = {name for name in dir(Trainer(**QUIET)) if not name.startswith("_")}
    assert {"fit", "validate", "test", "predict", "save_checkpoint", "stop", "callbacks", "state"} <= shown
    internals = {"run", "become_worker", "take_callbacks", "session", "settings", "num_processes"}
    assert not shown & internals


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ema": 1}, "give callbacks=EMA()"),
        ({"num_worker": 2}, "give it to the DataLoader"),
        ({"pin_memory": True}, "give it to the DataLoader"),
        ({"precision": 17}, "precision=17 is not known; did you mean 16? (numbers: 16, 32, 64; names: 'O0', "),
        (
            {"precision": 8},
            "precision=8 is not known; write 'fp8' (bf16 weights) or 'fp8-mixed' (fp32 weights) (numbers: 16, 32, ",
        ),
        ({"precision": 7}, "precision=7 is not known (numbers: 16, 32, 64; names: 'O0', "),
        ({"devices": "two"}, "devices='two' cannot be read ("),
        ({"max_epoch": 2}, "did you mean 'max_epochs'?"),
    ],
    ids=lambda given: next(iter(given), "") if isinstance(given, dict) else "",
)
def test_a_guess_is_near_or_there_is_none(given, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        Trainer(**{**QUIET, **given})
    assert ("did you mean" in str(raised.value)) == ("did you mean" in words)
