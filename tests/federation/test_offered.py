"""Classes that are not offered: in losses, metrics and recorded answers."""

import torch

from confed.federation.actions import among_offered
from confed.federation.evaluate import evaluate
from confed.federation.protocols import Output
from confed.tasks.vqa import VQA

LOGITS = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]])
BATCH = {"label": torch.tensor([2, 2]), "offered": torch.tensor([[False, True, True], [True, False, True]])}


class Fixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(LOGITS)

    def forward(self, batch: object) -> Output:
        return Output(self.logits, self.logits)


def test_loss_and_accuracy_are_those_among_offered_classes() -> None:
    task = VQA(3)
    wanted = -torch.stack([LOGITS[0, 1:].log_softmax(0)[1], LOGITS[1, [0, 2]].log_softmax(0)[1]]).mean()
    torch.testing.assert_close(task.loss(Output(LOGITS, LOGITS), BATCH), wanted)
    assert task.predictions(Output(LOGITS, LOGITS), BATCH).tolist() == [1, 1]
    assert task.predictions(Output(LOGITS, LOGITS), {"label": BATCH["label"]}).tolist() == [0, 0]


def test_recorded_answers_are_offered_ones() -> None:
    scores: list[tuple[torch.Tensor, torch.Tensor]] = []
    evaluate(Fixed(), VQA(3), [BATCH], scores=scores)
    assert scores[0][1].tolist() == [2, 2]


def test_batches_without_the_column_are_unchanged() -> None:
    assert among_offered(LOGITS, {}) is LOGITS
