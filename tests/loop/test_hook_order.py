"""The order of hooks is Lightning's, minus its closure.

Forward, backward and update run one after the other instead of inside ``optimizer.step``, so M.optimizer_step comes after
configure_gradient_clipping and not around everything.
"""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from fabricamp import Callback, hooks
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.hooks import ModuleHooks
from tests.small import Classifier, loader, quiet_trainer

LOADERS = {f"{name}_dataloader" for name in ("train", "val", "test", "predict")}
QUERIES = LOADERS | {"configure_callbacks", "configure_optimizers"}
UPDATE = {"optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step", "backward"}
STEPS = {"training_step", "validation_step", "test_step", "predict_step"}


def recorded(name, original, calls):
    def call(self, *args, **kwargs):
        calls.append(f"M.{name}")
        return original(self, *args, **kwargs)

    return call


def recording_module(calls):
    names = [name for name, _ in inspect.getmembers(ModuleHooks, inspect.isfunction)]
    names += sorted(QUERIES | UPDATE | STEPS)
    body = {name: recorded(name, getattr(Scheduled, name), calls) for name in set(names) if not name.startswith("_")}
    return type("Recording", (Scheduled,), body)()


class Scheduled(Classifier):
    def train_dataloader(self):
        return loader(8)

    def val_dataloader(self):
        return loader(4)

    test_dataloader = predict_dataloader = val_dataloader

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def recording_callback(calls, label="C"):
    def record(name):
        def call(self, *args, **kwargs):
            calls.append(f"{label}.{name}")
            return {} if name == "state_dict" else None

        return call

    names = [
        name
        for name, _ in inspect.getmembers(Callback, inspect.isfunction)
        if not name.startswith("_") and name not in {"state_dict", "load_state_dict", "evaluation_context"}
    ]
    return type("RecordingCallback", (Callback,), {name: record(name) for name in names})()


TRANSFER = ["M.on_before_batch_transfer", "M.transfer_batch_to_device", "M.on_after_batch_transfer"]


def both(name):
    return [f"C.{name}", f"M.{name}"]


def evaluation(kind, batches=1):
    batch = [*TRANSFER, *both(f"on_{kind}_batch_start"), f"M.{kind}_step", *both(f"on_{kind}_batch_end")]
    return [
        f"M.on_{kind}_model_eval",
        *both(f"on_{kind}_start"),
        *both(f"on_{kind}_epoch_start"),
        *batch * batches,
        *both(f"on_{kind}_epoch_end"),
        *both(f"on_{kind}_end"),
        *([] if kind == "predict" else [f"M.on_{kind}_model_train"]),  # Lightning has none for predict
    ]


TRAIN_BATCH = [
    *TRANSFER,
    *both("on_train_batch_start"),
    "M.training_step",
    *both("on_before_zero_grad"),
    "M.optimizer_zero_grad",
    *both("on_before_backward"),
    "M.backward",
    *both("on_after_backward"),
    *both("on_before_optimizer_step"),
    "M.configure_gradient_clipping",
    "M.optimizer_step",
    "M.lr_scheduler_step",
    *both("on_train_batch_end"),
]


def fit_order(epochs=1):
    epoch = [
        *both("on_train_epoch_start"),
        *TRAIN_BATCH * 2,
        "M.on_validation_model_zero_grad",
        *evaluation("validation"),
        *both("on_train_epoch_end"),
    ]
    return [
        "M.configure_callbacks",
        "M.prepare_data",
        *both("setup"),
        "M.configure_model",
        "M.configure_optimizers",
        *both("on_fit_start"),
        "C.on_sanity_check_start",
        "M.val_dataloader",
        *evaluation("validation"),
        "C.on_sanity_check_end",
        "M.train_dataloader",
        *both("on_train_start"),
        *epoch * epochs,
        *both("on_train_end"),
        *both("on_fit_end"),
        *both("teardown"),
    ]


@pytest.mark.parametrize("epochs", [1, 2])
def test_fit_calls_every_hook_in_lightnings_order(epochs):
    calls = []
    quiet_trainer(max_epochs=epochs, callbacks=recording_callback(calls)).fit(recording_module(calls))
    assert calls == fit_order(epochs)


@pytest.mark.parametrize(("method", "kind"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_evaluation_calls_every_hook_in_lightnings_order(method, kind):
    calls = []
    getattr(quiet_trainer(callbacks=recording_callback(calls)), method)(recording_module(calls))
    name = "val" if kind == "validation" else kind
    assert calls == [
        "M.configure_callbacks",
        "M.prepare_data",
        *both("setup"),
        "M.configure_model",
        f"M.{name}_dataloader",
        *evaluation(kind),
        *both("teardown"),
    ]


def test_accumulation_clears_gradients_first_and_steps_last():
    calls = []
    quiet_trainer(
        max_epochs=1, accumulate_grad_batches=2, limit_val_batches=0, callbacks=recording_callback(calls)
    ).fit(recording_module(calls))
    update = {"M.optimizer_zero_grad", "M.backward", "M.optimizer_step", "M.on_before_zero_grad", "M.training_step"}
    assert [call for call in calls if call in update] == [
        "M.training_step",
        "M.on_before_zero_grad",
        "M.optimizer_zero_grad",
        "M.backward",
        "M.training_step",
        "M.backward",
        "M.optimizer_step",
    ]


def test_monitors_run_after_the_modules_epoch_end():
    calls = []
    monitor = recording_callback(calls, label="Monitor")
    type(monitor).monitors = True
    quiet_trainer(max_epochs=1, callbacks=[monitor, recording_callback(calls)]).fit(recording_module(calls))
    ends = [call for call in calls if call.endswith("on_train_epoch_end")]
    assert ends == ["C.on_train_epoch_end", "M.on_train_epoch_end", "Monitor.on_train_epoch_end"]


def test_a_batch_start_hook_can_skip_the_rest_of_the_epoch():
    class Skips(Scheduled):
        steps = 0

        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 else None

        def training_step(self, batch, batch_idx):
            self.steps += 1
            return super().training_step(batch, batch_idx)

    module = Skips()
    trainer = quiet_trainer(max_epochs=3)
    trainer.fit(module)
    assert (module.steps, trainer.current_epoch, trainer.global_step) == (3, 3, 3)


def test_an_exception_reaches_every_callback_and_the_caller():
    calls = []

    class Fails(Scheduled):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        quiet_trainer(max_epochs=1, callbacks=recording_callback(calls)).fit(Fails())
    assert calls[-1] == "C.on_exception"


REPEATS = {"for each micro-batch": 2}
"""The number of repetitions of these lines with this file's modules; all other lines occur once."""


def documented(block, *, left_out=""):
    """Returns the calls of a block of the docstring, without the lines for other kinds of runs (``left_out``)."""
    calls = []
    lines = [line for line in block.splitlines() if line]
    while lines:
        line = lines.pop(0)
        inner = []
        while lines and indent(lines[0]) > indent(line):
            inner.append(lines.pop(0))
        words, _, remark = line.strip().partition(")")
        if left_out and left_out in remark:
            continue
        name, _, owners = words.partition(" (")
        if owners:
            calls += [f"{owner.upper()}.{name}" for owner in owners.split(", ")]
        elif name == "the validation":
            calls += documented(VALIDATION)
        calls += documented("\n".join(inner), left_out=left_out) * REPEATS.get(name, 1)
    return calls


def indent(line):
    return len(line) - len(line.lstrip())


FIT, VALIDATION = re.findall(r"::\n\n(.*?)\n\n(?=\S)", inspect.getdoc(hooks), flags=re.DOTALL)


def test_the_documented_order_is_that_of_a_fit(tmp_path):
    calls = []
    for epochs, left_out in ((1, "resumes from a checkpoint"), (2, "does not resume")):
        file = next(tmp_path.glob("*.ckpt"), None)
        calls.clear()
        both_kinds = [recording_callback(calls), ModelCheckpoint(tmp_path)]
        trainer = quiet_trainer(max_epochs=epochs, callbacks=both_kinds, enable_checkpointing=True)
        trainer.fit(recording_module(calls), ckpt_path=file)
        assert calls == documented(FIT, left_out=left_out)


@pytest.mark.parametrize(("method", "kind"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_the_documented_order_is_that_of_an_evaluation(method, kind):
    calls = []
    getattr(quiet_trainer(callbacks=recording_callback(calls)), method)(recording_module(calls))
    begin = next(place for place, call in enumerate(calls) if call.endswith("_dataloader")) + 1
    end = calls.index("C.teardown")
    expected = [call.replace("validation", kind) for call in documented(VALIDATION)]
    assert calls[begin:end] == [call for call in expected if call != "M.on_predict_model_train"]
