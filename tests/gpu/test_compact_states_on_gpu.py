"""Compact states on a GPU: steps beside the references; graphs, groups of steps and compiled networks have eager steps' bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Compile, CudaGraph, TrainingModule
from fabricamp.ops import codes
from fabricamp.optimizers import FusedAdam, FusedLion, FusedSGD
from tests.cuda_on_cpu.compiler import references
from tests.small import quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

KINDS = {
    "adam": lambda own, **options: FusedAdam(own, lr=0.01, weight_decay=0.1, **options),
    "lion": lambda own, **options: FusedLion(own, lr=0.001, weight_decay=0.1, **options),
    "sgd": lambda own, **options: FusedSGD(own, lr=0.01, momentum=0.9, weight_decay=0.1, **options),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_state = pytest.mark.parametrize("state", ["bf16", "8bit"])


class Net(TrainingModule):
    def __init__(self, kind, state, masters="fp32"):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 36))
        self.options = kind, {"state": state, "masters": masters}

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self):
        kind, options = self.options
        optimizer = KINDS[kind](self.parameters(), **options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trained(kind, state, masters="fp32", **options):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(320, 64, generator=generator), torch.randint(0, 36, (320,), generator=generator))
    module = Net(kind, state, masters)
    options = {"accelerator": "gpu", "precision": "O5", "max_epochs": 1, "gradient_clip_val": 0.1, **options}
    quiet_trainer(**options).fit(module, DataLoader(data, batch_size=8))
    return module


def same(one, other):
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@every_state
@every_kind
def test_graphs_have_the_bits_of_eager_steps(kind, state):
    eager = trained(kind, state)
    assert same(eager, trained(kind, state, cuda_graph=True))
    assert same(eager, trained(kind, state, cuda_graph=CudaGraph(steps=4)))


def test_a_compiled_network_trains_in_a_graph():
    eager, graph = (trained("adam", "8bit", compile=Compile(), cuda_graph=one) for one in (None, True))
    assert same(eager, graph)


@pytest.mark.parametrize(("kind", "state"), [("adam", "8bit"), ("lion", "bf16"), ("sgd", "8bit"), ("sgd", "fp32")])
def test_remainders_have_the_values_of_masters(kind, state):
    """But for exact ties, in which copies of masters go to even: one value in 65,536."""
    found = [trained(kind, state, masters) for masters in ("fp32", "remainder")]
    for one, other in zip(*[module.parameters() for module in found], strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=2e-3)


@every_state
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_beside_the_reference(kind, state, dtype):
    shapes = [(300, 1001), (64, 64), (4096,), (77, 99)]
    device, results = torch.device("cuda", 0), []
    for reference in (False, True):
        generator = torch.Generator("cuda").manual_seed(0)
        own = [nn.Parameter(torch.randn(shape, device=device, generator=generator, dtype=dtype)) for shape in shapes]
        optimizer = KINDS[kind](own, state=state)
        for _ in range(5):
            for one in own:
                one.grad = torch.randn(one.shape, device=device, generator=generator, dtype=dtype)
            if reference:
                with references(device):
                    optimizer.step()
            else:
                optimizer.step()
        results.append((own, [optimizer.state[one] for one in own]))
    (own, states), (expected, others) = results
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.01, torch.float16: 2e-3}[dtype]
    for one, other in zip(own, expected, strict=True):
        off = ((one - other).abs() > tolerance * (1 + other.abs())).float().mean()
        assert off < 2e-3
    for one, other in zip(states, others, strict=True):
        for name, value in one.items():
            if value is None or value.dim() == 0 or name.endswith("_scales"):
                continue
            left, right = values(one, name), values(other, name)
            assert ((left - right).abs() > 0.15 * right.abs() + 1e-3).float().mean() < 2e-3


def values(entry, name):
    value = entry[name]
    if value.dtype is torch.uint8:
        return codes.decoded(value, entry[f"{name}_scales"], squares=name == "exp_avg_sq")
    return value.float()
