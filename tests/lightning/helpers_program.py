"""Calls helpers of Lightning and prints what they return.

helpers_printed.txt has what Lightning 2.6.6 prints: ``python -W ignore tests/lightning/helpers_program.py > helpers_printed.txt``.
"""

import inspect
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars, convert_to_tensors
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.data import has_iterable_dataset, has_len, sized_len, suggested_max_num_workers
from lightning.fabric.utilities.device_parser import _check_data_type, _check_unique, _normalize_parse_gpu_string_input
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper, _distributed_is_initialized
from lightning.fabric.utilities.logger import (
    _add_prefix,
    _convert_json_serializable,
    _convert_params,
    _flatten_dict,
    _sanitize_callable_params,
    _sanitize_params,
)
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.fabric.utilities.types import Optimizable, Steppable, _Stateful
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, convert_inf
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.core.saving import (
    convert,
    load_hparams_from_tags_csv,
    load_hparams_from_yaml,
    save_hparams_to_tags_csv,
    save_hparams_to_yaml,
    update_hparams,
)
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringModel,
    DemoModel,
    ManualOptimBoringModel,
    Net,
    RandomIterableDataset,
)
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
    _IndexBatchSamplerWrapper,
)
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.memory import is_oom_error, recursive_detach
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary import (
    get_formatted_model_size,
    get_human_readable_count,
    parse_batch_shape,
)
from lightning.pytorch.utilities.parameter_tying import find_shared_parameters, set_shared_parameters
from lightning.pytorch.utilities.parsing import (
    clean_namespace,
    collect_init_args,
    get_init_args,
    is_picklable,
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
    parse_class_init_keys,
)
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


def show(*a):
    print(*a)


def attempt(f):
    try:
        return f()
    except Exception as e:
        return "MisconfigurationException" if isinstance(e, MisconfigurationException) else type(e).__name__


class A:
    def __init__(self, x, *args, y=2, **kw):
        self.given = get_init_args(inspect.currentframe())


class B(A):
    def __init__(self, x, z=3, **kw):
        super().__init__(x, 7, q=z)
        self.mine = get_init_args(inspect.currentframe())


b = B(1, w=4)
show(b.given, b.mine, get_init_args(inspect.currentframe()))
show(parse_class_init_keys(A), parse_class_init_keys(B))


class C:
    def __init__(self, x, *args, y=2, **kw):
        self.all = collect_init_args(inspect.currentframe(), [], classes=(C,))


class D(C):
    def __init__(self, x, z=3, **kw):
        super().__init__(x, 7, q=z)


class E_(D):
    def __init__(self, t, r=1):
        super().__init__(t, z=r)


def mk():
    return E_(4)


show(mk().all, collect_init_args(inspect.currentframe(), []))


class F:
    def __init__(self, v):
        self.e = E_(v)


show(F(3).e.all)
show(is_picklable(1), is_picklable(lambda: 1))
h = {"a": 1, "b": lambda: 1}
clean_namespace(h)
show(h)
m = BoringModel()


class M2(BoringModel):
    def __init__(self, lr=0.1, bs=3):
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr


m = M2()
show(
    lightning_hasattr(m, "lr"),
    lightning_hasattr(m, "zz"),
    lightning_getattr(m, "lr"),
    attempt(lambda: lightning_getattr(m, "zz")),
    attempt(lambda: lightning_setattr(m, "zz", 1)),
)
lightning_setattr(m, "lr", 0.5)
show(m.lr, m.hparams.lr, lightning_getattr(m, "bs"))
lightning_setattr(m, "bs", 5)
show(m.hparams.bs)


class P(pl.LightningModule):
    def forward(self, x):
        return x

    def training_step(self, b, i):
        return None

    def on_x(self):
        pass


class CB(pl.Callback):
    def on_train_start(self, *a):
        pass


show(
    [
        is_overridden(n, P())
        for n in ("training_step", "validation_step", "forward", "on_train_start", "configure_optimizers")
    ],
    is_overridden("on_train_start", CB()),
    is_overridden("x", None),
    attempt(lambda: is_overridden("x", 3)),
    attempt(lambda: is_overridden("nope", P())),
    attempt(lambda: is_overridden("on_x", P())),
)
show(is_overridden("setup", BoringDataModule()), is_overridden("prepare_data", BoringDataModule()))


class T(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)
        self.b = torch.nn.Linear(3, 3)
        self.c = torch.nn.Linear(3, 3, bias=False)
        self.c.weight = self.a.weight
        self.seq = torch.nn.Sequential(torch.nn.Linear(3, 3))
        self.seq[0].bias = self.b.bias


t = T()
s = find_shared_parameters(t)
show(s)
t.c.weight = torch.nn.Parameter(torch.zeros(3, 3))
show(find_shared_parameters(t))
set_shared_parameters(t, s)
show(find_shared_parameters(t), t.c.weight is t.a.weight)
x = torch.ones(2, requires_grad=True) * 2
show(
    recursive_detach({"a": x, "b": [x, 1]})["b"][0].requires_grad,
    is_oom_error(RuntimeError("CUDA out of memory")),
    is_oom_error(RuntimeError("x")),
    is_oom_error(RuntimeError("DefaultCPUAllocator: can't allocate memory")),
)
show(
    GradClipAlgorithmType.supported_types(),
    GradClipAlgorithmType.supported_type("norm"),
    GradClipAlgorithmType.supported_type("q"),
    GradClipAlgorithmType("norm") == "norm",
    GradClipAlgorithmType.NORM == "NORM",
)


class H:
    def f(self, a, b=1):
        pass

    def g(self, *a):
        pass


show(
    is_param_in_hook_signature(H().f, "a"),
    is_param_in_hook_signature(H().f, "z"),
    is_param_in_hook_signature(H().g, "z"),
    is_param_in_hook_signature(H().g, "z", explicit=True),
    is_param_in_hook_signature(H().f, "z", min_args=2),
)


@dataclass
class DC:
    x: torch.Tensor


show(
    [
        attempt(lambda b=b: extract_batch_size(b))
        for b in (
            torch.zeros(4, 2),
            {"a": torch.zeros(3), "b": [torch.zeros(3)]},
            [torch.zeros(2), torch.zeros(5)],
            "abc",
            [],
            torch.tensor(1.0),
            ["a", torch.zeros(2)],
            DC(torch.zeros(6)),
            {"n": 3, "t": torch.zeros(2)},
            5,
        )
    ]
)
show(
    [get_human_readable_count(n) for n in (0, 1, 123, 999, 1234, 12345, 123456, 999999, 1234567, 2e6, 3e9, 4e14, 5e15)],
    get_formatted_model_size(1234.5678),
    parse_batch_shape([torch.zeros(2, 3), torch.zeros(1)]),
    parse_batch_shape(3),
    parse_batch_shape(torch.tensor(1)),
)
ds = list(range(7))
for sh in (False, True):
    show(
        [list(UnrepeatedDistributedSampler(ds, num_replicas=3, rank=r, shuffle=sh)) for r in range(3)],
        [len(UnrepeatedDistributedSampler(ds, num_replicas=3, rank=r, shuffle=sh)) for r in range(3)],
    )
show(attempt(lambda: UnrepeatedDistributedSampler(ds[:1], num_replicas=3, rank=2)))
show(
    list(
        UnrepeatedDistributedSamplerWrapper(
            torch.utils.data.SequentialSampler(ds), num_replicas=2, rank=1, shuffle=False
        )
    ),
    list(DistributedSamplerWrapper(torch.utils.data.SequentialSampler(ds), num_replicas=2, rank=1, shuffle=False)),
    attempt(lambda: DistributedSamplerWrapper(iter([1]), num_replicas=1, rank=0)),
)
w = _IndexBatchSamplerWrapper(torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(ds), 3, False))
show(list(w), w.seen_batch_indices, len(w), w.batch_size)
d = tempfile.mkdtemp()
hp = {"a": 1, "b": {"c": [1, 2]}, "s": "x", "f": 0.5, "n": None}
save_hparams_to_yaml(d + "/h.yaml", hp)
r = load_hparams_from_yaml(d + "/h.yaml")
show(type(r).__name__, dict(r), load_hparams_from_yaml(d + "/h.yaml", use_omegaconf=False))
save_hparams_to_yaml(d + "/h2.yaml", Namespace(x=1, fn=2))
show(Path(d, "h2.yaml").read_text())
save_hparams_to_tags_csv(d + "/h.csv", Namespace(bs=32, lr=0.01, p="./x", l=[1]))
show(
    Path(d, "h.csv").read_text().split(),
    load_hparams_from_tags_csv(d + "/h.csv"),
    load_hparams_from_tags_csv(d + "/no.csv"),
    load_hparams_from_yaml(d + "/no.yaml"),
)
show(attempt(lambda: save_hparams_to_yaml(d + "/no/h.yaml", hp)))
u = {"c": 4}
update_hparams(u, {"a": {"b": 2}, "c": 1})
update_hparams(u, {"a": {"b": 4}, "c": 7})
show(u, convert("1"), convert("a b"), convert("[1]"))
show(
    sized_len([1]),
    sized_len(iter([])),
    has_len([1]),
    has_len(iter([])),
    has_iterable_dataset(torch.utils.data.DataLoader(RandomIterableDataset(2, 3))),
    attempt(lambda: suggested_max_num_workers(0)),
    suggested_max_num_workers(100),
    _distributed_is_initialized(),
)
show(
    _flatten_dict(
        {"a": {"b": "c"}, 5: {"a": 1}, "dl": [{"a": 1}, {"b": 2}], "l": [1, 2], "e": [], "ns": Namespace(z=1), "em": {}}
    ),
    _sanitize_params({"f": 0.3, "n": np.float32(0.5), "l": [1], "b": True, "x": None}),
    _sanitize_callable_params({"c": int, "f": lambda: 3, "g": len, "h": lambda: len, "v": 1}),
    _convert_params(None),
    _convert_params(Namespace(a=1)),
    _add_prefix({"a": 1}, "p", "-"),
    _add_prefix({"a": 1}, "", "-"),
    sorted(_convert_json_serializable({"a": 1, "o": {1}, "n": None})),
)
show(
    convert_to_tensors([1, 2.5, True, np.ones(1)], torch.device("cpu")),
    convert_tensors_to_scalars({"a": torch.tensor(1.5), "b": 2}),
    attempt(lambda: convert_tensors_to_scalars(torch.zeros(2))),
)
show(
    [_normalize_parse_gpu_string_input(s) for s in ("-1", "2", "0,1", "1,", 3, [1])],
    attempt(lambda: _check_unique([0, 0])),
    [attempt(lambda v=v: _check_data_type(v)) for v in (1, "1", [0], None, True, 1.5, [0.5], (0,), ["a"], [True])],
)
show(
    [Tqdm.format_num(n) for n in (1, 1.0, 0.123456, "1", "abc", "1e-5", 1e-5, 12345.678, "0.1", 123, 10000.0)],
    convert_inf(float("inf")),
    convert_inf(None),
    convert_inf(3),
    convert_inf(float("nan")),
)
c = _AcceleratorConnector(accelerator="auto", devices="auto")
show(
    c._accelerator_flag,
    c._devices_flag,
    c._parallel_devices,
    type(c.accelerator).__name__,
    c.is_distributed,
    c._choose_auto_accelerator(),
)
c = _AcceleratorConnector(accelerator="cpu", devices=2)
show(c._accelerator_flag, c._devices_flag, c._parallel_devices, c.is_distributed)
show(attempt(lambda: _AcceleratorConnector(accelerator="gpu")))


class Acc:
    def __init__(self, a=1):
        self.a = a


AcceleratorRegistry.register("mine", Acc, description="d", a=3)
show(
    "mine" in AcceleratorRegistry.available_accelerators(),
    AcceleratorRegistry.get("mine").a,
    AcceleratorRegistry["mine"]["description"],
    attempt(lambda: AcceleratorRegistry.register("mine", Acc)),
    attempt(lambda: AcceleratorRegistry.get("none")),
    AcceleratorRegistry.get("none", 5),
    attempt(lambda: AcceleratorRegistry.register(3, Acc)),
)


@AcceleratorRegistry.register("deco")
class Acc2(Acc):
    pass


show(AcceleratorRegistry.get("deco").a)
AcceleratorRegistry.remove("deco")
show("deco" in AcceleratorRegistry, "cpu" in AcceleratorRegistry)
StrategyRegistry.register("minest", Acc, description="d", a=3)
show(
    "minest" in StrategyRegistry.available_strategies(),
    StrategyRegistry.get("minest").a,
    attempt(lambda: StrategyRegistry.register("minest", Acc)),
    attempt(lambda: StrategyRegistry.get("none")),
    type(StrategyRegistry.get("ddp")).__name__,
    "ddp_find_unused_parameters_true" in StrategyRegistry,
)
show(
    instantiate_class(
        torch.nn.Linear(2, 2).parameters(), {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.3}}
    ).defaults["lr"]
)
show(
    isinstance(torch.nn.ReLU(), _Stateful),
    isinstance(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1), Optimizable),
    isinstance(3, Steppable),
)
show(type(get_filesystem("/tmp")).__name__, type(get_filesystem("memory://a")).__name__, _get_rank())
torch.manual_seed(3)
m = BoringModel()
tr = pl.Trainer(
    max_epochs=1,
    limit_train_batches=4,
    limit_val_batches=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
tr.fit(m, datamodule=BoringDataModule())
show(float(m.layer.weight.sum()))
torch.manual_seed(3)
m = ManualOptimBoringModel()
tr = pl.Trainer(
    max_epochs=1,
    limit_train_batches=4,
    limit_val_batches=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
tr.fit(m)
show(float(m.layer.weight.sum()))
torch.manual_seed(3)
n = Net().eval()
show(float(n(torch.ones(1, 1, 28, 28)).sum()), float(DemoModel()(torch.ones(2, 32)).sum()))
