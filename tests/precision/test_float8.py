"""FP8 products of linear layers: which layers get them, what stays of the layers, and the way back; emulated on a CPU."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import pickle
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from fabricamp import ConfigError, Float8
from fabricamp.callbacks.model_summary import summarize
from fabricamp.precision import float8, float8_linears, level, precision_from, precision_name
from fabricamp.precision.float8_linears import RECIPES, Float8Products, choose, plain_linears

pytest.importorskip("torchao", reason="needs the package torchao")

SMALL = 64


@pytest.fixture(autouse=True)
def _small_layers_pay(monkeypatch):
    monkeypatch.setattr(float8_linears, "SMALLEST", dict.fromkeys(RECIPES, SMALL))


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(64, 64)
        self.lora = nn.Linear(64, 64)


class Distance(nn.MSELoss):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(64, 64)


class Net(nn.Module):
    """One layer of each kind."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(64, 64)
        self.wide = nn.Linear(64, 128)
        self.narrow = nn.Linear(128, 64)
        self.hooked = nn.Linear(64, 64)
        self.hooked.register_forward_hook(lambda *_: None)
        self.normed = parametrizations.weight_norm(nn.Linear(64, 64))
        self.scaled = Scaled(64, 64)
        self.tied = nn.Linear(64, 64)
        self.tied_too = nn.Linear(64, 64)
        self.tied_too.weight = self.tied.weight
        self.twice = self.again = nn.Linear(64, 64)
        self.odd = nn.Linear(64, 72)
        self.tiny = nn.Linear(64, 16)
        self.attention = nn.MultiheadAttention(64, 4)
        self.adapter = Adapter()
        self.aux_head = nn.Linear(64, 128)
        self.loss = Distance()
        self.last = nn.Linear(64, 64)


def names(root, choice):
    known = {id(module): name for name, module in root.named_modules()}
    return [known[id(layer)] for layer in choice.layers]


def test_only_plain_large_layers_within_the_network_are_chosen_and_the_others_counted():
    net = Net()
    choice = choose(net, "tensorwise")
    assert names(net, choice) == ["wide", "narrow"]
    assert choice.others == {
        "first": 1,
        "with hooks": 1,
        "parametrised": 1,
        "of a subclass": 2,  # the attention's own, whose weight another function reads
        "shared": 3,
        "with sizes that 16 does not divide": 1,
        "too small to be faster": 1,
        "in adapters": 2,
        "head": 2,
        "outside of the level": 1,
    }
    total = sum(layer.in_features * layer.out_features for layer in net.modules() if isinstance(layer, nn.Linear))
    assert choice.flops == 2 * 64 * 128 / total
    line = choice.line("tensorwise")
    assert line.startswith(
        f"float8 (tensorwise): 2 of 17 linear layers, {choice.flops:.0%} of their FLOPs; in bf16: 1 first"
    )


@pytest.mark.parametrize(("recipe", "least"), [("tensorwise", 2048), ("rowwise", 4096), ("rowwise_with_gw_hp", 4096)])
def test_both_sizes_of_a_layer_decide_whether_it_is_large(monkeypatch, recipe, least):
    """As measured: 1024 x 4096 weights lose where 2048 x 2048 gain."""
    monkeypatch.undo()
    with torch.device("meta"):
        net = nn.Sequential(
            nn.Embedding(8, least),
            nn.Linear(least, least),
            nn.Linear(least, least - 16),
            nn.Linear(least - 16, 4 * least),
            nn.Linear(4 * least, least),
            nn.Linear(least, 16),
        )
    choice = choose(net, recipe)
    assert names(net, choice) == ["1", "4"]
    assert choice.others == {"too small to be faster": 2, "head": 1}


def test_the_oldest_torchao_is_that_of_the_extra_and_of_the_page():
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    (extra,) = project["optional-dependencies"]["fp8"]
    assert extra == f"torchao>={float8._OLDEST[0]}.{float8._OLDEST[1]}"
    assert extra in project["optional-dependencies"]["dev"]
    page = (root / "docs" / "how-to" / "fp8.md").read_text()
    assert f"torchao {float8._OLDEST[0]}.{float8._OLDEST[1]} or newer" in page


def test_a_layer_after_an_embedding_or_a_convolution_is_not_the_first():
    for first in (nn.Embedding(8, 64), nn.Conv1d(3, 64, 3)):
        net = nn.Sequential(first, nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64))
        assert names(net, choose(net, "rowwise")) == ["2"]


def test_the_output_of_a_model_of_transformers_is_a_head():
    net = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    net.get_input_embeddings = lambda: net[0]
    net.get_output_embeddings = lambda: net[1]
    assert names(net, choose(net, "tensorwise")) == ["2"]


def test_a_method_of_the_user_with_that_name_is_not_called():
    net = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    net.get_output_embeddings = net.forward
    assert names(net, choose(net, "tensorwise")) == ["1"]


def test_a_model_of_transformers_without_output_embeddings_is_passed_over():
    def missing():
        raise NotImplementedError

    net = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    net.get_input_embeddings = net.get_output_embeddings = missing
    assert names(net, choose(net, "tensorwise")) == ["1"]


def gpt():
    return nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 128))


def test_layers_of_a_loss_are_neither_head_nor_first():
    net = nn.Module()
    net.before = Distance()
    net.body = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    net.after = Distance()
    choice = choose(net, "tensorwise")
    assert names(net, choice) == ["body.1"]
    assert choice.others == {"outside of the level": 2, "first": 1, "head": 1}


def test_a_trained_network_and_its_frozen_copy_have_a_head_each():
    net = nn.Module()
    net.student = gpt()
    net.teacher = copy.deepcopy(net.student).requires_grad_(False)
    choice = choose(net, "tensorwise")
    assert names(net, choice) == ["student.1", "student.2", "teacher.1", "teacher.2"]
    assert choice.others == {"head": 2}


def test_names_and_patterns_leave_layers_out_or_take_them_in():
    net = Net()
    assert names(net, choose(net, "tensorwise", skip=["w*"])) == ["narrow"]
    taken = choose(net, "tensorwise", skip=["wide"], include=["inward", "tiny", "*_head", "last", "wide"])
    assert names(net, taken) == ["inward", "narrow", "tiny", "aux_head", "last"]
    assert taken.others["in skip"] == 1
    blocks = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), nn.Linear(16, 16))
    assert names(blocks, choose(blocks, "rowwise", include=["0"])) == ["0.0", "0.1"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"skip": ["wyde"]}, r"Float8\(skip=...\): 'wyde' matches no linear layer; did you mean 'wide'"),
        (
            {"include": ["odd"]},
            "odd, which cannot have FP8 products: it is counted as 'with sizes that 16 does not divide'",
        ),
        ({"include": ["scaled"]}, "scaled, .* 'of a subclass'"),
    ],
)
def test_patterns_without_a_layer_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        choose(Net(), "tensorwise", **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "rowise"}, "recipe='rowise' is not known; did you mean 'rowwise'"),
        ({"base": "O2"}, "base='O2' is not known"),
        ({"skip": "head"}, r"Float8\(skip='head'\) is not allowed; give a list"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Float8(**options)


def test_without_torchao_the_level_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torchao" else find(name, *more)
    )
    with pytest.raises(ConfigError, match=r"needs the package torchao: pip install torchao"):
        precision_from("fp8")


PACKAGES = {
    # What the folder torchao has: __init__.py, float8.py.
    "older": ('__version__ = "0.9.0"', "", "0.17 or newer, and 0.9.0 is installed"),
    "without float8": (
        '__version__ = "0.18.0"',
        None,
        "its import fails with torch {torch} (ModuleNotFoundError: No module named 'torchao.float8')",
    ),
    "for another torch": (
        '__version__ = "0.18.0"',
        "from torch import no_such_name",
        "its import fails with torch {torch} (ImportError: cannot import name 'no_such_name' from 'torch'",
    ),
    "broken": ('raise AttributeError("no such operator")', "", "(AttributeError: no such operator)"),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_torchao_that_does_not_fit_is_refused_with_the_cause(monkeypatch, tmp_path, name):
    start, linears, words = PACKAGES[name]
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text(start)
    if linears is not None:
        (tmp_path / "torchao" / "float8.py").write_text(linears)
    loaded = [module for module in sys.modules if module.partition(".")[0] == "torchao"]
    with monkeypatch.context() as patch:
        for module in loaded:
            patch.delitem(sys.modules, module)
        patch.syspath_prepend(tmp_path)
        with pytest.raises(ConfigError) as error:
            precision_from("fp8")
        for module in [module for module in sys.modules if module.partition(".")[0] == "torchao"]:
            del sys.modules[module]
    text = str(error.value)
    assert text.startswith("precision 'fp8' needs the package torchao, ")
    assert words.format(torch=torch.__version__) in text
    assert text.endswith('; pip install --upgrade "torchao>=0.17"')


def test_other_cards_than_those_with_fp8_products_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A100")
    with pytest.raises(
        ConfigError, match=r"'fp8' needs a GPU with FP8 products \(Hopper or newer\), and A100 is older; use 'O5'"
    ):
        precision_from("fp8", device_type="cuda")
    with pytest.raises(ConfigError, match="'fp8-mixed' on 'mps', which has no FP8 products; use 'O4'"):
        Float8(base="O4").check_device("mps")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert precision_from("fp8", device_type="cuda").level.name == "O5"


def index(card):
    return card if isinstance(card, int) else card.index


def test_one_card_with_fp8_products_suffices_until_the_module_is_on_another(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda card=0: (8 + index(card), 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda card: f"card {index(card)}")
    precision = precision_from("fp8", device_type="cuda")
    # No GPU is needed to see what is refused: only where the weights are is not true.
    monkeypatch.setattr(level, "device_of", lambda _: torch.device("cuda", 0))
    net = gpt()
    with pytest.raises(ConfigError, match="and card 0 is older"):
        precision.convert_module(net)
    assert not any(isinstance(layer, Float8Products) for layer in net)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match="'fp8' needs an NVIDIA GPU"):
        precision_from("fp8", device_type="cuda")


HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")


@pytest.mark.parametrize("kind", HOOKS)
def test_layers_with_a_hook_of_any_kind_are_left_out(kind):
    net = gpt()
    getattr(net[1], f"register_{kind}")(lambda *_: None)
    choice = choose(net, "tensorwise")
    assert names(net, choice) == ["2"]
    assert choice.others == {"with hooks": 1, "head": 1}


def test_the_deprecation_within_torchao_is_not_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        converted()
        torch.get_autocast_gpu_dtype()
        warnings.warn("another", DeprecationWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["another"]


class Quantised(torch.Tensor):
    """Weights of another class."""


def test_layers_that_another_package_has_changed_are_left_out():
    net = gpt().append(nn.Linear(128, 64)).append(nn.Linear(64, 64))
    net[1].weight = nn.Parameter(net[1].weight.detach().as_subclass(Quantised))
    net[2].forward = lambda x: 2 * F.linear(x, net[2].weight)
    choice = choose(net, "tensorwise")
    assert names(net, choice) == ["3", "4"]
    assert choice.others == {"with weights of another class": 1, "with a forward of their own": 1, "head": 1}


def test_a_module_that_calls_another_module_its_base_layer_is_no_adapter():
    net = gpt()
    net.base_layer = nn.LayerNorm(128)
    assert names(net, choose(net, "tensorwise")) == ["1", "2"]


def test_a_layer_made_by_the_class_of_another_one_takes_the_arguments_of_a_linear_layer():
    net, _, _ = converted()
    made = type(net[1])(64, 32, bias=False, dtype=torch.bfloat16)
    assert made.weight.shape == (32, 64)
    assert made(torch.zeros(16, 64, dtype=torch.bfloat16)).shape == (16, 32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_have_the_scales_of_the_recipe_emulated_on_a_cpu(recipe):
    net, _, _ = converted(recipe)
    config = net[1].config
    assert config.cast_config_input.scaling_granularity.name == ("TENSORWISE" if recipe == "tensorwise" else "AXISWISE")
    in_bf16 = config.cast_config_input_for_grad_weight.scaling_type.name == "DISABLED"
    assert in_bf16 == (recipe == "rowwise_with_gw_hp")
    assert config.emulate


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_has_the_bits_of_torchao_s_own(recipe):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    net, _, _ = converted(recipe)
    theirs = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).to(torch.bfloat16)
    theirs.load_state_dict({**net[1].state_dict(prefix="0."), **net[3].state_dict(prefix="1.")})
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(theirs, config=dataclasses.replace(config, emulate=True))
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    found = []
    for layers in ((net[1], net[3]), tuple(theirs)):
        given = x.clone().requires_grad_()
        hidden = layers[0](given)
        output = layers[1](hidden)
        output.float().square().sum().backward()
        found.append([output, given.grad, *(value.grad for layer in layers for value in layer.parameters())])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_names():
    for name, base in (("fp8", "O5"), ("fp8-mixed", "O4")):
        precision = precision_from(name)
        assert (precision_name(precision), precision.level.name, precision.state_dict()["level"]) == (name, base, base)
    assert summarize(nn.Linear(4, 4), opt_level="fp8").memory["masters"] == 20 * 4


def converted(recipe="tensorwise", base="O5", **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 16))
    precision = Float8(recipe, base=base, **options)
    return net, precision, precision.convert_module(net)


@pytest.mark.parametrize("base", ["O4", "O5"])
def test_a_converted_layer_is_the_same_object_and_plain_again_afterwards(base):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 8))
    before = {name: (id(value), type(value)) for name, value in (*net.named_modules(), *net.named_parameters())}
    attributes = {name: set(vars(module)) for name, module in net.named_modules()}
    state = {name: value.clone() for name, value in net.state_dict().items()}
    precision = Float8(base=base)
    conversion = precision.convert_module(net)
    assert [isinstance(layer, Float8Products) for layer in net] == [False, True, True, False]
    assert all(isinstance(layer, nn.Linear) for layer in net[1:])
    assert {name: id(value) for name, value in (*net.named_modules(), *net.named_parameters())} == {
        name: value for name, (value, _) in before.items()
    }
    assert list(net.state_dict()) == list(state)
    assert all(type(value) is torch.Tensor for value in net.state_dict().values())
    assert {name: set(vars(module)) for name, module in net.named_modules()} == attributes
    conversion.undo()
    assert {name: (id(value), type(value)) for name, value in (*net.named_modules(), *net.named_parameters())} == before
    torch.testing.assert_close(net.state_dict(), state, rtol=0, atol=0)


def test_copies_and_pickles_have_plain_layers():
    net, _, conversion = converted()
    copied, pickled = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    conversion.undo()
    for other in (copied, pickled, copy.copy(net[1])):
        assert not any(isinstance(module, Float8Products) for module in other.modules())
    assert type(copied[1]) is type(pickled[1]) is nn.Linear
    torch.testing.assert_close(copied[1].weight.float(), net[1].weight, rtol=2**-8, atol=0)
    assert b"Float8" not in pickle.dumps(net)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("base", ["O4", "O5"])
def test_a_layer_parametrised_after_the_conversion_stays_parametrised(base):
    net, precision, conversion = converted(base=base)
    parametrize.register_parametrization(net[1], "weight", Doubled())
    own = type(net[1])
    tokens = torch.arange(8).repeat(4)
    rounded = precision.forward(lambda: net(tokens))
    with plain_linears(net):
        assert type(net[1]) is own
        assert not isinstance(net[1], Float8Products)
        exact = precision.forward(lambda: net(tokens))
    assert isinstance(net[1], Float8Products)
    assert not torch.equal(rounded, exact)
    conversion.undo()
    assert type(net[1]) is own
    assert not isinstance(net[1], Float8Products)
    weight = net[1].parametrizations.weight.original
    torch.testing.assert_close(net[1].weight, 2 * weight, rtol=0, atol=0)
    x = torch.randn(16, 64)
    torch.testing.assert_close(net[1](x), F.linear(x, 2 * weight, net[1].bias), rtol=0, atol=0)
    parametrize.remove_parametrizations(net[1], "weight")
    assert type(net[1]) is nn.Linear


def test_a_conversion_that_fails_leaves_plain_layers(monkeypatch):
    net = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 8))
    with pytest.raises(ConfigError, match="matches no linear layer"):
        Float8(skip=["nothing"]).convert_module(net)
    assert {layer.weight.dtype for layer in (net[1], net[2])} == {torch.float32}
    assert not any(isinstance(layer, Float8Products) for layer in net)


def test_exports_within_a_run_are_plain():
    net, _, _ = converted()
    with plain_linears(net):
        assert type(net[1]) is type(net[3]) is nn.Linear
    assert isinstance(net[1], Float8Products)
    with pytest.raises(KeyError), plain_linears(net):
        raise KeyError
    assert isinstance(net[1], Float8Products)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("base", ["O4", "O5"])
def test_products_are_rounded_to_fp8_and_gradients_have_the_layer_s_dtype(recipe, base):
    net, precision, conversion = converted(recipe, base)
    tokens = torch.arange(8).repeat(4)

    def step():
        return precision.forward(lambda: net(tokens).float().square().mean())

    loss = step()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    assert {gradient.dtype for gradient in gradients.values()} == {torch.bfloat16 if base == "O5" else torch.float32}
    with plain_linears(net):
        net.zero_grad()
        exact = step()
        exact.backward()
    assert loss != exact
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0)
    for name, parameter in net.named_parameters():
        error = (parameter.grad - gradients[name]).norm() / parameter.grad.norm()
        assert error < 0.15, name
    conversion.undo()


def test_a_call_with_rows_that_16_does_not_divide_is_in_bf16():
    net, precision, _ = converted()
    for rows in (0, 1, 20):
        x = torch.randn(rows, 64)
        expected = F.linear(x.bfloat16(), net[1].weight, net[1].bias).float()
        torch.testing.assert_close(precision.forward(lambda: net[1](x)), expected, rtol=0, atol=0)
    x = torch.randn(2, 16, 64)
    assert not torch.equal(
        precision.forward(lambda: net[1](x)), F.linear(x.bfloat16(), net[1].weight, net[1].bias).float()
    )


def test_a_call_without_autocast_is_in_the_fp32_of_the_weights():
    net, precision, _ = converted(base="O4")
    x = torch.randn(32, 64)
    expected = F.linear(x, net[1].weight, net[1].bias)

    def without_autocast():
        with torch.autocast("cpu", enabled=False):
            return net[1](x)

    for found in (precision.forward(without_autocast), net[1](x)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_notes_say_which_layers_and_when_it_is_slow():
    _net, precision, conversion = converted()
    line, on_cpu = precision.notes()
    assert line == "float8 (tensorwise): 2 of 3 linear layers, 94% of their FLOPs; in bf16: 1 head"
    assert on_cpu == "float8 on a CPU: the products are emulated in fp32, for tests"
    assert precision.slowness(compiled=False) == ""
    precision._device = torch.device("cuda")
    assert precision.notes() == [line]
    assert precision.slowness(compiled=True) == ""
    assert precision.slowness(compiled=False) == (
        "float8 without torch.compile is slower than O5: give Trainer(compile='blocks'), or precision='O5'"
    )
    conversion.undo()
    assert precision.notes() == []
    assert precision.slowness(compiled=False) == ""
