"""Checkpoints through the Trainer: an interrupted and resumed fit equals an uninterrupted one, at every level."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from fabricamp import Callback, CheckpointError, DataModule, TrainingModule
from fabricamp.callbacks import EarlyStopping, ModelCheckpoint
from tests.small import Classifier, data, loader, quiet_trainer

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


class Counted(Dataset):
    """Returns eight features and a class; counts the samples that are read."""

    def __init__(self, size=24):
        self.data = data(size)
        self.read = []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.read.append(index)
        return self.data[index]


class Endless:
    """A stream of batches without a length."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(loader(self.size))


class Net(Classifier):
    """Has AdamW, a schedule by steps and BatchNorm; records its samples."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
            )
        self.firsts = []

    def training_step(self, batch, batch_idx):
        self.firsts.append((self.current_epoch, batch_idx, float(batch[0].float().sum())))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        # The default eps is 0 in half precision.
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


def shuffled(dataset=None):
    return DataLoader(dataset or data(24), 4, shuffle=True, generator=torch.Generator().manual_seed(3))


def fit(steps, *, ckpt_path=None, module=None, train=None, val=None, **options):
    module = module or Net()
    trainer = quiet_trainer(
        **{"max_steps": steps, "max_epochs": -1, "enable_checkpointing": True, "callbacks": [], **options}
    )
    trainer.fit(module, train or shuffled(), val, ckpt_path=ckpt_path)
    return module, trainer


def assert_equal(one, other, path="state"):
    """Checks that two nested values are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{path}[{index}]")
    else:
        assert one == other or (one != one and other != other), (path, one, other)


def saved(trainer, path):
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    content.pop("callbacks")
    content.pop("checksum")  # also depends on the callbacks
    return content


class Overflow(Callback):
    """Makes the loss of some steps infinite."""

    def __init__(self, *steps):
        self.steps = steps

    def on_before_backward(self, trainer, module, loss):
        if trainer.global_step in self.steps:
            loss.data.mul_(float("inf"))
            loss.register_hook(lambda gradient: gradient * float("inf"))


CUTS = {1: [6, 4, 9], 2: [3, 2], 4: [5]}
"""By accumulation: the steps at which runs are interrupted; each level uses one step of each accumulation in turn."""


@pytest.mark.parametrize(
    ("precision", "cut", "accumulate"),
    [
        (level, cuts[place % len(cuts)], accumulate)
        for place, level in enumerate(LEVELS)
        for accumulate, cuts in CUTS.items()
    ],
)
def test_a_resumed_fit_equals_one_that_was_never_cut(precision, cut, accumulate, tmp_path):
    options = {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    overflow = (1, cut - 1) if precision in {"O1", "O2"} else ()
    straight, whole = fit(12, **options, callbacks=[Overflow(*overflow)])
    writer = ModelCheckpoint(tmp_path, every_n_train_steps=cut, filename="cut-{step}", save_top_k=-1)
    first, _ = fit(cut, **options, callbacks=[Overflow(*overflow), writer])
    second, resumed = fit(12, **options, ckpt_path=tmp_path / f"cut-step={cut}.ckpt", callbacks=[Overflow(*overflow)])
    assert first.firsts + second.firsts == straight.firsts
    assert (resumed.global_step, resumed.current_epoch) == (whole.global_step, whole.current_epoch)
    assert resumed.skipped_steps == whole.skipped_steps >= len(set(overflow))
    assert_equal(saved(resumed, tmp_path / "resumed.ckpt"), saved(whole, tmp_path / "whole.ckpt"))


class SaveInTheMiddle(Callback):
    """Writes a checkpoint after the second of an accumulation's three micro-batches."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 1 and batch_idx == 4:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("precision", LEVELS)
def test_a_window_that_was_cut_in_the_middle_goes_on(precision, tmp_path):
    options = {"precision": precision, "accumulate_grad_batches": 3}
    straight, whole = fit(6, **options, callbacks=[SaveInTheMiddle(tmp_path / "middle.ckpt")])
    second, resumed = fit(6, **options, ckpt_path=tmp_path / "middle.ckpt")
    assert straight.firsts[5:] == second.firsts
    assert resumed.global_step == whole.global_step
    assert_equal(saved(resumed, tmp_path / "resumed.ckpt"), saved(whole, tmp_path / "whole.ckpt"))


def test_what_lies_before_is_not_read(tmp_path):
    fit(4, callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=4, filename="cut")])
    dataset, counted = Counted(), Counted()
    fit(6, train=shuffled(dataset))
    fit(6, train=shuffled(counted), ckpt_path=tmp_path / "cut.ckpt")
    assert counted.read == dataset.read[16:]


@pytest.mark.parametrize(
    "make",
    [lambda: [data(24)[i : i + 4] for i in range(0, 24, 4)], lambda: {"a": shuffled(), "b": loader(12, shuffle=True)}],
)
def test_other_loaders_are_read_past(make, tmp_path):
    class Summed(Net):
        def training_step(self, batch, batch_idx):
            parts = list(batch.values()) if isinstance(batch, dict) else [batch]
            return sum(Net.training_step(self, part, batch_idx) for part in parts)

    def seeded():
        torch.manual_seed(4)
        return make()

    straight, _ = fit(9, module=Summed(), train=seeded())
    for cut in (2, 5):
        first, _ = fit(
            cut,
            module=Summed(),
            train=seeded(),
            callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=cut, filename=f"cut{cut}")],
        )
        second, _ = fit(9, module=Summed(), train=make(), ckpt_path=tmp_path / f"cut{cut}.ckpt")
        assert first.firsts + second.firsts == straight.firsts
        assert_equal(second.state_dict(), straight.state_dict())


def test_limits_and_cadences_count_the_batches_before_the_cut(tmp_path):
    class Validates(Net):
        def validation_step(self, batch, batch_idx):
            self.firsts.append("v")

    options = {"limit_train_batches": 5, "val_check_interval": 2, "num_sanity_val_steps": 0, "val": loader(4)}
    straight, _ = fit(12, module=Validates(), **options)
    first, _ = fit(
        3,
        module=Validates(),
        **options,
        callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=3, filename="cut", save_on_train_epoch_end=True)],
    )
    second, trainer = fit(12, module=Validates(), ckpt_path=tmp_path / "cut.ckpt", **options)
    assert first.firsts + second.firsts == straight.firsts
    assert trainer.num_training_batches == 5


@pytest.mark.parametrize("cut", [3, 6, 9])
@pytest.mark.parametrize("interval", [1.0, 0.5])
def test_a_validation_that_the_cut_came_before_is_made_up_for(interval, cut, tmp_path):
    class Validates(Net):
        def validation_step(self, batch, batch_idx):
            self.firsts.append("v")
            self.log("val_loss", -float(self.global_step))

    options = {"val_check_interval": interval, "num_sanity_val_steps": 0, "val": loader(4)}
    straight, whole = fit(14, module=Validates(), callbacks=[EarlyStopping("val_loss", patience=1)], **options)
    writer = ModelCheckpoint(tmp_path, every_n_train_steps=cut, filename="cut")
    fit(cut, module=Validates(), callbacks=[writer], **options)
    second, resumed = fit(
        14,
        module=Validates(),
        ckpt_path=tmp_path / "cut.ckpt",
        callbacks=[EarlyStopping("val_loss", patience=1)],
        **options,
    )
    trained = [place for place in straight.firsts if place != "v"]
    begin = straight.firsts.index(trained[cut - 1]) + 1
    assert second.firsts == straight.firsts[begin:]
    assert resumed.callback_metrics["val_loss"] == whole.callback_metrics["val_loss"]


@pytest.mark.parametrize("interval", [1.0, 3])
def test_a_validation_that_wrote_the_file_is_not_made_again(interval, tmp_path):
    class Validates(Net):
        def validation_step(self, batch, batch_idx):
            self.firsts.append("v")

    options = {"val_check_interval": interval, "num_sanity_val_steps": 0, "val": loader(4), "max_epochs": 1}
    writer = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, save_on_train_epoch_end=False)
    straight, _ = fit(-1, module=Validates(), callbacks=[writer], **options)
    for cut in [6] if interval == 1.0 else [3, 6]:
        second, trainer = fit(-1, module=Validates(), ckpt_path=tmp_path / f"step={cut}.ckpt", **options)
        assert second.firsts == ([] if cut == 6 else straight.firsts[straight.firsts.index("v") + 1 :])
        assert (trainer.current_epoch, trainer.global_step) == (1, 6)


def test_a_run_that_goes_on_within_its_first_window_tries_no_validation_again(tmp_path):
    class Tries(Callback):
        tried = 0

        def on_sanity_check_start(self, trainer, module):
            self.tried += 1

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "cut.ckpt")

    for ckpt_path, tried in (None, 1), (tmp_path / "cut.ckpt", 0):
        tries = Tries()
        fit(1, ckpt_path=ckpt_path, val=loader(4), accumulate_grad_batches=2, callbacks=[tries])
        assert tries.tried == tried


def test_the_number_of_batches_stays_the_epochs_while_a_resumed_one_begins(tmp_path):
    fit(4, callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=4, filename="cut")])
    seen = []

    class Looks(Callback):
        def on_train_epoch_start(self, trainer, module):
            seen.append(trainer.num_training_batches)

    fit(7, ckpt_path=tmp_path / "cut.ckpt", callbacks=[Looks()])
    assert seen == [6, 6]


def test_the_end_of_an_epoch_is_the_beginning_of_the_next(tmp_path):
    _, trainer = fit(-1, max_epochs=2, callbacks=[ModelCheckpoint(tmp_path, filename="{epoch}")])
    content = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    assert (content["epoch"], content["global_step"]) == (1, 12)
    assert (content["loops"]["fit"]["epoch"], content["loops"]["fit"]["batch_idx"]) == (2, 0)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    module, resumed = fit(-1, max_epochs=2, ckpt_path=tmp_path / "after.ckpt")
    assert (module.firsts, resumed.current_epoch, resumed.global_step) == ([], 2, 12)
    module, resumed = fit(-1, max_epochs=3, ckpt_path=tmp_path / "after.ckpt")
    assert [place[:2] for place in module.firsts] == [(2, index) for index in range(6)]


@pytest.mark.parametrize("make", [shuffled, lambda: Endless(24)])
@pytest.mark.parametrize("asks", [False, True])
def test_a_stop_behind_the_last_batch_of_an_epoch_leaves_the_next_one_whole(make, asks, tmp_path):
    class Asks(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.should_stop or (asks and trainer.global_step == 12)

    straight, _ = fit(18, train=make())
    first, _ = fit(18 if asks else 12, train=make(), callbacks=[ModelCheckpoint(tmp_path, filename="{epoch}"), Asks()])
    second, _ = fit(18, train=make(), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert first.firsts + second.firsts == straight.firsts
    assert_equal(second.state_dict(), straight.state_dict())


@pytest.mark.parametrize("make", [shuffled, lambda: Endless(24)])
@pytest.mark.parametrize("size", [24, 4])
def test_what_is_saved_before_the_last_batch_of_an_epoch_goes_on_with_it(make, size, tmp_path):
    class Saves(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == last:
                trainer.save_checkpoint(tmp_path / "before.ckpt")

    last = size // 4 - 1
    options = {"limit_train_batches": size // 4} if make is shuffled else {}
    straight, _ = fit(2 * last + 2, train=make() if options else Endless(size), callbacks=[Saves()], **options)
    second, _ = fit(
        2 * last + 2, train=make() if options else Endless(size), ckpt_path=tmp_path / "before.ckpt", **options
    )
    assert [place[:2] for place in second.firsts] == [place[:2] for place in straight.firsts[last:]]


@pytest.mark.parametrize("precision", LEVELS)
def test_after_fit_the_module_and_its_file_hold_full_weights(precision, tmp_path):
    module, trainer = fit(4, precision=precision)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    everything = torch.load(tmp_path / "all.ckpt", weights_only=True)
    weights = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert set(everything) - set(weights) == {
        "optimizer_states",
        "lr_schedulers",
        "amp",
        "callbacks",
        "data",
        "loggers",
        "rng",
    }
    assert_equal(everything["state_dict"], dict(module.state_dict()))
    Net().load_state_dict(weights["state_dict"])


@pytest.mark.parametrize("saved_at", ["O0", "O2"])
@pytest.mark.parametrize("loaded_at", ["O0", "O1", "O2", "O5"])
def test_every_level_goes_on_from_another(saved_at, loaded_at, tmp_path):
    _, trainer = fit(4, precision=saved_at)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module, resumed = fit(8, precision=loaded_at, ckpt_path=tmp_path / "a.ckpt")
    assert resumed.global_step == 8
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_hooks_carry_what_is_the_users(tmp_path):
    class Remembers(Net):
        secret = None

        def on_save_checkpoint(self, checkpoint):
            checkpoint["secret"] = {"words": ["a", 1]}

        def on_load_checkpoint(self, checkpoint):
            self.secret = checkpoint["secret"]

    class Counts(Callback):
        calls = 0
        loaded = None

        def on_train_batch_end(self, *args):
            self.calls += 1

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state_dict):
            self.calls = state_dict["calls"]

        def on_save_checkpoint(self, trainer, module, checkpoint):
            checkpoint["by_callback"] = trainer.global_step

        def on_load_checkpoint(self, trainer, module, checkpoint):
            self.loaded = checkpoint["by_callback"]

    class Data(DataModule):
        position = 0

        def train_dataloader(self):
            return shuffled()

        def state_dict(self):
            return {"position": 7}

        def load_state_dict(self, state_dict):
            self.position = state_dict["position"]

    trainer = quiet_trainer(max_steps=4, callbacks=Counts())
    trainer.fit(Remembers(), datamodule=Data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module, counts, datamodule = Remembers(), Counts(), Data()
    quiet_trainer(max_steps=6, callbacks=counts).fit(module, datamodule=datamodule, ckpt_path=tmp_path / "a.ckpt")
    assert module.secret == {"words": ["a", 1]}
    assert (counts.calls, counts.loaded, datamodule.position) == (6, 4, 7)
    assert Remembers.load_from_checkpoint(tmp_path / "a.ckpt").secret == {"words": ["a", 1]}


def test_user_state_that_a_checkpoint_cannot_hold(tmp_path):
    class Wrong(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {"thing": object()}

    _, trainer = fit(1, module=Wrong(), enable_checkpointing=False)
    with pytest.raises(CheckpointError, match=r"mine.*thing.*object"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_best_and_last_stand_for_files(tmp_path):
    class Scores(Net):
        def validation_step(self, batch, batch_idx):
            self.log("score", [3.0, 1.0, 2.0][self.current_epoch])
            self.log("weight", self.net[0].weight.sum())

    options = {"max_epochs": 3, "enable_checkpointing": True}
    trainer = quiet_trainer(
        **options, callbacks=ModelCheckpoint(tmp_path, "{epoch}", "score", save_last=True, save_top_k=2)
    )
    module = Scores()
    trainer.fit(module, shuffled(), loader(4))
    assert trainer.checkpoint_callback.best_model_path.endswith("epoch=1.ckpt")
    best = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["state_dict"]
    last = {name: value.clone() for name, value in module.state_dict().items()}

    class Reads(Scores):
        def validation_step(self, batch, batch_idx):
            self.log("weight", self.net[0].weight.sum())

        test_step = validation_step

    for path, state in (("best", best), ("last", last), ("best", best)):
        for method in (trainer.validate, trainer.test):
            (result,) = method(Reads(), loader(4), ckpt_path=path, verbose=False)
            assert result["weight"] == pytest.approx(float(state["net.0.weight"].sum()))
    trainer.fit(module, shuffled(), loader(4), ckpt_path="last")
    assert (trainer.current_epoch, trainer.global_step) == (3, 18)


def test_the_default_checkpoint_callback_stays_for_what_follows(tmp_path):
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=True)
    module = Classifier()
    trainer.fit(module, loader(8), loader(4))
    path = trainer.checkpoint_callback.best_model_path
    assert path.startswith(str(tmp_path))
    for _ in range(2):
        trainer.test(module, loader(4), ckpt_path="best", verbose=False)
        trainer.validate(module, loader(4), ckpt_path="best", verbose=False)
    assert trainer.checkpoint_callback.best_model_path == path


def test_early_stopping_goes_on_counting(tmp_path):
    class Flat(Net):
        def training_step(self, batch, batch_idx):
            self.log("flat", 1.0, on_epoch=True, on_step=False)
            return super().training_step(batch, batch_idx)

    _, trainer = fit(-1, max_epochs=3, module=Flat(), callbacks=[EarlyStopping("flat", patience=4)])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    _, resumed = fit(
        -1, max_epochs=20, module=Flat(), callbacks=[EarlyStopping("flat", patience=4)], ckpt_path=tmp_path / "a.ckpt"
    )
    assert resumed.current_epoch == 5


class Configured(TrainingModule):
    def __init__(self, width, *, lr=0.1, names=("a", "b"), options=None):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(8, width)
        self.late = None

    def configure_model(self):
        if self.late is None:
            self.late = torch.nn.Linear(self.hparams.width, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.late(self.net(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def test_load_from_checkpoint_builds_the_module_anew(tmp_path):
    module = Configured(5, lr=0.2, options={"depth": 2})
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, loader(8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Configured.load_from_checkpoint(tmp_path / "a.ckpt", lr=0.3)
    assert (loaded.hparams.width, loaded.hparams.lr, loaded.hparams.options.depth) == (5, 0.3, 2)
    assert_equal(dict(loaded.state_dict()), dict(module.state_dict()))
    with pytest.raises(CheckpointError, match="does not fit the model of this Classifier"):
        Classifier.load_from_checkpoint(tmp_path / "a.ckpt", lr=0.3)
    plain = quiet_trainer(max_epochs=1)
    plain.fit(Net(), loader(8))
    plain.save_checkpoint(tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match=r"width.*save_hyperparameters"):
        Configured.load_from_checkpoint(tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match="does not fit the model"):
        Configured.load_from_checkpoint(tmp_path / "b.ckpt", width=5)


def test_a_checkpoint_that_does_not_fit_the_optimizers(tmp_path):
    _, trainer = fit(2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    class Without(Net):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    class Grouped(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW([{"params": self.net[0].parameters()}, {"params": self.net[3].parameters()}])
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    with pytest.raises(CheckpointError, match="1 schedulers, configure_optimizers returned 0"):
        fit(4, module=Without(), ckpt_path=tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="does not fit"):
        fit(4, module=Grouped(), ckpt_path=tmp_path / "a.ckpt")


class FailsIn(Classifier):
    """Makes two steps by hand in each micro-batch; raises after the second micro-batch, in a hook or between the steps."""

    def __init__(self, place):
        super().__init__()
        self.automatic_optimization, self.place = False, place

    def fail_in(self, place):
        if self.place == place and self.global_step >= 2:
            raise ValueError(place)

    def training_step(self, batch, batch_idx):
        for part in range(2):
            self.manual_backward(torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
            self.optimizers().step()
            self.optimizers().zero_grad()
            if part == 0:
                self.fail_in("between two steps")


def _failing(name):
    def hook(self, *_):
        self.fail_in(name)

    return hook


FAILING_HOOKS = [
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
]
for _name in FAILING_HOOKS:
    setattr(FailsIn, _name, _failing(_name))


@pytest.mark.parametrize("place", ["between two steps", *FAILING_HOOKS])
def test_a_checkpoint_that_an_exception_left_says_so(place, tmp_path, caplog):
    def fit(place, **options):
        keeper = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_epochs=100, save_last=True)
        trainer = quiet_trainer(max_epochs=1, callbacks=keeper, enable_checkpointing=True, num_sanity_val_steps=0)
        trainer.fit(FailsIn(place), loader(12), loader(4), **options)

    with pytest.raises(ValueError, match=place):
        fit(place)
    assert not caplog.records
    fit("", ckpt_path=tmp_path / "last.ckpt")
    (said,) = [one.message for one in caplog.records if "exception" in one.message]
    assert "may differ from those of a run without the exception" in said
    caplog.clear()
    fit("")
    fit("", ckpt_path="last")  # the file of a training that ended normally
    assert not [one for one in caplog.records if "exception" in one.message]


class Asked(DataModule):
    """Records which loaders are asked for, and draws their samples at random."""

    def __init__(self):
        super().__init__()
        self.asked = []
        self.drawn = {}

    def _loader(self, name):
        self.asked.append(name)
        self.drawn[name] = torch.randperm(24).tolist()
        return DataLoader(torch.utils.data.Subset(data(24), self.drawn[name][:8]), 4)

    def train_dataloader(self):
        return self._loader("train")

    def val_dataloader(self):
        return self._loader("val")

    def state_dict(self):
        return {"seen": 3}

    def load_state_dict(self, state_dict):
        self.asked.append(f"state {state_dict['seen']}")


@pytest.mark.parametrize("sanity", [2, 0])
def test_data_is_asked_in_one_order_in_each_fit_and_has_its_state_before(sanity, tmp_path):
    class Plans(Classifier):
        def configure_optimizers(self):
            self.trainer.datamodule.asked.append("optimizers")
            return super().configure_optimizers()

    def run(max_epochs, path=None):
        torch.manual_seed(5)
        data = Asked()
        trainer = quiet_trainer(max_epochs=max_epochs, num_sanity_val_steps=sanity)
        trainer.fit(Plans(), datamodule=data, ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{max_epochs}.ckpt")
        return data

    first, resumed = run(1), run(2, tmp_path / "1.ckpt")
    loaders = ["val", "train"] if sanity else ["train", "val"]
    assert first.asked == ["optimizers", *loaders]
    assert resumed.asked == ["state 3", "optimizers", *loaders]
    assert resumed.drawn == first.drawn


def test_the_data_has_its_state_where_configure_optimizers_asks_for_the_number_of_steps(tmp_path):
    class Plans(Classifier):
        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches == 2 * self.trainer.max_epochs
            return super().configure_optimizers()

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Plans(), datamodule=Asked())
    trainer.save_checkpoint(tmp_path / "1.ckpt")
    data = Asked()
    quiet_trainer(max_epochs=2).fit(Plans(), datamodule=data, ckpt_path=tmp_path / "1.ckpt")
    assert data.asked.index("state 3") < data.asked.index("train")
