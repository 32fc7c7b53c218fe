"""First values of modules built on the meta device, in one process: who fills what, equal numbers unit by unit and at once."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fabricamp import ConfigError, TrainingModule
from fabricamp.strategies.fsdp_units import own_modules, units_of
from fabricamp.strategies.meta_init import digest_of, leave_meta
from fabricamp.strategies.seeded_draws import SeededDraws
from fabricamp.torch_private import storage_key
from tests.small import quiet_trainer
from tests.strategies.first_values import (
    LAYERS,
    LENGTH,
    STRUCTURES,
    WIDTH,
    RootFillsAll,
    RootFillsTheTable,
    Stack,
    block_of,
    by_units,
    first_values,
    on_meta,
    tensors,
    whole,
)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_units_one_by_one_get_what_the_whole_module_gets(structure):
    """Whatever was drawn before; nothing is left without a value."""
    together, left = whole(STRUCTURES[structure])
    torch.rand(3), random.random(), np.random.rand(2)
    apart, left_apart = by_units(STRUCTURES[structure])
    assert left == left_apart == []
    expected, found = tensors(together), tensors(apart)
    assert expected.keys() == found.keys()
    different = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    assert not different
    shared = [{id(value): None for value in one.values()} for one in (expected, found)]
    assert len(shared[0]) == len(shared[1])
    assert not any(value.is_floating_point() and value.isnan().any() for value in found.values())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_another_seed_gives_other_values(structure):
    (first, _), (second, _) = whole(STRUCTURES[structure]), whole(STRUCTURES[structure], seed=4)
    assert any(
        not torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True)
    ) or ("generator" in structure)


def test_a_root_that_fills_all_gives_its_parts_their_arguments():
    module, _ = by_units(RootFillsAll)
    assert float(module.words.weight.detach().std()) > 0.8
    for number, layer in enumerate(module.layers.values()):
        assert float(layer.part.down.weight.detach().std()) == pytest.approx(
            0.02 / math.sqrt(2 * (number + 1)), rel=0.1
        )
        assert layer.norm.weight.eq(1).all()
    assert module.turns.shape == (LENGTH, WIDTH // 2)
    assert module.turns.is_complex()
    assert module.turns.abs().allclose(torch.ones(()))


def test_a_method_that_wants_arguments_is_left_to_its_owner():
    """Though the owner leaves a tensor of it without a value, which the layer's own method then gets."""

    def leaves_one(self):
        self.part.init_weights(0.5)

    def wants_std(self, std, *, mean=0.0):
        nn.init.normal_(self.up.weight, mean, std)

    inner = block_of(init_weights=wants_std)
    outer = block_of(init_weights=leaves_one)

    def build():
        stack = Stack(outer)
        for block in stack.blocks:
            block.part = inner(0)
        return stack

    module, left = by_units(build)
    assert not left
    for block in module.blocks:
        assert float(block.part.up.weight.detach().std()) == pytest.approx(0.5, rel=0.1)
        assert block.part.down.weight.abs().max() <= 1 / math.sqrt(2 * WIDTH)


def test_what_an_outer_method_leaves_is_filled_by_inner_ones():
    module, _ = by_units(RootFillsTheTable)
    assert torch.equal(module.cosine, module.tables()[0])
    assert 0.5 < module.net["words"].weight.std() < 1.5
    weight = module.net["h"][1].up.weight
    assert weight.abs().max() <= 1 / math.sqrt(WIDTH)
    assert weight.unique().numel() > 0.9 * weight.numel()


def test_an_inner_method_changes_nothing_that_has_a_value():
    """The outer method zeroes biases alone, and the layers' own methods would draw them."""
    module, _ = by_units(STRUCTURES["torch's layers"])
    for block in module.blocks:
        assert block.attention.out_proj.bias.eq(0).all()
        assert block.attention.in_proj_bias.eq(0).all()
        assert block.attention.out_proj.weight.abs().min() > 0
        assert block.norms[0].running_var.eq(1).all()
        assert (int(block.norms[0].num_batches_tracked), float(block.one.detach())) == (0, 1.0)
        assert block.mask.sum() == 10
        assert block.memory._flat_weights[0] is block.memory.weight_ih_l0
        block.memory(torch.ones(2, WIDTH))


def test_a_method_that_changes_what_layers_draw_is_called_after_them():
    scaled, _ = by_units(STRUCTURES["scales what layers draw"])
    plain, _ = by_units(lambda: Stack(block_of()))
    for one, other in zip(scaled.blocks, plain.blocks, strict=True):
        assert torch.equal(one.down.weight, other.down.weight * (1 / math.sqrt(2 * LAYERS)))
        assert torch.equal(one.up.weight, other.up.weight)
        assert torch.equal(one.up.bias, other.up.weight.norm(dim=1))


def test_flags_of_transformers_hide_nothing():
    module, _ = by_units(STRUCTURES["flags of transformers, tied embedding"])
    assert module.head.weight is module.words.weight
    assert module.words.weight[0].eq(0).all()
    assert float(module.words.weight[1:].detach().std()) == pytest.approx(0.02, rel=0.1)


def test_parts_of_a_tensor_are_drawn_apart_in_any_order():
    module, _ = by_units(STRUCTURES["parts of a tensor"])
    query, key = module.blocks[1].up.weight.chunk(2)
    assert (float(query.detach().std()), float(key.detach().std())) == pytest.approx((0.01, 0.1), rel=0.15)

    def other_order(self):
        query, key = self.up.weight.chunk(2)
        nn.init.normal_(query, std=0.01)
        nn.init.normal_(key, std=0.1)

    other, _ = by_units(lambda: Stack(block_of(reset_parameters=other_order)))
    assert torch.equal(other.blocks[1].up.weight, module.blocks[1].up.weight)


def test_numbers_belong_to_the_name_not_to_the_neighbours():
    """A network with more layers before it has the same weights in the layers that both have."""
    small, _ = whole(lambda: nn.ModuleDict({"b": nn.Linear(4, 4)}))
    large, _ = whole(lambda: nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}))
    assert torch.equal(small["b"].weight, large["b"].weight)
    assert not torch.equal(large["a"].weight, large["b"].weight)


def test_a_tensor_that_is_replaced_keeps_its_place_in_memory_meanwhile():
    """Else what a method allocates next could be taken for it, and be drawn by its name: or not, as memory happens to lie."""
    replaced, later = [], []

    def init_weights(self):
        later.extend(storage_key(one) for one in [torch.empty(4) for _ in range(500)] if replaced)
        replaced.append(storage_key(self.up.weight))
        self.up.weight.data = torch.zeros(2 * WIDTH, WIDTH)

    whole(lambda: Stack(block_of(init_weights=init_weights)))
    assert len(later) == 500 * (LAYERS - 1)
    assert not set(replaced) & set(later)


class Once(Stack):
    """Fills on its first call only, and counts its calls."""

    def __init__(self):
        super().__init__(block_of(), first=lambda: nn.Linear(WIDTH, WIDTH))
        self.filled = False

    def init_weights(self):
        if self.filled:
            return
        self.filled = True
        for tensor in self.parameters():
            nn.init.constant_(tensor, 2.0)


def test_what_a_method_notes_about_itself_is_forgotten_between_units():
    module, _ = by_units(Once)
    assert all(tensor.eq(2).all() for tensor in module.parameters())
    assert module.filled


class DataOfAll(Stack):
    """Replaces the ``.data`` of all units' parameters, which tensors on the meta device refuse."""

    def __init__(self):
        super().__init__(block_of(), first=lambda: nn.Linear(WIDTH, WIDTH))

    def init_weights(self):
        for tensor in self.parameters():
            tensor.data = torch.randn(tensor.shape)


class Silent(Stack):
    """Multiplies by another unit's value: torch leaves out ``real.mul_(meta)`` without a word."""

    def __init__(self):
        super().__init__(block_of())

    def init_weights(self):
        for tensor in self.parameters():
            nn.init.constant_(tensor, 2.0)
        with torch.no_grad():
            for block in self.blocks[1:]:
                block.up.weight.mul_(self.blocks[0].up.weight)


@pytest.mark.parametrize(("kind", "value"), [(DataOfAll, None), (Silent, 4.0)])
def test_a_method_that_needs_all_units_gets_them(kind, value):
    (apart, left), (together, _) = by_units(kind), whole(kind)
    assert not left
    for (name, one), other in zip(apart.named_parameters(), together.parameters(), strict=True):
        assert torch.equal(one, other), name
    if value is not None:
        assert apart.blocks[1].up.weight.eq(value).all()


def test_only_tensors_of_one_unit_have_memory_at_a_time(monkeypatch):
    """Of the tensors that a root's method is given, all but those of one unit are on the meta device."""
    seen = []

    class Watches(RootFillsAll):
        def init_weights(self):
            seen.append([name for name, tensor in tensors(self).items() if not tensor.is_meta])
            super().init_weights()

    module = on_meta(Watches)
    values, units = first_values(module, 3), units_of(module, "auto")
    for unit in units:
        values.fill(own_modules(unit, units))
    assert len(seen) == LAYERS + 1
    assert [{name.split(".")[1] for name in names} for names in seen[:-1]] == [{"2"}, {"1"}, {"0"}]
    assert set(seen[-1]) == {"words.weight", "turns", "norm.weight", "head.weight"}


def test_a_module_with_values_keeps_them():
    """Only what was built on the meta device is filled, though the root's method would fill all."""

    def build():
        module = RootFillsAll()
        with torch.device("cpu"):
            module.words = nn.Embedding(8, WIDTH)
            nn.init.constant_(module.words.weight, 5.0)
        return module

    for module, left in (by_units(build), whole(build)):
        assert not left
        assert module.words.weight.eq(5).all()
        assert module.head.weight.std() > 0.1


def test_attributes_of_parameters_stay():
    def build():
        layer = nn.Linear(2, 2)
        layer.weight.decays = False
        layer.bias.requires_grad_(False)
        return layer

    layer, _ = whole(build)
    assert layer.weight.decays is False
    assert [one.requires_grad for one in layer.parameters()] == [True, False]
    assert all(type(one) is nn.Parameter for one in layer.parameters())


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(3))
        self.part = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.zeros(2, dtype=torch.int64))

    def reset_parameters(self):
        with torch.no_grad():
            self.part[0] = 1.0


class Fitted(TrainingModule):
    """A network on the meta device; no step is trained."""

    def __init__(self, build):
        super().__init__()
        self.build = build

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = on_meta(self.build)

    def training_step(self, batch, batch_idx):
        return self.net(batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(build, **options):
    module = Fitted(build)
    quiet_trainer(max_steps=0, **options).fit(module, torch.utils.data.DataLoader([torch.zeros(2)]))
    return module


def test_tensors_without_a_value_are_named():
    with pytest.raises(
        ConfigError, match=r"net\.scale, net\.part, net\.table of Fitted were built on the meta device, and no "
    ):
        fitted(Bare)


def test_lazy_layers_on_the_meta_device_are_refused():
    with pytest.raises(ConfigError, match=r"net\.weight, net\.bias .*no shape yet.*meta device"):
        fitted(lambda: nn.LazyLinear(3))


def test_one_process_fills_where_it_trains_and_leaves_its_generators_alone():
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    torch.manual_seed(3)
    before = states()
    module = fitted(RootFillsAll)
    other = Fitted(RootFillsAll)
    other.configure_model()
    torch.manual_seed(3)
    assert leave_meta(other) == []
    assert states() == before
    for (name, one), two in zip(tensors(module).items(), tensors(other).values(), strict=True):
        assert torch.equal(one, two), name


def test_a_checkpoints_values_are_not_filled_before_they_are_loaded(tmp_path):
    """Only what the file has not is filled: here a table that it leaves out."""
    calls = []

    class Counted(RootFillsTheTable):
        def reset_parameters(self):
            calls.append([name for name, tensor in tensors(self).items() if not tensor.is_meta])
            super().reset_parameters()

    module = fitted(Counted)
    path = Path(tmp_path, "one.ckpt")
    trainer = quiet_trainer(max_steps=1, default_root_dir=tmp_path)
    trainer.fit(module, torch.utils.data.DataLoader([torch.zeros(2, dtype=torch.int64)]))
    trainer.save_checkpoint(path)
    calls.clear()
    loaded = Fitted.load_from_checkpoint(path, build=Counted)
    assert calls == [["cosine", "sine"]]
    for (name, one), two in zip(tensors(module).items(), tensors(loaded).values(), strict=True):
        assert torch.equal(one, two), name


def test_a_digest_tells_bits_and_their_order():
    value = torch.randn(3, 5)
    others = [value.flip(0), value.flip(1), value + 1e-6, -value, value.t().reshape(3, 5)]
    assert all(digest_of(value) != digest_of(other) for other in others)
    assert digest_of(value) == digest_of(value.clone())
    assert digest_of(torch.tensor([-0.0])) != digest_of(torch.tensor([0.0]))
    assert digest_of(torch.ones(3, dtype=torch.bfloat16)) != digest_of(torch.ones(5, dtype=torch.bfloat16))
    assert digest_of(torch.tensor([1 + 2j])) != digest_of(torch.tensor([2 + 1j]))
    assert digest_of(torch.zeros(0)) == 0


def test_a_draw_into_a_tensor_that_is_kept_changes_nothing():
    kept = torch.ones(3)
    mode = SeededDraws(1, "owner", {}, {storage_key(kept)}, torch.device("cpu"))
    with mode:
        assert kept.normal_() is kept
        kept[1:].zero_()
        torch._foreach_add_([kept], 1)
        torch.add(kept, 1, out=kept)
    assert kept.eq(1).all()
    assert not mode.written
