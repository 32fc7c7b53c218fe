"""Configuration files: overrides, interpolation, checks before anything is built, and the copy in the log folder."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fabricamp import ConfigError, DataModule, OptLevel, TrainingModule
from fabricamp.callbacks import EarlyStopping
from fabricamp.cli import main
from fabricamp.config import build_parts, check_config, read_config

BASE = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  callbacks:
    - _target_: fabricamp.callbacks.EarlyStopping
      monitor: val_loss
module:
  _target_: parts_of_config.Net
  width: ${variables.width}
data:
  _target_: parts_of_config.Data
  size: 3
variables:
  width: 8
"""

PARTS = """
from collections.abc import Sequence
from typing import Literal

from fabricamp import DataModule, TrainingModule

built = []

class Net(TrainingModule):
    def __init__(self, width, lr=0.1, inner=None):
        super().__init__()
        built.append(width)
        self.width, self.lr, self.inner = width, lr, inner

class Data(DataModule):
    def __init__(self, size=1, **options):
        super().__init__()
        self.size, self.options = size, options

class Typed(Net):
    def __init__(
        self, width: int, rate: "float | None" = None, act: Literal["relu", "gelu"] | None = None, sizes: Sequence[int] = (),
        name: str = None, betas: "tuple[float, float]" = (0.9, 0.99), flag: bool = False, hidden: "Elsewhere" = None,
    ):
        super().__init__(width % 4)
        self.given = (rate, act, sizes, name, betas, flag, hidden)

class Strict(Net):
    def __init__(self, width, token=""):
        super().__init__(width % 4)

class Passing(Strict):
    def __init__(self, **options):
        super().__init__(**options)

class Unbuildable(Net):
    def __init__(self, width):
        raise KeyError(width)

class Pair:
    def __init__(self, left, right=0):
        self.left, self.right = left, right

NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns a folder with a configuration and the module that it names; it is not the current folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "config.yaml").write_text(BASE)
    (folder / "parts_of_config.py").write_text(PARTS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    sys.modules.pop("parts_of_config", None)


def read(folder, *overrides):
    content = read_config(folder / "config.yaml", overrides)
    check_config(content)
    return content


def test_builds_what_the_file_describes(folder):
    trainer, module, data, ckpt_path = build_parts(read(folder))
    assert isinstance(module, TrainingModule)
    assert isinstance(data, DataModule)
    assert (module.width, module.lr, data.size, ckpt_path) == (8, 0.1, 3, None)
    assert [one.monitor for one in trainer.callbacks if isinstance(one, EarlyStopping)] == ["val_loss"]


def test_overrides_replace_add_and_reach_into_lists(folder):
    content = read(
        folder,
        "trainer.max_epochs=7",
        "module.lr=3e-4",
        "variables.width=16",
        "trainer.callbacks.0.patience=9",
        "data.extra=[1, {a: b}]",
        "ckpt_path=last",
        "trainer.precision={_target_: fabricamp.OptLevel, level: O4}",
        "data.empty=null",
    )
    trainer, module, data, ckpt_path = build_parts(content)
    assert (trainer.max_epochs, module.lr, module.width, ckpt_path) == (7, 3e-4, 16, "last")
    assert data.options == {"extra": [1, {"a": "b"}], "empty": None}
    assert next(one for one in trainer.callbacks if isinstance(one, EarlyStopping)).patience == 9
    assert isinstance(trainer.precision_plugin, OptLevel)


def test_targets_are_built_anywhere_in_the_tree(folder):
    nested = "{_target_: parts_of_config.Pair, left: [{_target_: parts_of_config.Pair, left: 1, right: 2}]}"
    inner = build_parts(read(folder, f"module.inner={nested}")).module.inner
    assert (inner.left[0].left, inner.left[0].right, inner.right) == (1, 2, 0)


def test_the_seed_comes_before_the_module(folder):
    import torch

    build_parts(read(folder, "seed=5"))
    first = torch.rand(3)
    build_parts(read(folder, "seed=5"))
    assert torch.equal(first, torch.rand(3))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_epoch=3", r"trainer\.max_epoch is not known; did you mean 'max_epochs'"),
        ("module.widtth=3", r"module\.widtth is not known; did you mean 'width'"),
        ("trainer.callbacks.0.patiense=3", r"trainer\.callbacks\.0\.patiense is not known; did you mean 'patience'"),
        ("trainr.max_epochs=3", r"'trainr' is not a section of a configuration; did you mean 'trainer'"),
        (
            "module.inner={_target_: parts_of_config.Pair, lefd: 1}",
            r"module\.inner\.lefd is not known; did you mean 'left'",
        ),
        (
            "module.inner={_target_: parts_of_config.Pair}",
            r"module\.inner\.left is missing.*add module\.inner\.left=VALUE",
        ),
        ("trainer.amp_level=O2", r"trainer\.amp_level is not known; write precision='O2'$"),
        (
            "optimizer.lr=0.1",
            r"'optimizer' is not a section of a configuration; the module makes .*: write module\.lr=0\.1$",
        ),
        ("max_epochs=3", r"'max_epochs' is not a section of a configuration; write trainer\.max_epochs$"),
        (
            "trainer.logger={_target_: fabricamp.loggers.TensorBoard, save_dir: x}",
            r"fabricamp\.loggers has no 'TensorBoard'; did you mean 'TensorBoardLogger'\?$",
        ),
        ("module._target_=parts_of_config.Met", r"has no 'Met'; did you mean 'Net'"),
        ("module._target_=part_of_config.Net", r"no module 'part_of_config'.*did you mean 'parts_of_config'"),
        ("module._target_=fabricamp.kallbacks.X", r"fabricamp has no 'kallbacks'; did you mean 'callbacks'"),
        ("module._target_=parts_of_config.NUMBER", r"is a int; name a class or a function"),
        ("module._target_=parts_of_config.Data", r"is not a TrainingModule"),
        ("data._target_=parts_of_config.Net", r"is not a DataModule"),
        ("module._target_=Net", r"is not a dotted name"),
        ("module._target_=3", r"is not a dotted name"),
        ("module=null", r"module has no _target_"),
        ("module=3", r"module=3 is not a mapping"),
        ("data={size: 1}", r"data has no _target_"),
        ("module.width=null", None),
        ("seed=abc", r"seed='abc' is not a whole number"),
        ("seed=true", r"seed=True is not a whole number"),
        ("import_from=src", r"import_from='src' is not a list"),
        ("module.lr=${modle_.width}", r"modle_\.width.*at module\.lr"),
        ("module.lr=???", r"Missing mandatory value: lr"),
        ("module.lr.inner=3", None),
        ("variables.width.inner=3", r"variables\.width is 8, which has no 'inner' below it"),
        ("trainer.callbacks.4.patience=3", r"trainer\.callbacks has 1 element"),
        ("trainer.callbacks.first.patience=3", r"trainer\.callbacks has 1 element"),
        ("module.lr=[1", r"cannot be read as YAML"),
        ("trainer.precision", r"is not an override; write key=value"),
        ("--trainer.precision=O1", r"as in trainer\.precision=O1"),
        ("--max_epochs=4", r"as in trainer\.max_epochs=4"),
        ("=O1", r"is not an override"),
        ("trainer.precision =O1", r"without spaces"),
    ],
)
def test_mistakes_are_told_before_anything_is_built(folder, override, message):
    if message is None:
        read(folder, override)
        return
    with pytest.raises(ConfigError, match=message):
        read(folder, override)
    assert not getattr(sys.modules.get("parts_of_config"), "built", [])


def test_a_value_that_the_trainer_refuses(folder):
    with pytest.raises(ConfigError, match="precision='O9' is not known"):
        build_parts(read(folder, "trainer.precision=O9"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("width=abc", "width='abc' is not allowed; Typed takes int"),
        ("width=4.5", "width=4.5 is not allowed; Typed takes int"),
        ("width=1e2", "width=100.0 is not allowed; Typed takes int; write 100"),
        ("width=null", "width=None is not allowed; Typed takes int"),
        ("width=[3]", "width=[3] is not allowed; Typed takes int"),
        ("rate=fast", "rate='fast' is not allowed; Typed takes float | None"),
        ("rate='1e-3'", "rate='1e-3' is not allowed; Typed takes float | None; write it without quotes"),
        (
            "rate=${oc.env:RATE}",
            "rate='${oc.env:RATE}' is not allowed; Typed takes float | None; write ${oc.decode:${oc.env:RATE}}",
        ),
        ("act=rely", "act='rely' is not allowed; Typed takes Optional[Literal['relu', 'gelu']]; did you mean 'relu'?"),
        ("sizes=3", "sizes=3 is not allowed; Typed takes Sequence[int]"),
        ("sizes=text", "sizes='text' is not allowed; Typed takes Sequence[int]"),
        ("sizes=[1, two]", "sizes=[1, 'two'] is not allowed; Typed takes Sequence[int]"),
        ("width=true", "width=True is not allowed; Typed takes int"),
        ("width=1:30", "width='1:30' is not allowed; Typed takes int"),
        ("rate=false", "rate=False is not allowed; Typed takes float | None"),
        ("rate=1:30", "rate='1:30' is not allowed; Typed takes float | None"),
        ("betas=[0.9]", "betas=[0.9] is not allowed; Typed takes tuple[float, float]"),
        ("flag=maybe", "flag='maybe' is not allowed; Typed takes bool"),
        ("flag=2", "flag=2 is not allowed; Typed takes bool"),
    ],
)
@pytest.mark.parametrize("within", ["override", "file"])
def test_a_wrong_type_is_told_before_anything_is_built(folder, monkeypatch, override, message, within):
    monkeypatch.setenv("RATE", "0.5")
    key, _, value = override.partition("=")
    overrides = ["module.width=8", f"module.{override}"]
    if within == "file":
        lines = f"  width: {value}" if key == "width" else f"  width: 8\n  {key}: {value}"
        (folder / "config.yaml").write_text(BASE.replace("  width: ${variables.width}", lines))
        overrides = []
    with pytest.raises(ConfigError) as error:
        read(folder, "module._target_=parts_of_config.Typed", *overrides)
    assert str(error.value) == f"module.{message}"
    assert not getattr(sys.modules.get("parts_of_config"), "built", [])


def test_values_that_a_constructor_can_use_are_no_wrong_types(folder):
    """An int is a float, 0 and 1 are flags, a list is a tuple, a mapping may become any object, and a default's type is allowed."""
    pair = "{_target_: parts_of_config.Pair, left: 1}"
    for override, expected in {
        "rate=1": 1,
        "rate=1e-3": 1e-3,
        "rate=null": None,
        "act=gelu": "gelu",
        "sizes=[]": [],
        "name=null": None,
        "betas=[0, 0.5]": [0, 0.5],
        "flag=1": 1,
        "hidden=text": "text",
        f"rate={pair}": pair,
    }.items():
        content = read(folder, "module._target_=parts_of_config.Typed", f"module.{override}")
        given = build_parts(content).module.given
        assert expected in given or given[0].left == 1


READINGS = [
    ("rate=-.5", -0.5), ("rate=nan", math.nan), ("rate=inf", math.inf), ("rate=-.inf", -math.inf), ("rate=1e3", 1000.0),
    ("rate=010", 10), ("rate=1", 1), ("flag=1", True), ("flag=0", False), ("flag=no", False), ("name=1e3", "1e3"),
    ("name=010", "010"), ("name=true", "true"), ("name=1:30", "1:30"), ("name='7'", "7"),
    ("sizes=[010, 0x10, 1_000]", [10, 16, 1000]), ("betas=[.5, -.25]", [0.5, -0.25]), ("hidden=-.5", -0.5),
    ("hidden=010", 10), ("hidden=1:30", "1:30"), ("hidden=nan", "nan"), ("hidden=1e3", 1000.0), ("hidden=off", False),
    ("hidden={a: 010, b: [-.5, x]}", {"a": 10, "b": [-0.5, "x"]}), ("act=null", None),
]  # fmt: skip


@pytest.mark.parametrize("within", ["override", "file", "variable", "written"])
def test_what_a_number_looks_like_follows_the_annotation(folder, within):
    for written, expected in READINGS:
        key, _, text = written.partition("=")
        overrides = ["module._target_=parts_of_config.Typed"]
        base = BASE.replace(
            "  width: ${variables.width}", "  width: 8" if within != "file" else f"  width: 8\n  {key}: {text}"
        )
        if within == "variable":
            base += f"  mine: {text}\n"
            overrides += [f"module.{key}=${{variables.mine}}"]
        elif within != "file":
            overrides += [f"module.{written}"]
        (folder / "config.yaml").write_text(base)
        content = read(folder, *overrides)
        if within == "written":  # the file of the run starts it again
            (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(content.written)))
            content = read(folder)
        found = content["module"][key]
        assert (type(found), str(found)) == (type(expected), str(expected)), written
        assert str(content.written["module"][key]) == str(expected)


def test_numbers_of_the_trainer_and_the_seed_follow_too(folder):
    content = read(
        folder,
        "trainer.gradient_clip_val=-.5",
        "trainer.limit_val_batches=1",
        "trainer.max_time=1:02:03:04",
        "seed=010",
    )
    trainer = content["trainer"]
    assert (trainer["gradient_clip_val"], trainer["max_time"], content["seed"]) == (-0.5, "1:02:03:04", 10)
    assert type(trainer["limit_val_batches"]) is int
    assert type(read(folder, "trainer.limit_val_batches=1.0")["trainer"]["limit_val_batches"]) is float


def test_keys_that_yaml_merges_are_read_so_too(folder):
    lines = "  <<: {rate: -.5, name: 010}\n  name: 1e3\n  width: 010"
    (folder / "config.yaml").write_text(BASE.replace("  width: ${variables.width}", lines))
    module = read(folder, "module._target_=parts_of_config.Typed")["module"]
    assert (module["rate"], module["name"], module["width"]) == (-0.5, "1e3", 10)


def test_a_wrong_type_deep_in_the_file_is_told_too(folder):
    with pytest.raises(
        ConfigError, match=r"^trainer\.callbacks\.0\.patience='x' is not allowed; EarlyStopping takes int$"
    ):
        read(folder, "trainer.callbacks.0.patience=x")


def test_what_a_constructor_raises_is_one_line_with_its_arguments_and_place(folder, monkeypatch):
    monkeypatch.setenv("RATE", "secret of the environment")
    override = ["module._target_=parts_of_config.Strict", "module.width=[3]", "module.token=abc"]
    line = 1 + PARTS.splitlines().index(
        "        super().__init__(width % 4)", PARTS.splitlines().index("class Strict(Net):")
    )
    with pytest.raises(ConfigError) as error:
        build_parts(read(folder, *override))
    assert str(error.value) == (
        "module: Strict(width=[3], token='***') raised TypeError: unsupported operand type(s) for %: 'list' and 'int' "
        f"(parts_of_config.py, line {line})"
    )
    with pytest.raises(ConfigError, match=r"Strict\(width='\$\{oc.env:RATE\}'\) raised TypeError"):
        build_parts(read(folder, override[0], "module.width=${oc.env:RATE}"))


def test_a_misspelt_key_that_a_constructor_passes_on_has_the_nearest_name(folder):
    """tests/test_keywords.py has the same for fabricamp's own classes."""
    override = ["module._target_=parts_of_config.Passing", "module.tokn=abc"]
    with pytest.raises(ConfigError, match=r"^module\.tokn is not known; did you mean 'token'\?$"):
        build_parts(read(folder, *override))
    with pytest.raises(
        ConfigError, match=r"^module: Passing\(width=8, unlike=1\) raised TypeError: .*'unlike' \(parts"
    ):
        build_parts(read(folder, override[0], "module.unlike=1"))


REFUSED = """
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from fabricamp import DataModule, TrainingModule

class Late(TrainingModule):
    def __init__(self, lr=0.1, momentum=0.5, factor=0.5, every=3, width=2, spare=-1):
        super().__init__()
        self.lr, self.momentum, self.factor, self.every, self.width = lr, momentum, factor, every, width
    def configure_model(self):
        self.net = torch.nn.Linear(2, self.width)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.every)]
    def on_train_start(self):
        torch.nn.functional.dropout(torch.ones(1), self.factor)

class Rows(DataModule):
    def __init__(self, batch_size=2, workers=0, ahead=None, draws=None):
        super().__init__()
        self.batch_size, self.workers, self.ahead, self.draws = batch_size, workers, ahead, draws
    def train_dataloader(self):
        rows = TensorDataset(torch.ones(8, 2))
        sampler = RandomSampler(rows, num_samples=self.draws)
        return DataLoader(
            rows, sampler=sampler, batch_size=self.batch_size, num_workers=self.workers, prefetch_factor=self.ahead
        )
"""


def _fit_late(folder, capsys, *overrides, command="fit"):
    """Runs a command on a module and data that make what torch refuses only when a run asks for it."""
    (folder / "late_parts.py").write_text(REFUSED)
    trainer = "trainer: {accelerator: cpu, devices: 1, logger: false, enable_checkpointing: false, max_steps: 1}\n"
    parts = "module: {_target_: late_parts.Late}\ndata: {_target_: late_parts.Rows}\n"
    (folder / "late.yaml").write_text(trainer + parts)
    try:
        code = main([command, str(folder / "late.yaml"), *overrides])
    finally:
        sys.modules.pop("late_parts", None)
    return code, capsys.readouterr().err.splitlines()[-1]


def _line_of(text):
    return 1 + next(number for number, line in enumerate(REFUSED.splitlines()) if text in line)


@pytest.mark.parametrize(
    ("override", "said", "at"),
    [
        (
            "data.batch_size=-1",
            "data.batch_size=-1 is refused by DataLoader: batch_size should be a positive integer value",
            "return DataLoader",
        ),
        ("data.workers=-1", "DataLoader: num_workers option should be non-negative", "return DataLoader"),
        (
            "data.ahead=2",
            "DataLoader: prefetch_factor option could only be specified in multiprocessing",
            "return DataLoader",
        ),
        ("data.draws=-3", "RandomSampler: num_samples should be a positive integer value", "= RandomSampler"),
        ("module.lr=-1", "module.lr=-1 is refused by SGD: Invalid learning rate: -1", "torch.optim.SGD"),
        (
            "module.momentum=-0.5",
            "module.momentum=-0.5 is refused by SGD: Invalid momentum value: -0.5",
            "torch.optim.SGD",
        ),
        ("module.every=-3", "OneCycleLR: Expected positive integer total_steps, but got -3", "OneCycleLR"),
        ("module.width=-3", "Linear: Trying to create tensor with negative dimension -3: [-3, 2]", "torch.nn.Linear"),
    ],
)
def test_what_torch_refuses_when_a_run_makes_it_is_one_line(folder, override, said, at, capsys):
    code, line = _fit_late(folder, capsys, override)
    assert code == 2
    assert line.startswith(f"fabricamp: {said}")
    assert f" in late_parts.py, line {_line_of(at)})" in line
    if " is refused by " not in said:
        assert line.endswith("; change the value in the configuration that it comes from")
    assert (code, line) == _fit_late(folder, capsys, override, command="bench")


def test_other_errors_of_a_run_keep_their_traceback(folder, capsys):
    with pytest.raises(ValueError, match="dropout probability"):
        _fit_late(folder, capsys, "module.factor=3")


def test_a_layer_that_torch_refuses_within_a_constructor_is_one_line(folder):
    (folder / "layers.py").write_text(
        "import torch\nfrom fabricamp import TrainingModule\nclass One(TrainingModule):\n"
        "    def __init__(self, width=2):\n        super().__init__()\n        self.net = torch.nn.Linear(2, width)\n"
    )
    with pytest.raises(
        ConfigError, match=r"^module: One\(width=-4\) raised RuntimeError: .*-4.* \(layers\.py, line 6\)$"
    ):
        build_parts(read(folder, "module._target_=layers.One", "module.width=-4"))
    del sys.modules["layers"]


def test_other_errors_of_a_constructor_say_what_was_being_built(folder):
    with pytest.raises(KeyError) as error:
        build_parts(read(folder, "module._target_=parts_of_config.Unbuildable"))
    (note,) = error.value.__notes__
    assert note == "fabricamp: module of the configuration was being built: Unbuildable(width=8)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no mapping"),
        ("- 1\n", "holds no mapping"),
        ("a: [1\n", "cannot be read as YAML"),
        ("a: 1\na: 2\n", "duplicate"),
    ],
)
def test_files_that_are_no_configuration(folder, text, message):
    (folder / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(folder)


def test_files_that_cannot_be_read(folder):
    (folder / "config.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(folder)
    with pytest.raises(ConfigError, match="a folder; give a YAML file"):
        read_config(folder)
    with pytest.raises(ConfigError, match=r"did you mean '.*config\.yaml'"):
        read_config(folder / "konfig.yaml")
    with pytest.raises(ConfigError, match="the file comes first"):
        read_config(Path("trainer.devices=2"))


def test_an_import_that_fails_inside_a_found_module_is_not_hidden(folder):
    (folder / "broken_part.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        read(folder, "module._target_=broken_part.Net")


def test_folders_of_import_from_are_taken_from_the_file_and_kept(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "parts_elsewhere.py").write_text(PARTS)
    content = read(folder, "import_from=[../elsewhere]", "module._target_=parts_elsewhere.Net")
    assert content["import_from"] == [str(tmp_path / "elsewhere"), str(folder), str(tmp_path)]
    assert build_parts(content).module.width == 8


ODD_VALUES = {
    "a circle of mappings": ("{x: '${variables.b}'}, b: {y: '${variables.a}'}", "refers to itself in a circle"),
    "a number of 5000 digits": ("9" * 5000, "value has 5000 digits"),
    "a set": ("!!set {a, b}", "Value 'set' is not a supported"),
    "null as a key": ("{null: 1}", "Incompatible key type 'NoneType'"),
    "no date": ("!!timestamp 2026-99-99", "month must be in 1..12"),
    "no number": ("!!int abc", "invalid literal for int()"),
    "no truth": ("!!bool maybe", "maybe"),
    "lists 3000 deep": ("[" * 3000 + "]" * 3000, "nested too deep"),
    "a bad reference": ("'${'", "${"),
}


@pytest.mark.parametrize(("value", "message"), ODD_VALUES.values(), ids=ODD_VALUES)
def test_odd_values_are_refused_in_one_line(folder, value, message, capsys):
    text = BASE.replace("variables:\n", f"variables:\n  a: {value}\n".replace("}, b: ", "}\n  b: "))
    (folder / "odd.yaml").write_text(text)
    assert main(["fit", str(folder / "odd.yaml")]) == 2
    said = capsys.readouterr().err
    assert (message in said, said.count("\n"), len(said) < 600) == (True, 1, True), said


@pytest.mark.parametrize("depth", [100, 300, 1000, 5000])
@pytest.mark.parametrize("write", [lambda n: f"variables.{'a.' * n}b=1", lambda n: f"variables.a={'[' * n}{']' * n}"])
def test_a_deep_override_is_taken_or_refused_in_one_line(folder, depth, write, capsys):
    code = main(["fit", str(folder / "config.yaml"), write(depth)])
    said = capsys.readouterr().err
    assert (code, said.count("\n"), len(said) < 600) == (2, 1, True), said
    assert ("nested too deep" in said) or ("training_step" in said)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ckpt_path=[]", "ckpt_path=[] is not a path; give that of a checkpoint"),
        ("ckpt_path={a: 1}", "ckpt_path={'a': 1} is not a path"),
        ("ckpt_path=3", "ckpt_path=3 is not a path"),
        ("ckpt_path=true", "ckpt_path=True is not a path"),
        ("ckpt_path=''", "ckpt_path='' is not a path"),
        (f"ckpt_path={'a' * 300}", "is not there"),
        ("ckpt_path=~nobody_of_this_name/x.ckpt", "is not there"),
        ("module.inner={1: 2}", None),
        (
            "data.size={_target_: parts_of_config.Pair, left: 1, 2: 3}",
            "data.size has the key 2, which is no argument's",
        ),
        ("data.size={_target_: parts_of_config.Pair, left: 1, true: 3}", "data.size has the key True, which is no"),
        ("module.inner=!!set {a}", "the value cannot be read as YAML (Value 'set' is not a supported"),
        ("module.inner={null: 1}", "the value cannot be read as YAML (Incompatible key type"),
        ("module.inner=${", "the value cannot be read as YAML (no viable alternative"),
        (f"seed={'9' * 5000}", "value has 5000 digits"),
        ('import_from=["\\0"]', "import_from=['\\x00'] has a folder that no path can name"),
        (f"module._target_={'a.' * 5000}b", "is not a dotted name"),
    ],
)
def test_odd_overrides_are_refused_in_one_line(folder, override, message, capsys):
    code = main(["fit", str(folder / "config.yaml"), override])
    said = capsys.readouterr().err
    assert (code, said.count("\n"), len(said) < 800) == (2, 1, True), said
    assert (message or "training_step") in said
