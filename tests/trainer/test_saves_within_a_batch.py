"""A checkpoint that is written while a batch is in work: a resumed run does that batch, or its accumulation, again."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from fabricamp import TrainingModule
from fabricamp.callbacks import OnExceptionCheckpoint
from fabricamp.data import CombinedLoader, Feed
from fabricamp.rng import isolate_rng
from tests.pairs import pairs
from tests.small import quiet_trainer

BEFORE_BACKWARD = ("on_train_batch_start", "training_step", "on_before_zero_grad")
"""The gradients of the earlier micro-batches are complete, and saved: only the batch in work is done again."""
FROM_BACKWARD = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "an exception")
"""The accumulation is done again from its first micro-batch."""
BETWEEN = ("on_train_batch_end", "on_train_epoch_end", "on_validation_start", "on_validation_end")
"""No batch is in work."""


@pytest.fixture(autouse=True)
def _own_generators():
    with isolate_rng():
        yield


class Own:
    """A loader that keeps its position and knows its length; its numbers tell the pass, and ``draws`` adds noise as it reads."""

    def __init__(self, size, *, draws=False):
        self.size, self.draws = size, draws
        self.done, self.passes, self.loaded = 0, -1, False

    def __len__(self):
        return self.size

    def __iter__(self):
        if not self.loaded:
            self.done = 0
            self.passes += 1
        self.loaded = False
        while self.done < self.size:
            self.done += 1
            noise = torch.rand(1) if self.draws else 0.0
            yield torch.tensor([10.0 * self.passes + self.done]) + noise

    def state_dict(self):
        return {"done": self.done, "passes": self.passes}

    def load_state_dict(self, state):
        self.done, self.passes, self.loaded = state["done"], state["passes"], True


class Unsized(Own):
    __len__ = None


class Stream(IterableDataset):
    __init__, __iter__ = Own.__init__, Own.__iter__
    state_dict, load_state_dict = Own.state_dict, Own.load_state_dict


def plain(size):
    return DataLoader(torch.arange(float(size)).view(size, 1), batch_size=None, shuffle=True)


def torchdatas(size, **options):
    kind = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the package torchdata").StatefulDataLoader
    return kind(torch.arange(float(size)).view(size, 1), batch_size=1, shuffle=True, **options)


def combined(mode, **loaders):
    return CombinedLoader(loaders, mode)


LOADERS = {
    "own": lambda: Own(5),
    "own that draws": lambda: Own(5, draws=True),
    "own without a length": lambda: Unsized(5),
    "a stream": lambda: DataLoader(Stream(5), batch_size=None),
    "torchdata's": lambda: torchdatas(5),
    "torchdata's with its generator": lambda: torchdatas(5, generator=torch.Generator().manual_seed(3)),
    "torchdata's with workers": lambda: torchdatas(5, num_workers=1),
    "torch's": lambda: plain(5),
    "two own": lambda: {"a": Own(3), "b": Own(5, draws=True)},
    "cycle": lambda: {"a": Own(3, draws=True), "b": plain(5)},
    "cycle of torch's": lambda: {"a": plain(3), "b": plain(5)},
    "cycle of a stream": lambda: {"a": DataLoader(Stream(3), batch_size=None), "b": Own(5)},
    "longest": lambda: combined("max_size", a=plain(3), b=Own(5)),
    "longest, own first": lambda: combined("max_size", a=Own(3, draws=True), b=plain(5)),
    "longest of a stream": lambda: combined("max_size", a=DataLoader(Stream(3), batch_size=None), b=Own(5)),
    "longest of torch's": lambda: combined("max_size", a=plain(3), b=plain(5)),
    "shortest": lambda: combined("min_size", a=Own(7), b=plain(5)),
    "in turn": lambda: combined("sequential", a=Own(2), b=plain(1), c=Own(2)),
    "in turn, torch's first": lambda: combined("sequential", a=plain(2), b=Own(3)),
    "torchdata's beside an own": lambda: {"a": torchdatas(3), "b": Own(5)},
}


class Sums(TrainingModule):
    """Its weight tells the batches of each step; saves at ``places``: pairs of hook and (epoch, batch)."""

    def __init__(self, places=(), folder=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.places, self.folder = places, folder
        self.seen, self.saved = [], {}
        self.batch = -1

    def _at(self, hook):
        place = (hook, (self.current_epoch, self.batch))
        if place in self.places and place not in self.saved:
            self.saved[place] = self.folder / f"{hook}-{place[1]}.ckpt"
            self.trainer.save_checkpoint(self.saved[place])

    def on_train_batch_start(self, batch, batch_idx):
        self.batch = batch_idx
        self._at("on_train_batch_start")

    def training_step(self, batch, batch_idx):
        self._at("training_step")
        values = (
            [float(one) for one in batch.values() if one is not None] if isinstance(batch, dict) else [float(batch)]
        )
        self.seen.append((self.current_epoch, batch_idx, values))
        return self.weight.square() * sum(values)

    def on_before_zero_grad(self, optimizer):
        self._at("on_before_zero_grad")

    def on_before_backward(self, loss):
        self._at("on_before_backward")

    def on_after_backward(self):
        self._at("on_after_backward")
        if ("an exception", (self.current_epoch, self.batch)) in self.places:
            raise ArithmeticError

    def on_before_optimizer_step(self, optimizer):
        self._at("on_before_optimizer_step")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self._at("on_train_batch_end")

    def on_train_epoch_end(self):
        self._at("on_train_epoch_end")

    def on_validation_start(self):
        self._at("on_validation_start")

    def on_validation_end(self):
        self._at("on_validation_end")

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def fit(make, module=None, *, seed=1, callbacks=(), **options):
    torch.manual_seed(seed)
    loader = make()
    module = module or Sums()
    ckpt_path = options.pop("ckpt_path", None)
    options = {"max_epochs": 3, "callbacks": list(callbacks), "enable_checkpointing": bool(callbacks), **options}
    options = {"val_check_interval": 2, "num_sanity_val_steps": 0, **options}
    quiet_trainer(**options).fit(module, loader, [torch.zeros(1)], ckpt_path=ckpt_path)
    return module


def check(make, place, path, straight, *, accumulate_grad_batches=1, **options):
    """Resumes from ``path``, and compares batches and weight with those of the uninterrupted run."""
    hook, (epoch, batch) = place
    resumed = fit(make, seed=9, ckpt_path=path, accumulate_grad_batches=accumulate_grad_batches, **options)
    first = (epoch, batch - batch % accumulate_grad_batches if hook in FROM_BACKWARD else batch)
    behind = [one for one in straight.seen if one[:2] > (epoch, batch) or (hook not in BETWEEN and one[:2] >= first)]
    assert resumed.seen == behind, place
    assert torch.equal(resumed.weight, straight.weight), place


HOOKS = tuple(hook for hook in (*BEFORE_BACKWARD, *FROM_BACKWARD, *BETWEEN) if hook != "an exception")
BATCHES = ((0, 0), (1, 0), (1, 1), (1, 4))
"""The first batch of a pass, one within a step of three, and the last one."""


def check_each(kind, places, folder, accumulate, **options):
    """Compares runs resumed from each of ``places``, those that there are, with the uninterrupted run."""
    options["accumulate_grad_batches"] = accumulate
    straight = fit(LOADERS[kind], Sums(places, folder), **options)
    assert straight.saved
    for place, path in straight.saved.items():
        check(LOADERS[kind], place, path, straight, **options)
    return straight


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_batch_is_done_again(kind, accumulate, tmp_path):
    rows = pairs(tuple(LOADERS), HOOKS, BATCHES, (1, 3))
    places = {(hook, batch) for name, hook, batch, number in rows if (name, number) == (kind, accumulate)}
    places.add(("training_step", (1, 1)))  # some rows have a hook that does not run at their batch
    if "workers" in kind:  # which start slowly
        places = {("training_step", (1, 1))}
    straight = check_each(kind, places, tmp_path, accumulate)
    assert torch.equal(straight.weight, fit(LOADERS[kind], accumulate_grad_batches=accumulate).weight), (
        "saving changes it"
    )


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_each_batch_is_done_again(kind, accumulate, tmp_path):
    check_each(kind, {(hook, batch) for hook in HOOKS for batch in BATCHES}, tmp_path, accumulate)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", ["own", "own that draws", "a stream", "torchdata's", "cycle", "two own"])
def test_after_an_exception(kind, accumulate, tmp_path):
    straight = fit(LOADERS[kind], accumulate_grad_batches=accumulate)
    for batch in BATCHES:
        place = ("an exception", batch)
        with contextlib.suppress(ArithmeticError):
            fit(
                LOADERS[kind],
                Sums([place]),
                callbacks=[OnExceptionCheckpoint(tmp_path)],
                accumulate_grad_batches=accumulate,
            )
        check(LOADERS[kind], place, tmp_path / "on_exception.ckpt", straight, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "kind", ["own", "own that draws", "own without a length", "a stream", "torchdata's", "two own"]
)
def test_passes_that_a_limit_ends(kind, accumulate, tmp_path):
    places = [(hook, batch) for hook in ("training_step", "on_after_backward") for batch in ((1, 0), (1, 1), (2, 3))]
    check_each(kind, places, tmp_path, accumulate, limit_train_batches=4)


@pytest.mark.parametrize(
    ("kind", "ahead", "accumulate"),
    pairs(("own", "own that draws", "a stream", "torchdata's", "cycle", "torch's"), (1, 2), (1, 3)),
)
def test_batches_that_were_read_ahead(kind, ahead, accumulate, tmp_path, monkeypatch):
    """Makes the feed prefetch on a CPU as on a GPU."""

    def feed(*args, **options):
        return Feed(*args, **{**options, "prefetch": ahead})

    monkeypatch.setattr("fabricamp.engine.source.Feed", feed)
    places = [(hook, batch) for hook in ("training_step", "on_after_backward") for batch in ((0, 1), (1, 0), (1, 2))]
    check_each(kind, places, tmp_path, accumulate)


@pytest.mark.parametrize("kind", ["own that draws", "a stream", "torchdata's", "cycle", "torch's"])
def test_a_resumed_run_is_cut_in_its_first_batch(kind, tmp_path):
    place = ("on_after_backward", (1, 1))
    straight = fit(LOADERS[kind], Sums([place], tmp_path))
    (tmp_path / "again").mkdir()
    again = fit(LOADERS[kind], Sums([place], tmp_path / "again"), seed=5, ckpt_path=straight.saved[place])
    check(LOADERS[kind], place, again.saved[place], straight)


def test_a_save_before_the_first_batch_of_a_resumed_run(tmp_path):
    """Nothing has been read since the file was loaded, also where that is within the first batch of an epoch."""

    class Early(Sums):
        def on_train_start(self):
            self.trainer.save_checkpoint(tmp_path / "early.ckpt")

    for batch in ((1, 0), (1, 2)):
        place = ("training_step", batch)
        straight = fit(LOADERS["own that draws"], Sums([place], tmp_path))
        fit(LOADERS["own that draws"], Early(), seed=5, ckpt_path=straight.saved[place])
        check(LOADERS["own that draws"], place, tmp_path / "early.ckpt", straight)


@pytest.mark.parametrize("kind", ["own that draws", "a stream", "torchdata's", "cycle", "cycle of torch's", "torch's"])
def test_a_run_that_was_resumed_within_an_accumulation_is_cut_within_it(kind, tmp_path):
    """The accumulation began in an earlier process."""
    first, second = ("on_train_batch_end", (1, 0)), ("on_after_backward", (1, 1))
    options = {"accumulate_grad_batches": 3}
    straight = fit(LOADERS[kind], Sums([first], tmp_path), **options)
    again = fit(LOADERS[kind], Sums([second], tmp_path), seed=5, ckpt_path=straight.saved[first], **options)
    check(LOADERS[kind], second, again.saved[second], straight, **options)


@pytest.mark.parametrize("kind", LOADERS)
def test_an_accumulation_that_does_not_fit_is_computed_again(kind, tmp_path, caplog):
    """With another number of micro-batches per step; the reference begins at the end of the epoch before."""
    places = [("on_train_batch_end", (1, batch)) for batch in (0, 1, 3)]
    between = ("on_train_epoch_end", (0, 4))
    saved = fit(LOADERS[kind], Sums([between, *places], tmp_path), accumulate_grad_batches=3).saved
    for place in places:
        first = place[1][1] // 3 * 3
        for accumulate in (1, 2):
            module = Sums(places[:1], tmp_path / "again")
            resumed = fit(LOADERS[kind], module, seed=5, ckpt_path=saved[place], accumulate_grad_batches=accumulate)
            assert [one[:2] for one in resumed.seen[:2]] == [(1, first), (1, first + 1)]
            reason = f"do not fit this run (accumulate was 3 in the checkpoint and is {accumulate} here)"
            assert f"{reason}: the micro-batches of the step are computed again\n" in caplog.text
            caplog.clear()
            if first == 0:  # where the reference begins
                expected = fit(LOADERS[kind], seed=5, ckpt_path=saved[between], accumulate_grad_batches=accumulate)
                assert resumed.seen == expected.seen
                assert torch.equal(resumed.weight, expected.weight)


@pytest.mark.parametrize("kind", ["own that draws", "a stream", "cycle", "torch's"])
def test_a_save_before_such_an_accumulation_is_computed_again(kind, tmp_path):
    """Nothing has been read since the file was loaded, and neither run can use its gradients."""

    class Early(Sums):
        def on_train_start(self):
            self.trainer.save_checkpoint(tmp_path / "early.ckpt")

    place, between = ("on_train_batch_end", (1, 1)), ("on_train_epoch_end", (0, 4))
    saved = fit(LOADERS[kind], Sums([between, place], tmp_path), accumulate_grad_batches=3).saved
    for accumulate in (3, 2):  # the first one could use them
        fit(LOADERS[kind], Early(), seed=5, ckpt_path=saved[place], accumulate_grad_batches=accumulate)
        resumed = fit(LOADERS[kind], ckpt_path=tmp_path / "early.ckpt", accumulate_grad_batches=2)
        expected = fit(LOADERS[kind], ckpt_path=saved[between], accumulate_grad_batches=2)
        assert resumed.seen == expected.seen
        assert torch.equal(resumed.weight, expected.weight)


def test_a_validation_before_an_accumulation_that_is_computed_again_is_not_repeated(tmp_path):
    class Counts(Sums):
        def on_validation_start(self):
            self.validated_at.append((self.current_epoch, len(self.seen)))

    place = ("on_train_batch_end", (1, 3))
    saved = fit(LOADERS["torch's"], Sums([place], tmp_path), accumulate_grad_batches=3, val_check_interval=3).saved
    module = Counts()
    module.validated_at = []
    fit(LOADERS["torch's"], module, ckpt_path=saved[place], accumulate_grad_batches=2, val_check_interval=3)
    assert [one[:2] for one in module.seen[:2]] == [(1, 3), (1, 4)]
    assert module.validated_at == [(2, 5)]


def test_an_accumulation_that_was_carried_over_is_computed_again_as_far_as_it_can(tmp_path, caplog):
    place = ("on_train_batch_end", (1, 0))
    options = {"partial_window": "carry"}
    saved = fit(LOADERS["torch's"], Sums([place], tmp_path), accumulate_grad_batches=4, **options).saved
    resumed = fit(LOADERS["torch's"], ckpt_path=saved[place], accumulate_grad_batches=3, **options)
    assert resumed.seen[0][:2] == (1, 0)
    assert "computed again, except those of the epoch before: their gradients are dropped\n" in caplog.text
