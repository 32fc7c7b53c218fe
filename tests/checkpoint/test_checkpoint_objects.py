"""Checkpoints with objects: which runs write them, and which calls may run a file's code to rebuild them."""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import random
import sys
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fabricamp import Callback, CheckpointError, ConfigError, DataModule, habits
from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint, read_header, write_checkpoint
from fabricamp.checkpoint.objects import ObjectRef, PickledObjects
from fabricamp.checkpoint.packing import pack_objects
from fabricamp.commands.export import export
from fabricamp.errors import CheckpointObjectsError
from tests.distributed.ranks import run_ranks
from tests.inside import settings
from tests.small import Classifier, loader, quiet_trainer


class Loss(nn.Module):
    """A loss with a parameter, a buffer, and a plain attribute."""

    def __init__(self, scale=2.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, scale, 1.0]))
        self.register_buffer("seen", torch.zeros(1))
        self.reduction = "mean"

    def forward(self, logits, target):
        self.seen += 1
        return nn.functional.cross_entropy(logits, target) * self.weight.mean()


class Encoder:
    def __init__(self, classes):
        self.classes = classes

    def __eq__(self, other):
        return type(other) is Encoder and other.classes == self.classes

    __hash__ = None


class Forecast(Classifier):
    """Like pytorch-forecasting's models: a loss, an encoder and a dataset's parameters are hyper-parameters."""

    def __init__(self, loss=None, encoder=None, dataset_parameters=None, lr=0.1):
        super().__init__(lr)
        self.save_hyperparameters()
        self.loss = loss or Loss()

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[0]), batch[1])


class WithNet(Classifier):
    def __init__(self, net):
        super().__init__()
        self.save_hyperparameters()
        self.net = net


class Statistics(Callback):
    """Its state is an object."""

    def __init__(self):
        self.seen = Encoder([])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.classes.append(trainer.global_step)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@dataclasses.dataclass
class Options:
    encoder: Encoder


class Marked(torch.Tensor):
    """A tensor of another class."""


class Mode(enum.Enum):
    FAST = 1


def forecast():
    return Forecast(Loss(), Encoder(["a", "b"]), {"encoders": {"group": Encoder([3])}, "lengths": (2, 3)})


def trained(*, module=None, checkpoint_objects=True, **options):
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=3, checkpoint_objects=checkpoint_objects, **options)
    module = module or forecast()
    trainer.fit(module, loader())
    return trainer, module


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with objects."""
    trainer, _ = trained(callbacks=[Statistics()])
    trainer.save_checkpoint(tmp_path / "objects.ckpt")
    return tmp_path / "objects.ckpt"


# -- writing -------------------------------------------------------------------------------------------------------------------


def test_torch_load_shows_the_objects_where_lightnings_file_has_them(saved):
    content = torch.load(saved, weights_only=False)
    hparams = content["hyper_parameters"]
    assert isinstance(hparams["loss"], Loss)
    assert hparams["encoder"] == Encoder(["a", "b"])
    assert hparams["dataset_parameters"] == {"encoders": {"group": Encoder([3])}, "lengths": (2, 3)}
    assert content["callbacks"]["Statistics"]["seen"] == Encoder([1, 2, 3])


def test_a_tensor_that_is_in_a_loss_and_in_the_weights_is_in_the_file_once(saved):
    content = torch.load(saved, weights_only=False)
    inside = content["hyper_parameters"]["loss"].weight
    beside = content["state_dict"]["loss.weight"]
    assert inside.untyped_storage().data_ptr() == beside.untyped_storage().data_ptr()
    assert content["hyper_parameters"]["loss"].seen.item() == 3


def test_without_the_switch_objects_stay_names(tmp_path):
    trainer, _ = trained(checkpoint_objects=None)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    content = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    assert content["hyper_parameters"]["loss"] == f"{__name__}.Loss"
    with pytest.raises(CheckpointError, match=r"Encoder.*Trainer\(checkpoint_objects=True\)"):
        trained(checkpoint_objects=None, callbacks=[Statistics()])[0].save_checkpoint(tmp_path / "other.ckpt")


def test_a_state_without_objects_has_the_same_bytes_with_the_switch(tmp_path):
    class Kept(Classifier):
        def __init__(self, mode=Mode.FAST, folder=Path("a"), means=np.ones(2), layers=(1, 2)):  # noqa: B008
            super().__init__()
            self.save_hyperparameters()

    for switch in (True, False):
        torch.manual_seed(0)
        trainer, _ = trained(module=Kept(), checkpoint_objects=switch)
        trainer.save_checkpoint(tmp_path / f"{switch}" / "a.ckpt")
    assert (tmp_path / "True/a.ckpt").read_bytes() == (tmp_path / "False/a.ckpt").read_bytes()


def test_the_switch_is_on_for_scripts_of_lightning(monkeypatch):
    assert not settings(quiet_trainer()).checkpoint_objects
    monkeypatch.setattr(habits, "_present", habits.LIGHTNING)
    assert settings(quiet_trainer()).checkpoint_objects
    assert not settings(quiet_trainer(checkpoint_objects=False)).checkpoint_objects
    with pytest.raises(ConfigError, match="checkpoint_objects"):
        quiet_trainer(checkpoint_objects="yes")


def test_what_a_hook_adds_is_saved(tmp_path):
    class Adds(Classifier):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["encoder"] = shared
            checkpoint["list"] = [1, shared, {"mode": Mode.FAST}]
            checkpoint["pair"] = (Mode.FAST, torch.ones(2))
            checkpoint[("a", 1)] = np.float64(2.5)
            checkpoint["by mode"] = {Mode.FAST: 1}

        def on_load_checkpoint(self, checkpoint):
            self.found = checkpoint

    shared = Encoder([1])
    trainer, module = trained(module=Adds())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    quiet_trainer(max_epochs=2).fit(module, loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    found = module.found
    assert found["encoder"] == shared
    assert found["list"][1] is found["encoder"]
    assert found["list"][2]["mode"] is Mode.FAST
    assert found["by mode"] == {Mode.FAST: 1}
    assert found["pair"][0] is Mode.FAST
    assert torch.equal(found["pair"][1], torch.ones(2))
    assert type(found[("a", 1)]) is np.float64


@pytest.mark.parametrize("callback", [ModelCheckpoint, AsyncCheckpoint])
def test_what_cannot_be_pickled_is_refused_by_key_path_and_no_file_is_touched(callback, tmp_path):
    module = Forecast(encoder=lambda x: x)
    before = tmp_path / "epoch=0-step=3.ckpt"
    before.write_bytes(b"an earlier file")
    with pytest.raises(CheckpointError, match=r"checkpoint\['hyper_parameters'\]\['encoder'\] is a .*lambda.*ignore="):
        trained(
            module=module,
            enable_checkpointing=True,
            callbacks=[callback(dirpath=tmp_path, enable_version_counter=False)],
        )
    assert [path.name for path in tmp_path.iterdir()] == [before.name]
    assert before.read_bytes() == b"an earlier file"


def test_the_first_save_says_once_what_a_resume_takes(tmp_path, caplog):
    caplog.set_level("INFO", "fabricamp")
    trainer, _ = trained()
    for number in range(2):
        trainer.save_checkpoint(tmp_path / f"{number}.ckpt")
    lines = [record.getMessage() for record in caplog.records if "weights_only" in record.getMessage()]
    assert len(lines) == 1
    assert "['hyper_parameters']['loss']" in lines[0]


class Draws:
    """Draws random numbers while it is pickled."""

    def __getstate__(self):
        return {"numbers": (torch.rand(1).item(), random.random(), np.random.rand())}


def test_objects_that_draw_random_numbers_do_not_change_the_run(tmp_path):
    def weights(folder, steps, tag=None, **options):
        torch.manual_seed(3)
        module = WithNet(nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 3)))
        module.save_hyperparameters({"tag": tag}, ignore=["net"])
        checkpoint = ModelCheckpoint(folder, every_n_train_steps=1)
        trainer = quiet_trainer(
            max_steps=steps, enable_checkpointing=True, checkpoint_objects=True, callbacks=[checkpoint]
        )
        trainer.fit(module, loader(), **options)
        return module.net[1].weight.detach()

    straight = weights(tmp_path / "straight", 6, Draws())
    assert torch.equal(weights(tmp_path / "without", 6), straight)
    weights(tmp_path / "killed", 3, Draws())
    resumed = weights(tmp_path / "killed", 6, Draws(), ckpt_path="last", weights_only=False)
    assert torch.equal(resumed, straight)


def test_what_torch_pickles_but_does_not_rebuild_is_refused():
    with pytest.raises(CheckpointError, match=r"\['x'\] is a .*Encoder, which cannot be pickled .*UntypedStorage"):
        pack_objects({"x": Encoder(torch.ones(2).untyped_storage())})


def test_the_background_writes_objects_as_they_were_at_the_save(tmp_path):
    """The object and its tensors are those of the snapshot, whatever training does before the thread has written."""
    trainer, module = trained(
        enable_checkpointing=True,
        callbacks=[AsyncCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1), Statistics()],
    )
    for step in (1, 2, 3):
        content = torch.load(tmp_path / f"epoch=0-step={step}.ckpt", weights_only=False)
        assert content["callbacks"]["Statistics"]["seen"].classes in ([*range(1, step)], [*range(1, step + 1)])
        loss = content["hyper_parameters"]["loss"]
        assert loss.seen.item() == step == content["state_dict"]["loss.seen"].item()
    assert trainer.global_step == 3
    assert module.loss.seen.item() == 3


def test_tensors_inside_objects_are_counted_and_copied_like_others():
    from fabricamp.checkpoint.background import HostCopy
    from fabricamp.checkpoint.plain import tensors_in

    loss = Loss()
    sparse = torch.eye(2).to_sparse()
    packed = pack_objects({"state_dict": {"weight": loss.weight}, "objects": [loss, Encoder(sparse)]})
    tensors = {id(tensor) for tensor in tensors_in(packed)}
    assert {id(loss.weight), id(loss.seen), id(sparse)} <= tensors
    copied = HostCopy().take(packed)
    with torch.no_grad():
        loss.weight.zero_()
    write_checkpoint("a.ckpt", copied)
    found = read_checkpoint("a.ckpt", weights_only=False)
    assert found["objects"][0].weight.tolist() == [1, 2, 1] == found["state_dict"]["weight"].tolist()
    assert torch.equal(found["objects"][1].classes.to_dense(), torch.eye(2))


@pytest.mark.parametrize("precision", ["O2", "O3"])
def test_a_half_network_is_saved_in_full_and_without_casts(precision, tmp_path):
    """Inside an object the values are those of ``state_dict``, and no hook of the precision is in the file."""
    net = nn.Linear(8, 3)
    checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1)
    options = {"precision": precision, "max_steps": 1, "checkpoint_objects": True, "enable_checkpointing": True}
    quiet_trainer(callbacks=[checkpoint], **options).fit(WithNet(net), loader())
    content = read_checkpoint(checkpoint.best_model_path, weights_only=False)
    found = content["hyper_parameters"]["net"]
    assert torch.equal(found.weight, content["state_dict"]["net.weight"])
    assert found.weight.dtype is content["state_dict"]["net.weight"].dtype
    assert not [hook for name, hook in vars(found).items() if "forward" in name and hook]
    assert found(torch.ones(1, 8, dtype=found.weight.dtype)).dtype is found.weight.dtype


def test_tensors_keep_views_attributes_and_class():
    whole = torch.arange(6.0)
    marked = nn.Parameter(torch.ones(2))
    marked.note = "kept"
    state = {"state_dict": {}, "all": Encoder([whole, whole[2:4], marked, marked, Marked(whole[4:])])}
    write_checkpoint("a.ckpt", pack_objects(state))
    whole, part, marked, again, other = read_checkpoint("a.ckpt", weights_only=False)["all"].classes
    part += 1
    other += 1
    assert whole.tolist() == [0, 1, 3, 4, 5, 6]
    assert type(other) is Marked
    assert type(marked) is nn.Parameter
    assert marked.note == "kept"
    assert again is marked


# -- reading -------------------------------------------------------------------------------------------------------------------

CALLS = {
    "fit": lambda trainer, path, **options: trainer.fit(forecast(), loader(), ckpt_path=path, **options),
    "validate": lambda trainer, path, **options: trainer.validate(forecast(), loader(), ckpt_path=path, **options),
    "test": lambda trainer, path, **options: trainer.test(forecast(), loader(), ckpt_path=path, **options),
    "predict": lambda trainer, path, **options: trainer.predict(forecast(), loader(), ckpt_path=path, **options),
    "load_from_checkpoint": lambda _, path, **options: Forecast.load_from_checkpoint(path, **options),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", [{}, {"weights_only": None}, {"weights_only": True}])
def test_objects_are_refused_by_key_class_and_argument(call, options, saved):
    with pytest.raises(CheckpointObjectsError, match=r"\['loss'\]: tests\S+Loss.*weights_only=False") as refused:
        CALLS[call](quiet_trainer(max_epochs=2), saved, **options)
    assert isinstance(refused.value, pickle.UnpicklingError)


@pytest.mark.parametrize("call", CALLS)
def test_the_call_allows_objects(call, saved):
    CALLS[call](quiet_trainer(max_epochs=2, callbacks=[Statistics()]), saved, weights_only=False)


def test_the_switch_to_write_allows_nothing_to_be_read(saved, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setattr(habits, "_present", habits.LIGHTNING)
    for call in CALLS.values():
        with pytest.raises(CheckpointObjectsError):
            call(quiet_trainer(max_epochs=2, checkpoint_objects=True), saved)


def test_torchs_variable_takes_the_permission_away(saved, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(CheckpointObjectsError):
        read_checkpoint(saved, weights_only=False)


def test_torchs_variable_keeps_a_file_from_naming_classes_too(tmp_path, monkeypatch):
    class Kept(Classifier):
        def __init__(self, mode):
            super().__init__()
            self.save_hyperparameters()

    trainer, _ = trained(module=Kept(Mode.FAST))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(CheckpointError, match="name this enum"):
        Kept.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=False)


def test_a_wrong_permission_is_refused():
    with pytest.raises(ConfigError, match=r"fit\(weights_only='no'\).*None or True"):
        quiet_trainer().fit(Classifier(), loader(), weights_only="no")


def test_a_module_comes_back_with_its_objects(saved):
    module = Forecast.load_from_checkpoint(saved, weights_only=False)
    assert isinstance(module.hparams.loss, Loss)
    assert module.hparams.loss.reduction == "mean"
    assert module.hparams.encoder == Encoder(["a", "b"])
    assert module.hparams.dataset_parameters["encoders"]["group"] == Encoder([3])


def test_plain_forms_come_back_as_their_classes_without_annotations(tmp_path):
    """As with Lightning's files, which hold objects: weights_only=False allows the file to name classes."""

    class Kept(Classifier):
        def __init__(self, mode, options, folder):
            super().__init__()
            self.save_hyperparameters()

    trainer, _ = trained(module=Kept(Mode.FAST, Options(Encoder([1])), Path("a")))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    hparams = Kept.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=False).hparams
    assert dict(hparams) == {"mode": Mode.FAST, "options": Options(Encoder([1])), "folder": Path("a")}


def test_a_datamodule_comes_back_with_its_objects(tmp_path):
    class Data(DataModule):
        def __init__(self, encoder):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return loader()

    trainer = quiet_trainer(max_epochs=1, checkpoint_objects=True)
    trainer.fit(Classifier(), datamodule=Data(Encoder([1])))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert Data.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=False).hparams.encoder == Encoder([1])
    with pytest.raises(CheckpointObjectsError):
        Data.load_from_checkpoint(tmp_path / "a.ckpt")


def test_types_that_the_program_allows_load_without_permission(tmp_path):
    trainer, _ = trained(module=Classifier(), callbacks=[Statistics()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointObjectsError):
        read_checkpoint(tmp_path / "a.ckpt")
    with torch.serialization.safe_globals([Encoder]):
        assert read_checkpoint(tmp_path / "a.ckpt")["callbacks"]["Statistics"]["seen"] == Encoder([1, 2, 3])


def test_open_files(saved):
    content = io.BytesIO(saved.read_bytes())
    assert isinstance(Forecast.load_from_checkpoint(content, weights_only=False).hparams.loss, Loss)
    with saved.open("rb") as file:
        assert isinstance(Forecast.load_from_checkpoint(file, weights_only=False).hparams.loss, Loss)
    with pytest.raises(CheckpointObjectsError, match="the BytesIO holds objects"):
        Forecast.load_from_checkpoint(content)
    with pytest.raises(FileNotFoundError, match="BytesIO"):  # as in Lightning: fit takes only paths
        quiet_trainer().fit(forecast(), loader(), ckpt_path=content)
    with pytest.raises(CheckpointError, match="the BytesIO is damaged"):
        Forecast.load_from_checkpoint(io.BytesIO(b"text"), weights_only=False)


def test_a_checkpoint_that_the_program_changed_loads_from_memory_alone(saved, tmp_path):
    checkpoint = torch.load(saved, weights_only=False)
    checkpoint["hyper_parameters"]["added"] = 1
    content = io.BytesIO()
    torch.save(checkpoint, content)
    content.seek(0)
    assert read_checkpoint(content, weights_only=False)["hyper_parameters"]["added"] == 1

    (tmp_path / "changed.ckpt").write_bytes(content.getvalue())
    with pytest.raises(CheckpointError, match="was changed after it was written"):
        read_checkpoint(tmp_path / "changed.ckpt", weights_only=False)
    with (tmp_path / "changed.ckpt").open("rb") as file, pytest.raises(CheckpointError, match="was changed"):
        read_checkpoint(file, weights_only=False)


@pytest.mark.parametrize("target", ["copy.ckpt", "copy/"])
def test_an_export_hands_objects_on_without_looking_into_them(target, saved, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delitem(globals(), "Encoder")
        export(str(saved), target)
    found = Forecast.load_from_checkpoint(target.rstrip("/"), weights_only=False)
    assert found.hparams.encoder == Encoder(["a", "b"])


def test_a_header_is_read_without_permission_and_its_objects_stay_closed(saved):
    assert isinstance(read_header(str(saved))["callbacks"]["Statistics"]["seen"], ObjectRef)


# -- forbidden files -----------------------------------------------------------------------------------------------------------


def hostile(path, touched):
    write_checkpoint(path, pack_objects({"state_dict": {}, "trap": Hostile(touched)}))


def test_no_code_runs_without_permission(tmp_path):
    touched = tmp_path / "touched"
    hostile(tmp_path / "ours.ckpt", touched)
    torch.save({"state_dict": {}, "trap": Hostile(touched)}, tmp_path / "others.ckpt")
    for name in ("ours", "others"):
        path = tmp_path / f"{name}.ckpt"
        for call in CALLS.values():
            with pytest.raises(CheckpointObjectsError):
                call(quiet_trainer(max_epochs=1), path)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=True)
        assert not touched.exists()
        read_checkpoint(path, weights_only=False)
        assert touched.exists()
        touched.unlink()


PLACES = {
    "no bytes": lambda: ObjectRef(None, 0),
    "another index": lambda: ObjectRef(PickledObjects(names=["x"]), 5),
    "no number": lambda: ObjectRef(PickledObjects(names=["x"]), "0"),
    "other bytes": lambda: ObjectRef(PickledObjects(torch.ones(3), [], ["x"], ""), 0),
    "no tensors": lambda: ObjectRef(PickledObjects(torch.ones(3, dtype=torch.uint8), None, ["x"], ""), 0),
    "a few bytes again and again": lambda: ObjectRef(
        PickledObjects(torch.ones(1, dtype=torch.uint8).expand(1 << 45), [], ["x"], ""), 0
    ),
    "rows of bytes": lambda: ObjectRef(PickledObjects(torch.ones(2, 2, dtype=torch.uint8), [], ["x"], ""), 0),
    "sparse bytes": lambda: ObjectRef(PickledObjects(torch.ones(3, dtype=torch.uint8).to_sparse(), [], ["x"], ""), 0),
    "places far away": lambda: ObjectRef(
        PickledObjects(
            torch.ones(3, dtype=torch.uint8), [], ["x"], blake2b(b"\1\1\1", digest_size=16).hexdigest(), 1 << 40
        ),
        0,
    ),
    "no names": lambda: ObjectRef(PickledObjects(torch.ones(3, dtype=torch.uint8), [], [1], ""), 0),
}


@pytest.mark.parametrize("weights_only", [None, False])
@pytest.mark.parametrize("place", PLACES)
def test_objects_of_another_layout_are_damage(place, weights_only, tmp_path):
    torch.save({"state_dict": {}, "x": PLACES[place]()}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"a\.ckpt is damaged") as refused:
        read_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only)
    assert not isinstance(refused.value, CheckpointObjectsError)


def test_no_file_puts_an_attribute_in_the_place_of_a_method(tmp_path):
    class Trap:
        def __init__(self, name, own):
            self.name, self.own = name, own

        def __reduce__(self):
            function, parts = self.own.__reduce__()
            return function, parts, {self.name: torch._utils._rebuild_tensor_v2}

    packed = pack_objects({"state_dict": {}, "x": Encoder([1])})
    for name in ("load", "parts", "objects"):
        packed["x"].objects = Trap(name, packed["x"].objects)
        torch.save(packed, tmp_path / "a.ckpt")
        with pytest.raises(CheckpointError, match="damaged"):
            read_checkpoint(tmp_path / "a.ckpt", weights_only=False)
        packed["x"].objects = packed["x"].objects.own


@pytest.mark.parametrize("made", [b"object_at\n)\x81", b"unpickled\n)\x81", b"unpickled\n)R"])
def test_no_file_makes_an_object_without_fields(made, tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "a.ckpt")
    content = b"\x80\x02}(X\x0a\x00\x00\x00state_dict}X\x01\x00\x00\x00xcfabricamp.checkpoint.objects\n" + made + b"u."
    changed(tmp_path / "a.ckpt", "data.pkl", lambda _: content)
    for read in (read_checkpoint, read_header):
        with pytest.raises(CheckpointError, match="damaged"):
            read(str(tmp_path / "a.ckpt"))


def test_what_a_file_says_of_its_objects_does_not_control_the_terminal(tmp_path):
    packed = pack_objects({"state_dict": {}, "x": Encoder([1])})
    packed["x"].objects.names[0] = "\x1b[2J\nall is well"
    torch.save(packed, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointObjectsError, match=r"\['x'\]: \?\[2J\?all is well"):
        read_checkpoint(tmp_path / "a.ckpt")


def changed(path, member, change):
    """Rewrites the zip with ``member`` changed and right checksums."""
    with zipfile.ZipFile(path) as archive:
        members = {one.filename: archive.read(one) for one in archive.infolist()}
        comment = archive.comment
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = comment
        for name, content in members.items():
            archive.writestr(name, change(content) if name.endswith(member) else content)


@pytest.mark.parametrize("keeps_comment", [True, False])
def test_a_damaged_seal_is_seen_before_anything_is_unpickled(keeps_comment, tmp_path):
    """Also with weights_only=False, and for a wrong or a missing checksum footer."""
    touched = tmp_path / "touched"
    path = tmp_path / "a.ckpt"
    write_checkpoint(path, pack_objects({"state_dict": {}, "trap": Encoder(Hostile(touched))}))
    changed(path, "data.pkl", lambda content: content.replace(b"classes", b"CLASSES"))
    if not keeps_comment:
        with zipfile.ZipFile(path, "a") as archive:
            archive.comment = b""
    for options in ({}, {"weights_only": False}):
        with pytest.raises(CheckpointError, match="damaged|changed"):
            read_checkpoint(path, **options)
        assert not touched.exists()


def with_another_name(path):
    """Changes one bit of the file, in the name of the module with a class of its objects."""
    content = path.read_bytes()
    name = f"c{__name__}\nEncoder\n"
    path.write_bytes(content.replace(name.encode(), name.replace("objects", "objectr").encode()))
    assert path.read_bytes() != content


@pytest.fixture
def called(monkeypatch):
    """Calls of the class in the module that :func:`with_another_name` names."""
    calls = []
    module = types.ModuleType(__name__.replace("objects", "objectr"))

    class Called:
        def __new__(cls, *_):
            calls.append("ran")
            return super().__new__(cls)

    module.Encoder = Called
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


@pytest.mark.parametrize("weights_only", [None, False])
@pytest.mark.parametrize("read", [read_checkpoint, read_header])
def test_a_damaged_name_is_damage_and_is_not_called(read, weights_only, called, saved):
    with_another_name(saved)
    with pytest.raises(CheckpointError, match="is damaged") as refused:
        read(str(saved), weights_only=weights_only)
    assert not isinstance(refused.value, CheckpointObjectsError)
    assert not called


def test_damage_in_a_file_of_lightning_is_no_refusal(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.full((8,), 3.0)}, "x": Encoder([1])}, path)
    path.write_bytes(path.read_bytes().replace(torch.tensor([3.0]).numpy().tobytes(), b"ruin", 1))
    with pytest.raises(CheckpointError, match="is damaged") as refused:
        read_checkpoint(path, weights_only=False)
    assert not isinstance(refused.value, CheckpointObjectsError)


@pytest.mark.parametrize("weights_only", [None, False])
def test_threads_that_read_at_once_check_and_refuse_as_one_does(weights_only, saved):
    """torch has one set of allowed types for all threads, so concurrent reads must not take a file for another trainer's."""
    allowed = torch.serialization.get_safe_globals()

    def outcome(_):
        try:
            read_checkpoint(saved, weights_only=weights_only)
        except CheckpointError as error:
            return type(error)
        return None

    with ThreadPoolExecutor(4) as threads:
        outcomes = {*threads.map(outcome, range(24))}
    assert outcomes == {CheckpointObjectsError if weights_only is None else None}
    assert {*torch.serialization.get_safe_globals()} == {*allowed}


def test_the_bytes_have_a_digest_of_their_own(tmp_path):
    touched = tmp_path / "touched"
    packed = pack_objects({"state_dict": {}, "trap": Hostile(touched)})
    packed["trap"].objects.data[-3] ^= 1
    torch.save(packed, tmp_path / "a.ckpt")  # as after `del checkpoint["checksum"]`, and without a footer
    with pytest.raises(CheckpointError, match="the bytes of its objects are not those that were written"):
        read_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert not touched.exists()


def test_a_class_that_is_gone_is_named(saved, monkeypatch):
    monkeypatch.delitem(globals(), "Encoder")
    with pytest.raises(CheckpointObjectsError, match=r"\['encoder'\]: .*cannot be rebuilt here \(AttributeError"):
        read_checkpoint(saved, weights_only=False)


# -- "auto", "last" and "best" ---------------------------------------------------------------------------------------------------


def restarted(folder, word, **options):
    callbacks = [ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1), Statistics()]
    trainer = quiet_trainer(max_epochs=2, enable_checkpointing=True, callbacks=callbacks, checkpoint_objects=True)
    trainer.fit(forecast(), loader(), ckpt_path=word, **options)
    return trainer


@pytest.mark.parametrize("word", ["auto", "last", "best"])
def test_a_refusal_is_not_damage_and_no_older_file_is_taken(word, tmp_path):
    older = quiet_trainer(max_steps=1)
    older.fit(Forecast(), loader())
    older.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(
        max_steps=3, enable_checkpointing=True, callbacks=[checkpoint, Statistics()], checkpoint_objects=True
    )
    trainer.fit(forecast(), loader())
    with pytest.raises(CheckpointObjectsError, match=f"ckpt_path={word!r}" if word != "best" else "step=3"):
        restarted(tmp_path, word)
    trainer = restarted(tmp_path, word, weights_only=False)
    assert trainer.ckpt_path.endswith("step=3.ckpt")
    assert trainer.global_step == 16


def test_damage_in_the_newest_file_is_passed_over_with_permission_too(called, tmp_path, caplog):
    checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(
        max_steps=3, enable_checkpointing=True, callbacks=[checkpoint, Statistics()], checkpoint_objects=True
    )
    trainer.fit(forecast(), loader())
    with_another_name(tmp_path / "epoch=0-step=3.ckpt")
    assert restarted(tmp_path, "auto", weights_only=False).ckpt_path.endswith("step=2.ckpt")
    assert "skipped, trying an older checkpoint" in caplog.text
    assert not called


def test_files_of_lightning_with_objects_stop_auto_too(tmp_path):
    torch.save({"pytorch-lightning_version": "2.6.0", "state_dict": {}, "trap": Encoder([1])}, tmp_path / "z.ckpt")
    with pytest.raises(CheckpointObjectsError, match=r"z\.ckpt holds objects.*Encoder"):
        restarted(tmp_path, "auto")


def test_two_ranks_stop_together_and_go_on_together(tmp_path):
    def ranks():
        def trainer():
            checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
            return quiet_trainer(
                max_steps=3, strategy="ddp", devices=2, enable_checkpointing=True, checkpoint_objects=True,
                callbacks=[checkpoint, Statistics()],
            )  # fmt: skip

        trainer().fit(forecast(), loader())
        with pytest.raises(CheckpointObjectsError, match="ckpt_path='auto'"):
            trainer().fit(forecast(), loader(), ckpt_path="auto")
        resumed = trainer()
        resumed.fit_loop.max_steps = 4
        statistics = resumed.callbacks[-1]
        statistics = next(one for one in resumed.callbacks if isinstance(one, Statistics))
        resumed.fit(forecast(), loader(), ckpt_path="auto", weights_only=False)
        return statistics.seen.classes, resumed.global_step

    assert run_ranks(ranks, 2) == [([1, 2, 3, 4], 4)] * 2


def test_two_ranks_refuse_together_what_cannot_be_pickled(tmp_path):
    def ranks():
        trainer = quiet_trainer(
            max_steps=1, strategy="ddp", devices=2, enable_checkpointing=True, checkpoint_objects=True,
            callbacks=[ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1)],
        )  # fmt: skip
        with pytest.raises(CheckpointError, match=r"\['encoder'\].*cannot be pickled"):
            trainer.fit(Forecast(encoder=lambda x: x), loader())
        return True

    assert run_ranks(ranks, 2) == [True, True]
    assert not [*tmp_path.iterdir()]
