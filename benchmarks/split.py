"""A round of BiCSL in the simulator against training the whole network end to end on the same batches.

For 1 and for 4 clients; "plain" is a loop over the same modules, loss and optimisers without any federation, client by
client. Both take turns in one process; times are processor time. Also: bytes of a step against B (D + H) values, each
way, and the evaluation of 10,000 questions over 3,129 answers against the forward pass of the backbone alone.
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from confed.algorithms.bicsl import BiCSL
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.local import InProcess, Members, Setup, Simulation, simulate
from confed.federation.local import Local
from confed.federation.randomness import generator, isolated
from confed.federation.state import MemoryStore
from confed.federation.train import make_optimizer
from confed.models.mcan import mcan_s_mini
from confed.tasks.contrastive import Contrastive
from measure import finish

ANSWERS = tuple(f"answer {number}" for number in range(40))
WORDS, EXAMPLES, REGIONS, WIDTH, BATCH = 200, 1024, 16, 64, 64
LOCAL = Local(epochs=1, batch_size=BATCH, lr=1e-3)


def build(answers: tuple[str, ...] = ANSWERS) -> Any:
    task = Contrastive(len(answers), width=64, hidden=128, embedding=64)
    backbone = mcan_s_mini(answers, WORDS, region_width=WIDTH)
    return task.wrap(backbone, answers, torch.Generator().manual_seed(0))


class Batches(TableData):
    """Examples that are tensors already."""

    def __init__(self, seed: int, count: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.columns = {
            "regions": torch.randn(count, REGIONS, WIDTH, generator=rng),
            "boxes": torch.rand(count, REGIONS, 4, generator=rng),
            "text": torch.randint(1, WORDS, (count, 14), generator=rng),
            "text_mask": torch.ones(count, 14, dtype=torch.int64),
            "label": torch.randint(0, len(ANSWERS), (count,), generator=rng),
        }
        nothing = Table(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(count, dtype=torch.int64), {})
        super().__init__(nothing, nothing.take(0), nothing.take(0))

    def train(self, batch_size: int, rng: torch.Generator) -> Any:
        for rows in torch.randperm(len(self), generator=rng).split(batch_size):
            yield {name: column[rows] for name, column in self.columns.items()}


def timed(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def plain(models: list[Any], clients: dict[str, Batches], task: Contrastive) -> None:
    """One epoch of every client on a model of its own, then the mean of the models."""
    for model, (name, data) in zip(models, clients.items(), strict=True):
        model.train()
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], LOCAL)
        with isolated(0):
            for batch in data.train(BATCH, generator(0, 0, name, "order/0")):
                optimizer.zero_grad(set_to_none=True)
                task.loss(model(batch), batch).backward()
                optimizer.step()
    states = [model.state_dict() for model in models]
    with torch.no_grad():
        for name, value in states[0].items():
            if value.is_floating_point():
                mean: Tensor = torch.stack([state[name] for state in states]).mean(0)
                for state in states:
                    state[name].copy_(mean)


def cost(count: int) -> tuple[list[float], int]:
    """Time of a round over the plain loop's, in pairs that take turns; and bytes of a step each way."""
    clients = {f"client-{number}": Batches(number, EXAMPLES) for number in range(count)}
    task = Contrastive(len(ANSWERS), width=64, hidden=128, embedding=64)
    algorithm = BiCSL().configure(build(), task)
    setup = Setup(algorithm, Members(clients), task, LOCAL, build, rounds=9)
    answerer, models = InProcess(setup), [build() for _ in clients]
    ratios: list[float] = []
    with Simulation(setup, MemoryStore(), answerer) as simulation:
        records = simulate(simulation, simulation.start(answerer.workspace))
        for number in range(8):
            ours = timed(lambda: next(records))
            theirs = timed(lambda: plain(models, clients, task))
            if number:  # the first round builds the workspaces
                ratios.append(ours / theirs)
        traffic = next(records).traffic["step"]
    return sorted(ratios), round(traffic.up / count / (EXAMPLES // BATCH))


def evaluation() -> float:
    """Time of scoring 10,000 questions over 3,129 answers, over the backbone's."""
    answers = tuple(f"answer {number}" for number in range(3129))
    model, data = build(answers).eval(), Batches(0, 10_000)
    batches = [{n: c[i : i + 250] for n, c in data.columns.items()} for i in range(0, 10_000, 250)]
    ratios: list[float] = []
    with torch.inference_mode():
        for _ in range(5):
            whole = timed(lambda: [model(batch) for batch in batches])
            ratios.append(whole / timed(lambda: [model.mha(batch) for batch in batches]))
    return median(ratios)


def main() -> None:
    torch.set_num_threads(1)
    (one, step), (four, _) = cost(1), cost(4)
    model = build()
    values = BATCH * (model.nha.first.in_features + model.apn.project.out_features)
    finish(
        "split",
        1.15,
        ratio=max(median(one), median(four)),
        one_client=median(one),
        one_client_range=[one[0], one[-1]],
        four_clients=median(four),
        four_clients_range=[four[0], four[-1]],
        step_bytes_up=step,
        step_bytes_arithmetic=4 * values,
        evaluation_over_backbone=evaluation(),
    )


if __name__ == "__main__":
    sys.exit(main())
