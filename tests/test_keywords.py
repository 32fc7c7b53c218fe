"""Errors for an unknown keyword name the called class and the argument that was probably meant."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc

import pytest
import torch

from fabricamp import Callback, ConfigError, OptLevel, callbacks, loggers, optimizers, profilers, strategies
from fabricamp.callbacks import AsyncCheckpoint, EarlyStopping, ModelCheckpoint
from fabricamp.data import CombinedLoader, DataModule, LengthGroups, ResidentLoader, Sharded
from fabricamp.errors import UnknownArgumentError
from fabricamp.tuner import Tuner

BASES = (Callback, loggers.Logger, profilers.Profiler, strategies.Strategy, torch.optim.Optimizer)
OTHERS = [OptLevel, CombinedLoader, LengthGroups, ResidentLoader, Sharded]
PLUGINS = [
    kind
    for part in (callbacks, loggers, profilers, strategies, optimizers)
    for kind in (getattr(part, name) for name in part.__all__)
    if isinstance(kind, type) and issubclass(kind, BASES) and len(inspect.signature(kind).parameters)
]


def named(kind: type) -> list[str]:
    return [
        one.name
        for one in inspect.signature(kind).parameters.values()
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]


@pytest.mark.parametrize("kind", [*dict.fromkeys(PLUGINS), *OTHERS], ids=lambda kind: kind.__name__)
def test_every_plug_in_names_itself_and_the_nearest_argument(kind):
    # This class checks its options only after the required folder.
    places = ["logs"] if kind is loggers.TensorBoardLogger else []
    for name in named(kind):
        with pytest.raises(
            ConfigError, match=f"^{kind.__name__} has no (argument|option) '{name}z'; did you mean '{name}'"
        ):
            kind(*places, **{f"{name}z": 1})


def test_the_plug_ins_are_those_of_the_package():
    assert {AsyncCheckpoint, loggers.CSVLogger, strategies.DDP, optimizers.FusedSGD, optimizers.LARC} <= set(PLUGINS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AsyncCheckpoint(montior="x"), "AsyncCheckpoint has no argument 'montior'; did you mean 'monitor'?"),
        (
            lambda: strategies.DDPStrategy(find_unused=True),
            "DDPStrategy has no argument 'find_unused'; did you mean 'find",
        ),
        (lambda: ModelCheckpoint(period=2), "ModelCheckpoint has no argument 'period'; write every_n_epochs=2"),
        (lambda: AsyncCheckpoint(period=2), "AsyncCheckpoint has no argument 'period'; write every_n_epochs=2"),
        (lambda: callbacks.ProgressBar(refresh_rate=0), "for none enable_progress_bar=False"),
        (lambda: optimizers.FusedSGD([], learning_rate=0.1), "FusedSGD has no argument 'learning_rate'; write lr=0.1"),
        (
            lambda: Tuner(None).lr_find(None, num_train=9),
            "lr_find has no argument 'num_train'; did you mean 'num_training'?",
        ),
        (
            lambda: Tuner(None).scale_batch_size(None, x=1),
            "scale_batch_size has no argument 'x' (known: model, train_data",
        ),
        (
            lambda: DataModule.from_datasets(batchsize=4),
            "DataModule.from_datasets has no argument 'batchsize'; did you mean 'b",
        ),
        (lambda: callbacks.DivergenceCheck(xyz=1), "DivergenceCheck has no argument 'xyz' (known: every_n_steps)"),
    ],
)
def test_words(call, message):
    with pytest.raises(UnknownArgumentError) as error:
        call()
    assert message in str(error.value)


def test_it_is_a_type_error_too_as_python_has_it():
    with pytest.raises(TypeError):
        EarlyStopping("loss", patiense=3)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'monitor'"):
        EarlyStopping()


class Passing(ModelCheckpoint):
    """A user's class that passes unknown keywords on."""

    def __init__(self, folder: str, **options: object) -> None:
        super().__init__(dirpath=folder, **options)


class Fixed(ModelCheckpoint):
    """A user's class with mistakes in its constructor."""

    def __init__(self, patience: int, *, broken: bool = False) -> None:
        self.patience = patience
        if broken:
            len(3)
        super().__init__(montior="loss")


def test_users_classes_are_named_where_their_caller_is_wrong():
    assert Passing("x", monitor="loss").monitor == "loss"
    with pytest.raises(ConfigError, match="^Passing has no argument 'foldr'; did you mean 'folder'"):
        Passing("x", foldr="y")
    with pytest.raises(ConfigError, match="^Passing has no argument 'montior'; did you mean 'monitor'"):
        Passing("x", montior="loss")
    with pytest.raises(ConfigError, match="^Fixed has no argument 'patiense'; did you mean 'patience'"):
        Fixed(patiense=3)


def test_a_mistake_within_a_constructor_is_its_own():
    with pytest.raises(ConfigError, match="^ModelCheckpoint has no argument 'montior'; did you mean 'monitor'"):
        Fixed(3)
    with pytest.raises(TypeError, match="has no len") as error:
        Fixed(3, broken=True)
    assert not isinstance(error.value, ConfigError)


def test_signatures_and_help_are_those_of_the_class():
    names = list(inspect.signature(ModelCheckpoint).parameters)
    assert names[:3] == ["dirpath", "filename", "monitor"]
    assert list(inspect.signature(AsyncCheckpoint).parameters) == names
    assert list(inspect.signature(Passing).parameters) == ["folder", "options"]
    assert not inspect.signature(Callback).parameters
    # Python 3.13 wraps a long signature.
    shown = "".join(pydoc.plain(pydoc.render_doc(EarlyStopping)).replace("|", "").split())
    assert "EarlyStopping(monitor:'str',min_delta:'float'=0.0,patience" in shown
    assert "def __init__" in inspect.getsource(EarlyStopping.__init__)


def test_copies_and_pickles():
    stopping = EarlyStopping("loss", patience=7)
    assert pickle.loads(pickle.dumps(stopping)).patience == 7
    assert copy.deepcopy(stopping).patience == 7
    assert pickle.loads(pickle.dumps(OptLevel("O2", loss_scale=8.0))).level.loss_scale == 8.0


def test_a_class_with_keywords_of_its_own_making():
    class Marked(Callback):
        def __init_subclass__(cls, *, mark: str, **options: object) -> None:
            super().__init_subclass__(**options)
            cls.mark = mark

    class One(Marked, mark="one"):
        pass

    assert One().mark == "one"
