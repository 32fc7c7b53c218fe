"""torch's private names: each listed one exists in the installed torch, and each one in use is listed."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from fabricamp import torch_private

PACKAGE = Path(torch_private.__file__).parent
OTHERS = {  # private names of others: the standard library, torchmetrics, torchrun's agent, OmegaConf, apex
    "_asdict", "_fields", "_field_defaults", "_getframe", "_current_frames", "_option_string_actions", "_defaults",
    "_reductions", "_update_count", "_resolvers", "_amp_stash", "_copied_masters", "_wrapped_by_lr_sched", "_opt_called",
    "_first_recorded_ns", "_exit", "_written_as",
}  # fmt: skip
MARKS = {"_dynamo_marked_constant"}  # set on fabricamp's functions for torch.compile


def sources():
    return {
        file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py")) if file.name != "torch_private.py"
    }


def own_names(trees):
    """Returns the private names that the package defines: functions, classes, variables, attributes of self."""
    names = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            names.update([node.attr] if node.value.id in ("self", "cls") else [])
    return names


def private(name):
    return name.startswith("_") and not name.startswith(("__", "_foreach_"))  # torch documents the _foreach_ functions


def test_no_private_name_is_used_that_is_not_listed():
    trees = sources()
    listed = {name.rsplit(".", 1)[1] for name in torch_private.ATTRIBUTES}
    allowed = own_names(trees) | OTHERS | MARKS | listed
    found = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                names = [*node.module.split("."), *(one.name for one in node.names)]
            elif isinstance(node, ast.Import):
                names = [part for one in node.names for part in one.name.split(".") if one.name.startswith("torch")]
            elif isinstance(node, ast.Attribute):
                names = [] if node.attr in allowed else [node.attr]
            else:
                continue
            found += [f"{file.relative_to(PACKAGE)}:{node.lineno} {name}" for name in names if private(name)]
    assert not found


@pytest.mark.parametrize("name", torch_private.__all__)
def test_each_function_and_class_exists(name):
    assert getattr(torch_private, name) is not None


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Returns an object of each class with attributes in the list."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group, linear = dist.group.WORLD, torch.nn.Linear(1, 1)
    yield {
        "torch.nn.Module": linear,
        "torch.nn.parallel.DistributedDataParallel": DistributedDataParallel(linear),
        "torch.optim.Optimizer": torch.optim.SGD(linear.parameters(), 0.1),
        "torch.amp.GradScaler": torch.amp.GradScaler("cpu"),
        "torch.Tensor": torch.zeros(1),
        "torch.storage.TypedStorage": torch.storage.TypedStorage(
            wrap_storage=torch.zeros(1).untyped_storage(), dtype=torch.float32, _internal=True
        ),
        "torch.UntypedStorage": torch.zeros(1).untyped_storage(),
        "torch.utils.data.DataLoader": DataLoader([0]),
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": iter(DataLoader([0], num_workers=1)),
        "torch.utils.tensorboard.SummaryWriter": SummaryWriter,
        "torch.distributed.ProcessGroup": group,
        "torch.distributed.checkpoint.FileSystemReader": FileSystemReader,
        "torch.distributed.tensor.DTensor": DTensor.from_local(torch.zeros(1), init_device_mesh("cpu", (1,))),
        "torch.distributed.ProcessGroup.Options": group._get_backend(torch.device("cpu")).options,
    }
    dist.destroy_process_group()


def test_each_attribute_exists(samples):
    missing = []
    for name in torch_private.ATTRIBUTES:
        owner = max((one for one in samples if name.startswith(f"{one}.")), key=len)
        value = samples[owner]
        for part in name.removeprefix(f"{owner}.").split("."):
            if not hasattr(value, part):
                missing.append(name)
                break
            value = getattr(value, part)
    assert not missing


def test_the_functions_do_what_they_are_used_for():
    assert not torch_private.functorch_active()
    assert torch.func.vmap(lambda x: x + torch_private.functorch_active())(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert torch_private.forward_derivative_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.forward_derivative_level() == 0
    assert torch_private.dispatch_modes() == 0
    assert torch_private.tracing_state() is None
    assert not torch_private.exporting()
    assert not torch_private.observed()
    assert torch.func.vmap(lambda x: x + torch_private.observed())(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert not torch_private.any_autocast()
    with torch.autocast("cpu"):
        assert torch_private.any_autocast()
    made = torch_private.allocator("cpu")((2, 3), (3, 1), torch.float16)
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((2, 3), (3, 1), torch.float16, "cpu")
    assert callable(torch_private.allocator("cuda"))
    called = []
    leaf = torch.zeros(1, requires_grad=True)
    leaf.register_hook(lambda _: torch_private.call_at_end_of_backward(lambda: called.append(leaf.grad is not None)))
    assert torch_private.current_backward() == -1
    leaf.sum().backward()
    assert called == [True]
