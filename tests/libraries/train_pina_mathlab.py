"""The physics-informed network of PINA's first page for u' = u, with one batch an epoch, which is its default, and with more."""

import lightning.pytorch as pl
import torch
from pina import Condition, LabelTensor, Trainer
from pina.domain import CartesianDomain
from pina.equation import Equation
from pina.equation.zoo import FixedValue
from pina.model import FeedForward
from pina.operator import grad
from pina.problem import SpatialProblem
from pina.solver import PhysicsInformedSingleModelSolver
from recorder import Records, main


class Recorder(Records, pl.Callback):
    pass


def equation(points, output):
    return grad(output, points, components=["u"], d=["x"]) - output.extract(["u"])


class SimpleODE(SpatialProblem):
    output_variables = ["u"]
    spatial_domain = CartesianDomain({"x": [0, 1]})
    domains = {"x0": CartesianDomain({"x": 0.0}), "D": CartesianDomain({"x": [0, 1]})}
    conditions = {
        "bound_cond": Condition(domain="x0", equation=FixedValue(1.0)),
        "phys_cond": Condition(domain="D", equation=Equation(equation)),
    }


def parts():
    problem = SimpleODE()
    problem.discretise_domain(n=50, mode="grid", domains=["D", "x0"])
    return problem, FeedForward(input_dimensions=1, output_dimensions=1, layers=[16, 16])


def fit():
    for batch_size in (None, 10):
        pl.seed_everything(3)
        problem, model = parts()
        solver = PhysicsInformedSingleModelSolver(problem, model)
        trainer = Trainer(
            solver,
            batch_size=batch_size,
            max_epochs=5,
            train_size=0.8,
            val_size=0.2,
            accelerator="cpu",
            callbacks=[Recorder()],
            default_root_dir=f"batch_{batch_size}",
        )
        trainer.train()
    trainer.save_checkpoint("pinn.ckpt")


def predict():
    problem, model = parts()
    solver = PhysicsInformedSingleModelSolver.load_from_checkpoint(
        "pinn.ckpt", problem=problem, model=model, weights_only=False
    )
    points = torch.linspace(0, 1, 20).reshape(-1, 1)
    with torch.no_grad():
        return solver(LabelTensor(points, ["x"])).as_subclass(torch.Tensor)


if __name__ == "__main__":
    main(fit, predict)
