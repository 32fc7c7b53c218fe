"""What a run logs about CUDA graphs: why steps stay eager, what a capture raised, which entries of a batch only hooks read."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from concurrent.futures import Future
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from fabricamp import Callback, ConfigError, CudaGraph
from fabricamp.engine.graph import refusals
from fabricamp.engine.graph.batches import (
    BatchIndex,
    HookEntry,
    NotCapturableError,
    constants_of,
    copied,
    refuse_placeholders,
    signature,
    tensors_of,
    view_of,
)
from fabricamp.engine.graph.capture_errors import explained_errors, reason_of_failure
from fabricamp.engine.graph.seen_batches import SeenBatches
from fabricamp.optimizers.refusals import UnsupportedError
from tests.small import Classifier, loader, quiet_trainer

# -- why steps stay eager ----------------------------------------------------------------------------------------------------------


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class WithLBFGS(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


class Middle(Callback):
    def on_after_backward(self, trainer, module):
        """Looks."""


class Overridden(Classifier):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
        super().optimizer_step(epoch, batch_idx, optimizer, closure)


def said(caplog):
    return [line for line in caplog.messages if "cuda_graph" in line or "CudaGraph" in line or "CUDA graph" in line]


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (Manual, {}, "manual optimization is not captured"),
        (WithLBFGS, {}, "LBFGS runs the forward itself"),
        (Classifier, {"callbacks": [Middle()]}, "on_after_backward runs in the middle of a step"),
        (Overridden, {}, "optimizer_step runs in the middle of a step"),
    ],
)
@pytest.mark.parametrize("shows", [True, False])
def test_auto_says_once_why_it_stays_eager(module, options, words, shows, caplog, monkeypatch):
    """Also if bar and summary are switched off, as in many scripts."""
    monkeypatch.setattr(refusals, "reason_against", lambda *_: "")  # as on a GPU
    options = {**options, "enable_progress_bar": shows, "enable_model_summary": shows}
    quiet_trainer(cuda_graph="auto", max_epochs=2, **options).fit(module(), loader(), loader())
    (line,) = said(caplog)
    assert line.startswith(f"cuda_graph='auto' runs eagerly: {words}")


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_on_a_cpu_each_entry_point_says_it_once(name, caplog):
    trainer = quiet_trainer(cuda_graph="auto", max_epochs=2)
    module = Tested()
    data = [loader(), loader()] if name == "fit" else [[loader(), loader()]]
    getattr(trainer, name)(module, *data)
    (line,) = said(caplog)
    assert "a CUDA graph needs a CUDA GPU, and this run is on 'cpu'; give accelerator='gpu'" in line
    assert quiet_trainer(max_epochs=1).fit(module, loader()) is None
    assert len(said(caplog)) == 1  # a run without cuda_graph logs nothing about graphs


class Tested(Classifier):
    __test__ = False

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", Classifier.training_step(self, batch, batch_idx))

    def test_step(self, batch, batch_idx, dataloader_idx=0):  # noqa: PT028 - of a module
        self.log("test_loss", Classifier.training_step(self, batch, batch_idx))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch[0]


def test_trials_of_the_tuner_say_nothing(caplog):
    from fabricamp.tuner import Tuner

    trainer = quiet_trainer(cuda_graph="auto", max_epochs=1)
    Tuner(trainer).lr_find(WithRate(), loader(), num_training=4)
    assert not said(caplog)


class WithRate(Classifier):
    def __init__(self):
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


# -- batches that are seen ---------------------------------------------------------------------------------------------------------


def seen(**options):
    lines = []
    return SeenBatches("training_step", CudaGraph(**options), lines.append), lines


def count(one, *batches):
    return [one.counts(signature(batch), batch) for batch in batches]


def images(*beside, size=2):
    return (torch.zeros(size, 3), torch.zeros(size), *beside)


def test_other_strings_in_each_batch_are_named_once():
    one, lines = seen(shapes=3)
    batches = [
        images({"path": [f"{number}.png"], "split": "train"}, number, size=2 + number % 2) for number in range(9)
    ]
    count(one, *batches[:3])
    assert not lines
    count(one, *batches[3:])
    one.end()
    (line,) = lines
    assert "batches differ in batch[2]['path'] (tuple), batch[3] (int), each combination needs a graph" in line
    assert "CudaGraph(shapes=3) allows 3" in line
    assert "name it in CudaGraph(hook_entries=[...])" in line


def test_a_few_values_that_come_again_are_no_reason():
    one, lines = seen(shapes=2, warmup=4)
    count(one, *[images(flag) for flag in (True, False) * 4])
    one.end()
    (line,) = lines
    assert "batches ended before all ranks" in line


def test_only_so_many_signatures_are_kept():
    one, lines = seen()
    assert all(count(one, *[images(number) for number in range(1000)]))
    assert count(one, images(1000), images(7)) == [False, True]
    assert len(lines) == 1


def test_a_shape_too_many_is_named_once():
    one, lines = seen(shapes=1)
    one.note_full(images())
    one.note_full(images(size=5))
    assert len(lines) == 1
    assert "for batches (2, 3), (2,) and other new shapes: CudaGraph(shapes=1) allows no further graph" in lines[0]


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (0, ""),
        (
            1,
            "every training_step ran eagerly: a step is captured at batch 5 of a shape, and the run had 1 batch of 1 shape;",
        ),
        (4, "the run had 4 batches of 1 shape; give CudaGraph(warmup=...) a smaller number"),
        (6, "the 6 batches ended before all ranks"),
    ],
)
def test_a_run_without_a_graph_says_why_at_its_end(batches, words):
    one, lines = seen(warmup=5)
    count(one, *[images()] * batches)
    one.end()
    assert [words in line for line in lines] == [True] * bool(words)
    one.captured = True
    one.end()
    assert len(lines) == bool(words)


def test_constants_are_named_as_a_user_writes_them():
    batch = {"x": torch.zeros(1), "meta": [["a", "b"], {"index": 1}, None, (torch.zeros(1), "c")], "empty": []}
    assert list(constants_of(batch)) == [
        ("batch['meta'][0]", ("a", "b")),
        ("batch['meta'][1]['index']", 1),
        ("batch['meta'][2]", None),
        ("batch['meta'][3][1]", "c"),
    ]


# -- entries that only hooks read --------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: torch.Tensor
    path: str


def sample(name):
    return {"x": torch.ones(2), "meta": [name, torch.zeros(1)]}


@pytest.mark.parametrize(
    ("make", "entry"),
    [
        (lambda name: (torch.ones(2), name), 1),
        (lambda name: [torch.ones(2), [name, name]], -1),
        (lambda name: Pair(torch.ones(2), name), 1),
        (sample, "meta"),
        (lambda name: MappingProxyType(sample(name)), ("meta", 0)),
        (lambda name: (torch.ones(2), sample(name)), (1, "meta", 0)),
        (lambda name: (torch.ones(2), torch.ones(len(name))), 1),
        (lambda name: (torch.ones(2), SimpleNamespace(name=name)), 1),
    ],
)
def test_batches_that_differ_in_what_hooks_read_have_one_graph(make, entry):
    entries = CudaGraph(hook_entries=[entry]).hook_entries
    batches = [make("a.png"), make("another.png")]
    one, other = (view_of(batch, entries) for batch in batches)
    assert type(one) is type(batches[0])
    assert signature(one) == signature(other)
    assert hash(signature(one)) == hash(signature(other))
    assert signature(copied(one)) == signature(one)
    assert len(tensors_of(one)) == len(tensors_of(other))
    with contextlib.suppress(NotCapturableError):  # for an object that cannot be in a batch
        assert signature(batches[0]) != signature(batches[1])  # the batch itself is unchanged
    assert not any(isinstance(part, HookEntry) for part in (batches[0].values() if "x" in batches[0] else batches[0]))


def test_without_entries_a_batch_is_its_own_view():
    batch = images("a")
    assert view_of(batch, CudaGraph().hook_entries) is batch


@pytest.mark.parametrize(
    ("batch", "entry", "words"),
    [
        (images("a"), 3, "names 3, and the batch has no such entry (it is a tuple of 3); give"),
        (images("a"), "path", "names 'path', and the batch has no such entry (it is a tuple of 3)"),
        (sample("a"), "path", "names 'path', and the batch has no such entry (it is a dict with the keys 'x', 'meta')"),
        (sample("a"), ("meta", 2), "names ('meta', 2), and the batch has no such entry"),
        (sample("a"), ("other", 2), "names ('other', 2), and the batch has no such entry"),
        (torch.zeros(2), 0, "(it is a Tensor)"),
    ],
)
def test_an_entry_that_a_batch_lacks(batch, entry, words):
    entries = CudaGraph(hook_entries=[entry]).hook_entries
    with pytest.raises(ConfigError) as caught:
        view_of(batch, entries)
    assert words in str(caught.value)
    assert view_of(batch, entries, skips_missing=True) is batch


@pytest.mark.parametrize("wrong", ["path", 2, None, [None], [1.0], [True], [()], [("a", True)], {"path": 1}])
def test_entries_are_indices_and_keys(wrong):
    with pytest.raises(
        ConfigError, match=r"CudaGraph\(hook_entries=.* is not allowed; give a list of indices and keys"
    ):
        CudaGraph(hook_entries=wrong)


def test_options_with_entries_are_kept_whole():
    one = CudaGraph(hook_entries=["path", ["meta", 0]], steps=4, warmup=5)
    assert one.hook_entries == (("path",), ("meta", 0))
    assert one.one_by_one() == CudaGraph(hook_entries=[("path",), ("meta", 0)], warmup=5)


@pytest.mark.parametrize(
    "use",
    [
        bool,
        str,
        hash,
        lambda path: path == "a",
        lambda path: f"{path}",
        len,
        list,
        lambda path: path[0],
        lambda path: path.split("."),
        lambda path: torch.zeros(1) * path,
        torch.tensor,
        open,
    ],
)
def test_a_captured_step_that_reads_such_an_entry_is_told_so(use):
    path = view_of(images("a.png"), [(2,)])[2]
    words = r"the step uses .*an entry of the batch that CudaGraph\(hook_entries"
    with pytest.raises(NotCapturableError, match=words), explained_errors():
        use(path)


def test_a_placeholder_does_not_leave_the_step():
    outputs = {"loss": torch.ones(1), "more": [1, "a"]}
    assert refuse_placeholders(outputs) is outputs
    for placeholder, words in ((HookEntry(("path",)), "hook_entries"), (BatchIndex(), "batch_idx")):
        with pytest.raises(NotCapturableError, match=f"the step returns .*{words}"):
            refuse_placeholders({"loss": torch.ones(1), "more": [placeholder]})


# -- strides -----------------------------------------------------------------------------------------------------------------------


def test_batches_of_other_strides_have_other_graphs():
    """A transposed tensor is multiplied by another kernel, so the inputs of a graph have the strides of its batches."""
    square = torch.arange(16.0).view(4, 4)
    images = torch.zeros(2, 3, 4, 4)
    twins = [(square, square.t()), (images, images.to(memory_format=torch.channels_last))]
    for one, other in twins:
        assert signature([one]) != signature([other])
        for batch in (one, other):
            assert copied([batch])[0].stride() == batch.stride()
            assert signature(copied([batch])) == signature([batch])


def test_a_sparse_tensor_has_no_graph():
    with pytest.raises(NotCapturableError, match=r"a tensor of layout torch.sparse_coo, which has no strides"):
        signature([torch.eye(3).to_sparse()])


# -- errors in a capture -----------------------------------------------------------------------------------------------------------


class Ending(torch.cuda.graph):
    """Ends a capture as torch does; ``message`` is the CUDA error that the end raises (none if empty)."""

    def __init__(self, message=""):
        super().__init__(SimpleNamespace(capture_end=self._end), stream=SimpleNamespace())
        self.stream_ctx = contextlib.nullcontext()
        self._message = message

    def __enter__(self):
        pass

    def _end(self):
        if self._message:
            raise RuntimeError(self._message)


BROKEN = "CUDA error: operation failed due to a previous error during capture"
UNJOINED = "CUDA error: capturing stream has unjoined work"
CAPTURING = "CUDA error: operation not permitted when stream is capturing"
STEP = """\
def step(raise_it):
    loss = 1
    raise_it()  # the user's line


def handled(raise_it):
    try:
        raise_it()  # the user's line
    except RuntimeError as error:
        raise KeyError("no such loss") from error
"""


@pytest.fixture
def user(tmp_path):
    """A module of the user's code."""
    spec = importlib.util.spec_from_file_location("train", tmp_path / "train.py")
    (tmp_path / "train.py").write_text(STEP)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def raising(error):
    """Returns a library's function that raises the error; no line of the user's code is involved."""
    future = Future()
    future.set_exception(error)
    return future.result


class OddError(Exception):
    pass


OWN_ERRORS = [
    ValueError("a label below 0"),
    KeyError("x"),
    AssertionError(),
    OddError("?"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x3 and 4x2)"),
    RuntimeError("no frame was captured by the camera"),
    ConfigError("training_step returned a dict"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
]


@pytest.mark.parametrize("end", ["", UNJOINED])
@pytest.mark.parametrize("error", OWN_ERRORS, ids=repr)
def test_an_error_of_the_users_code_passes_unchanged(error, end, user):
    error = copy.copy(error)
    error.__cause__ = cause = LookupError("why")
    with pytest.raises(type(error)) as caught, explained_errors(), Ending(end):
        user.step(raising(error))
    assert caught.value is error
    assert error.__cause__ is cause
    assert error.__context__ is None
    with pytest.raises(type(error)) as caught:
        reason_of_failure(error)
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (RuntimeError(CAPTURING), ""),
        (torch.AcceleratorError(CAPTURING), BROKEN),
        (torch.AcceleratorError(CAPTURING), UNJOINED),
        (
            RuntimeError(
                "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned"
            ),
            "",
        ),
        (RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode."), ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["step", "handled"])
def test_an_error_of_the_capture_names_the_users_line_and_is_its_cause(error, end, name, user):
    error = copy.copy(error)
    with pytest.raises(NotCapturableError) as caught, explained_errors(), Ending(end):
        getattr(user, name)(raising(error))
    assert caught.value.__cause__ is error
    number = {"step": 3, "handled": 8}[name]
    where = f"{user.__file__}:{number}: raise_it()  # the user's line"
    reason = reason_of_failure(caught.value)
    assert reason == f"the step does something that cannot be captured at {where} ({type(error).__name__}: {error})"


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (RuntimeError("CUSOLVER_STATUS_INTERNAL_ERROR"), BROKEN),  # no word of a capture in the error
        (UnsupportedError("the first step of this FusedAdam is inside a CUDA graph's capture"), ""),
    ],
    ids=str,
)
def test_what_a_capture_has_broken_is_no_error_of_the_users(error, end, user):
    with pytest.raises(NotCapturableError, match="cannot be captured at") as caught, explained_errors(), Ending(end):
        user.step(raising(error))
    assert caught.value.__cause__ is error


def test_the_end_of_a_capture_alone():
    words = "cannot be captured .*RuntimeError: CUDA error: operation failed"
    with pytest.raises(NotCapturableError, match=words) as caught, explained_errors(), Ending(BROKEN):
        pass
    assert str(caught.value.__cause__) == BROKEN


def test_what_was_handled_before_the_capture_is_no_part_of_it(user):
    """Tests a program that calls fit again while it handles the error of an earlier fit."""
    error = ValueError("a label below 0")
    try:
        raise RuntimeError(CAPTURING)
    except RuntimeError:
        with pytest.raises(ValueError, match="a label below 0"), explained_errors(), Ending():
            user.step(raising(error))
        with pytest.raises(NotCapturableError, match="previous error"), explained_errors(), Ending(BROKEN):
            pass


def test_other_reasons_pass_the_end_of_a_capture(user):
    for error in (NotCapturableError("training_step reads global_step"), torch.OutOfMemoryError("out of memory")):
        with pytest.raises(type(error)) as caught, explained_errors(), Ending(BROKEN):
            user.step(raising(error))
        assert caught.value is error
    assert "does not fit beside what is allocated" in reason_of_failure(error)
