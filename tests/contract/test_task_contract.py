"""The contract of tasks: those that come with confed keep it, and every check catches what it is for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import confed
from confed.federation.model_contract import TASK_CHECKS
from confed.federation.protocols import Output
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from confed.tasks.multilabel import Multilabel
from confed.tasks.retrieval import Retrieval
from confed.tasks.vqa import VQA
from confed.testing import ContractViolation, check_task
from refusals import refuses

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 3.0], [3.0, 1.0, 2.0], [0.1, 0.2, 0.3]])
LABELS = {"label": torch.tensor([0, 1, 0, 2])}
SOFT = {"target": torch.tensor([[1.0, 0.3, 0.0], [0.0, 1.0, 0.6], [0.9, 0.0, 0.0], [0.0, 0.0, 0.0]])}
STATES = {"labels": torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.int8)}


@pytest.mark.parametrize(
    ("task", "batch"),
    [
        (VQA(3), LABELS),
        (VQA(3, "bce"), SOFT),
        (VQA(3, "kl"), SOFT | LABELS),
        (VQA(3, types=("a", "b")), LABELS | {"type": torch.tensor([0, 1, 1, 0])}),
        (Retrieval(3), LABELS),
        (Multilabel(3), STATES),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "",
)
def test_tasks_keep_the_contract(task: Any, batch: dict[str, torch.Tensor]) -> None:
    assert [check for check, _ in check_task(task, Output(LOGITS, LOGITS), batch)] == [*TASK_CHECKS]


def broken(name: str, change: Callable[[Any], Any]) -> VQA:
    """VQA whose function of that name has its result changed."""
    plain = getattr(VQA, name)
    return type("Broken", (VQA,), {name: lambda self, output, batch: change(plain(self, output, batch))})(3)


def changing(self: VQA, output: Output, batch: dict[str, torch.Tensor]) -> Any:
    result = VQA.tally(self, output, batch)
    batch["label"] += 0 * batch["label"]
    batch["label"][0] = 2
    return result


CASES: dict[str, tuple[Any, str]] = {
    TASK_CHECKS[0]: (broken("tally", lambda tally: tally | {"speed": (1.0, 1.0)}), "scores 'speed'"),
    TASK_CHECKS[1]: (broken("tally", lambda tally: tally | {"accuracy": (9.0, 4.0)}),
                     "declares 'accuracy' between 0 and 1, and gave 2.25"),
    TASK_CHECKS[2]: (broken("loss", lambda loss: loss.detach()), "does not depend on the logits"),
    TASK_CHECKS[3]: (broken("predictions", lambda scores: scores.mean()), "must give 4 finite predictions"),
    TASK_CHECKS[4]: (broken("predictions", lambda scores: 1 - scores), "paired tests would be of another number"),
    TASK_CHECKS[5]: (broken("tally", lambda tally: {k: (t / n, 1.0) for k, (t, n) in tally.items()}), "other sums"),
    TASK_CHECKS[6]: (type("Changing", (VQA,), {"tally": changing})(3), r"changes batch\['label'\]"),
}  # fmt: skip


@pytest.mark.parametrize("check", TASK_CHECKS)
def test_every_check_catches_what_it_is_for(check: str) -> None:
    task, message = CASES[check]
    batch = {"label": LABELS["label"].clone()}
    with pytest.raises(ContractViolation, match=f"^{check}: the task .*{message}"):
        check_task(task, Output(LOGITS, LOGITS), batch)


def test_a_task_without_declared_scores_is_refused() -> None:
    with pytest.raises(ContractViolation, match="does not declare what it scores"):
        confed.check_task(object(), Output(LOGITS, LOGITS), LABELS)


class Inverted(VQA):
    """A task of somebody's own whose predictions are not what its headline is the mean of."""

    name = "inverted"

    def predictions(self, output: Output, batch: confed.Batch) -> torch.Tensor:
        """1 where the answer is wrong."""
        return 1 - super().predictions(output, batch)


def test_a_run_makes_the_same_checks_before_the_first_round(tmp_path: Any) -> None:
    settings = [
        "data.train=8",
        "data.validation=4",
        "data.test=8",
        "model.name=vilt_tiny",
        "run.rounds=1",
        "run.workers=1",
    ]
    recipe = load_recipe("fedvqa_scenes", [*settings, "task.name=test_task_contract:Inverted"])
    refuses("paired tests would be of another number than tables", run, recipe, tmp_path / "run")
