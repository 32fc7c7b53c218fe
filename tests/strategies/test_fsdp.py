"""FSDP before its first batch, in one process: options, units found by structure, and refused modules."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Backend, BackendConfig

from fabricamp import Activations, Callback, ConfigError
from fabricamp.callbacks import (
    AmpState,
    DivergenceCheck,
    GradientMonitor,
    ModelCheckpoint,
)
from fabricamp.engine.saved.accumulation_state import at_offset
from fabricamp.errors import CheckpointError
from fabricamp.loggers import TensorBoardLogger
from fabricamp.optimizers import FusedAdam
from fabricamp.precision import OptLevel
from fabricamp.strategies import DDP, FSDP, Environment
from fabricamp.strategies.fsdp_units import described, layers_to_name, stays_gathered, units_of
from fabricamp.tuner import Tuner
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


class Layer(nn.Module):
    def __init__(self, width=4, inner=None):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        if inner is not None:
            self.experts = nn.ModuleList(inner() for _ in range(4))


class Tower(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(8, 4), nn.Embedding(8, 4)
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Tower(Layer() for _ in range(6)), "6 Layer and the rest"),
        (Tied(), "4 Layer and the rest"),
        # A mixture of experts has its outer layers as units; two towers have the layers within them.
        (Tower(Layer(inner=Layer) for _ in range(6)), "6 Layer and the rest"),
        (nn.ModuleDict({"a": Tower(Layer() for _ in range(4)), "b": Tower(Layer() for _ in range(4))}), "8 Layer and the rest"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "2 Linear and the rest"),
        (nn.Linear(4, 4), "the module as a whole"),
    ],
)  # fmt: skip
def test_repeated_layers_are_the_units(module, words):
    units = units_of(module, "auto")
    assert described(units) == words
    assert units[-1].module is module
    assert sum(len(one.parameters) for one in units) == len(list(module.parameters()))


def test_classes_are_the_units_inner_ones_first():
    module = Tower(Layer(inner=Layer) for _ in range(2))
    units = units_of(module, [Layer])
    assert [one.name for one in units][-4:] == ["layers.0.experts.1", "layers.0.experts.0", "layers.0", ""]
    assert [len(one.parameters) for one in units] == [4] * 10 + [0]


def test_names_are_units_beside_classes_in_the_order_of_the_module():
    module = nn.ModuleDict(
        {"words": nn.Embedding(8, 4), "body": Tower(Layer() for _ in range(2)), "head": nn.Linear(4, 8)}
    )
    wanted = ["head", Layer, "words", "body.layers.1"]
    units = units_of(module, wanted)
    assert [one.name for one in units] == ["head", "body.layers.1", "body.layers.0", "words", ""]
    assert [len(one.parameters) for one in units] == [2, 4, 4, 1, 0]
    assert stays_gathered(units, wanted) is module["head"]
    # A class may stand for many, a module with parts is large, and nothing is behind the last block.
    assert stays_gathered(units_of(module, [Layer, nn.Linear]), [Layer, nn.Linear]) is None
    assert stays_gathered(units_of(module, ["body.layers.1"]), ["body.layers.1"]) is None
    assert stays_gathered(units_of(nn.Linear(4, 4), "auto"), "auto") is None


def test_large_layers_of_the_rest_are_told_by_name():
    def network(width):
        with torch.device("meta"):
            layers = {"words": nn.Embedding(32768, width), "places": nn.Embedding(8, width)}
            return nn.ModuleDict(
                {**layers, "body": Tower(Layer(width) for _ in range(40)), "head": nn.Linear(width, 32768)}
            )

    large = network(1024)
    assert layers_to_name(units_of(large, [Layer])) == ["words", "head"]
    assert layers_to_name(units_of(large, [Layer, "head"])) == ["words"]
    assert layers_to_name(units_of(large, [Layer, "head", "words"])) == []
    assert layers_to_name(units_of(network(64), [Layer])) == []  # small
    large["head"].weight = large["words"].weight
    assert layers_to_name(units_of(large, [Layer])) == []  # tied: gathered once, with the rest


def test_units_that_cannot_be_are_refused():
    with pytest.raises(
        ConfigError, match=r"units=\[Conv2d\]\): Tied has no submodule of this class; it has Layer, Sequential"
    ):
        units_of(Tied(), [nn.Conv2d])
    with pytest.raises(ConfigError, match=r"FSDP: embedding and the rest share a parameter \(weight\)"):
        units_of(Tied(), [nn.Embedding])
    with pytest.raises(
        ConfigError, match=r"FSDP: head and the rest share a parameter \(weight\).* without the class or name"
    ):
        units_of(Tied(), ["head"])
    with pytest.raises(
        ConfigError, match=r"units=\['position'\]\): Tied has no submodule .*; did you mean 'positions'\?"
    ):
        units_of(Tied(), ["position"])
    with pytest.raises(ConfigError, match=r"units=\[''\]\): Tied has no submodule of this name$"):
        units_of(Tied(), [""])
    with pytest.raises(
        ConfigError, match=r"Tower\.layers is a ModuleList, which is never called; name the modules in it"
    ):
        units_of(Tower([Layer()]), ["layers"])
    with pytest.raises(ConfigError, match=r"Sequential\.1 has no parameters; leave it out"):
        units_of(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ["1"])
    with torch.device("meta"):
        large = Tied()
        large.body = nn.Linear(8192, 4096)
    with pytest.raises(
        ConfigError,
        match=r"FSDP: the rest, outside .* holds 100% of the weights.*\(0\.13 GB\).*Layer \(4x\)",
    ):
        units_of(large, "auto")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"units": "all"}, r"FSDP\(units='all'\) has to be 'auto', or a list of classes"),
        ({"units": []}, "has to be 'auto', or a list of classes"),
        ({"units": [nn.Linear(1, 1)]}, "has to be 'auto', or a list of classes"),
        ({"units": "head"}, "has to be 'auto', or a list of .* names of single ones"),
        (
            {"reshard_after_forward": "zero1"},
            r"FSDP\(reshard_after_forward='zero1'\) has to be True \('zero3'\), False",
        ),
        ({"reshard_after_forward": 1}, "or a number of ranks above 1"),
        ({"timeout": -1}, "timeout=-1"),
        ({"replicate": 0}, r"FSDP\(replicate=0\) is not allowed; give a whole number from 1"),
        ({"device_mesh": None}, "has no argument 'device_mesh'; write replicate= with the number of copies"),
        ({"offload": "cpu"}, r"FSDP\(offload='cpu'\) is not allowed; give True or False"),
        ({"cpu_offload": True}, "write offload=True"),
        ({"activation_checkpointing": [nn.Linear]}, r"write Trainer\(activations='recompute'\)"),
        ({"activation_checkpointing_policy": {nn.Linear}}, r"or activations=Activations\(\[Block\], save='inputs'\)"),
        ({"parallelize": len}, r"tensor_parallel=1\): give both"),
        ({"tensor_parallel": 2}, r"FSDP\(parallelize=None, tensor_parallel=2\): give both"),
        ({"parallelize": 1, "tensor_parallel": 2}, r"FSDP\(parallelize=1\) has to be a function"),
        ({"tensor_parallel": 0}, r"FSDP\(tensor_parallel=0\) is not allowed; give a whole number from 1"),
        ({"parallelize": len, "tensor_parallel": 2, "offload": True}, "leave one of them out"),
        ({"tensor_parallel_size": 2}, "write tensor_parallel=, and parallelize="),
        ({"auto_wrap_policy": len}, r"write units=\[...\]"),
        ({"sharding_strategy": "FULL_SHARD"}, "reshard_after_forward='zero3'"),
        ({"unit": 1}, "did you mean 'units'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        FSDP(**options)


class Manual(Classifier):
    automatic_optimization = False


class Unfilled(Classifier):
    def configure_model(self):
        with torch.device("meta"):
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.zeros(2, dtype=torch.int64))


class Sharded(Classifier):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.net)


class Unfreezing(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.net[0].bias.requires_grad_(trainer.current_epoch == 0)


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (Classifier, {"callbacks": AmpState()}, "AmpState with strategy='fsdp' is not offered"),
        (
            Classifier,
            {"callbacks": GradientMonitor(histograms=True), "logger": TensorBoardLogger(".")},
            r"GradientMonitor\(histograms=True\) with strategy='fsdp' is not offered",
        ),
        (Classifier, {"logger": TensorBoardLogger(".", log_graph=True)}, "log_graph=True.*rank 0 alone cannot run forward"),
        (Classifier, {"callbacks": DivergenceCheck()}, "DivergenceCheck with strategy='fsdp' is not offered"),
        (Classifier, {"callbacks": ModelCheckpoint("memory://x"), "enable_checkpointing": True}, "have mounted; give a path"),
        (Classifier, {"callbacks": Unfreezing(), "max_epochs": 2}, "net.0.bias changed requires_grad after the run began"),
        (Classifier, {"precision": OptLevel("O4", cast_model_outputs="float16")}, "cast_model_outputs="),
        (Classifier, {"precision": OptLevel("O1", num_losses=2)}, r"num_losses=2\) with strategy='fsdp' is not offered"),
        (Classifier, {"strategy": FSDP(reshard_after_forward=2)}, r"has to divide the number of ranks that share a copy, 1"),
        (Classifier, {"strategy": FSDP(replicate=2)}, r"FSDP\(replicate=2\) has to divide the number of ranks, 1"),
        (Classifier, {"strategy": FSDP(offload=True), "precision": "O2"}, r"offload=True\) with precision 'O2' .* 'O4' or 'O5'"),
        (Classifier, {"strategy": FSDP(offload=True), "nan_policy": "raise"}, "nan_policy='raise' is not offered"),
        (Classifier, {"strategy": FSDP(parallelize=lambda *_: None, tensor_parallel=2)}, r"replicate=1, tensor_parallel=2\) "),
        (Manual, {}, "automatic_optimization=False is not offered"),
        (Unfilled, {}, "scale, table of Unfilled were built on the meta device, and no module gives them values"),
        (Sharded, {}, "Sharded is sharded already"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_the_first_batch(module, options, words, tmp_path):
    if "callbacks" in options:
        options = {**options, "callbacks": [options["callbacks"]]}
    trainer = quiet_trainer(**{"strategy": "fsdp", "max_epochs": 1, "default_root_dir": tmp_path, **options})
    with pytest.raises(ConfigError, match=words):
        trainer.fit(module(), loader(8, 4))
    dist.destroy_process_group() if dist.is_initialized() else None


class Penalized(Classifier):
    """Adds a penalty on the gradient of its output with respect to its input."""

    def __init__(self, *, create_graph):
        super().__init__()
        self.create_graph = create_graph

    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_()
        out = self.net(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True, create_graph=self.create_graph)
        return out.square().mean() + (gradient.norm(dim=1) - 1).square().mean() * x.sum()


@pytest.mark.parametrize(("units", "words"), [([nn.Linear], "through 'net.2'"), ([nn.Sequential], "through 'net'")])
@pytest.mark.parametrize("again", [None, Activations([nn.Linear], save="inputs")], ids=["kept", "computed again"])
def test_a_gradient_of_a_gradient_is_refused_at_the_first_batch(units, words, again):
    trainer = quiet_trainer(strategy=FSDP(units), max_epochs=1, activations=again)
    with pytest.raises(ConfigError, match=f"{words} with strategy='fsdp' is not offered"):
        trainer.fit(Penalized(create_graph=True), loader(8, 4))
    dist.destroy_process_group() if dist.is_initialized() else None


def test_a_gradient_in_a_step_is_what_it_is_in_one_process():
    def trained(strategy):
        module = Penalized(create_graph=False)
        quiet_trainer(strategy=strategy, max_epochs=1).fit(module, loader(16, 4))
        return torch.cat([one.detach().flatten() for one in module.parameters()])

    assert torch.allclose(trained(FSDP([nn.Linear])), trained("single"), rtol=0, atol=1e-6)


def test_a_tuner_and_a_save_after_the_run_are_refused(tmp_path):
    trainer = quiet_trainer(strategy="fsdp", max_epochs=1)
    with pytest.raises(ConfigError, match="Tuner with strategy='fsdp' is not offered"):
        Tuner(trainer).lr_find(Classifier(), loader(8, 4))
    trainer.fit(Classifier(), loader(8, 4))
    with pytest.raises(CheckpointError, match="its shards were freed at its end; call it in a hook"):
        trainer.save_checkpoint(tmp_path / "x.ckpt")


def test_a_module_comes_back_as_it_was_and_nobody_holds_the_group():
    module, groups = Classifier(), []
    module.training_step = module.training_step  # an attribute of the instance, as some tests and hooks set it
    before = {name: set(vars(one)) for name, one in module.named_modules()}

    class Watching(Callback):
        def on_fit_end(self, trainer, pl_module):
            groups.append(weakref.ref(dist.group.WORLD))
            pl_module.net.register_forward_hook(lambda *_: None)

    trainer = quiet_trainer(strategy=FSDP([nn.Linear]), max_epochs=1, callbacks=[Watching()])
    trainer.fit(module, loader(8, 4), loader(8, 4))
    assert type(module) is Classifier
    assert {name: set(vars(one)) - {"_attachment", "_hparams"} for name, one in module.named_modules()} == before
    assert [type(one) for one in module.parameters()] == [nn.Parameter] * 4
    assert len(module.net._forward_hooks) == 1
    assert not module.net[0]._forward_hooks
    assert not module.net[0]._state_dict_pre_hooks
    assert not module.net[0]._load_state_dict_post_hooks
    gc.collect()
    assert groups[0]() is None
    module.state_dict()
    trainer.fit(module, loader(8, 4))


def test_a_fused_optimizer_updates_shards_without_a_trainer():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def trained(shard):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        if shard:
            fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
        optimizer = FusedAdam(net.parameters(), lr=0.1)
        for _ in range(3):
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state[next(net.parameters())]["exp_avg"]
        return [one.full_tensor() if shard else one for one in (*net.parameters(), state)]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert all(map(torch.equal, trained(True), trained(False)))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_batch_norm_is_gathered_in_fp32_and_what_the_step_calls_gives_fp32(level):
    seen = {}

    class Convolutional(Classifier):
        def __init__(self):
            super().__init__()
            self.net.insert(1, nn.BatchNorm1d(16))
            self.net.insert(1, nn.Identity())
            self.net[1].register_buffer("table", torch.ones(16))

        def training_step(self, batch, batch_idx):
            self.net[0].register_forward_pre_hook(
                lambda one, given: seen.update(half=(one.weight.dtype, given[0].dtype))
            )
            self.net[2].register_forward_pre_hook(lambda one, _: seen.update(norm=one.weight.dtype))
            seen["table"] = self.net[1].table.dtype
            seen["out"] = self.net(batch[0]).dtype
            return super().training_step(batch, batch_idx)

    def trained(strategy):
        torch.manual_seed(0)
        module = Convolutional()
        quiet_trainer(strategy=strategy, max_steps=3, precision=level).fit(module, loader(16, 4))
        assert all(one.dtype == torch.float32 for one in module.state_dict().values() if one.is_floating_point())
        return torch.cat([one.flatten().float() for one in module.state_dict().values()])

    together = trained("fsdp")
    half = torch.float16 if level == "O2" else torch.bfloat16
    assert seen == {"half": (half, half), "norm": torch.float32, "table": half, "out": torch.float32}
    assert torch.allclose(together, trained("single"), atol=1e-5)


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_activations_are_computed_again_whatever_the_units(level):
    calls = []

    class Noisy(Classifier):
        def __init__(self):
            super().__init__()
            self.net.insert(2, nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2)))
            self.net[2][0].register_forward_hook(lambda *_: calls.append(1))

    def trained(units, **options):
        calls.clear()
        torch.manual_seed(0)
        module = Noisy()
        names = list(module.state_dict())
        quiet_trainer(strategy=FSDP(units), max_steps=3, precision=level, **options).fit(module, loader(16, 4))
        assert list(module.state_dict()) == names
        return torch.cat([one.flatten() for one in module.state_dict().values()]), len(calls), module

    straight, once, _ = trained([nn.Linear])
    assert once == 3
    # Units within a block, and blocks within a unit.
    for units, blocks in (
        ([nn.Linear], ["net"]),
        ([nn.Linear], ["net.2"]),
        ([nn.Sequential], ["net.2"]),
        ("auto", ["net"]),
    ):
        again, twice, module = trained(units, activations=Activations(blocks, save="inputs"))
        assert torch.equal(straight, again)
        assert twice == 2 * once
        module.net(torch.ones(1, 8)).sum().backward()
        assert len(calls) == twice + 1  # no recomputation after the run


@pytest.mark.parametrize("offset", [0, 4, 12])
def test_gradients_of_an_open_window_come_back_at_their_offset(offset):
    """The alignment has to be kept: kernels sum in another order if they cannot load 16 bytes at once."""
    part = torch.randn(17, 3)
    found = at_offset(part, offset)
    assert found.data_ptr() % 16 == offset
    assert torch.equal(found, part)
    assert at_offset(torch.empty(0, 3), offset).shape == (0, 3)


class Filtered(torch.nn.Linear):
    """Returns only trainable parameters from ``parameters()``, as adapters do."""

    def parameters(self, recurse=True):
        return (parameter for parameter in super().parameters(recurse) if parameter.requires_grad)


def values_of_hidden_parameters():
    """Returns a layer's full values at the beginning of a run in which each rank has built it with others."""

    class Reads(Classifier):
        def configure_model(self):
            self.layer = Filtered(2, 4)
            self.layer.weight.requires_grad_(False)
            for parameter in (self.layer.weight, self.layer.bias):
                nn.init.constant_(parameter, 1.0 + int(os.environ["RANK"]))

        def on_fit_start(self):
            self.read = [parameter.detach().full_tensor() for parameter in (self.layer.weight, self.layer.bias)]

    module = Reads()
    quiet_trainer(strategy="fsdp", devices="auto", max_steps=0).fit(module, loader(8, 4))
    return module.read


def test_what_a_module_does_not_show_is_shared_as_well():
    for values in run_ranks(values_of_hidden_parameters, 2, backend=None):
        assert all(value.eq(1).all() for value in values)


class Evaluated(Classifier):
    """Notes whether its steps run in inference mode."""

    def validation_step(self, batch, batch_idx):
        self.seen = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        return self.net(batch[0])

    test_step = predict_step = validation_step


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_one_process_evaluates_without_inference_mode(name):
    module = Evaluated()
    getattr(quiet_trainer(strategy=FSDP([nn.Linear])), name)(module, loader(8, 4))
    assert module.seen == (False, False)


def test_several_processes_evaluate_in_inference_mode():
    strategy = FSDP()
    strategy.environment = Environment(world_size=2)
    assert strategy.allows_inference_mode()
    copies = FSDP(replicate=2)
    copies.environment = Environment(world_size=2)
    assert not copies.allows_inference_mode()


@pytest.mark.parametrize("entry", ["fit", "validate"])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_without_a_dimension_are_named(entry, frozen):
    class Scaled(Classifier):
        def __init__(self):
            super().__init__()
            self.temperature = torch.nn.Parameter(torch.tensor(1.0), requires_grad=not frozen)
            self.net.scale = torch.nn.Parameter(torch.tensor(2.0))

    trainer = quiet_trainer(strategy="fsdp", max_epochs=1)
    words = r"temperature, net.scale of Scaled has none; give it one element, .*zeros\(1\)"
    with pytest.raises(ConfigError, match=words):
        getattr(trainer, entry)(Scaled(), loader(8))


@pytest.mark.parametrize(
    ("strategy", "device", "backends"),
    [
        (FSDP(offload=True), "cuda:0", {"cpu": "gloo", "cuda": "nccl"}),
        (FSDP(), "cuda:0", {"cuda": "nccl"}),
        (DDP(), "cuda:0", {"cuda": "nccl"}),
        (FSDP(offload=True), "cpu", {"cpu": "gloo"}),
        (FSDP(), "cpu", {"cpu": "gloo"}),
    ],
    ids=["offload", "fsdp", "ddp", "offload on a CPU", "fsdp on a CPU"],
)
def test_the_process_group_exchanges_where_the_parts_are(strategy, device, backends, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)  # without a GPU
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: asked.append(backend))
    strategy.setup_environment(Environment(), torch.device(device))
    strategy.teardown()
    found = BackendConfig(Backend(asked[0])).get_device_backend_map()
    assert {kind: found[kind] for kind in backends} == backends
    assert device == "cpu" or found == backends


def offloaded_parts():
    """Returns the full values of an offloaded parameter and its gradient, as a hook reads them."""

    class Reads(Classifier):
        def on_before_optimizer_step(self, optimizer):
            weight = self.net[0].weight
            parts = weight.to_local().device.type, weight.grad.to_local().device.type
            self.read = parts, weight.detach().full_tensor().clone(), weight.grad.full_tensor().clone()

    module = Reads()
    strategy = FSDP([nn.Linear], offload=True)
    quiet_trainer(strategy=strategy, devices="auto", max_steps=1).fit(module, loader(16))
    return module.read


def test_hooks_read_full_values_of_offloaded_parts():
    (parts, weight, gradient), (_, other_weight, other_gradient) = run_ranks(offloaded_parts, 2, backend=None)
    assert parts == ("cpu", "cpu")
    assert torch.equal(weight, Classifier().net[0].weight)
    assert torch.equal(weight, other_weight)
    assert torch.equal(gradient, other_gradient)
    assert gradient.shape == weight.shape
    assert bool(gradient.any())
