"""Files with objects where fabricamp is not: plain torch opens them, Lightning validates and resumes from them."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import io
import os
import pickle
import pickletools
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fabricamp import CheckpointError
from fabricamp.checkpoint import closed_pickle, read_checkpoint, read_header, write_checkpoint
from fabricamp.checkpoint.objects import ObjectRef
from fabricamp.checkpoint.packing import pack_objects
from fabricamp.checkpoint.search import Candidates
from fabricamp.commands.export import export
from fabricamp.errors import CheckpointObjectsError
from tests.checkpoint.test_checkpoint_objects import Encoder, Hostile, Loss, Marked, changed
from tests.checkpoint.test_lightning_names import check_that_it_came_back, write_pickle
from tests.lightning.forked_door import run_forked

ROOT = Path(__file__).parents[2]
EARLIER = Path(__file__).parent / "files_with_objects" / "0.2.0.ckpt"

MODEL = """
    import torch
    import lightning.pytorch as pl
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import AttributeDict
    from torch.utils.data import DataLoader, TensorDataset

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, prediction):
            self.seen += 1
            return (prediction * self.scale.sum()).square().mean()

    class Options:
        def __init__(self):
            self.stage, self.kind, self.more = TrainerFn.FITTING, pl.LightningModule, AttributeDict(width=3)

    class Net(pl.LightningModule):
        def __init__(self, loss, options, lr=0.1):
            super().__init__()
            self.save_hyperparameters()
            self.loss = loss
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.loss(self.layer(batch[0]))

        def validation_step(self, batch, batch_idx):
            self.log("v", self.layer(batch[0]).sum())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), self.hparams.lr)

        def on_save_checkpoint(self, checkpoint):
            checkpoint["added"] = {"options": self.hparams.options, "view": (Options, torch.arange(4.0)[1:3])}

        def on_load_checkpoint(self, checkpoint):
            self.added = checkpoint["added"]

    class Counts(pl.Callback):
        def __init__(self):
            self.count = torch.zeros((), dtype=torch.int64)

        def on_train_batch_end(self, *_):
            self.count = self.count + 1

        def state_dict(self):
            return {"options": Options(), "count": self.count}

        def load_state_dict(self, state):
            self.loaded = type(state["options"])
            self.count = state["count"]

    def data():
        return DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2)), batch_size=2)

    def trainer(**options):
        return pl.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[Counts()], **options,
        )
"""
WRITES = """
    import sys, torch
    from model import Loss, Net, Options, data, trainer
    torch.manual_seed(0)
    net, runs = Net(Loss(), Options()), trainer(max_epochs=1)
    runs.fit(net, data(), data())
    runs.save_checkpoint(sys.argv[1])
"""
BLOCKS = """
    import sys

    class Blocks:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "fabricamp":
                raise ModuleNotFoundError("fabricamp is blocked here")

    sys.meta_path.insert(0, Blocks())
"""
OPENS = """
    import blocks, sys, torch
    content = torch.load(sys.argv[1], weights_only=False)
    from model import Loss, Net, Options, TrainerFn, pl
    loss, options = (content["hyper_parameters"][key] for key in ("loss", "options"))
    assert type(loss) is Loss and loss.seen.item() == 4 and type(loss.scale) is torch.nn.Parameter
    assert loss.scale.data_ptr() == content["state_dict"]["loss.scale"].data_ptr()
    assert type(options) is Options and options.stage is TrainerFn.FITTING and options.kind is pl.LightningModule
    assert type(options.more) is pl.utilities.AttributeDict and options.more.width == 3
    assert content["added"]["options"] is options
    kind, view = content["added"]["view"]
    assert kind is Options and view.tolist() == [1, 2]
    assert type(content["callbacks"]["Counts"]["options"]) is Options
    assert not [name for name in sys.modules if name.partition(".")[0] == "fabricamp"]
"""
RESUMES = """
    import blocks, sys, torch
    from model import Loss, Net, Options, data, trainer, pl
    path = sys.argv[1]
    net = Net.load_from_checkpoint(path, weights_only=False)
    assert type(net.loss) is Loss and type(net.added["options"]) is Options and net.hparams.lr == 0.1
    expected = trainer().validate(net, data())
    other = Net(Loss(), Options())
    assert trainer().validate(other, data(), ckpt_path=path, weights_only=False) == expected
    further = trainer(max_epochs=2)
    resumed = Net(Loss(), Options())
    further.fit(resumed, data(), data(), ckpt_path=path, weights_only=False)
    assert (further.global_step, further.callbacks[0].count.item(), further.callbacks[0].loaded) == (8, 8, Options)
    assert resumed.loss.seen.item() == 8
    further.save_checkpoint(sys.argv[2])
    assert not [name for name in sys.modules if name.partition(".")[0] == "fabricamp"]
"""
RUNS_NEXT = """
    import runpy
    sys.argv[:] = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert not [name for name in sys.modules if name.partition(".")[0] == "fabricamp"]
"""
BACK = """
    import sys, torch
    from model import Loss, Net, Options, data, trainer
    net, runs = Net(Loss(), Options()), trainer(max_epochs=3)
    runs.fit(net, data(), data(), ckpt_path=sys.argv[1], weights_only=False)
    assert (runs.global_step, net.loss.seen.item(), type(net.added["options"])) == (12, 12, Options)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script in a folder with the model; by the door of Lightning's scripts, or with Lightning and without fabricamp."""
    for name, text in {"model": MODEL, "blocks": BLOCKS}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))

    def run(script, *arguments, door):
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        if door:
            run_forked(tmp_path, "script.py", *arguments)
            return
        path = [lightning_folder(), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, "script.py", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr

    return run


def lightning_folder():
    spec = importlib.util.find_spec("lightning")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package lightning")
    return str(Path(spec.origin).parents[1])


def test_lightning_goes_on_from_files_of_the_alias_without_fabricamp_and_we_from_lightnings(run, tmp_path):
    """torch opens one; Lightning loads, validates and resumes, and makes the round trip of test_lightning_names.py.

    All in one interpreter, because Lightning's import takes longer than everything else.
    """
    lightning_folder()
    run(WRITES, "ours.ckpt", door=True)
    round_trip = write_pickle(tmp_path)
    run(OPENS + RESUMES + RUNS_NEXT, "ours.ckpt", "theirs.ckpt", *map(str, round_trip), door=False)
    run(BACK, "theirs.ckpt", door=True)
    check_that_it_came_back(tmp_path)


# -- the same without Lightning --------------------------------------------------------------------------------------------------


def names_in(path):
    with zipfile.ZipFile(path) as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    return {argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}


def a_state():
    loss = Loss()
    whole = torch.arange(6.0)
    marked = Marked(whole[4:])
    shared = Fraction(1, 3)
    return {
        "state_dict": {"weight": loss.weight.detach()},
        "hyper_parameters": {"loss": loss, "net": nn.Linear(2, 1), "ratio": shared},
        "added": [Encoder([shared, whole[2:4], marked]), np.float64(2.5), b"bytes", Loss, (shared, loss)],
    }


def test_the_file_names_no_function_of_ours(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", pack_objects(a_state()))
    found = names_in(tmp_path / "a.ckpt")
    assert not [name for name in found if name.startswith("fabricamp")]
    assert {"fractions Fraction", "tests.checkpoint.test_checkpoint_objects Loss"} <= found


def test_plain_torch_sees_what_fabricamp_sees(tmp_path):
    path = tmp_path / "a.ckpt"
    write_checkpoint(path, pack_objects(a_state()))
    for content in (torch.load(path, weights_only=False), read_checkpoint(path, weights_only=False)):
        loss = content["hyper_parameters"]["loss"]
        encoder, number, some, kind, pair = content["added"]
        shared, view, marked = encoder.classes
        assert loss.weight.data_ptr() == content["state_dict"]["weight"].data_ptr()
        assert pair[0] is shared is content["hyper_parameters"]["ratio"]
        assert pair[1] is loss
        assert (type(number), some, kind) == (np.float64, b"bytes", Loss)
        view += 1
        marked += 1
        assert (view.tolist(), marked.tolist(), type(marked)) == ([3, 4], [5, 6], Marked)
        assert view.untyped_storage().data_ptr() == marked.untyped_storage().data_ptr()


def test_types_that_a_reader_allows_open_it_as_any_file_of_torch(tmp_path):
    """darts looks which names a file has, and lets torch load those that are on its list."""
    path = tmp_path / "a.ckpt"
    write_checkpoint(path, pack_objects({"state_dict": {}, "loss": (loss := Loss()), "x": [Encoder([loss.seen])]}))
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    assert "fabricamp" not in str(needed)
    module = "tests.checkpoint.test_checkpoint_objects"
    assert {f"{module}.Loss", f"{module}.Encoder"} <= {*needed}
    with torch.serialization.safe_globals(
        [Loss, Encoder, *map(allowed, {*needed} - {f"{module}.Loss", f"{module}.Encoder"})]
    ):
        assert torch.load(path, weights_only=True)["x"][0].classes[0].tolist() == [0]
        assert read_checkpoint(path)["x"][0].classes[0].tolist() == [0]


def allowed(name):
    module, _, inner = name.rpartition(".")
    return getattr(importlib.import_module(module), inner)


def test_many_objects_and_tensors(tmp_path):
    """Numbers of places beyond one byte, and beyond one batch of pickle's."""
    encoders = [Encoder([torch.full((1,), float(number)), str(number)]) for number in range(1500)]
    state = {"state_dict": {}, "many": encoders, "again": dict(enumerate(encoders))}
    write_checkpoint(tmp_path / "a.ckpt", pack_objects(state))
    for content in (
        torch.load(tmp_path / "a.ckpt", weights_only=False),
        read_checkpoint(tmp_path / "a.ckpt", weights_only=False),
    ):
        assert [one.classes[0].item() for one in content["many"]] == [*range(1500)]
        assert [one.classes[1] for one in content["many"]] == [*map(str, range(1500))]
        assert all(content["again"][number] is one for number, one in enumerate(content["many"]))


def test_an_object_as_deep_as_pickle_writes_it(tmp_path):
    """Pickle's own C code writes chains of 300 and more; its Python code stops below 200."""
    chain = None
    for _ in range(220):
        chain = Encoder(chain)
    write_checkpoint(tmp_path / "a.ckpt", pack_objects({"state_dict": {}, "chain": chain}))
    export(str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt"))
    for content in (
        torch.load(tmp_path / "b.ckpt", weights_only=False),
        read_checkpoint(tmp_path / "b.ckpt", weights_only=False),
    ):
        found = content["chain"]
        for _ in range(220):
            found = found.classes
        assert found is None


def test_the_key_of_the_objects_is_not_in_what_fabricamp_returns(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", pack_objects(a_state()))
    assert read_checkpoint(tmp_path / "a.ckpt", weights_only=False).keys() == a_state().keys()
    assert read_header(str(tmp_path / "a.ckpt")).keys() == {*a_state(), "checksum"} - {"checksum"}


def with_pickle(path, change):
    changed(path, "data.pkl", change)


LAYOUTS = {
    "a length of the head": lambda data: number_in(data, 0, 1 << 40),
    "a length of the objects": lambda data: number_in(data, 1, 1 << 62),
    "a first place": lambda data: number_in(data, 2, 1 << 31),
    "a negative place": lambda data: number_in(data, 2, -1),
    "a number of objects": lambda data: number_in(data, 3, 1 << 31),
    "no such object": lambda data: number_in(data, 3, 0),
    "a name": lambda data: data.replace(b"tests.checkpoint.test_checkpoint_objects.Hostile", b"\xff" * 48, 1),
    "a name of a function outside": lambda data: data.replace(b"state_dictq", b"state_dicto", 1),
    "its end": lambda data: data[:-40],
    "an attribute": lambda data: data[:-1] + b"}b.",
}


def number_in(data, index, value):
    place = data.index(b"\x8a\x08") + 10 * index + 2
    return data[:place] + value.to_bytes(8, "little", signed=True) + data[place + 8 :]


@pytest.mark.parametrize("seal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_is_damage_and_runs_nothing(layout, seal, tmp_path):
    touched = tmp_path / "touched"
    path = tmp_path / "a.ckpt"
    write_checkpoint(path, pack_objects({"state_dict": {"w": torch.ones(2)}, "trap": Hostile(touched)}))
    with_pickle(path, LAYOUTS[layout])
    if not seal:
        with zipfile.ZipFile(path, "a") as archive:
            archive.comment = b""
    for options in ({}, {"weights_only": False}):
        with pytest.raises(CheckpointError, match="damaged|changed") as refused:
            read_checkpoint(path, **options)
        assert not isinstance(refused.value, CheckpointObjectsError)
        assert not touched.exists()


def test_torchs_variable_leaves_what_the_program_allows(tmp_path, monkeypatch):
    """Then no call can allow objects; they are opened only if the program allows all of their types, and never for the header."""
    path = tmp_path / "a.ckpt"
    write_checkpoint(path, pack_objects({"state_dict": {}, "x": Encoder([1])}))
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    for weights_only in (None, False):
        with pytest.raises(CheckpointObjectsError, match=r"Encoder"):
            read_checkpoint(str(path), weights_only=weights_only)
    assert isinstance(read_header(str(path))["x"], ObjectRef)
    with torch.serialization.safe_globals([Encoder]):
        assert read_checkpoint(path) == {"state_dict": {}, "x": Encoder([1])}
        assert isinstance(read_header(str(path))["x"], ObjectRef)


# -- hostile files: torch's other loaders never get them ---------------------------------------------------------------------------


class WritesAFile(torch.nn.Module):
    """TorchScript runs its ``__setstate__`` while it loads, and that writes a file."""

    def __init__(self):
        super().__init__()
        self.x = torch.zeros(1)

    @torch.jit.export
    def __getstate__(self):
        return (self.x, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]):
        self.x = state[0]
        self.training = state[1]
        torch.save(torch.zeros(1, device="cpu"), "written_by_torchscript")

    def forward(self):
        return self.x


READS = {
    "whole": read_checkpoint,
    "without its seal": functools.partial(read_checkpoint, verify=False),
    "mapped": functools.partial(read_checkpoint, verify=False, mapped=True),
    "header": read_header,
    "open": lambda path: read_checkpoint(io.BytesIO(Path(path).read_bytes())),
    "for a resume": lambda path: Candidates([[path]], training=True).next_path(),
}


# torch.load warns before it gives such a file to torch.jit: as an error, the warning would hide what follows.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", READS)
def test_torchscript_in_the_guise_of_a_file_with_objects_runs_nothing(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.jit.save(torch.jit.script(WritesAFile()), "module.pt")
    with zipfile.ZipFile("module.pt") as source, zipfile.ZipFile("a.ckpt", "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, closed_pickle.BEGIN + data[2:] if name.endswith("/data.pkl") else data)
    with contextlib.suppress(CheckpointError):
        READS[how](str(tmp_path / "a.ckpt"))
    assert not Path("written_by_torchscript").exists()


@pytest.mark.parametrize("how", READS)
def test_a_tar_file_before_the_zip_is_not_unpacked(how, tmp_path):
    """torch's oldest loader would open the pipe in it, and wait for a writer."""
    path = tmp_path / "a.ckpt"
    with tarfile.open(path, "w") as tar:
        pipe = tarfile.TarInfo("storages")
        pipe.type = tarfile.FIFOTYPE
        tar.addfile(pipe)
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("m/data.pkl", closed_pickle.BEGIN)
    path.write_bytes(path.read_bytes() + zipped.getvalue())
    with contextlib.suppress(CheckpointError):
        READS[how](str(path))


# -- what is written ---------------------------------------------------------------------------------------------------------------


def test_a_state_that_torch_has_loaded_can_be_written_again(tmp_path):
    path = tmp_path / "a.ckpt"
    write_checkpoint(path, pack_objects({"state_dict": {}, "x": Encoder([1])}))
    loaded = torch.load(path, weights_only=False)
    write_checkpoint(path, pack_objects(loaded))
    assert read_checkpoint(path, weights_only=False) == {"state_dict": {}, "x": Encoder([1])}


def test_references_to_objects_in_another_file_are_refused_beside_objects(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", pack_objects({"state_dict": {}, "x": Encoder([1])}))
    reference = read_header(tmp_path / "a.ckpt")["x"]
    with pytest.raises(CheckpointError, match=r"references of read_header.*put the objects there"):
        write_checkpoint(tmp_path / "b.ckpt", pack_objects({"state_dict": {}, "x": reference, "y": Encoder([2])}))


def test_the_key_of_the_objects_is_no_name_for_a_value(tmp_path):
    path = tmp_path / "a.ckpt"
    with pytest.raises(CheckpointError, match=r"'fabricamp_objects' is fabricamp's own"):
        write_checkpoint(path, pack_objects({"state_dict": {}, "x": Encoder([1]), "fabricamp_objects": [1, 2]}))
    assert not path.exists()


def test_an_ordered_dict_is_written_as_a_dict(tmp_path):
    path = tmp_path / "a.ckpt"
    write_checkpoint(path, collections.OrderedDict(pack_objects({"state_dict": {}, "x": Encoder([1])})))
    assert read_checkpoint(path, weights_only=False)["x"] == Encoder([1])


class Named(torch.Tensor):
    pass


def test_two_dtypes_in_one_memory_are_refused():
    numbers = torch.arange(4.0).as_subclass(Named)
    bits = numbers.view(torch.int32)
    with pytest.raises(CheckpointError, match=r"torch\.float32 and torch\.int32 in the same memory"):
        pack_objects({"state_dict": {}, "x": Encoder([numbers, bits])})


def test_two_dtypes_in_one_memory_are_told_of_the_object_that_has_the_second():
    numbers = torch.arange(4.0).as_subclass(Named)
    state = {"state_dict": {}, "w": Encoder([1]), "x": Encoder([numbers]), "y": Encoder([numbers.view(torch.int32)])}
    with pytest.raises(
        CheckpointError, match=r"^checkpoint\['y'\] is a .*torch\.float32 and torch\.int32 in the same memory"
    ):
        pack_objects({**state, "z": Encoder([2])})


# -- files of 0.2.0 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["as it was written", "exported"])
def test_a_file_of_the_previous_version(path, tmp_path):
    if path == "exported":
        export(str(EARLIER), str(tmp_path / "new.ckpt"))
    path = EARLIER if path != "exported" else tmp_path / "new.ckpt"
    assert isinstance(read_header(str(path))["hyper_parameters"]["net"], ObjectRef)
    with pytest.raises(CheckpointObjectsError, match=r"\['net'\]: torch\.nn\.modules\.linear\.Linear"):
        read_checkpoint(path)
    for content in (read_checkpoint(path, weights_only=False), torch.load(path, weights_only=False)):
        net = content["hyper_parameters"]["net"]
        assert net.weight.data_ptr() == content["state_dict"]["weight"].data_ptr()
        ratios = content["callbacks"]["Mine"]["ratios"]
        marked, shared = content["callbacks"]["Mine"]["marked"]["tensors"]
        assert content["hyper_parameters"]["ratio"] is ratios[0] is shared
        assert ratios == [Fraction(1, 3), Fraction(2)]
        assert (marked.tolist(), marked.note) == ([0, 1, 2], "kept")


def test_damage_in_a_file_of_the_previous_version(tmp_path):
    path = tmp_path / "a.ckpt"
    path.write_bytes(EARLIER.read_bytes().replace(b"fractions\nFraction", b"fractionz\nFraction", 1))
    with pytest.raises(CheckpointError, match="damaged") as refused:
        read_checkpoint(path, weights_only=False)
    assert not isinstance(refused.value, CheckpointObjectsError)
