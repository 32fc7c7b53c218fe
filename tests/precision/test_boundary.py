"""The interface of a half module: half inside, fp32 outside, however it is called, copied or run again."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fabricamp.precision import OptLevel, precision_from
from fabricamp.strategies.base import Strategy

HALF_LEVELS = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


class Pair(NamedTuple):
    left: object
    right: object


@dataclass(frozen=True)
class Scaled:
    values: torch.Tensor
    factor: int


class Recorder(nn.Module):
    """A linear layer that records the dtypes of its inputs; its forward takes and returns containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = []

    def forward(self, x, *, extra=None):
        self.seen.append((x.dtype, None if extra is None else extra["values"].dtype))
        y = self.linear(x)
        return {"logits": y, "pair": Pair(y, 3), "scaled": Scaled(y, 2), "name": "recorder"}


class Inner(nn.Module):
    def __init__(self, reentrant=None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant = reentrant
        self.seen = []

    def half(self, x):
        y = self.first(x)
        self.seen.append((x.dtype, y.dtype))
        return torch.relu(y)

    def forward(self, x):
        x = self.half(x) if self.reentrant is None else checkpoint(self.half, x, use_reentrant=self.reentrant)
        return self.second(x)


class Task(nn.Module):
    def __init__(self, net) -> None:
        super().__init__()
        self.net = net
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(4))
        self.plain = Plain()

    def training_step(self, x):
        return self.loss(self.plain(self.net(x)), torch.zeros(len(x), dtype=torch.long))


class Plain(nn.Module):
    """A module without parameters and with one buffer, which the step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.full((4,), 1e-6))

    def forward(self, x):
        assert x.dtype is torch.float32
        return x + self.offset


def converted(module, level="O2", **options):
    precision = OptLevel(level, **options)
    precision.convert_module(module)
    return precision


@pytest.mark.parametrize(("level", "dtype"), HALF_LEVELS.items())
def test_half_inside_and_fp32_outside(level, dtype):
    net = Recorder()
    precision = converted(net, level)
    output = precision.forward(lambda: net(torch.randn(2, 4), extra={"values": torch.randn(1).double(), "n": 1}))
    assert net.seen == [(dtype, dtype)]
    assert output["logits"].dtype is output["pair"].left.dtype is output["scaled"].values.dtype is torch.float32
    assert (type(output["pair"]), output["pair"].right, output["scaled"].factor) == (Pair, 3, 2)
    assert output["name"] == "recorder"
    assert F.cross_entropy(output["logits"], torch.tensor([0, 1])).dtype is torch.float32


def test_every_way_of_calling_from_the_step_and_none_inside_a_forward():
    net = nn.Sequential(Inner(), nn.ReLU(), Inner())
    precision = converted(net)
    x = torch.randn(2, 4)
    for call in (lambda: net(x), lambda: net[0](x), lambda: net[0].first(x), lambda: net[2](net[0](x))):
        assert precision.forward(call).dtype is torch.float32
    assert {dtypes for inner in (net[0], net[2]) for dtypes in inner.seen} == {(torch.float16, torch.float16)}


def test_outside_a_step_nothing_is_cast():
    net = nn.Linear(4, 4)
    converted(net)
    assert net(torch.randn(2, 4).half()).dtype is torch.float16
    with pytest.raises(RuntimeError):
        net(torch.randn(2, 4))


def test_losses_metrics_and_modules_without_parameters_stay_as_they_are():
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs the package torchmetrics")
    task = Task(nn.Sequential(nn.Linear(4, 4), Offset(), nn.Linear(4, 4)))
    task.accuracy = torchmetrics.MeanMetric()
    converted(task)
    for untouched in (task.loss, task.plain, task.accuracy):
        assert not untouched._forward_pre_hooks
        assert all(buffer.dtype is not torch.float16 for buffer in untouched.buffers())
    assert task.net[1].offset.dtype is torch.float16  # the module is called inside a forward, where everything is half
    assert not task.net[1]._forward_pre_hooks


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x):
        return x + self.offset


@pytest.mark.parametrize("keep", [True, False])
def test_batchnorm_with_and_without_weights(keep):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.LayerNorm(4))
    precision = converted(net, keep_batchnorm_fp32=keep)
    expected = torch.float32 if keep else torch.float16
    for norm in (net[1], net[2]):
        assert {tensor.dtype for tensor in norm.state_dict().values() if tensor.is_floating_point()} == {expected}
        assert norm.num_batches_tracked.dtype is torch.int64
    assert net[3].weight.dtype is torch.float16
    precision.backward(precision.forward(lambda: net(torch.randn(4, 4)).square().mean()))
    assert net[1].weight.grad.dtype is expected


def test_fp64_weights_keep_their_precision():
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    converted(net)
    assert (net[0].weight.dtype, net[1].weight.dtype) == (torch.float16, torch.float64)


def test_cast_model_outputs():
    for level in ("O1", "O2", "O0"):
        net = nn.Linear(4, 4)
        precision = converted(net, level, cast_model_outputs="bfloat16")
        assert precision.forward(lambda net=net: net(torch.randn(2, 4))).dtype is torch.bfloat16


def test_tied_weights_are_converted_once_and_stay_tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    kept = net[0].weight
    converted(net)
    assert net[0].weight is net[1].weight is kept


def test_a_raising_forward_leaves_the_boundary_in_order():
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.fail = True

        def forward(self, x):
            y = self.linear(x)
            if self.fail:
                raise ValueError("on purpose")
            return y

    net = nn.Sequential(nn.Linear(4, 4), Raises())
    precision = converted(net)
    x = torch.randn(2, 4)

    def step():
        with pytest.raises(ValueError, match="on purpose"):
            net(x)
        return net[0](x)  # in the same step

    assert precision.forward(step).dtype is torch.float32
    with pytest.raises(ValueError, match="on purpose"):
        precision.forward(net, x)
    assert net(x.half() if net[1].__dict__.update(fail=False) is None else x).dtype is torch.float16
    assert precision.forward(net, x).dtype is torch.float32
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_a_boundary_and_weights_of_their_own(how):
    net = nn.Sequential(Inner(), nn.BatchNorm1d(4), nn.Linear(4, 4))
    precision = converted(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    precision.setup_optimizers(net, [optimizer], Strategy())
    twin = copy.deepcopy(net) if how == "deepcopy" else pickle.loads(pickle.dumps(net))
    x = torch.randn(2, 4)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert precision.forward(twin, x).eq(0).all()
    assert precision.forward(twin, x).dtype is torch.float32
    assert not precision.forward(net, x).eq(0).all()
    twin.load_state_dict({key: torch.ones_like(value) for key, value in twin.state_dict().items()})
    assert not any(master.eq(1).all() for master in optimizer.param_groups[0]["params"] if master.dim() == 2)
    buffer = io.BytesIO()
    torch.save(twin.state_dict(), buffer)
    assert (
        precision.forward(twin.float(), x).dtype is torch.float32
    )  # the module was converted to fp32, so its boundary casts nothing


# Nested checkpoints: while the outer one computes without gradients, the inner one's input has none.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("inner", [None, True, False])
@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_activation_checkpointing_in_a_forward_and_from_the_step(level, outer, inner):
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = Inner(inner if recompute else None)
        task = Task(net)
        precision = converted(task, level, loss_scale=1024.0)
        x = torch.randn(2, 4, requires_grad=True)  # reentrant checkpoints need an input with a gradient

        def step(net=net, task=task, recompute=recompute, x=x):
            if outer is None or not recompute:
                y = net(x)
            else:
                y = checkpoint(lambda value: net(value) + net.second(value), x, use_reentrant=outer) - net.second(x)
            return task.loss(task.plain(y.float()), torch.zeros(2, dtype=torch.long))

        precision.backward(precision.forward(step))
        gradients.append([x.grad, *(p.grad for p in net.parameters())])
        assert len(set(net.seen)) == 1
        assert len(net.seen) == 1 if not recompute else len(net.seen) > 1 or (inner, outer) == (None, None)
    for once, twice in zip(*gradients, strict=True):
        assert once.dtype is twice.dtype
        torch.testing.assert_close(once, twice, rtol=2e-2, atol=8.0 if level == "O5" else 2.0)


def test_a_module_called_from_the_step_and_inside_a_checkpointed_forward():
    # The flag distinguishes the two calls of the same module in the same step.
    torch.manual_seed(0)
    net = Inner(reentrant=False)
    precision = converted(net)
    x = torch.randn(2, 4)
    precision.backward(precision.forward(lambda: (net(x) + net.first(x)).square().mean()))
    assert net.seen == [(torch.float16, torch.float16)] * 2


def test_backward_inside_the_step_runs_with_the_boundary_at_rest():
    net = Inner(reentrant=False)
    precision = converted(net)
    x = torch.randn(2, 4)

    def training_step():
        precision.backward(net(x).square().mean())
        return net(x)

    assert precision.forward(training_step).dtype is torch.float32
    assert set(net.seen) == {(torch.float16, torch.float16)}


def test_restoring_gives_back_the_very_weights():
    for level in ("O2", "O3", "O5", "O1"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Offset(), nn.Linear(4, 4))
        before = {key: value.clone() for key, value in net.state_dict().items()}
        identities = [id(parameter) for parameter in net.parameters()]
        precision = OptLevel(level)
        conversion = precision.convert_module(net)
        precision.forward(net.eval(), torch.randn(2, 4))
        conversion.undo()
        assert [id(parameter) for parameter in net.parameters()] == identities
        assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())
        net(torch.randn(2, 4)).sum().backward()
        assert net[0].weight.grad.dtype is net[0].weight.grad_dtype is torch.float32


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(ValueError, match="TorchScript"):
        converted(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))
    with pytest.raises(ValueError, match="without a shape"):
        converted(nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(ValueError, match=r"weight is torch\.float16 already"):
        converted(nn.Linear(2, 2).half(), "O1")


def test_convert_input_by_level():
    batch = {"x": torch.tensor([70000.0]), "y": torch.tensor([1]), "name": "a"}
    for level in (
        "O0",
        "O1",
        "O2",
        "O3",
        "O5",
    ):  # the batch is not cast, so that targets keep their precision: modules cast their own inputs
        assert precision_from(level).convert_input(batch)["x"].item() == 70000.0
    cast = precision_from("64-true").convert_input(batch)
    assert (cast["x"].dtype, cast["y"].dtype, cast["name"]) == (torch.float64, torch.int64, "a")


def runs_in_bf16(layer, *arguments):
    """Returns whether torch's autocast runs the layer here: oneDNN has a bf16 LSTM only on some CPUs."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            layer(*arguments)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "MultiheadAttention", "Conv2d", "Embedding"])
def test_layers_of_torch_run_at_every_level(kind):
    for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
        x = torch.randn(2, 3, 8)
        layer, arguments = {
            "LSTM": lambda x=x: (nn.LSTM(8, 4, batch_first=True), (x,)),
            "GRU": lambda x=x: (nn.GRU(8, 4, batch_first=True), (x,)),
            "MultiheadAttention": lambda x=x: (nn.MultiheadAttention(8, 2), (x, x, x)),
            "Conv2d": lambda x=x: (nn.Conv2d(2, 3, 3, padding=1), (x,)),
            "Embedding": lambda x=x: (nn.Embedding(5, 4), (torch.tensor([1, 2]),)),
        }[kind]()
        if (kind, level) == ("LSTM", "O1"):
            with pytest.raises(ValueError, match="with an LSTM"):
                converted(layer, level)
            continue
        precision = converted(layer, level)
        if (kind, level) == ("LSTM", "O4") and not runs_in_bf16(layer, *arguments):
            with pytest.raises(RuntimeError, match="primitive"):  # the same error as in torch alone
                precision.forward(layer, *arguments)
            continue
        output = precision.forward(layer, *arguments)
        output = output[0] if isinstance(output, tuple) else output
        precision.backward(output.float().square().mean())
        assert all(parameter.grad is not None for parameter in layer.parameters())
