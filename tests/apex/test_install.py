import importlib
import importlib.util
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

import fabricamp.apex
from fabricamp.apex._not_offered import NOT_OFFERED
from fabricamp.errors import ConfigError
from tests.apex.conftest import NAMES

pytestmark = pytest.mark.usefixtures("as_found")


def test_names_of_apex_are_real_entries_of_sys_modules():
    fabricamp.apex.install()
    for name, module in list(sys.modules.items()):
        if name.startswith("fabricamp.apex.") and "__main__" not in name:
            assert sys.modules[name.removeprefix("fabricamp.")] is module
    assert sys.modules["apex"] is fabricamp.apex
    for name in NAMES - {"apex"}:
        if importlib.util.find_spec(f"fabricamp.apex._extensions.{name}"):
            assert sys.modules[name].__name__ == f"fabricamp.apex._extensions.{name}"
    for part in fabricamp.apex._PARTS:
        assert vars(fabricamp.apex)[part] is sys.modules[f"apex.{part}"]


def test_import_statements_of_scripts_find_it():
    fabricamp.apex.install()
    scope = {}
    exec(  # as the script has them
        textwrap.dedent(
            """
            import apex
            import apex.optimizers.fused_adam
            from apex import optimizers
            from apex.multi_tensor_apply import multi_tensor_applier
            from apex.optimizers.fused_lamb import FusedLAMB
            import amp_C, apex_C
            """
        ),
        scope,
    )
    assert scope["apex"].optimizers.FusedAdam is scope["optimizers"].FusedAdam
    assert scope["apex"].optimizers.fused_adam.FusedAdam is scope["optimizers"].FusedAdam
    assert scope["multi_tensor_applier"].available
    assert scope["amp_C"].multi_tensor_scale


def test_a_name_that_is_a_module_and_an_object_is_the_object():
    fabricamp.apex.install()
    scope = {}
    exec("import apex.amp._amp_state\nfrom apex.amp import _amp_state", scope)
    module = sys.modules["apex.amp._amp_state"]
    assert isinstance(module, types.ModuleType)
    assert scope["apex"].amp._amp_state is scope["_amp_state"] is module._amp_state
    assert callable(scope["apex"].install)


def test_installing_twice_changes_nothing():
    fabricamp.apex.install()
    modules, path = dict(sys.modules), list(sys.path)
    fabricamp.apex.install()
    assert sys.modules == modules
    assert sys.path == path


def test_nvidias_apex_imported_before_is_named(monkeypatch, tmp_path):
    (tmp_path / "apex" / "optimizers").mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("apex")
    with pytest.raises(ConfigError, match="is NVIDIA apex") as raised:
        fabricamp.apex.install()
    assert str(tmp_path / "apex" / "__init__.py") in str(raised.value)
    assert "apex.optimizers" not in sys.modules


def test_the_other_package_of_that_name_is_named(monkeypatch, tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("apex")
    with pytest.raises(ConfigError, match="pip uninstall apex") as raised:
        fabricamp.apex.install()
    assert str(tmp_path / "apex" / "__init__.py") in str(raised.value)


def test_a_compiled_extension_imported_before_is_named(monkeypatch):
    module = types.ModuleType("amp_C")
    module.__file__ = "/somewhere/amp_C.so"
    monkeypatch.setitem(sys.modules, "amp_C", module)
    with pytest.raises(ConfigError, match=r"/somewhere/amp_C\.so"):
        fabricamp.apex.install()


def test_spawned_processes_find_it_on_their_path():
    # A spawned process only inherits sys.path; test_entry_point.py has a script with a worker that uses it.
    fabricamp.apex.install()
    code = (
        f"import sys; sys.path = {sys.path!r}; from importlib.util import find_spec; "
        "print(find_spec('apex').origin, find_spec('amp_C').origin)"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    here = Path(fabricamp.apex.__file__).parent / "_extensions"
    assert printed.split() == [f"{here}/apex.py", f"{here}/amp_C.py"]


def test_parts_are_imported_on_first_use_only():
    code = (
        "import sys, fabricamp.apex; print([n for n in sys.modules if n.startswith('fabricamp.apex.') or n == 'torch'])"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "['fabricamp.apex.install']"


def test_what_is_not_offered_says_what_to_use():
    with pytest.raises(AttributeError, match="Megatron Core"):
        _ = fabricamp.apex.transformer
    with pytest.raises(AttributeError, match="nonsense"):
        _ = fabricamp.apex.nonsense
    with pytest.raises(AttributeError, match="did you mean 'optimizers'"):
        _ = fabricamp.apex.optimisers


@pytest.mark.parametrize(
    ("line", "use"),
    [
        ("from apex import transformer", "Megatron Core"),
        ("from apex.transformer import parallel_state", "Megatron Core"),
        ("import apex.pyprof", "torch.profiler"),
        ("from apex.contrib.multihead_attn import SelfMultiheadAttn", "scaled_dot_product_attention"),
        ("from apex.contrib import fmha", "scaled_dot_product_attention"),
        ("from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam", "ZeroRedundancyOptimizer"),
        ("import fused_adam_cuda", "apex.contrib.optimizers.FusedAdam"),
    ],
)
def test_an_import_of_what_is_not_offered_says_what_to_use(line, use):
    fabricamp.apex.install()
    with pytest.raises(ModuleNotFoundError, match=use):
        exec(line, {})
    exec(f"try:\n    {line}\nexcept ImportError:\n    pass", {})  # as scripts check whether it is installed
    with pytest.raises(ImportError, match="nonsense"):
        exec("from apex import nonsense", {})


def test_the_page_names_what_is_not_offered():
    page = (
        (Path(fabricamp.__file__).parents[1] / "docs" / "from-apex.md")
        .read_text()
        .partition("## What is not offered")[2]
    )
    parts = [name.removeprefix("apex.") for name in NOT_OFFERED if name.startswith("apex.")]
    sharded = {f"contrib.optimizers.distributed_fused_{name}" for name in ("adam", "lamb")}
    assert [name for name in parts if f"`{name}`" not in page and name not in sharded] == []
