"""Trainer(performance=...): settings during a run, their restoration, contradictions, and the log line."""

from __future__ import annotations

import contextlib
import gc
from functools import partial

import pytest
import torch

from fabricamp import ConfigError
from fabricamp.engine.performance import PROFILES, as_performance
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


def settings():
    """Returns the process's settings that a profile may change."""
    b = torch.backends
    legacy = None
    with contextlib.suppress(RuntimeError):
        legacy = torch.get_float32_matmul_precision(), b.cudnn.allow_tf32
    places = (b.cuda.matmul, b.mkldnn.matmul, b.cudnn.conv, b.cudnn.rnn)
    collector = gc.get_threshold(), gc.isenabled()
    return legacy, tuple(one.fp32_precision for one in places), b.cudnn.benchmark, collector


class Net(Classifier):
    """Records settings and memory formats during a run, and fails in a given hook."""

    def __init__(self, fails=False):
        super().__init__()
        self.fails = fails
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.conv = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.ConvTranspose2d(4, 3, 2))
        self.seen, self.formats = None, None

    def training_step(self, batch, batch_idx):
        self.seen = settings()
        weights = [one.weight for one in self.conv]
        self.formats = [one.is_contiguous(memory_format=torch.channels_last) for one in weights]
        if self.fails:
            raise ValueError
        images = batch[0].repeat(1, 6).view(-1, 3, 4, 4)
        return super().training_step(batch, batch_idx) + self.conv(images).square().mean()

    def validation_step(self, batch, batch_idx):
        self.seen = settings()


@contextlib.contextmanager
def unchanged():
    before = settings()
    try:
        yield before
    finally:
        assert settings() == before


def fit(performance, module=None, **options):
    module = module or Net()
    quiet_trainer(performance=performance, max_epochs=1, **options).fit(module, loader(8))
    return module


def test_without_one_nothing_is_set():
    with unchanged() as before:
        assert fit(None).seen == before
        assert fit({}).seen == before


def test_max_lasts_as_long_as_the_run():
    with unchanged():
        module = fit("max")
    legacy, places, benchmark, (threshold, enabled) = module.seen
    assert legacy == ("high", True)
    assert (places[0], places[2:]) == ("tf32", ("tf32", "tf32"))
    assert benchmark
    assert (threshold[0], enabled) == (100_000, True)
    assert module.formats == [True, True]
    assert all(one.weight.is_contiguous() for one in module.conv)


def test_safe_leaves_the_bits():
    with unchanged() as before:
        module = fit("safe")
    assert module.seen[:3] == before[:3]
    assert module.seen[3][0][0] == 100_000
    assert all(map(torch.equal, module.parameters(), fit(None).parameters()))


@pytest.mark.parametrize("precision", ["O0", "O2", "O4"])
def test_channels_last_at_half_weights_and_in_a_checkpoint(precision, tmp_path):
    """Weights, masters and states are channels_last too, and a run without the setting resumes from them."""
    module = fit({"channels_last": True}, precision=precision)
    assert module.formats == [True, True]
    assert all(one.weight.is_contiguous() and one.weight.dtype is torch.float32 for one in module.conv)
    plain = fit(None, precision=precision)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-2 if precision != "O0" else 1e-6, rtol=1e-2)
    trainer = quiet_trainer(performance={"channels_last": True}, max_epochs=1, precision=precision)
    trainer.fit(Net(), loader(8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    ends = []
    for performance in ("max", None):
        again = Net()
        options = {"max_epochs": 2, "precision": precision, "performance": performance}
        quiet_trainer(**options).fit(again, loader(8), ckpt_path=tmp_path / "a.ckpt")
        ends.append(again)
    for one, other in zip(*(end.parameters() for end in ends), strict=True):
        torch.testing.assert_close(one, other, atol=1e-2 if precision != "O0" else 1e-6, rtol=1e-2)


def test_weights_that_are_so_already_stay_so():
    module = Net()
    module.conv.to(memory_format=torch.channels_last)
    fit("max", module)
    assert all(one.weight.is_contiguous(memory_format=torch.channels_last) for one in module.conv)


def test_all_comes_back_after_a_failure_and_an_evaluation():
    with unchanged():
        with pytest.raises(ValueError):
            fit("max", Net(fails=True))
        module = Net()
        quiet_trainer(performance="max").validate(module, loader(8), verbose=False)
        assert module.seen[2]


def test_settings_under_their_new_names_come_back_too():
    place = torch.backends.cuda.matmul
    with unchanged():
        before = place.fp32_precision
        place.fp32_precision = "tf32"
        try:
            with unchanged():
                assert fit({"tf32": False}).seen[1][0] == "ieee"
        finally:
            place.fp32_precision = before


def frozen_objects(*, before):
    """Returns the number of frozen objects during a fit and after it; runs in a separate process with its own heap."""

    class Look(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.frozen = gc.get_freeze_count()

    gc.unfreeze()
    if before:
        gc.freeze()
    module = Look()
    fit("safe", module)
    return module.frozen, gc.get_freeze_count()


@pytest.mark.parametrize("before", [False, True])
def test_what_the_process_had_frozen_stays_so(before):
    ((meanwhile, behind),) = run_ranks(partial(frozen_objects, before=before), 1, backend=None)
    assert meanwhile > 0
    assert (behind > 0) is before


CONTRADICTIONS = {
    "benchmark": ({"performance": "max", "benchmark": False}, "benchmark=False contradicts performance='max'"),
    "another way": ({"performance": {"benchmark": False}, "benchmark": True}, "benchmark=True contradicts"),
    "deterministic": (
        {"performance": "max", "deterministic": True},
        "deterministic=True contradicts performance='max'",
    ),
    "warned": ({"performance": "max", "deterministic": "warn"}, "deterministic='warn' contradicts"),
    "products": ({"performance": {"tf32": False, "matmul_precision": "high"}}, "contradict each other"),
    "products too": ({"performance": {"tf32": True, "matmul_precision": "highest"}}, "contradict each other"),
    "misspelt": ({"performance": {"chanels_last": True}}, "did you mean 'channels_last'"),
    "name": ({"performance": "maxx"}, "did you mean 'max'"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_contradicts_it_is_refused(case):
    options, words = CONTRADICTIONS[case]
    with pytest.raises(ConfigError, match=words):
        quiet_trainer(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"performance": "max", "benchmark": True},
        {"performance": "safe", "deterministic": True},
        {"performance": {"tf32": True, "matmul_precision": "medium"}},
        {"performance": {"benchmark": False}, "deterministic": True},
    ],
)
def test_what_agrees_with_it_is_not(options):
    quiet_trainer(**options)


def test_a_line_says_what_was_set(caplog):
    quiet_trainer(performance="max", max_steps=1, enable_model_summary=True).fit(Net(), loader(8))
    line = next(one for one in caplog.messages if "performance" in one)
    assert line == (
        "performance='max': TF32 in convolutions on, matmul precision 'high', cudnn.benchmark on, convolutions channels_last, "
        "garbage collection held off"
    )
    assert as_performance("performance", {}).line == "performance={}: nothing is set"
    assert set(PROFILES) == {"max", "safe"}


def test_a_lazy_convolution_is_left_alone():
    module = Net()
    module.conv = torch.nn.Sequential(torch.nn.LazyConv2d(4, 2), torch.nn.ConvTranspose2d(4, 3, 2))
    performance = as_performance("performance", "max")
    assert performance.convert(module) == [module.conv[1].weight]
