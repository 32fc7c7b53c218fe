"""``amp.initialize``: refused arguments, output, converted models, and the end of amp."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fabricamp.apex import amp
from fabricamp.apex.amp import frontend
from fabricamp.optimizers import LARC, FusedNovoGrad
from tests.apex.amp_nets import ALL_OPTIMIZERS, LEVELS, Net, batch, loss_of, net, same, snapshot, spoil, start, train


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()
    amp._amp_state.hard_override = amp._amp_state.allow_incoming_model_not_fp32 = False
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# -- options ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "options", "error", "text"),
    [
        ("01", {}, RuntimeError, 'letter "O"'),
        ("O1", {"cast_model_type": torch.float16}, RuntimeError, "weights stay fp32"),
        ("O1", {"keep_batchnorm_fp32": True}, RuntimeError, "batchnorm"),
        ("O1", {"keep_batchnorm_fp32": False}, RuntimeError, "batchnorm"),
        ("O1", {"master_weights": False}, RuntimeError, "masters"),
        ("O2", {"patch_torch_functions": True}, RuntimeError, "patch_torch_functions"),
        ("O2", {"keep_batchnorm_fp32": "maybe"}, AssertionError, "keep_batchnorm_fp32"),
        ("O2", {"loss_scale": "large"}, ValueError, "loss_scale"),
        ("O2", {"num_losses": 0}, ValueError, "num_losses"),
    ],
)
def test_refuses_options(level, options, error, text):
    model = net()
    with pytest.raises(error, match=text):
        amp.initialize(model, sgd(model), opt_level=level, verbosity=0, **options)
    assert model.first.weight.dtype is torch.float32


def test_hard_override_prints_instead(capsys):
    amp._amp_state.hard_override = True
    model = net()
    amp.initialize(model, sgd(model), opt_level="O1", keep_batchnorm_fp32=True)
    assert "Warning" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", (torch.float32, False, None, False, 1.0)),
        ("O1", (None, True, None, None, "dynamic")),
        ("O2", (torch.float16, False, True, True, "dynamic")),
        ("O3", (torch.float16, False, False, False, 1.0)),
    ],
)
def test_defaults_of_levels(level, expected):
    properties = frontend.opt_levels[level](frontend.Properties())
    names = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
    assert tuple(getattr(properties, name) for name in names) == expected
    start(level)
    assert amp._amp_state.opt_properties.enabled
    assert amp._amp_state.opt_properties.opt_level == level
    assert amp.frontend._amp_state is amp._amp_state


def test_strings_of_the_command_line():
    model, _ = start("O2", keep_batchnorm_fp32="False", loss_scale="128.0")
    assert amp._amp_state.opt_properties.keep_batchnorm_fp32 is False
    assert amp._amp_state.loss_scalers[0].loss_scale() == 128.0
    assert model.norm.weight.dtype is torch.float16


def test_prints_levels_and_overrides(capsys):
    model = net()
    amp.initialize(model, sgd(model), opt_level="O2", loss_scale=128.0)
    printed = capsys.readouterr().out
    assert "Selected optimization level O2" in printed
    assert "Processing user overrides" in printed
    assert "loss_scale             : dynamic" in printed
    assert "loss_scale             : 128.0" in printed
    amp.initialize(net(), opt_level="O0", verbosity=0)
    assert not capsys.readouterr().out


# -- models and optimizers -------------------------------------------------------------------------------------------------------


def test_shapes_of_what_comes_back():
    one, two = net(0), net(1)
    optimizers = [sgd(one), sgd(two)]
    models, returned = amp.initialize([one, two], optimizers, opt_level="O1", verbosity=0)
    assert models == [one, two]
    assert returned == optimizers
    amp.shutdown()
    assert amp.initialize(one, opt_level="O1", verbosity=0) is one
    model, returned = amp.initialize(one, [sgd(one)], opt_level="O1", verbosity=0)
    assert model is one
    assert isinstance(returned, list)


@pytest.mark.parametrize("models", [(net(), net(1)), "model", [net(), 3]])
def test_refuses_other_models(models):
    with pytest.raises(TypeError, match=r"models must be either a single model or a list of models\."):
        amp.initialize(models, verbosity=0)


def test_refuses_other_optimizers():
    with pytest.raises(TypeError, match=r"optimizers must be either a single optimizer or a list of optimizers\."):
        amp.initialize(net(), "SGD", verbosity=0)


def test_refuses_data_parallel():
    with pytest.raises(RuntimeError, match=r"AFTER amp\.initialize"):
        amp.initialize(nn.DataParallel(net()), verbosity=0)


def test_refuses_half_weights_unless_told():
    model = net().half()
    with pytest.raises(RuntimeError, match=r"Found param/buffer first\.weight with type torch\.HalfTensor"):
        amp.initialize(model, opt_level="O2", verbosity=0)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(model, opt_level="O0", verbosity=0)
    assert model.first.weight.dtype is torch.float32


def test_refuses_without_cudnn(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    with pytest.raises(RuntimeError, match="cudnn"):
        start("O0")


def test_dtypes_by_level():
    for level, linear, norm in (
        ("O0", torch.float32, torch.float32),
        ("O1", torch.float32, torch.float32),
        ("O2", torch.float16, torch.float32),
        ("O3", torch.float16, torch.float16),
        ("O5", torch.bfloat16, torch.float32),
    ):
        model, _ = start(level)
        assert (model.first.weight.dtype, model.norm.running_mean.dtype) == (linear, norm)
        amp.shutdown()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS)
def test_learns_as_plain_torch_does(level, optimizer):
    model, stepped = start(level, optimizer)
    losses = train(model, stepped, range(20))
    amp.shutdown()
    twin = net()
    plain = ALL_OPTIMIZERS[optimizer](twin.parameters())
    for index in range(20 if level != "O3" else 2):  # half weights soon diverge
        loss = loss_of(twin, index)
        plain.zero_grad()
        loss.backward()
        plain.step()
        assert losses[index] == pytest.approx(loss.item(), rel={"O0": 1e-5, "O3": 0.1}.get(level, 0.02))


def test_parameters_stay_the_objects_that_they_were():
    model = net()
    before = list(model.parameters())
    optimizer = sgd(model)
    group = optimizer.param_groups[0]
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert optimizer.param_groups[0] is group  # schedulers hold references to these dicts
    masters = list(amp.master_params(optimizer))
    assert all(one.dtype is torch.float32 for one in masters)
    assert any(one is model.norm.weight for one in masters)
    assert not any(one is model.first.weight for one in masters)


# -- casts of a half model's inputs and outputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_boundary(level):
    model, _ = start(level)
    x, _ = batch(0)
    assert model(x).dtype is torch.float32
    assert model(x.double()).dtype is torch.float32
    amp.initialize(model, opt_level=level, cast_model_outputs=torch.float16, verbosity=0)
    assert model(x).dtype is torch.float16


def test_cast_model_outputs_at_o1():
    model, _ = start("O1", cast_model_outputs=torch.float32)
    assert model(batch(0)[0]).dtype is torch.float32
    start("O1")
    plain = net()
    assert plain(batch(0)[0]).dtype is torch.float16


def test_o0_brings_half_inputs_up():
    model, _ = start("O0")
    assert model(batch(0)[0].half()).dtype is torch.float32
    model, _ = start("O0", cast_model_type=False)
    with pytest.raises(RuntimeError):
        model(batch(0)[0].half())


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    name: str


class Box:
    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, dtype):
        return Box(self.tensor.to(dtype))


def test_containers_keep_their_types():
    point = collections.namedtuple("point", ["x", "y"])  # noqa: PYI024  # as scripts have them

    class Taker(nn.Linear):
        def forward(self, *args, **kwargs):
            self.seen = args, kwargs
            return {"out": super().forward(args[0].x), "names": ["a", 3], "range": range(3)}

    model = Taker(2, 2)
    amp.initialize(model, opt_level="O2", verbosity=0)
    x = torch.ones(1, 2)
    output = model(point(x, 1), [x, "a"], Pair(x, "b"), Box(x), range(2), ordered=collections.OrderedDict(x=x))
    (named, listed, pair, box, numbers), options = model.seen
    assert type(named) is point
    assert named.x.dtype is listed[0].dtype is pair.x.dtype is box.tensor.dtype is torch.float16
    assert type(options["ordered"]) is collections.OrderedDict
    assert options["ordered"]["x"].dtype is torch.float16
    assert numbers == range(2)
    assert output["out"].dtype is torch.float32
    assert output["names"] == ["a", 3]


def test_apex_933_a_part_called_by_itself_takes_fp32():
    model, _ = start("O2")
    x, _ = batch(0)
    assert model.first(x).dtype is torch.float32
    assert model.last(torch.relu(model.first(x))).dtype is torch.float32


def test_transformers_11173_methods_other_than_forward_take_fp32():
    model, _ = start("O2")
    assert model.encode(batch(0)[0]).dtype is torch.float32


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # inputs are data
def test_checkpointed_parts_run_again_as_they_ran(use_reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            hidden = self.first(x)
            assert hidden.dtype is torch.float16
            return checkpoint(self.part, torch.relu(hidden), use_reentrant=use_reentrant)

        def part(self, hidden):
            output = self.last(hidden)
            assert output.dtype is torch.float16
            return output * output

    model = Checkpointed()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    for run in (model, lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)):
        loss = run(batch(0)[0]).sum()
        assert loss.dtype is torch.float32
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        assert model(batch(0)[0]).dtype is torch.float32


def test_a_failing_forward_leaves_the_boundary_in_order():
    model, _ = start("O2")
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert model(batch(0)[0]).dtype is torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_a_deep_copy_has_weights_of_its_own(level):
    model, optimizer = start(level)
    average = copy.deepcopy(model)
    before = average(batch(0)[0]).clone()
    train(model, optimizer, range(3))
    assert torch.equal(average(batch(0)[0]), before)
    assert before.dtype is (torch.float16 if level == "O1" else torch.float32)
    assert all(one.dtype is torch.float32 for one in average.state_dict().values() if one.is_floating_point())


@pytest.mark.parametrize("level", LEVELS)
def test_models_can_be_pickled(level):
    model, optimizer = start(level)
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    model.eval(), again.eval()
    assert torch.equal(again(batch(0)[0]), model(batch(0)[0]))
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


# -- state dicts -----------------------------------------------------------------------------------------------------------------


class WithExtraState(Net):
    def get_extra_state(self):
        return {"any": "thing"}

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("level", LEVELS)
def test_state_dicts_are_fp32_and_load_at_every_level(level):
    model = WithExtraState()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    state = model.state_dict()
    assert all(one.dtype is torch.float32 for name, one in state.items() if "weight" in name or "running" in name)
    assert state["_extra_state"] == {"any": "thing"}
    saved = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    for other in LEVELS:
        amp.shutdown()
        again = WithExtraState()
        amp.initialize(again, sgd(again), opt_level=other, verbosity=0)
        again.load_state_dict(saved)
        for name, value in again.state_dict().items():
            if isinstance(value, torch.Tensor):
                reference = saved[name] if other != "O3" else saved[name].to(again.first.weight.dtype)
                assert torch.equal(value, reference.to(value.dtype)), (other, name)


def test_parts_have_fp32_state_dicts_too():
    model, optimizer = start("O2")
    train(model, optimizer, range(2))
    assert torch.equal(model.first.state_dict()["weight"], next(iter(amp.master_params(optimizer))))
    assert model.state_dict(keep_vars=True)["first.weight"] is model.first.weight


def test_apex_964_parts_of_a_state_dict_load():
    model, optimizer = start("O2")
    train(model, optimizer, range(2))
    body = {name: value for name, value in model.state_dict().items() if not name.startswith("last")}
    amp.shutdown()
    other, optimizer = start("O2", seed=5)
    other.load_state_dict(body, strict=False)
    assert torch.equal(other.state_dict()["first.weight"], body["first.weight"])
    train(other, optimizer, range(2))


# -- again, and the end ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_transformers_19731_initialize_twice_with_the_same_objects(level):
    model, optimizer = start(level)
    losses = train(model, optimizer, range(4))
    amp.shutdown()
    model, optimizer = start(level)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert train(model, optimizer, range(2)) == losses[:2]
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert train(model, optimizer, range(2, 4)) == pytest.approx(losses[2:], rel=1e-6 if level != "O3" else 1e-2)


def test_apex_439_a_second_initialize_leaves_the_first_model_working():
    first, first_optimizer = start("O2")
    second, second_optimizer = start("O2", seed=1)
    for model, optimizer in ((first, first_optimizer), (second, second_optimizer)):
        losses = train(model, optimizer, [0] * 10)
        assert losses[-1] < losses[0]
    third, third_optimizer = start("O1", seed=2)
    with amp.disable_casts():
        assert third(batch(0)[0]).dtype is torch.float32
    train(third, third_optimizer, range(2))


def test_a_new_optimizer_for_a_known_model():
    model, optimizer = start("O2")
    train(model, optimizer, range(3))
    weight = model.state_dict()["first.weight"].clone()
    other = ALL_OPTIMIZERS["Adam"](model.parameters())
    amp.initialize(model, other, opt_level="O2", verbosity=0)
    assert torch.equal(model.state_dict()["first.weight"], weight)
    train(model, other, range(3))
    assert not hasattr(optimizer, "_amp_stash")


def test_an_optimizer_again_without_its_model():
    _, optimizer = start("O2")
    with pytest.raises(RuntimeError, match=r"only be passed through amp\.initialize once"):
        amp.initialize(net(1), optimizer, opt_level="O2", verbosity=0)


def test_apex_975_an_optimizer_listed_twice():
    one, two = net(), net(1)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    amp.initialize([one, two], [optimizer, optimizer], opt_level="O2", verbosity=0)
    loss = loss_of(one, 0) + loss_of(two, 0)
    with amp.scale_loss(loss, [optimizer, optimizer]) as scaled_loss:
        scaled_loss.backward()
    expected = torch.autograd.grad(loss_of(one, 0), one.last.bias)[0]
    gradients = [master.grad for master in amp.master_params(optimizer)]
    assert torch.allclose(gradients[5], expected.float(), atol=1e-2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["SGD", "Adam", "FusedAdam"])
def test_shutdown_gives_everything_back(level, name):
    model, optimizer = start(level, name)
    methods = set(optimizer.__dict__)
    train(model, optimizer, range(3))
    expected = model.state_dict()["first.weight"].clone()
    amp.shutdown()
    assert torch.equal(model.first.weight, expected)
    assert model.first.weight.dtype is torch.float32
    assert optimizer.param_groups[0]["params"][0] is model.first.weight
    assert "step" not in optimizer.__dict__
    assert not {one for one in methods if "amp" in one}.intersection(optimizer.__dict__)
    assert not any(one._forward_hooks or one._forward_pre_hooks or one._state_dict_hooks for one in model.modules())
    for index in range(3):  # a plain loop continues with the existing state
        optimizer.zero_grad()
        loss_of(model, index).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="has not been initialized"):
        spoil(optimizer, torch.zeros(()))


def test_a_level_in_the_place_of_enabled():
    with pytest.raises(TypeError, match="write opt_level='O2'"):
        amp.initialize(net(), None, "O2")


def test_not_enabled():
    model = net()
    optimizer = sgd(model)
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    loss = loss_of(model, 0)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    with amp.disable_casts():
        pass


def test_not_enabled_ends_casts():
    start("O1")
    model = net()
    amp.initialize(model, sgd(model), enabled=False)
    assert model(batch(0)[0]).dtype is torch.float32


def test_apex_698_a_fresh_fused_novograd():
    model = net()
    optimizer = FusedNovoGrad(model.parameters(), lr=0.01)
    for level in LEVELS:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        before = [one.detach().clone() for one in amp.master_params(optimizer)]
        train(model, optimizer, range(2))
        assert not any(torch.equal(*pair) for pair in zip(before, amp.master_params(optimizer), strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_apex_210_larc(level):
    model = net()
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = train(model, optimizer, range(20))
    assert losses[-1] < losses[0]
    assert optimizer.optim.param_groups[0]["params"][0].dtype is (torch.float16 if level == "O3" else torch.float32)


def test_optimizer_state_from_before_moves_to_the_masters():
    model = net()
    optimizer = ALL_OPTIMIZERS["Adam"](model.parameters())
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    average = optimizer.state[model.first.weight]["exp_avg"].clone()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    master = next(iter(amp.master_params(optimizer)))
    assert torch.equal(optimizer.state[master]["exp_avg"], average)
    amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert optimizer.state[model.first.weight]["exp_avg"].dtype is torch.float16


def test_masters_have_the_bits_that_half_weights_lost():
    model = net()
    weight = model.first.weight.detach().clone()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    master = next(iter(amp.master_params(optimizer)))
    assert torch.equal(master, weight)
    assert not torch.equal(model.first.weight.float(), weight)
    before = snapshot(model, optimizer)
    model.first.weight.data.fill_(0.25)  # as apex took masters at the first backward
    train(model, optimizer, [0])
    assert (master - 0.25).abs().max() < 0.1
    assert not same(before, snapshot(model, optimizer))
