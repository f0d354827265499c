"""PromptFL against a plain loop over the same text passes, and AFL's round.

``promptfl``: 10 clients, a text tower of ViT-B/16's size (12 layers of width 512, random weights) and a small picture
tower whose features are kept. The plain loop has the features ready and does nothing per step but the text pass, the
loss, the gradient and the step. ``afl``: 60 clients x 400 pictures x 512 features, which are given.
"""

import argparse
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.algorithms.afl import AFL
from confed.algorithms.promptfl import PromptFL
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.executor import InProcess
from confed.engines.local import Members, Setup, Simulation, Workspace, simulate
from confed.federation.families.prompts import CONTEXT
from confed.federation.local import Local
from confed.federation.protocols import Batch, Output
from confed.federation.randomness import generator
from confed.federation.state import MemoryStore
from confed.models.clip import TEXT, VISION, DualEncoder, tiny_encoder
from confed.models.finetuning import USUAL, finetune
from confed.models.pretrained import seeded
from confed.tasks.vqa import VQA
from measure import finish, side_by_side

CLASSES, SIDE, FEATURES = 10, 32, 512
NAMES = tuple(f"class number {i}" for i in range(CLASSES))
LOCAL = Local(epochs=1, batch_size=16, lr=0.01, optimizer="sgd", weight_decay=0.0)
TEXT_TARGET, AFL_TARGET = 1.05, 2.0


def main() -> None:
    """Both, or the one that is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", choices=("promptfl", "afl", "both"), default="both")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--examples", type=int, default=32)
    arguments, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    if arguments.what in ("promptfl", "both"):
        promptfl(arguments.clients, arguments.examples, arguments.repeats)
    if arguments.what in ("afl", "both"):
        afl(arguments.repeats)


def dual_encoder() -> DualEncoder:
    """CLIP with ViT-B/16's text tower, 4 context vectors that learn, and a picture tower of two small layers."""
    from transformers import AutoConfig, AutoModel

    text = {**TEXT, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    config = AutoConfig.for_model("clip", text_config=text, vision_config=VISION, projection_dim=FEATURES)
    rng = torch.Generator().manual_seed(0)
    model = DualEncoder(
        seeded(0, lambda: AutoModel.from_config(config)), tiny_encoder("clip")[1], NAMES,
        templates=("a photo of a {}.",), context=4, head="text", rng=rng,
    )  # fmt: skip
    finetune(model, "head", USUAL, model.places(), rng)
    return model


def promptfl(clients: int, examples: int, repeats: int) -> None:
    """A round of PromptFL against the plain loop."""
    rng, model = torch.Generator().manual_seed(1), dual_encoder()
    tables = [
        Table(
            torch.randint(0, 256, (examples, 3, SIDE, SIDE), dtype=torch.uint8, generator=rng), torch.arange(examples),
            {"label": torch.randint(0, CLASSES, (examples,), generator=rng)},
        )
        for _ in range(clients)
    ]  # fmt: skip
    data = {f"{i}": TableData(t, t.take(0), t.take(0)) for i, t in enumerate(tables)}
    setup = Setup(PromptFL(), Members(data), VQA(CLASSES), LOCAL, lambda: model, 1, keep_personal=False)
    workspace, start = Workspace(model), model.initial_context()
    features = [model.image_features(t.batch(torch.arange(examples))) for t in tables]

    def ours() -> Tensor:
        with torch.no_grad():
            workspace.tensors[CONTEXT].copy_(start)
        simulation = Simulation(setup, MemoryStore(), InProcess(setup, workspace))
        servers = simulation.start(workspace)
        for record in simulate(simulation, servers):
            servers = record.servers
        return servers["main"].params[CONTEXT]

    def plain() -> Tensor:
        mean, classes, scale = torch.zeros_like(start), torch.arange(CLASSES), model.body.logit_scale.exp()
        for number, table in enumerate(tables):
            context = start.clone().requires_grad_()
            optimizer = torch.optim.SGD([context], lr=LOCAL.lr)
            order = torch.randperm(examples, generator=generator(0, 0, f"{number}", "order/0"))
            for rows in order.split(LOCAL.batch_size):
                scores = scale * features[number][rows] @ model.class_features(context, classes).T
                loss = F.cross_entropy(scores, table.columns["label"][rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            mean += context.detach() / clients
        return mean

    gap = float((ours() - plain()).abs().max() / (plain() - start).abs().max())
    passes = clients * -(-examples // LOCAL.batch_size)
    figures = side_by_side(plain, ours, repeats)
    finish("PromptFL, a round", TEXT_TARGET, **figures, text_passes=passes, largest_relative_difference=gap)


class Given(nn.Module):
    """Features that the batch has; nothing is computed."""

    frozen = frozenset({"unused"})
    answer_head = None
    feature_shape = (FEATURES, CLASSES)

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, batch: Batch) -> Output:
        """Scores of zero, and ``batch["x"]``."""
        return Output(batch["x"].new_zeros(len(batch["x"]), CLASSES), batch["x"])


def afl(repeats: int, clients: int = 60, examples: int = 400) -> None:
    """AFL's one round: moments of all clients, their mean, and the head."""
    rng = torch.Generator().manual_seed(2)
    none = torch.zeros(1, dtype=torch.uint8)

    def tables() -> Iterator[Table]:
        for _ in range(clients):
            x = F.normalize(torch.randn(examples, FEATURES, generator=rng), dim=1)
            yield Table(none, torch.arange(examples), {"x": x, "label": torch.randint(0, CLASSES, (examples,))})

    data = {f"{i}": TableData(t, t.take(0), t.take(0)) for i, t in enumerate(tables())}
    build = Given
    method = AFL().configure(build(), VQA(CLASSES))
    local = Local(batch_size=128)
    setup = Setup(method, Members(data), VQA(CLASSES), local, build, 1, keep_personal=False)
    times: list[tuple[float, float]] = []
    for _ in range(repeats):
        workspace = Workspace(setup.model())
        simulation = Simulation(setup, MemoryStore(), InProcess(setup, workspace))
        servers = simulation.start(workspace)
        cpu, wall = time.process_time(), time.perf_counter()
        assert not next(iter(simulate(simulation, servers))).errors
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, wall = min(times)
    finish(
        f"AFL, {clients} clients x {examples} x {FEATURES}", AFL_TARGET, ratio=cpu, wall_seconds=wall,
        unit="seconds of processor time",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
