"""What a run on a GPU says of its graphs: errors in a capture, batches that never become one, entries that only hooks read."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from fabricamp import Callback, ConfigError, CudaGraph, TrainingModule
from fabricamp.optimizers import FusedAdam
from tests.gpu.test_cuda_graph import Net, captured, fit, images, same, trainer_of
from tests.inside import captured_evaluations, captured_groups, captured_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# -- errors in a capture -----------------------------------------------------------------------------------------------------------


class OddError(Exception):
    """An error of a user's own."""


class Raising(Net):
    """Raises in the capture of training or validation, in forward or in backward."""

    def __init__(self, where, error):
        super().__init__()
        self.where, self.errors = where, [error]

    def _raise(self, where):
        if where == self.where and torch.cuda.is_current_stream_capturing():
            raise self.errors[0]

    def training_step(self, batch, batch_idx):
        self._raise("forward")
        loss = super().training_step(batch, batch_idx)
        if self.where == "backward":
            loss.register_hook(lambda _: self._raise("backward"))
        return loss

    def validation_step(self, batch, batch_idx):
        self._raise("validation")
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("graph", ["auto", True])
@pytest.mark.parametrize("where", ["forward", "backward", "validation"])
@pytest.mark.parametrize("kind", [OddError, RuntimeError])
def test_an_error_of_the_users_code_ends_the_run_unchanged(kind, where, graph):
    error = kind("shapes cannot be multiplied")
    outer = torch.cuda.current_stream()
    with pytest.raises(kind) as caught:
        fit(graph, module=Raising(where, error), validation=images(14), max_epochs=1)
    assert caught.value is error
    assert error.__cause__ is None
    assert "in _raise" in "".join(traceback.format_tb(error.__traceback__))
    assert torch.cuda.current_stream() == outer
    torch.rand(3, device="cuda")  # the generator is no captured one
    fit(True, max_epochs=1)


def test_an_error_of_the_users_code_in_a_launch_of_several_steps():
    class Second(Net):
        """Raises in the second capture, that of several steps."""

        def __init__(self):
            super().__init__(schedule=False)
            self.captures = []

        def training_step(self, batch, batch_idx):
            if torch.cuda.is_current_stream_capturing():
                self.captures.append(1)
                if len(self.captures) == 3:
                    raise OddError("here")
            return super().training_step(batch, batch_idx)

    trainer = trainer_of(CudaGraph(warmup=4, steps=4), max_epochs=2, log_every_n_steps=0)
    with pytest.raises(OddError, match="here"):
        trainer.fit(Second(), images(30))


class Waits(Net):
    """Waits for the device, but only within a capture, where the eager steps before it have shown nothing."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if torch.cuda.is_current_stream_capturing():
            if self.how == "item":
                loss.item()  # the user's line
            elif self.how == "handled":
                try:
                    loss.item()  # the user's line
                except RuntimeError as error:
                    raise KeyError("no loss") from error
            elif self.how == "synchronize":
                torch.cuda.synchronize()  # the user's line
            elif self.how == "copy":
                torch.zeros(3).to("cuda").sum()  # the user's line
        return loss


@pytest.mark.parametrize("how", ["item", "handled", "synchronize", "copy"])
def test_an_error_of_the_capture_names_the_users_line_and_is_chained(how, caplog):
    with pytest.raises(ConfigError, match="the step does something that cannot be captured at ") as caught:
        fit(CudaGraph(warmup=4), module=Waits(how), max_epochs=1)
    assert f"{__file__}:" in str(caught.value)
    assert "# the user's line" in str(caught.value)
    assert "capturing" in str(caught.value) or "capture" in str(caught.value)
    causes = []
    error = caught.value
    while error.__cause__ is not None:
        error = error.__cause__
        causes.append(error)
    assert isinstance(causes[-1], RuntimeError)
    assert not isinstance(causes[-1], ConfigError)
    assert "# the user's line" in "".join(traceback.format_tb(causes[-1].__traceback__))
    same(*(fit(graph, module=Waits(how), max_epochs=1) for graph in (False, "auto")))
    assert caplog.text.count("cuda_graph='auto' runs eagerly: the step does something that cannot be captured at ") == 1


# -- batches with names beside the tensors -----------------------------------------------------------------------------------------


class Named(Dataset):
    """Images with the names of their files."""

    def __init__(self, batches, last=0):
        self.tensors = images(batches, last=last).dataset.tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        return self.tensors[0][index], self.tensors[1][index], f"{index}.png"


class OfNamed(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[:2], batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch[:2], batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


class Names(Callback):
    def __init__(self):
        self.seen, self.replays = [], 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen.append(tuple(batch[2]))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        assert self.seen[-1] == tuple(batch[2])
        update = captured(trainer)
        if update is not None:
            self.replays = max([self.replays, *(step.replays for step in captured_steps(update).values())])


def named(graph, module=None, **options):
    names = Names()
    loaders = [DataLoader(Named(count, last), batch_size=8) for count, last in ((30, 3), (12, 0))]
    run = fit(graph, module=module or OfNamed(), loader=loaders[0], validation=loaders[1], callbacks=[names], **options)
    return run, names


@pytest.mark.parametrize("graph", ["auto", True])
def test_names_in_batches_are_told_of_once(graph, caplog):
    eager, _ = named(False, max_epochs=2)
    assert "hook_entries" not in caplog.text
    run, names = named(graph, max_epochs=2)
    same(eager, run)
    assert names.replays == 0
    lines = [line for line in caplog.messages if "hook_entries" in line]
    assert [line.split(":")[0] for line in lines] == ["training_step", "validation_step"]
    assert "batches differ in batch[2] (tuple), each combination needs a graph" in lines[0]


@pytest.mark.parametrize("precision", ["O0", "O2"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_with_hook_entries_they_are_replayed_and_hooks_see_all(precision, accumulate):
    options = {"precision": precision, "accumulate_grad_batches": accumulate, "max_epochs": 3}
    eager, expected = named(False, **options)
    for graph in (CudaGraph(warmup=4, hook_entries=[2]), CudaGraph(warmup=4, hook_entries=[-1], check_every=3)):
        run, names = named(graph, **options)
        same(eager, run)
        assert names.seen == expected.seen
        assert names.replays > 10


def test_an_evaluation_with_hook_entries():
    module = OfNamed()
    expected = trainer_of(False).predict(module, DataLoader(Named(12, 3), batch_size=8))
    for loader in (DataLoader(Named(12, 3), batch_size=8), images(12, last=3)):  # the second has no names
        trainer = trainer_of(CudaGraph(warmup=4, hook_entries=[2], check_every=3))
        for one, other in zip(expected, trainer.predict(module, loader), strict=True):
            assert torch.equal(one, other)
        (evaluation,) = captured_evaluations(trainer)
        assert evaluation.seen.captured


@pytest.mark.parametrize("name", ["use", "return"])
def test_a_step_that_reads_or_returns_an_entry_of_the_hooks(name):
    class Reads(OfNamed):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if name == "return":
                return {"loss": loss, "names": batch[2]}
            return loss * (1 + len(batch[2][0]))

    words = {
        "use": "the step uses an entry of the batch that CudaGraph",
        "return": "the step returns an entry of the batch",
    }
    with pytest.raises(ConfigError, match=words[name]):
        named(CudaGraph(warmup=4, hook_entries=[2]), Reads(), max_epochs=1)
    runs = [
        named(graph, Reads(), max_epochs=2)[0]
        for graph in (False, CudaGraph(warmup=4, hook_entries=[2], required=False))
    ]
    same(*runs)
    assert words[name] in captured(runs[1][0]).why_eager


def test_an_entry_that_no_batch_has_is_an_error():
    with pytest.raises(ConfigError, match="names 'path', and the batch has no such entry .it is a list of 3"):
        named(CudaGraph(warmup=4, hook_entries=["path"]), max_epochs=1)


def test_several_steps_a_launch_with_hook_entries():
    class Plain(TrainingModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Linear(64, 10)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0].flatten(1)), batch[1])

        def configure_optimizers(self):
            return FusedAdam(self.parameters())

    weights = []
    for graph in (False, CudaGraph(warmup=4, steps=4, hook_entries=[2])):
        module = Plain()
        trainer = trainer_of(graph, max_epochs=3, log_every_n_steps=0)
        grouped = []
        if graph:

            class Look(Callback):
                def on_train_epoch_end(self, trainer, module):
                    grouped.append(sum(group.replays for group in captured_groups(captured(trainer)).values()))

            trainer.callbacks.append(Look())
        trainer.fit(module, DataLoader(Named(32), batch_size=8))
        weights.append([one.clone() for one in module.parameters()])
    assert grouped[-1] > 10
    assert all(map(torch.equal, *weights))


# -- strides and shapes ------------------------------------------------------------------------------------------------------------


class Transposed(Dataset):
    """Batches of one shape, each second one transposed."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(64, 64, generator=generator)
        return (x.t() if index % 2 else x), torch.randint(0, 10, (64,), generator=generator)


class OfSquares(Net):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x @ x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)


@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O5"])
def test_batches_whose_strides_change_have_the_bits_of_eager_ones(precision):
    class Look(Callback):
        def on_train_epoch_end(self, trainer, module):
            self.replays = [step.replays for step in captured_steps(captured(trainer)).values()]

    look = Look()

    def run(graph):
        loader = DataLoader(Transposed(), batch_size=None)
        callbacks = [look] if graph else []
        return fit(graph, precision, OfSquares(), loader, loader, max_epochs=2, callbacks=callbacks)

    eager = run(False)
    for graph in (CudaGraph(warmup=4), CudaGraph(warmup=4, check_every=5)):
        same(eager, run(graph))
        assert len(look.replays) == 2  # a graph for each layout
        assert min(look.replays) > 20


def test_a_run_that_is_too_short_says_so_at_its_end(caplog):
    fit(True, max_epochs=1, loader=images(6))
    (line,) = [line for line in caplog.messages if "every training_step ran eagerly" in line]
    assert "a step is captured at batch 11 of a shape, and the run had 6 batches of 1 shape" in line
    caplog.clear()
    fit(True, max_epochs=1)
    assert "ran eagerly" not in caplog.text


def test_a_shape_too_many_is_told_of_once(caplog):
    fit(CudaGraph(warmup=4, shapes=1), module=Net(), loader=images(30, last=3), max_epochs=6)
    lines = [line for line in caplog.messages if "allows no further graph" in line and line.startswith("training_step")]
    assert len(lines) == 1
    assert "for batches (3, 1, 8, 8), (3,) and other new shapes: CudaGraph(shapes=1)" in lines[0]
