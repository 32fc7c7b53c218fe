"""Finds the communities of a graph, and teaches one thing: the whole graph is the batch, and masks say which nodes count."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fabricamp import Trainer, TrainingModule, seed_everything

NODES, COMMUNITIES, FEATURES = 1000, 5, 16
LABELLED = 10  # nodes per community whose community is known in training
Graph = dict[str, Tensor]


def make_graph() -> Graph:
    """A graph whose nodes have more neighbours in their own community than in the others, and features that say little."""
    community = torch.arange(NODES) % COMMUNITIES
    same = community[:, None] == community
    chance = torch.where(same, 0.03, 0.003)
    edges = (torch.rand(NODES, NODES) < chance).triu(diagonal=1)
    features = torch.randn(COMMUNITIES, FEATURES)[community] * 0.4 + torch.randn(NODES, FEATURES)
    number = torch.arange(NODES) // COMMUNITIES  # of the node within its community
    return {
        "adjacency": normalized(edges | edges.T),
        "features": features,
        "community": community,
        "train": number < LABELLED,
        "val": (number >= LABELLED) & (number < 3 * LABELLED),
        "test": number >= 3 * LABELLED,
    }


def normalized(edges: Tensor) -> Tensor:
    """The sparse matrix D^-1/2 (A + I) D^-1/2 of Kipf and Welling (2017): each node sees itself and its neighbours."""
    matrix = (edges | torch.eye(NODES, dtype=torch.bool)).float()
    scale = matrix.sum(dim=1).rsqrt()
    adjacency: Tensor = (scale[:, None] * matrix * scale).to_sparse_coo()
    return adjacency


class GraphConvolution(nn.Module):
    """A linear layer, then a weighted sum over each node and its neighbours."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        mixed: Tensor = adjacency @ self.linear(features)
        return mixed


class CommunityFinder(TrainingModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = GraphConvolution(FEATURES, width)
        self.second = GraphConvolution(width, COMMUNITIES)
        self.dropout = nn.Dropout(0.5)

    def forward(self, graph: Graph) -> Tensor:
        hidden = self.first(graph["features"], graph["adjacency"]).relu()
        scores: Tensor = self.second(self.dropout(hidden), graph["adjacency"])
        return scores

    def training_step(self, graph: Graph, batch_idx: int) -> Tensor:
        known = graph["train"]
        loss = F.cross_entropy(self(graph)[known], graph["community"][known])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, graph: Graph, batch_idx: int) -> None:
        self.log("val_accuracy", accuracy(self(graph), graph, "val"), prog_bar=True)

    def test_step(self, graph: Graph, batch_idx: int) -> None:
        self.log("test_accuracy", accuracy(self(graph), graph, "test"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=5e-4)


def accuracy(scores: Tensor, graph: Graph, nodes: str) -> Tensor:
    correct = scores.argmax(dim=1) == graph["community"]
    return correct[graph[nodes]].float().mean()


def train(graph: Graph, epochs: int, folder: str) -> tuple[CommunityFinder, float]:
    """Returns the trained module and its accuracy on the test nodes."""
    seed_everything(1)
    module = CommunityFinder()
    trainer = Trainer(accelerator="cpu", max_epochs=epochs, log_every_n_steps=10, default_root_dir=folder)
    trainer.fit(module, [graph] * 20, [graph])  # a list is a loader: an epoch is 20 steps on the same graph
    (result,) = trainer.test(module, [graph], verbose=False)
    return module, result["test_accuracy"]


def draw(path: str, graph: Graph, module: CommunityFinder) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise SystemExit("--picture needs matplotlib: pip install matplotlib") from error
    with torch.no_grad():
        scores = module.eval()(graph)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    titles = ("what is known of each node", "what the graph convolutions make of it")
    for axis, title, values in zip(axes, titles, (graph["features"], scores), strict=True):
        _, _, directions = torch.pca_lowrank(values, q=2)
        axis.scatter(
            *(values @ directions).T.numpy(), c=graph["community"].numpy(), cmap="tab10", vmax=9, s=5, antialiased=False
        )
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig(path, dpi=70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer epochs, for a test of the script")
    parser.add_argument("--picture", help="draw the nodes before and after the convolutions into this file")
    parser.add_argument("--folder", default="runs/gnn", help="where logs and checkpoints go")
    options = parser.parse_args()

    epochs = 2 if options.quick else 10
    seed_everything(0)
    graph = make_graph()
    module, with_edges = train(graph, epochs, options.folder)
    no_edges = normalized(torch.zeros(NODES, NODES, dtype=torch.bool))
    _, without = train({**graph, "adjacency": no_edges}, epochs, options.folder)
    print(f"accuracy on the test nodes: {with_edges:.1%} with the graph, {without:.1%} without its edges")
    if options.picture:
        draw(options.picture, graph, module)


if __name__ == "__main__":
    main()
