"""Trainer(compile=...) of a whole step: it trains as an eager one does and logs the same; what cannot be compiled is refused.

Most tests use backends that generate no code, because torch's default backend needs a C compiler.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fabricamp import Callback, Compile, ConfigError
from fabricamp.callbacks import ThroughputMonitor
from fabricamp.loggers import Logger
from fabricamp.nn import FusedLayerNorm, FusedRMSNorm
from fabricamp.ops import dispatch, fused_cross_entropy
from fabricamp.optimizers import FusedAdam
from tests.distributed.ranks import run_ranks
from tests.inside import session, settings
from tests.small import Classifier, loader, quiet_trainer

WHOLE = {"backend": "eager", "fullgraph": True}  # a break of the graph is an error


@pytest.fixture(autouse=True)
def _no_code_of_earlier_tests():
    """Resets the compiler: torch keeps eight compiled variants of a function, and with fullgraph a ninth is an error."""
    torch.compiler.reset()


class Logs(Classifier):
    """Has BatchNorm and dropout, and logs in every way, also a value that it changes after the call."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(16))
        self.net.insert(2, torch.nn.Dropout(0.3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        edited = logits.detach().mean()
        self.log_dict({"mean": edited, "number": 2.0}, on_step=True)
        edited.mul_(100.0)
        return loss


def fit(module, **options):
    rows = []
    trainer = quiet_trainer(**{"max_epochs": 2, "log_every_n_steps": 2, "num_sanity_val_steps": 0, **options})
    module.on_train_start = lambda: session(trainer).metrics.sinks.append(
        lambda row, step: rows.append((step, dict(row)))
    )
    torch.manual_seed(3)
    trainer.fit(module, loader(26), loader(8))  # the last batch is shorter
    return trainer, rows


@pytest.mark.parametrize(("precision", "accumulate"), [("O0", 1), ("O1", 2), ("O4", 4), ("bf16-true", 1)])
def test_the_bits_and_values_are_those_of_an_eager_step(precision, accumulate):
    found = []
    # In half precision "aot_eager" rounds in other operations.
    backend = "aot_eager" if precision == "O0" else "eager"
    for compiled in (False, {**WHOLE, "backend": backend}):
        module = Logs()
        options = {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0}
        trainer, rows = fit(module, compile=compiled, **options)
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found.append(([one.tolist() for one in module.parameters()], rows, values, list(module.state_dict())))
    assert found[0] == found[1]
    assert len(found[0][1]) > 2


def test_it_is_what_runs_and_compiled_once():
    graphs, runs = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *given: runs.append(1) or graph(*given)

    module = Logs()
    fit(module, compile={"backend": backend, "fullgraph": True})
    assert len(graphs) <= 2  # torch compiles again for other sizes, unless it already treats the size as dynamic
    assert len(runs) == 14
    assert not any("_orig_mod" in name for name in module.state_dict())
    assert "training_step" not in vars(module)


class Normed(Classifier):
    """Has a norm and a loss that may be kernels, and no random numbers, because torch's compiler generates its own."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, FusedLayerNorm(16))
        self.net.insert(3, FusedRMSNorm(16))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = fused_cross_entropy(self.net(x), y).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=0.01, eps=1e-3)


TOLERANCES = {"O0": 1e-5, "O1": 5e-3, "O4": 4e-2, "bf16-true": 4e-2}
"""Limits of the distance between compiled and eager weights, relative to the distance trained: compiled code rounds differently."""


def default_backend(precision, device):
    """Returns the distance of a compiled run's weights from an eager run's, relative to the distance trained, and both logs."""
    ends, logs = [], []
    for compiled in (False, {"fullgraph": True}):
        torch.manual_seed(0)
        module = Normed()
        begun = torch.cat([one.detach().double().flatten() for one in module.parameters()])
        options = {"accelerator": device, "precision": precision, "compile": compiled, "cuda_graph": False}
        _, rows = fit(module, **options, accumulate_grad_batches=2, gradient_clip_val=1.0)
        ends.append(torch.cat([one.detach().cpu().double().flatten() for one in module.parameters()]))
        logs.append([(step, row["loss_step"]) for step, row in rows if "loss_step" in row])
    return float((ends[1] - ends[0]).norm() / (ends[0] - begun).norm()), logs


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's default backend needs a C++ compiler")
@pytest.mark.parametrize("precision", TOLERANCES)
def test_torchs_default_backend(precision):
    apart, logs = default_backend(precision, "cpu")
    assert apart < TOLERANCES[precision]
    assert logs[1] == [(step, pytest.approx(value, rel=TOLERANCES[precision])) for step, value in logs[0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.skipif(shutil.which("cc") is None, reason="torch's default backend needs a C compiler")
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("precision", TOLERANCES)
def test_torchs_default_backend_on_a_gpu(precision, kernels):
    with dispatch.always("cupy") if kernels else contextlib.nullcontext():
        apart, logs = default_backend(precision, "gpu")
    assert apart < TOLERANCES[precision]
    assert logs[1] == [(step, pytest.approx(value, rel=TOLERANCES[precision])) for step, value in logs[0]]


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.state.batches_done == 9:
            trainer.save_checkpoint(self.path)


def test_a_run_goes_on_compiled_or_not(tmp_path):
    straight = Logs()
    options = {"accumulate_grad_batches": 2}
    fit(straight, compile=WHOLE, callbacks=[Saves(tmp_path / "cut.ckpt")], **options)
    weights = torch.load(tmp_path / "cut.ckpt", weights_only=True)["state_dict"]
    assert list(weights) == list(straight.state_dict())
    for compiled in (WHOLE, False):
        resumed = Logs()
        trainer = quiet_trainer(max_epochs=2, compile=compiled, num_sanity_val_steps=0, **options)
        trainer.fit(resumed, loader(26), loader(8), ckpt_path=tmp_path / "cut.ckpt")
        assert all(map(torch.equal, resumed.parameters(), straight.parameters()))


def of_ranks():
    """Returns for each strategy whether compiled steps leave the same bits as eager steps."""
    found = {}
    for strategy in ("ddp", "delayed_ddp"):
        ends = []
        for compiled in (False, WHOLE):
            module = Logs()
            options = {"strategy": strategy, "devices": "auto", "max_epochs": 1, "compile": compiled}
            torch.manual_seed(3)
            quiet_trainer(**options, accumulate_grad_batches=2).fit(module, loader(48))
            ends.append([one.tolist() for one in module.parameters()])
        found[strategy] = ends[0] == ends[1]
    return found, dist.get_rank()


def test_two_ranks():
    assert run_ranks(of_ranks, 2) == [({"ddp": True, "delayed_ddp": True}, rank) for rank in range(2)]


def test_flops_are_counted_beside_it():
    class Silent(Logger):
        def log_metrics(self, metrics, step):
            pass

    module, monitor = Logs(), ThroughputMonitor()
    fit(module, compile=WHOLE, callbacks=[monitor], logger=Silent())
    eager = Logs()
    fit(eager)
    assert monitor.flops_per_batch > 0
    assert all(map(torch.equal, module.parameters(), eager.parameters()))


def test_nothing_is_logged_in_a_barebones_run():
    module = Logs()
    trainer = quiet_trainer(max_epochs=1, compile=WHOLE, barebones=True)
    trainer.fit(module, loader(24))
    assert not trainer.callback_metrics


class ByHand(Classifier):
    automatic_optimization = False


REFUSED = {
    "by hand": ("step", {}, ByHand, "manual optimization calls backward"),
    "step of fsdp": ("step", {"strategy": "fsdp"}, Logs, "strategy 'fsdp' gathers parameters in hooks.*'blocks'"),
    "modules of fsdp": ("modules", {"strategy": "fsdp"}, Logs, "strategy 'fsdp' gathers parameters within.*'blocks'"),
    "step at O2": ("step", {"precision": "O2"}, Logs, "precision 'O2' casts at the modules.*'modules' or 'blocks'"),
    "step at O5": ("step", {"precision": "O5"}, Logs, "precision 'O5' casts at the modules.*'modules' or 'blocks'"),
    "no blocks": ("blocks", {}, Logs, "Logs has no repeated blocks"),
    "word": ("layers", {}, Logs, "compile='layers' is not allowed.*'modules'"),
    "keyword": ({"mod": "default"}, {}, Logs, "torch.compile has no 'mod'.*mode"),
    "both": ({"mode": "default", "options": {}}, {}, Logs, "mode or options"),
    "number": (3, {}, Logs, "compile=3 is not allowed"),
    "graph in a graph": (
        {"mode": "reduce-overhead"},
        {"cuda_graph": "auto"},
        Logs,
        "mode='reduce-overhead' makes torch capture",
    ),
    "graph by option": ({"options": {"triton.cudagraphs": True}}, {"cuda_graph": "auto"}, Logs, "triton.cudagraphs"),
    "graph by backend": ({"backend": "cudagraphs"}, {"cuda_graph": "auto"}, Logs, "backend='cudagraphs'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case):
    value, options, make, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        quiet_trainer(compile=value, max_epochs=1, **options).fit(make(), loader())


def test_a_module_that_was_compiled_trains_as_the_original_compiled_once(tmp_path):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    eager, module = Logs(), Logs()
    _, rows = fit(eager)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    trainer, compiled_rows = quiet_trainer(max_epochs=2, log_every_n_steps=2, num_sanity_val_steps=0, compile=True), []
    module.on_train_start = lambda: session(trainer).metrics.sinks.append(
        lambda row, step: compiled_rows.append((step, dict(row)))
    )
    torch.manual_seed(3)
    trainer.fit(compiled, loader(26), loader(8))  # compile=True would take torch's default backend
    assert 1 <= len(graphs) <= 2
    assert all(map(torch.equal, module.parameters(), eager.parameters()))
    assert compiled_rows == rows
    assert trainer.lightning_module is module
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert list(torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]) == list(eager.state_dict())
    for run in (trainer.validate, trainer.test):
        assert run(compiled, loader(8), verbose=False) == run(module, loader(8), verbose=False)
    assert torch.equal(trainer.predict(compiled, loader(4))[0], trainer.predict(module, loader(4))[0])


def test_a_compiled_module_trains_by_hand_with_its_modules_compiled(caplog):
    class Manual(Logs):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    ends = []
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    for compiled in (False, True):
        module = Manual()
        given = torch.compile(module, backend=backend, fullgraph=True) if compiled else module
        with caplog.at_level("INFO", "fabricamp"):
            torch.manual_seed(3)
            quiet_trainer(max_steps=2, enable_model_summary=True).fit(given, loader())
        ends.append([one.tolist() for one in module.parameters()])
    assert ends[0] == ends[1]
    assert len(graphs) == 1
    assert "compile takes the modules that the step calls: manual optimization" in caplog.text
    with pytest.raises(ConfigError, match="got Linear"):
        quiet_trainer().fit(torch.compile(torch.nn.Linear(2, 2)), loader())


def test_where_no_graph_is_possible_the_compiled_step_runs():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    module, eager = Logs(), Logs()
    fit(module, compile={"backend": backend}, cuda_graph="auto")
    fit(eager)
    assert graphs
    assert all(map(torch.equal, module.parameters(), eager.parameters()))


def with_compiled_method():
    class CompilesMethod(Logs):
        @torch.compile(mode="reduce-overhead")
        def scores(self, x):
            return self.net(x)

    return CompilesMethod()


def with_compiled_part(name, part):
    module = Logs()
    setattr(module, name, part)
    return module


def with_compiled_call(**options):
    module = Logs()
    module.net.compile(**options)
    return module


OWN_GRAPHS = {
    "module": ("a module", lambda: torch.compile(Logs(), mode="reduce-overhead")),
    "module by backend": ("a module", lambda: torch.compile(Logs(), backend="cudagraphs")),
    "part": ("self.part", lambda: with_compiled_part("part", torch.compile(nn.Linear(2, 2), mode="max-autotune"))),
    "call": ("self.net", lambda: with_compiled_call(mode="reduce-overhead")),
    "call by option": ("self.net", lambda: with_compiled_call(options={"triton.cudagraphs": True})),
    "call by backend": ("self.net", lambda: with_compiled_call(backend="cudagraphs")),
    "function": ("self.loss", lambda: with_compiled_part("loss", torch.compile(torch.relu, mode="reduce-overhead"))),
    "method": ("CompilesMethod.scores", with_compiled_method),
}


@pytest.mark.parametrize("case", OWN_GRAPHS)
def test_parts_compiled_with_graphs_of_torchs_own_are_not_captured(case):
    what, make = OWN_GRAPHS[case]
    with pytest.raises(ConfigError, match=f"cuda_graph with {what} compiled by .* leave the mode out, or cuda_graph"):
        quiet_trainer(max_steps=1, cuda_graph="auto").fit(make(), loader())


def test_nor_are_they_in_an_evaluation():
    with pytest.raises(ConfigError, match=r"cuda_graph with self\.net compiled by"):
        quiet_trainer(cuda_graph="auto").validate(with_compiled_call(mode="reduce-overhead"), loader())


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"mode": "max-autotune-no-cudagraphs"}])
def test_parts_compiled_without_graphs_are_not_refused(options):
    module = with_compiled_part("unused", torch.compile(nn.Linear(2, 2), **options))
    quiet_trainer(max_steps=1, cuda_graph="auto").fit(module, loader())


def test_without_a_graph_torch_may_capture_its_own():
    module = with_compiled_part("unused", torch.compile(nn.Linear(2, 2), mode="reduce-overhead"))
    quiet_trainer(max_steps=1).fit(module, loader())


FORMS = {
    "True": (True, Compile()),
    "part": ("blocks", Compile("blocks")),
    "dict": ({"part": "modules", "fullgraph": True}, Compile("modules", fullgraph=True)),
    "object": (Compile("step"), Compile("step")),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_the_argument(form):
    given, meant = FORMS[form]
    assert settings(quiet_trainer(compile=given)).compile == meant
    assert pickle.loads(pickle.dumps(meant)) == meant
