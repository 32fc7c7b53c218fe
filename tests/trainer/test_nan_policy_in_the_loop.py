"""``nan_policy`` in the real loop: the end of a run, its files and its messages."""

from __future__ import annotations

import logging
import textwrap
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from fabricamp import Callback, NonFiniteError, OptLevel
from fabricamp.callbacks import AmpState, ModelCheckpoint
from fabricamp.errors import ConfigError
from fabricamp.ops.shards import local
from fabricamp.optimizers import FusedAdam
from fabricamp.state import NON_FINITE
from fabricamp.tuner import Tuner
from tests.distributed.forked import start_forked
from tests.distributed.ranks import run_ranks
from tests.distributed.scripts import finish
from tests.small import Classifier, loader, quiet_trainer

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5", "64-true"]
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, eps=1e-4, fused=True),
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=0.02, eps=1e-4),
}


def small_scale(level):
    """Returns the level with a loss scale that does not overflow by itself."""
    return OptLevel(level, max_loss_scale=2.0**8) if level in ("O1", "O2") else level


class Spoils(Callback):
    """Makes one gradient nan in some steps, and keeps the weights before each step."""

    def __init__(self, *windows, name="net.2.bias"):
        self.windows, self.name = windows, name
        self.weights = {}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        updated = [p.detach().clone() for group in trainer.optimizers[0].param_groups for p in group["params"]]
        self.weights.setdefault(trainer.global_step, updated)

    def on_after_backward(self, trainer, module):
        if trainer.global_step in self.windows:
            dict(module.named_parameters())[self.name].grad[0] = float("nan")


class Task(Classifier):
    def __init__(self, optimizer="sgd", schedule=False):
        super().__init__()
        self.optimizer, self.schedule = optimizer, schedule

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        if not self.schedule:
            return optimizer
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


def equal(some, others):
    """Returns whether the tensors are equal, pairwise in the narrower dtype."""
    some, others = list(some), list(others)
    dtypes = [
        min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize) for one, other in zip(some, others, strict=True)
    ]
    some, others = (
        [one.detach().to(dtype) for one, dtype in zip(each, dtypes, strict=True)] for each in (some, others)
    )
    return all(map(torch.equal, some, others))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_stop_leaves_the_state_before_the_first_bad_step(level, optimizer, accumulate, caplog):
    spoils, module = Spoils(3), Task(optimizer)
    checkpoint = ModelCheckpoint()
    trainer = quiet_trainer(
        precision=small_scale(level),
        nan_policy="stop",
        max_epochs=9,
        accumulate_grad_batches=accumulate,
        enable_checkpointing=True,
        callbacks=[spoils, checkpoint],
        gradient_clip_val=0.5,
    )
    with caplog.at_level(logging.WARNING, "fabricamp"):
        trainer.fit(module, loader(96))
    assert (trainer.global_step, trainer.skipped_steps, trainer.state.stop_reason) == (6, 3, NON_FINITE)
    before = spoils.weights[3]
    kept = torch.load(checkpoint.last_model_path, weights_only=True)
    assert kept["global_step"] == 6
    assert equal(module.parameters(), before)
    assert equal(kept["state_dict"].values(), before)
    steps = [int(one["step"]) for one in kept["optimizer_states"][0]["state"].values() if "step" in one]
    assert steps == ([3] * 4 if optimizer != "sgd" else [])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("training stopped at step 6: the gradients of net.2.bias were not finite at step 3")
    assert said.endswith(f"checkpoint: {checkpoint.last_model_path}")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_raise_names_parameter_loss_step_and_scale(level, optimizer):
    module = Task(optimizer)
    trainer = quiet_trainer(
        precision=small_scale(level), nan_policy="raise", max_epochs=2, callbacks=[Spoils(2, name="net.0.weight")]
    )
    with pytest.raises(
        NonFiniteError, match=r"of net.0.weight were not finite at step 2 \(loss \d\.\d+, loss scale "
    ) as error:
        trainer.fit(module, loader(96))
    assert ("256" if level in ("O1", "O2") else "loss scale 1)") in str(error.value)
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.parametrize("policy", ["stop", "raise"])
@pytest.mark.parametrize("spoiled", [6, 7])
def test_an_overflow_in_the_last_two_windows_counts(policy, spoiled):
    checkpoint, spoils = ModelCheckpoint(every_n_train_steps=100), Spoils(spoiled)
    trainer = quiet_trainer(nan_policy=policy, max_epochs=1, enable_checkpointing=True, callbacks=[spoils, checkpoint])
    module = Task()
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=f"at step {spoiled} "):
            trainer.fit(module, loader(32))
    else:
        trainer.fit(module, loader(32))
        assert trainer.state.stop_reason == NON_FINITE
        kept = torch.load(checkpoint.last_model_path, weights_only=True)
        assert equal(kept["state_dict"].values(), spoils.weights[spoiled])
    assert equal(module.parameters(), spoils.weights[spoiled])


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_policy_changes_no_number_of_a_finite_run(level):
    seen = []
    for policy in (None, "stop", "raise"):
        module = Task(schedule=True)
        trainer = quiet_trainer(
            precision=small_scale(level), nan_policy=policy, max_epochs=2, gradient_clip_val=0.3, callbacks=[Spoils()]
        )
        trainer.fit(module, loader(48))
        seen.append([*weights(module), torch.tensor(trainer.optimizers[0].param_groups[0]["lr"])])
    assert equal(seen[0], seen[1])
    assert equal(seen[0], seen[2])


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_stopped_run_goes_on_from_its_checkpoint(level, caplog):
    def fit(callbacks, path=None):
        module = Task("FusedAdam", schedule=True)
        trainer = quiet_trainer(
            precision=small_scale(level),
            nan_policy="stop",
            max_epochs=2,
            enable_checkpointing=True,
            callbacks=callbacks,
        )
        trainer.fit(module, loader(48), ckpt_path=path)
        return trainer, module

    first = ModelCheckpoint(dirpath="first")
    fit([first, Spoils(3)])
    spoils = Spoils()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fabricamp"):
        trainer, module = fit([ModelCheckpoint(dirpath="second"), spoils], first.last_model_path)
    assert "skipped" not in caplog.text
    assert (trainer.global_step, trainer.state.stop_reason) == (24, "")
    assert not equal(spoils.weights[6], module.parameters())
    # A new overflow ends the resumed run too.
    third = ModelCheckpoint(dirpath="third")
    trainer, module = fit([third, Spoils(7)], first.last_model_path)
    assert (trainer.global_step, trainer.state.stop_reason) == (10, NON_FINITE)


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_skips_before_the_checkpoint_are_not_reported_as_skips_of_the_resumed_run(steps, caplog):
    def fit(until, spoils, **options):
        trainer = quiet_trainer(
            nan_policy="skip", max_steps=until, max_epochs=-1, callbacks=[spoils, AmpState()], **options
        )
        trainer.fit(Task(), loader(48), ckpt_path="saved.ckpt" if Path("saved.ckpt").exists() else None)
        return trainer

    class Saves(Spoils):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 5:
                trainer.save_checkpoint("saved.ckpt")

    fit(5, Saves(2, 3, 4))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fabricamp"):
        trainer = fit(5 + steps, Spoils())
        assert (trainer.global_step, trainer.skipped_steps) == (5 + steps, 3)
        assert "skipped" not in caplog.text
        trainer = fit(5 + steps, Spoils(5))
    assert trainer.skipped_steps == 4
    assert "1 step was skipped: gradients were not finite (4 in all)" in caplog.text


def test_a_run_killed_before_the_host_knew_stops_where_it_would_have():
    def fit(**options):
        module = Task()
        trainer = quiet_trainer(nan_policy="stop", max_epochs=2, enable_checkpointing=True, **options)
        return trainer, module

    kept = ModelCheckpoint(dirpath="kept", every_n_train_steps=1, save_top_k=-1)
    trainer, module = fit(callbacks=[kept, Spoils(3)])
    trainer.fit(module, loader(48))
    for step in (4, 5):
        (path,) = [path for path in map(str, sorted(Path("kept").iterdir())) if f"step={step}" in path]
        again, twin = fit(callbacks=[ModelCheckpoint(dirpath=f"again{step}")])
        again.fit(twin, loader(48), ckpt_path=path)
        assert (again.global_step, again.state.stop_reason) == (6, NON_FINITE)
        assert equal(module.parameters(), twin.parameters())


def test_min_epochs_do_not_keep_a_spoiled_run_alive():
    trainer = quiet_trainer(nan_policy="stop", max_epochs=9, min_epochs=5, min_steps=40, callbacks=[Spoils(1)])
    trainer.fit(Task(), loader(32))
    assert trainer.global_step == 4


@pytest.mark.parametrize("level", ["O0", "O3", "O5"])
def test_skip_goes_on_without_a_dynamic_scale(level, caplog):
    spoils, module = Spoils(2), Task()
    trainer = quiet_trainer(precision=level, nan_policy="skip", max_epochs=1, callbacks=[spoils])
    with caplog.at_level(logging.WARNING, "fabricamp"):
        trainer.fit(module, loader(32))
    assert (trainer.global_step, trainer.skipped_steps) == (8, 1)
    assert equal(spoils.weights[2], spoils.weights[3])
    assert not equal(spoils.weights[3], spoils.weights[4])
    assert "1 step was skipped: gradients were not finite (1 in all)" in caplog.text


@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_what_a_hook_writes_into_gradients_is_looked_at_too(level, clip):
    class Writes(Spoils):
        def on_after_backward(self, trainer, module):
            """Does nothing in this hook."""

        def on_before_optimizer_step(self, trainer, module, optimizer):
            super().on_after_backward(trainer, module)

    writes, module = Writes(2), Task("FusedAdam")
    options = {} if clip is None else {"gradient_clip_val": 1.0, "gradient_clip_algorithm": clip}
    trainer = quiet_trainer(
        precision=small_scale(level), nan_policy="skip", max_epochs=1, callbacks=[writes], **options
    )
    trainer.fit(module, loader(32))
    assert (trainer.global_step, trainer.skipped_steps) == (8, 1)
    assert equal(writes.weights[2], writes.weights[3])
    assert not equal(writes.weights[3], writes.weights[4])


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_twenty_skips_at_the_floor_end_the_run(level):
    scale = OptLevel(level, max_loss_scale=4.0, min_loss_scale=1.0) if level != "O0" else level
    trainer = quiet_trainer(
        precision=scale, nan_policy="skip" if level == "O0" else None, max_epochs=9, callbacks=[Spoils(*range(5, 99))]
    )
    first = 4 if level != "O0" else 1
    with pytest.raises(
        NonFiniteError,
        match=rf"20 steps in a row .*net.2.bias were not finite at step 5 .*scale {first}; it is not known",
    ):
        trainer.fit(Task(), loader(64))
    # Two steps with the scales 4 and 2, twenty at the minimum, and two until the host knows.
    assert trainer.global_step == 5 + (2 if level != "O0" else 0) + 20 + 2


class Manual(Task):
    """Steps two optimizers in one micro-batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(x), y))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [OPTIMIZERS["FusedAdam"](self.net[0].parameters()), OPTIMIZERS["sgd"](self.net[2].parameters())]


@pytest.mark.parametrize("level", LEVELS)
def test_manual_optimization_with_two_optimizers(level):
    spoils, module = Spoils(2), Manual()
    trainer = quiet_trainer(precision=small_scale(level), nan_policy="stop", max_epochs=1, callbacks=[spoils])
    trainer.fit(module, loader(32))
    assert (trainer.global_step, trainer.state.stop_reason) == (5, NON_FINITE)
    assert "of net.2.bias were" in trainer.state.stop_explanation
    after = [p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]]
    assert all(torch.isfinite(p).all() for p in after)


def test_a_script_that_stops_exits_with_0_and_one_that_raises_does_not(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from tests.small import Classifier, loader
        from tests.trainer.test_nan_policy_in_the_loop import Spoils
        from fabricamp import Trainer
        Trainer(accelerator="cpu", devices=1, logger=False, nan_policy=sys.argv[1], callbacks=[Spoils(2)],
                enable_progress_bar=False, enable_model_summary=False, max_epochs=2).fit(Classifier(), loader(48))
        """)
    )
    for policy, expected in (("stop", 0), ("raise", 1)):
        code, _, said = finish(start_forked(tmp_path, "train.py", policy))
        assert code == expected, said
        assert said.count("net.2.bias were not finite at step 2") == 1
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


class LossIsNan(Task):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss * (float("nan") if self.global_step >= 4 else 1.0), on_epoch=True)
        self.log("rate", float("inf"))
        return loss


def test_without_a_policy_a_logged_loss_is_looked_at_once(caplog):
    with caplog.at_level(logging.WARNING, "fabricamp"):
        quiet_trainer(max_epochs=2, log_every_n_steps=2).fit(LossIsNan(), loader(32))
    told = [record.getMessage() for record in caplog.records if "nan_policy" in record.getMessage()]
    assert [message.split()[:5] for message in told] == [["train_loss", "is", "nan", "at", "step"]]
    caplog.clear()
    quiet_trainer(max_epochs=2, log_every_n_steps=2, nan_policy="skip").fit(LossIsNan(), loader(32))
    assert "train_loss" not in caplog.text


def test_wrong_ones_are_refused():
    with pytest.raises(ConfigError, match="nan_policy='stopped' is not known; did you mean 'stop'"):
        quiet_trainer(nan_policy="stopped")
    with pytest.raises(ConfigError, match="nan_policy=True"):
        quiet_trainer(nan_policy=True)

    class Lbfgs(Task):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigError, match="LBFGS.*nan_policy"):
        quiet_trainer(nan_policy="stop", max_epochs=1).fit(Lbfgs(), loader(32))


class Lost(Classifier):
    """Has a loss of nan from step ``first`` on, which it logs with ``options``."""

    def __init__(self, first=0, **options):
        super().__init__()
        self.first, self.options = first, options

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).mean()
        if self.trainer.global_step >= self.first:
            loss = loss * torch.nan
        self.log("my/loss", loss, **self.options)
        return loss

    def validation_step(self, batch, batch_idx):
        """Logs nothing."""


NOT_FINITE = "my/loss is nan at step {}, and training continues"


@pytest.mark.parametrize(
    "options",
    [{}, {"prog_bar": True}, {"logger": False}, {"on_epoch": True}, {"on_step": False, "on_epoch": True}],
    ids="-".join,
)
@pytest.mark.parametrize("every", [50, 1], ids=["no flush", "each step"])
def test_a_loss_that_is_lost_is_told_once_in_a_run_of_any_length(options, every, caplog):
    with caplog.at_level(logging.WARNING, "fabricamp"):
        quiet_trainer(max_epochs=3, log_every_n_steps=every).fit(Lost(**options), loader(16))
    (told,) = caplog.messages
    assert told.startswith(NOT_FINITE.format(1))


@pytest.mark.parametrize(("first", "at"), [(0, 1), (4, 8)])
def test_a_loss_that_is_lost_is_told_long_before_the_flush_and_no_other_loss_after_it(first, at, caplog):
    class Both(Lost):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("other_loss", loss, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.net(batch[0]).sum())

    with caplog.at_level(logging.WARNING, "fabricamp"):
        quiet_trainer(max_epochs=2).fit(Both(first), loader(64), loader(4))
    (told,) = caplog.messages
    assert told.startswith(NOT_FINITE.format(at))


def test_the_bar_tells_of_a_loss_as_soon_as_it_shows_it(caplog):
    module = Lost(first=2, prog_bar=True, logger=False)

    class Looks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            shown = trainer.progress_bar_metrics["my/loss"]
            told = NOT_FINITE.format(3) in caplog.text
            assert told == (batch_idx >= 2) == (shown != shown)

    with caplog.at_level(logging.WARNING, "fabricamp"):
        quiet_trainer(max_epochs=1, callbacks=[Looks()]).fit(module, loader(32))
    assert len(caplog.messages) == 1


def test_a_validation_in_an_epoch_tells_of_a_loss_that_no_flush_has_taken(caplog):
    with caplog.at_level(logging.WARNING, "fabricamp"):
        # Steps 5 to 7: between the looks at 4 and 8.
        quiet_trainer(max_epochs=1, val_check_interval=7).fit(Lost(first=4), loader(56), loader(4))
    assert caplog.messages[0].startswith(NOT_FINITE.format(7))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("options", [{"precision": "O2"}, {"nan_policy": "skip"}], ids=["O2", "skip"])
def test_where_gradients_are_checked_the_loss_of_a_validation_is_told_alone(options, caplog):
    class LostInValidation(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("lost_loss", torch.inf, prog_bar=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", torch.nan)

    with caplog.at_level(logging.WARNING, "fabricamp"):
        quiet_trainer(max_epochs=2, log_every_n_steps=1, **options).fit(LostInValidation(), loader(16), loader(4))
    told = [line for line in caplog.messages if "training continues" in line]
    assert len(told) == 1
    assert told[0].startswith(
        "val/loss is nan at step 4, and training continues: steps with such gradients are skipped"
    )


class LostUnlogged(Classifier):
    """Returns a loss that is nan, and logs nothing, or a name that says nothing of a loss."""

    logs = False

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).sum() * torch.nan
        if self.logs:
            self.log("cross_entropy", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        """Logs nothing."""


class LostByHand(LostUnlogged):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (LostUnlogged, {}),
        (LostUnlogged, {"accumulate_grad_batches": 2}),
        (LostUnlogged, {"precision": "O5"}),
        (LostUnlogged, {"fast_dev_run": True}),
        (LostByHand, {}),
        (LostByHand, {"precision": "O5"}),
        (type("LostLogged", (LostUnlogged,), {"logs": True}), {}),
    ],
)
def test_a_loss_that_is_lost_and_not_logged_is_told_at_the_end(module, options, caplog):
    with caplog.at_level(logging.WARNING, "fabricamp"):
        quiet_trainer(max_epochs=1, **options).fit(module(), loader(16))
    (told,) = caplog.messages
    assert told.startswith("4 of 4 trained parameters are nan at the end (the first is net.0.weight)")


def lost_on_ranks(strategy):
    """Returns the warnings of one rank of a fit that loses its loss."""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("fabricamp").addHandler(handler)
    quiet_trainer(max_epochs=1, devices=2, strategy=strategy).fit(LostUnlogged(), loader(16))
    return lines


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_first_of_several_ranks_tells_of_lost_weights(strategy):
    first, second = run_ranks(lost_on_ranks, 2, strategy)
    assert any("trained parameters are nan at the end" in line for line in first)
    assert not any("trained parameters" in line for line in second)


class LosesAShard(Callback):
    """Makes a part of one weight nan, on one rank alone, after the last step."""

    def __init__(self, rank):
        self.rank = rank

    def on_train_end(self, trainer, module):
        weight = module.net[0].weight
        assert local(weight.detach()).numel() < weight.numel()
        if trainer.global_rank == self.rank:
            local(weight.detach()).fill_(torch.nan)


def lost_shard_on_ranks(rank):
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("fabricamp").addHandler(handler)
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy="fsdp", callbacks=[LosesAShard(rank)])
    trainer.fit(Classifier(), loader(16))
    return lines


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_of_any_rank_is_told_to_be_lost(rank):
    first, second = run_ranks(lost_shard_on_ranks, 2, rank)
    assert any(
        line.startswith("1 of 4 trained parameters are nan at the end (the first is net.0.weight)") for line in first
    )
    assert not any("trained parameters" in line for line in second)


class LostConstant(Classifier):
    """Returns a loss that is not finite, from the step ``since`` on, and whose gradients are."""

    since = 2
    value = torch.nan

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss + self.value if self.global_step >= self.since else loss


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize(
    "options",
    [
        {"nan_policy": "raise"},
        {"nan_policy": "skip", "precision": "O5", "log_every_n_steps": 1},
        {"precision": small_scale("O2")},
        {"precision": small_scale("O1"), "accumulate_grad_batches": 2},
    ],
)
def test_a_loss_that_is_lost_while_its_gradients_are_not_is_told_where_they_are_checked(options, value, caplog):
    module = LostConstant()
    module.value = value
    with caplog.at_level(logging.WARNING, "fabricamp"):
        quiet_trainer(max_epochs=1, **options).fit(module, loader(32))
    (told,) = caplog.messages
    at = 5 if options.get("log_every_n_steps") else 4 if options.get("accumulate_grad_batches") else 8
    assert told.startswith(f"the loss was {value:g} at step {at} or just before, while all gradients were finite")


def test_a_manual_loss_that_the_trainer_does_not_see_is_none_that_is_lost(caplog):
    class ByHand(Classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            F.cross_entropy(self.net(batch[0]), batch[1]).backward()
            optimizer.step()

    with caplog.at_level(logging.WARNING, "fabricamp"):
        quiet_trainer(max_epochs=1, nan_policy="raise", log_every_n_steps=1).fit(ByHand(), loader(32))
    assert caplog.messages == []


@pytest.mark.parametrize("options", [{"nan_policy": "skip"}, {"precision": "O2"}, {"nan_policy": "stop"}])
def test_weights_that_a_policy_has_kept_are_not_told_to_be_lost(options, caplog):
    with caplog.at_level(logging.WARNING, "fabricamp"):
        quiet_trainer(max_epochs=1, **options).fit(LostUnlogged(), loader(16))
    assert "trained parameters" not in caplog.text


def test_what_is_infinite_or_frozen_is_no_lost_weight(caplog):
    module = Classifier()
    module.mask = torch.nn.Parameter(torch.full((2,), -torch.inf))
    module.unused = torch.nn.Parameter(torch.full((2,), torch.nan), requires_grad=False)
    with caplog.at_level(logging.WARNING, "fabricamp"):
        quiet_trainer(max_epochs=1).fit(module, loader(16))
    assert caplog.messages == []


def test_a_search_for_a_learning_rate_may_lose_the_loss_in_silence(caplog):
    with caplog.at_level(logging.WARNING, "fabricamp"):
        trainer = quiet_trainer(max_epochs=1, log_every_n_steps=1)
        Tuner(trainer).lr_find(
            Lost(first=20), loader(200), num_training=30, early_stop_threshold=None, update_attr=False
        )
    assert "is nan" not in caplog.text


@pytest.mark.parametrize(
    ("lowest", "says"), [(2.0**8, "its lowest: look for what is too large"), (1.0, "find its value")]
)
def test_a_scale_that_cannot_fall_is_not_said_to_be_sought(lowest, says, caplog):
    level = OptLevel("O2", min_loss_scale=lowest, max_loss_scale=2.0**8)
    with caplog.at_level(logging.WARNING, "fabricamp"):
        quiet_trainer(precision=level, max_epochs=1, callbacks=[Spoils(2)]).fit(Task(), loader(32))
    (told,) = caplog.messages
    scale = "is 256, its lowest" if lowest > 1 else "was lowered to 128; "
    assert told.startswith(f"1 step was skipped: gradients were not finite (1 in all; the loss scale {scale}")
    assert says in told
    assert ("find its value" in told) == (lowest == 1.0)
