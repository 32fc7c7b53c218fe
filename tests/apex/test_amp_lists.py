"""O1's casts of each function in apex's lists: the same on GPUs and on CPUs, where torch.autocast casts fewer functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricamp.apex import amp
from fabricamp.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LISTS = {"torch": torch_overrides, "Tensor": tensor_overrides, "functional": functional_overrides}


def listed(key, where=LISTS):
    return [(place, name) for place in where for name in getattr(LISTS[place], key, ())]


def ids(pairs):
    return [f"{place}.{name}" for place, name in pairs]


FP16, FP32, CASTS = listed("FP16_FUNCS"), listed("FP32_FUNCS"), listed("CASTS")
CASTS = [(place, name) for place, name in CASTS if name not in ("__div__", "__idiv__", "__rdiv__")]  # Python 2's
MODULES = {"torch": torch, "Tensor": torch.Tensor, "functional": nn.functional}


@pytest.fixture(params=DEVICES)
def device(request):
    """Turns O1 on, and returns the device."""
    amp.initialize(nn.Linear(2, 2).to(request.param), opt_level="O1", verbosity=0)
    yield request.param
    amp.shutdown()


def values(shape, dtype, device):
    """Returns values between 0.1 and 0.9, where every function of the lists is defined."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(shape, generator=generator) * 0.8 + 0.1).to(device, dtype)


def arguments(name, dtype, device):
    """Returns arguments for the function ``name``, with floating tensors in ``dtype`` and shapes of three."""
    x, row = values((3, 3), dtype, device), values((3,), dtype, device)
    index = torch.tensor([0, 1, 2], device=device)
    image, cube = values((1, 3, 4, 4), dtype, device), values((2, 3, 3), dtype, device)
    sign = torch.tensor([1.0, -1.0, 1.0], device=device).to(dtype)
    table = {
        "pow": (x, 2), "__pow__": (x, 2), "__ipow__": (x, 2), "__rpow__": (x, 2), "cumprod": (x, 0), "cumsum": (x, 0),
        "dist": (x, x + 1), "renorm": (x, 2, 0, 0.5), "interpolate": (image, 8),
        "grid_sample": (image, torch.zeros(1, 2, 2, 2, device=device, dtype=dtype)), "softmin": (x, 1), "softmax": (x, 1),
        "log_softmax": (x, 1), "layer_norm": (x, (3,)), "group_norm": (image, 3), "local_response_norm": (image, 2),
        "cosine_similarity": (x, x * 2), "poisson_nll_loss": (x, x), "cosine_embedding_loss": (x, x * 2, sign),
        "cross_entropy": (x, index), "hinge_embedding_loss": (x, sign), "kl_div": (x, x), "l1_loss": (x, x * 2),
        "mse_loss": (x, x * 2), "margin_ranking_loss": (row, row * 2, sign), "multilabel_margin_loss": (row, index),
        "multilabel_soft_margin_loss": (x, x), "multi_margin_loss": (x, index), "nll_loss": (x, index),
        "binary_cross_entropy_with_logits": (x, x), "smooth_l1_loss": (x, x * 2), "soft_margin_loss": (x, x),
        "triplet_margin_loss": (x, x * 2, x * 3),
        "ctc_loss": (values((5, 1, 3), dtype, device), *(torch.tensor([one], device=device) for one in ([1, 2], 5, 2))),
        "conv1d": (cube, cube), "conv2d": (image, image), "conv3d": (image[None], image[None]),
        "conv_transpose1d": (cube, values((3, 3, 3), dtype, device)),
        "conv_transpose2d": (image, values((3, 3, 2, 2), dtype, device)),
        "conv_transpose3d": (image[None], values((1, 3, 2, 2, 2), dtype, device)),
        "conv_tbc": (cube, cube[:1].mT.contiguous(), row), "prelu": (x, row), "linear": (x, x),
        "addmm": (x, x, x), "addmv": (row, x, row), "addr": (x, row, row), "matmul": (x, x), "mm": (x, x), "mv": (x, row),
        "__matmul__": (x, x), "addbmm": (x, cube, cube), "baddbmm": (cube, cube, cube), "bmm": (cube, cube),
    }  # fmt: skip
    return table.get(name, (x,))


def mixed(name, device):
    """Returns the arguments of a promoting function: half and fp32 tensors."""
    half, full = values((3, 3), torch.float16, device), values((3, 3), torch.float32, device)
    table = {
        "dot": (half[0], full[0]), "addcdiv": (half, full, full), "addcmul": (half, full, full),
        "bilinear": (half, half, values((2, 3, 3), torch.float32, device), None),
    }  # fmt: skip
    return table.get(name, (half, full))


# Warnings of kl_div and grid_sample, which are called with their defaults.
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.filterwarnings("ignore:Default grid_sample and affine_grid behavior")
@pytest.mark.parametrize(("place", "name"), FP32, ids=ids(FP32))
def test_half_is_computed_in_fp32(place, name, device):
    function = getattr(MODULES[place], name)
    result = function(*arguments(name, torch.float16, device))
    assert result.dtype is torch.float32
    wide = [one.float() if torch.is_tensor(one) and one.is_floating_point() else one
            for one in arguments(name, torch.float16, device)]  # fmt: skip
    with amp.disable_casts():
        expected = function(*wide)
    # On a GPU cross_entropy takes half logits and computes in fp32, in another order; computed in half it would differ by 5e-4.
    assert torch.allclose(result, expected, rtol=1e-5 if device == "cpu" else 1e-4, atol=1e-6)


@pytest.mark.parametrize(("place", "name"), FP16, ids=ids(FP16))
def test_fp32_is_computed_in_half(place, name, device):
    result = getattr(MODULES[place], name)(*arguments(name, torch.float32, device))
    assert result.dtype is torch.float16


@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim")  # called with its defaults
@pytest.mark.parametrize(("place", "name"), CASTS, ids=ids(CASTS))
def test_half_and_fp32_meet_in_fp32(place, name, device):
    result = getattr(MODULES[place], name)(*mixed(name, device))
    if name == "equal":
        assert result is False
    elif not name.startswith(
        "__i"
    ):  # in-place operations keep the dtype, as everywhere in torch: see docs/from-apex.md
        assert result.dtype in (torch.float32, torch.bool)


@pytest.mark.parametrize("name", torch_overrides.SEQUENCE_CASTS)
def test_sequences_meet_in_fp32(name, device):
    assert getattr(torch, name)(mixed(name, device)).dtype is torch.float32


IN_PLACE = [
    (place, f"{name}_") for place, name in FP32 if place != "functional" and hasattr(MODULES[place], f"{name}_")
]
MATCHED = [f"{name}_" for _, name in listed("FP16_FUNCS", ["Tensor"]) if hasattr(torch.Tensor, f"{name}_")]


@pytest.mark.parametrize(("place", "name"), IN_PLACE, ids=ids(IN_PLACE))
def test_in_place_on_half_is_refused(place, name, device):
    function = getattr(MODULES[place], name)
    given = arguments(name[:-1], torch.float16, device)
    before = given[0].clone()
    with pytest.raises(NotImplementedError, match=rf"in-place .* {name} .*fp16"):
        function(*given)
    assert torch.equal(given[0], before)
    full = arguments(name[:-1], torch.float32, device)
    assert function(*full) is full[0]
    with amp.disable_casts():
        assert function(*given) is given[0]


@pytest.mark.parametrize("name", MATCHED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_in_place_products_take_the_type_of_what_they_write(name, dtype, device):
    other = torch.float32 if dtype is torch.float16 else torch.float16
    own, rest = arguments(name[:-1], dtype, device)[0], arguments(name[:-1], other, device)[1:]
    assert getattr(own, name)(*rest) is own
    assert own.dtype is dtype


def test_all_is_as_before_after_shutdown():
    before = {place: dict(vars(module)) for place, module in MODULES.items()}
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    amp.shutdown()
    for place, module in MODULES.items():
        assert dict(vars(module)) == before[place]
    x = torch.ones(2, dtype=torch.float16)
    assert x.exp_() is x
    assert torch.softmax(x, 0).dtype is torch.float16


def test_other_tensors_are_left_alone(device):
    """fp64, integers, and tensors on other devices than the model's."""
    assert torch.exp(torch.ones(2, device=device, dtype=torch.float64)).dtype is torch.float64
    assert torch.sum(torch.ones(2, device=device, dtype=torch.int64)).dtype is torch.int64
    if device == "cuda":
        assert torch.exp(torch.ones(2, dtype=torch.float16)).dtype is torch.float16
        assert torch.ones(2, dtype=torch.float16).exp_().dtype is torch.float16
