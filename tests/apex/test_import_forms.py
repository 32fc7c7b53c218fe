"""The four ways to import apex's names, the names of its classes, and pickles of them."""

from __future__ import annotations

import importlib.util
import inspect
import pickletools
import subprocess
import sys
import textwrap
import types

import pytest
import torch

import fabricamp.apex
from tests.apex.conftest import kept
from tests.apex.test_every_name import SIGNATURES

PRIVATE = ["apex.amp._amp_state", "apex.amp._initialize", "apex.amp._process_optimizer", "apex._autocast_utils"]
DEEPER = [
    *("apex.multi_tensor_apply.multi_tensor_apply", "apex.fused_dense.fused_dense", "apex.RNN.models"),
    *("apex.fp16_utils.fp16_optimizer", "apex.fp16_utils.fp16util", "apex.fp16_utils.loss_scaler"),
    *(
        f"apex.optimizers.fused_{name}"
        for name in ("adam", "adagrad", "lamb", "mixed_precision_lamb", "novograd", "sgd")
    ),
    *(f"apex.contrib.optimizers.fused_{name}" for name in ("adam", "lamb", "sgd")),
    *("apex.contrib.clip_grad.clip_grad", "apex.contrib.index_mul_2d.index_mul_2d", "apex.contrib.groupbn.batch_norm"),
    *("apex.contrib.sparsity.asp", "apex.contrib.sparsity.sparse_masklib", "apex.contrib.optimizers.fp16_optimizer"),
]
PATHS = sorted({*SIGNATURES, *PRIVATE, *DEEPER} - {"apex.parallel.multiproc"})
NO_MODULES = {"apex.amp._amp_state": "AmpState", "apex.contrib.index_mul_2d.index_mul_2d": "function"}
"""Modules hidden by another object of the same name, which their package's ``__init__`` imports, and the kind of that object."""


@pytest.fixture(scope="module", autouse=True)
def _installed():
    with kept():
        fabricamp.apex.install()
        yield


def after(line):
    scope = {}
    exec(line, scope)
    del scope["__builtins__"]
    return scope


@pytest.mark.parametrize("path", PATHS)
def test_all_forms_give_the_same(path):
    top, _, rest = path.partition(".")
    (given,) = after(f"import {path}").values()
    assert given is sys.modules[top]
    for name in rest.split(".") if rest else ():
        given = getattr(given, name)
    (named,) = after(f"import {path} as x").values()
    assert named is given
    parent, _, last = path.rpartition(".")
    if parent:
        (imported,) = after(f"from {parent} import {last}").values()
        assert imported is given
    if path in NO_MODULES:
        assert type(given).__name__ == NO_MODULES[path]
    else:
        assert given is sys.modules[path]
        assert isinstance(given, types.ModuleType)
    for name in {one.partition(".")[0] for one in SIGNATURES.get(path, ())}:
        (value,) = after(f"from {path} import {name}").values()
        assert value is getattr(sys.modules[path], name)


@pytest.mark.parametrize(
    ("line", "use"),
    [
        ("import apex.parallel.LARC as x", "x.LARC"),
        ("from apex.parallel import LARC", "LARC.LARC"),
        ("from apex.parallel.LARC import LARC", "LARC"),
        ("import apex", "apex.parallel.LARC.LARC"),
        ("import fabricamp.apex.parallel.LARC as x", "x.LARC"),
    ],
)
def test_larc_is_in_the_module_of_its_name(line, use):
    scope = {}
    exec(line, scope)
    assert eval(use, scope).__name__ == "LARC"
    assert isinstance(eval(use, scope), type)


def test_asking_whether_a_compiled_module_is_there_raises_nothing():
    for name in ("fused_weight_gradient_mlp_cuda", "bnp", "apex.transformer", "apex.contrib.fmha"):
        assert importlib.util.find_spec(name) is None
        with pytest.raises(ModuleNotFoundError, match="fabricamp's apex has no"):
            exec(f"import {name}")
    assert importlib.util.find_spec("fast_layer_norm") is not None
    assert importlib.util.find_spec("apex.contrib.layer_norm") is not None


# -- the names of classes ---------------------------------------------------------------------------------------------------------


def classes():
    """Yields (path, class) for every class of apex that is offered."""
    for path, names in SIGNATURES.items():
        if path.startswith("apex") and path in PATHS and "._" not in path:
            for name in names:
                value = getattr(sys.modules[path], name.partition(".")[0])
                if isinstance(value, type) and not value.__module__.startswith("torch"):
                    yield path, value


def test_classes_say_the_names_of_apex():
    found = list(classes())
    assert len({value for _, value in found}) > 40
    for path, value in found:
        assert value.__module__.split(".")[0] == "apex", (path, value)
        assert getattr(sys.modules[value.__module__], value.__qualname__) is value
        assert repr(value) == f"<class '{value.__module__}.{value.__name__}'>"
    from apex.parallel import SyncBatchNorm  # as swav's page checks it

    assert SyncBatchNorm.__module__ == "apex.parallel.optimized_sync_batchnorm"
    assert sys.modules["apex.optimizers"].FusedAdam.__module__ == "apex.optimizers.fused_adam"


def test_fabricamps_own_classes_keep_their_names():
    for value in (fabricamp.optimizers.LARC, fabricamp.optimizers.FusedAdam, fabricamp.nn.FusedLayerNorm):
        assert value.__module__.startswith("fabricamp.")
        assert ".apex" not in value.__module__
    assert fabricamp.nn.SyncBatchNorm.__module__ == "fabricamp.nn.sync_batch_norm"


def test_a_converted_model_has_apexs_layers():
    from apex import normalization, parallel

    model = parallel.convert_syncbn_model(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
    assert type(model[1]) is parallel.SyncBatchNorm
    assert isinstance(parallel.convert_syncbn_model(torch.nn.BatchNorm2d(3)), parallel.SyncBatchNorm)
    assert issubclass(normalization.MixedFusedLayerNorm, normalization.FusedLayerNorm)
    assert issubclass(normalization.MixedFusedRMSNorm, normalization.FusedRMSNorm)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("kind", ["Affine", "AffineMixedDtypes", ""])
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_functions_of_norms_can_be_looked_at_and_run_by_passes(name, kind, memory_efficient):
    """Megatron inspects the argument ``memory_efficient``; other users run the passes in their own autograd function."""
    from apex.normalization import fused_layer_norm

    function = getattr(fused_layer_norm, f"Fused{name}{kind}Function")
    assert "memory_efficient" in inspect.getfullargspec(function.forward).args
    assert issubclass(function, torch.autograd.Function)
    count = 1 + (0 if not kind else 2 if name == "LayerNorm" else 1)
    torch.manual_seed(0)
    tensors = [torch.randn(3, 4), *[torch.rand(4) + 0.5 for _ in range(count - 1)]]
    results = []

    class Own(torch.autograd.Function):
        forward, backward = staticmethod(function.forward), staticmethod(function.backward)

    for apply in (function.apply, Own.apply):
        given = [one.clone().requires_grad_() for one in tensors]
        output = apply(*given, (4,), 1e-5, memory_efficient)
        (output * torch.arange(12.0).view(3, 4)).sum().backward()
        results.append([output.detach(), *[one.grad for one in given]])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_fast_layer_norm_by_its_passes(memory_efficient):
    import fast_layer_norm

    torch.manual_seed(0)
    x, gamma, beta = torch.randn(5, 8, requires_grad=True), torch.rand(8) + 0.5, torch.randn(8)
    gamma.requires_grad_(), beta.requires_grad_()
    expected = torch.nn.functional.layer_norm(x, (8,), gamma, beta, 1e-5)
    dz = torch.randn(5, 8)
    expected.backward(dz)
    with torch.no_grad():
        z, mu, rsigma = fast_layer_norm.ln_fwd(x, gamma, beta, 1e-5)
        if memory_efficient:
            found = fast_layer_norm.ln_bwd(dz, z, None, rsigma, gamma, beta, True)
        else:
            found = fast_layer_norm.ln_bwd(dz, x, mu, rsigma, gamma)
    assert torch.allclose(z, expected, atol=1e-6)
    for one, other in zip(found, (x.grad, gamma.grad, beta.grad, gamma.grad[None], beta.grad[None]), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


# -- pickles ----------------------------------------------------------------------------------------------------------------------

WRITES = """
    import sys, torch
    import {package}
    from {package} import normalization, optimizers, parallel
    from {package}.amp.scaler import LossScaler
    from {package}.fp16_utils import DynamicLossScaler
    from {package}.mlp import MLP
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = optimizers.FusedAdam([weight], lr=0.5)
    weight.sum().backward()
    optimizer.step()
    model = torch.nn.Sequential(normalization.FusedLayerNorm(3), parallel.SyncBatchNorm(3), normalization.MixedFusedRMSNorm(3))
    model = torch.nn.ModuleList([model, parallel.convert_syncbn_model(torch.nn.BatchNorm1d(3)), MLP([3, 2])])
    lamb = optimizers.FusedMixedPrecisionLamb([torch.nn.Parameter(torch.ones(2))])
    kinds = [parallel.LARC.LARC, parallel.DistributedDataParallel, optimizers.FusedSGD, LossScaler]
    torch.save([optimizer, weight, model, DynamicLossScaler(), kinds, lamb], sys.argv[1])
"""
READS = """
    import sys, torch
    import {package}
    for file in sys.argv[1:]:
        optimizer, weight, model, scaler, kinds, lamb = torch.load(file, weights_only=False)
        assert type(optimizer) is {package}.optimizers.FusedAdam
        assert optimizer.state[weight]["step"] == 1 and torch.allclose(weight, torch.full((3,), 0.5))
        weight.sum().backward()
        optimizer.step()
        assert optimizer.state[weight]["step"] == 2
        assert [type(one).__name__ for one in model[0]] == ["FusedLayerNorm", "SyncBatchNorm", "MixedFusedRMSNorm"]
        assert type(model[0][1]) is type(model[1]) is {package}.parallel.SyncBatchNorm
        assert model[2](model[0](torch.randn(4, 3))).shape == (4, 2)
        assert kinds[0] is {package}.parallel.LARC.LARC
        print("read")
"""
ALIAS, PLAIN = "apex", "fabricamp.apex"


def in_a_process(code, **files):
    """Runs the code for both names in one process: first for ``fabricamp.apex``, then, after the installation, for ``apex``."""
    text = "import sys\n"
    for package in (PLAIN, ALIAS):
        if package == ALIAS:
            text += "import fabricamp.apex; fabricamp.apex.install()\n"
        text += f"sys.argv[1:] = {[str(file) for file in files[package]]!r}\n"
        text += textwrap.dedent(code).format(package=package)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_in(file):
    """Returns the modules of ours that a file of torch.save names."""
    with torch.serialization._open_zipfile_reader(str(file)) as archive:
        data = archive.get_record("data.pkl")
    named = {argument.split(" ")[0] for code, argument, _ in pickletools.genops(data) if code.name == "GLOBAL"}
    return {one for one in named if "apex" in one}


def test_pickles_go_from_process_to_process(tmp_path):
    files = {writer: tmp_path / f"{writer}.pt" for writer in (ALIAS, PLAIN)}
    in_a_process(WRITES, **{writer: [file] for writer, file in files.items()})
    for writer, file in files.items():
        assert {one.partition("apex")[0] for one in modules_in(file)} == {"" if writer == ALIAS else "fabricamp."}
    assert in_a_process(READS, **{PLAIN: [files[PLAIN]], ALIAS: list(files.values())}) == "read\n" * 3
