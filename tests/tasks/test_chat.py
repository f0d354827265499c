"""Chat task: scores of written and chosen answers, the loss over tokens, and bad input."""

from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.algorithms.fedavg import FedAvg
from confed.data.caption_batches import pack_texts
from confed.data.examples import TableData
from confed.data.table import Table
from confed.engines.local import Members, Workspace
from confed.federation.client import Client
from confed.federation.local import Local
from confed.federation.protocols import Batch, Output
from confed.federation.state import ClientState
from confed.federation.train import train
from confed.metrics.captions import Cider
from confed.tasks.chat import Chat, Metric
from refusals import refuses

REFERENCES = [["red ball"], ["2"], ["a cat"]]
TEXTS = ["Red ball.", "two", "dog"]


class Letters:
    """Text k for the token k + 1."""

    pad = 0

    def decode(self, tokens: Tensor) -> list[str]:
        return ["".join(f" {TEXTS[token - 1]} " for token in row if token) for row in tokens.tolist()]


def written(*tokens: int) -> tuple[Output, dict[str, Tensor]]:
    logits = torch.tensor([[token, 0] for token in tokens])
    batch = {"references": pack_texts(REFERENCES), "type": torch.tensor([0, 1, 1])}
    return Output(logits, torch.zeros(len(tokens), 2)), batch


def test_exact_answers_are_compared_in_normal_form_and_by_type() -> None:
    task = Chat(3, types=("thing", "count")).reading(Letters(), REFERENCES)
    output, batch = written(1, 2, 3)
    assert task.predictions(output, batch).tolist() == [1, 1, 0]
    assert task.tally(output, batch) == {"exact": (2.0, 3.0), "exact/thing": (1.0, 1.0), "exact/count": (1.0, 2.0)}
    assert [entry["answer"] for entry in task.written(output, batch)] == TEXTS
    assert set(task.tally(output, batch)) <= set(task.measures)


@pytest.mark.parametrize(("metric", "expected"), [("anls", [8 / 9, 0.0, 0.0]), ("f1", [1.0, 0.0, 0.0])])
def test_other_metrics_score_the_same_answers(metric, expected: list[float]) -> None:
    task = Chat(3, metric).reading(Letters(), REFERENCES)
    output, batch = written(1, 2, 3)
    torch.testing.assert_close(task.predictions(output, batch), torch.tensor(expected))


@pytest.mark.parametrize("metric", get_args(Metric))
def test_an_empty_answer_is_right_in_no_metric(metric) -> None:
    task = Chat(3, metric).reading(Letters(), [["A"] * 4, ["the"] * 4, ["?"] * 4])
    for reference in ("A", "the", "?", "a ball"):
        assert [task.score(text, [reference] * 4) for text in ("", " \n", "...")] == [0, 0, 0]
    assert metric == "cider" or task.score("a", ["A"] * 4) == 1


def test_cider_is_that_of_captions() -> None:
    task = Chat(3, "cider").reading(Letters(), REFERENCES)
    output, batch = written(1, 2, 3)
    expected = [Cider.of(REFERENCES).score(t, r) for t, r in zip(TEXTS, REFERENCES, strict=True)]
    torch.testing.assert_close(task.predictions(output, batch), torch.tensor(expected, dtype=torch.float32))
    assert task.measures["cider"] == (0.0, 10.0)


def test_vqa_accuracy_counts_annotators() -> None:
    people = [["red ball"] * 2 + ["ball"] * 8]
    task = Chat(3, "vqa").reading(Letters(), people)
    batch = {"references": pack_texts(people)}
    assert task.predictions(Output(torch.tensor([[1]]), torch.zeros(1, 2)), batch).tolist() == pytest.approx([0.6])
    with pytest.raises(ValueError, match=r'"vqa" needs the answers of several people \(4 at least.*a question has 1'):
        Chat(3, "vqa").reading(Letters(), REFERENCES)


def test_chosen_answers_are_scored_as_texts() -> None:
    task = Chat(3, "choice").reading(Letters(), REFERENCES).choosing(torch.tensor([[9, 1], [9, 2], [9, 3]]))
    assert task.answers == 3
    _, batch = written(1, 2, 3)
    scores = torch.tensor([[0.0, -1, -2], [-3, -2, -1], [0, -1, -1]])
    assert task.predictions(Output(scores, torch.zeros(3, 2)), batch).tolist() == [1, 0, 0]


def test_loss_of_chosen_answers_is_that_of_the_right_one() -> None:
    scores = torch.tensor([[0.0, -1, -2], [-3, -2, -1], [0, -1, -1]])
    batch = {"label": torch.tensor([1, 2, -1])}  # the last one has no candidate
    expected = -(scores[0].log_softmax(0)[1] + scores[1].log_softmax(0)[2]) / 2
    torch.testing.assert_close(Chat(3, "choice").loss(Output(scores, torch.zeros(3, 2)), batch), expected)


def test_loss_is_the_mean_over_tokens_of_the_batch() -> None:
    logits = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[5, 1, 2, 3, 4], [5, 6, 0, 0, 0], [5, 1, 0, 2, 0]])  # a 0 before another token is one
    output, batch = Output(logits, torch.zeros(3, 2)), {"answer_tokens": tokens}
    target = tokens[:, 1:].clone()
    target[1, 1:], target[2, 3] = -100, -100
    expected = functional.cross_entropy(logits.transpose(1, 2), target, ignore_index=-100)
    torch.testing.assert_close(Chat(3).loss(output, batch), expected)
    tally = Chat(3).tally(output, batch)
    assert tally["loss"][1] == 4 + 1 + 3
    assert tally["loss"][0] / tally["loss"][1] == pytest.approx(expected.item(), rel=1e-5)


def test_several_answers_weigh_their_share() -> None:
    logits = torch.randn(3, 2, 7, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[[5, 1, 2], [5, 3, 0]], [[5, 4, 0], [0, 0, 0]]])
    weight = torch.tensor([[0.75, 0.25], [1.0, 0.0]])
    found = Chat(3).loss(Output(logits, torch.zeros(2, 2)), {"answer_tokens": tokens, "answer_weight": weight})
    log_p = logits.log_softmax(-1)
    total = 0.75 * (log_p[0, 0, 1] + log_p[0, 1, 2]) + 0.25 * log_p[1, 0, 3] + log_p[2, 0, 4]
    torch.testing.assert_close(found, -total / (0.75 * 2 + 0.25 + 1))


def test_missing_data_are_named() -> None:
    output, batch = written(1, 2, 3)
    refuses("reading and choosing come first", Chat(3).predictions, output, batch)
    refuses(r"need batch\['references'\]", Chat(3).reading(Letters(), REFERENCES).predictions, output, {})
    refuses("has no loss", Chat(3).loss, output, batch)
    with pytest.raises(ValueError, match='"choice" needs a list of answers to choose from'):
        Chat(3, "choice").choosing(torch.zeros(0, 1, dtype=torch.int64))


class Bigrams(nn.Module):
    """Scores of each token by the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self, batch: Batch) -> Output:
        tokens = batch["answer_tokens"]
        if tokens.ndim == 3:
            tokens = tokens[batch["answer_weight"] > 0]
        return Output(self.weight[tokens[:, :-1]], tokens[:, :1].float())


@pytest.mark.parametrize("several", [False, True])
def test_accumulated_steps_are_those_of_one_batch(several: bool) -> None:
    answers = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [1, 7, 0, 0, 0, 0, 0], [1, 3, 0, 0, 0, 0, 0], [1, 2, 4, 7, 0, 0, 0]])
    columns: dict[str, Tensor] = {"answer_tokens": answers}
    if several:
        columns = {"answer_tokens": torch.stack([answers, answers.roll(1, 0)], 1)}
        columns["answer_weight"] = torch.tensor([[0.75, 0.25], [1.0, 0.0], [0.5, 0.5], [1.0, 0.0]])
    table = Table(torch.zeros(1, 3, 1, 1, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), columns)
    data, found = TableData(table, table.take(0), table.take(0)), []
    for batch_size, accumulate in ((4, 1), (2, 2), (1, 4), (1, 1)):
        local = Local(1, batch_size, accumulate, lr=0.5, optimizer="sgd", weight_decay=0.0)
        workspace, info = Workspace(Bigrams()), Members({"a": data}).info(0)
        client = Client(
            info, data, workspace.model, workspace.tensors, Chat(1), local, ClientState(),
            workspace.scopes(FedAvg(), info), workspace.initial, 0, 1, seed=0,
        )  # fmt: skip
        client.load(workspace.initial)
        train(client, FedAvg().objective(client))
        found.append(client.tensors["weight"].detach().clone())
    for other in found[1:3]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[3], found[0], atol=1e-3)


def test_tokens_of_answers_are_told_from_the_padding_behind_them() -> None:
    tokens = torch.tensor([[[2, 5, 7, 0], [2, 5, 0, 7]], [[2, 9, 0, 0], [0, 0, 0, 0]]])
    batch = {"answer_tokens": tokens, "answer_weight": torch.tensor([[0.5, 0.5], [1.0, 0.0]])}
    found = Chat(3).learned(Output(torch.zeros(3, 3, 11), torch.zeros(2, 4)), batch)
    assert found is not None
    assert found.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    assert Chat(3).learned(Output(torch.zeros(2, 11), torch.zeros(2, 4)), batch) is None
