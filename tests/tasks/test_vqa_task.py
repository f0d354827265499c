"""The VQA task: losses against golden values, tallies by hand, adding and summarising."""

import math

import pytest
import torch
from torch.nn import functional

from confed.federation.protocols import Output, Task
from confed.metrics.retrieval import ranks_of_relevant
from confed.metrics.scores import summarise
from confed.privacy.membership import example_losses
from confed.registry import tasks
from confed.tasks.choice import Choice
from confed.tasks.retrieval import Retrieval
from confed.tasks.verdicts import NLVR2, Entailment
from confed.tasks.vqa import VQA, Headline, Objective
from refusals import refuses

LOGITS = torch.tensor([[2, 1, 0, -1], [0.5, -0.5, 1.5, 0]])
TARGET = torch.tensor([[0, 1, 0.3, 0], [0, 0, 1, 0]])


def output(logits):
    return Output(logits, torch.zeros(len(logits), 1))


def test_is_registered_and_implements_the_protocol():
    assert tasks["vqa"] is VQA
    assert isinstance(VQA(4), Task)
    assert (VQA(4).metric, VQA(4, "bce").metric) == ("accuracy", "vqa_accuracy")


def test_losses_equal_those_of_torch():
    label = torch.tensor([1, 2])
    assert VQA(4).loss(output(LOGITS), {"label": label}).item() == pytest.approx(
        functional.cross_entropy(LOGITS, label).item()
    )
    assert VQA(4, "bce").loss(output(LOGITS), {"target": TARGET}).item() == pytest.approx(2.8946565, abs=1e-6)


def test_tally_by_type_equals_a_computation_by_hand():
    task = VQA(4, types=("count", "color", "shape"))
    logits = torch.tensor([[math.log(3), 0, 0, 0], [0, 0, math.log(7), 0], [0, math.log(7), 0, 0]])
    tally = task.tally(output(logits), {"label": torch.tensor([0, 2, 3]), "type": torch.tensor([2, 0, 0])})
    assert tally["accuracy"] == (2, 3)
    assert tally["accuracy/count"] == (1, 2)
    assert tally["accuracy/shape"] == (1, 1)
    assert "accuracy/color" not in tally
    # -log of .5, .7 and .1; confidences .5 (right), .7 (right), .7 (wrong).
    assert tally["loss"] == pytest.approx((math.log(2) + math.log(10 / 7) + math.log(10), 3))
    assert tally["calibration/07/correct"] == (1, 1)
    assert tally["calibration/10/confidence"] == pytest.approx((1.4, 2))
    values = summarise(tally)
    assert values["accuracy"] == pytest.approx(2 / 3)
    assert values["ece"] == pytest.approx((0.5 + 0.4) / 3)
    assert set(values) == {"accuracy", "accuracy/count", "accuracy/shape", "loss", "ece"}


def test_soft_scores_are_tallied_by_type():
    batch = {"target": TARGET, "type": torch.tensor([0, 1])}
    task = VQA(4, "bce", types=("a", "b"))
    tally = task.tally(output(LOGITS), batch)
    assert "accuracy" not in tally
    assert tally["vqa_accuracy"] == (1, 2)
    assert (tally["vqa_accuracy/a"], tally["vqa_accuracy/b"]) == ((0, 1), (1, 1))
    assert tally["loss"][0] / 2 == pytest.approx(2.8946565, abs=1e-6)
    confidence = torch.tensor(2.0).sigmoid().item()
    assert tally["calibration/13/confidence"] == pytest.approx((confidence, 1))
    assert task.predictions(output(LOGITS), batch).tolist() == [0, 1]
    both = VQA(4).tally(output(LOGITS), {"target": TARGET, "label": torch.tensor([0, 2])})
    assert (both["accuracy"], both["vqa_accuracy"]) == ((2, 2), (1, 2))


def test_tallies_of_parts_add_up():
    rng = torch.Generator().manual_seed(0)
    logits, label = torch.randn(50, 7, generator=rng), torch.randint(7, (50,), generator=rng)
    task, total = VQA(7), {}
    whole = task.tally(output(logits), {"label": label})
    for rows in torch.arange(50).split(16):
        for key, (value, weight) in task.tally(output(logits[rows]), {"label": label[rows]}).items():
            old = total.get(key, (0.0, 0.0))
            total[key] = (old[0] + value, old[1] + weight)
    assert total.keys() == whole.keys()
    for key, pair in whole.items():
        assert total[key] == pytest.approx(pair)
    values = summarise(whole)
    assert values["loss"] == pytest.approx(task.loss(output(logits), {"label": label}).item(), rel=1e-5)
    assert values["accuracy"] == pytest.approx(task.predictions(output(logits), {"label": label}).mean().item())


def test_one_copy_to_the_host(monkeypatch):
    copies = []
    original = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copies.append(1) or original(self))
    # Tensors without storage fail at any read: the first one must be the copy.
    with pytest.raises(NotImplementedError):
        VQA(4, types=("a",)).tally(
            output(torch.zeros(2, 4, device="meta")),
            {name: torch.zeros(2, dtype=torch.int64, device="meta") for name in ("label", "type")},
        )
    assert copies == [1]


def test_half_precision_and_divergence():
    batch = {"label": torch.tensor([1, 2])}
    assert VQA(4).loss(output(LOGITS.bfloat16()), batch).dtype == torch.float32
    tally = VQA(4).tally(output(LOGITS * math.nan), batch)
    assert math.isnan(tally["loss"][0])
    assert summarise(tally)["ece"] == pytest.approx(summarise(tally)["accuracy"])
    assert VQA(4).tally(output(LOGITS[:0]), {"label": torch.zeros(0, dtype=torch.int64)}) == {}


@pytest.mark.parametrize("objective", ["ce", "bce"])
def test_examples_without_an_answer_are_wrong_and_have_no_loss(objective):
    task = VQA(4, objective, types=("a", "b"))
    rng = torch.Generator().manual_seed(0)
    logits, label = torch.randn(6, 4, generator=rng), torch.tensor([0, -1, 2, 3, -1, 1])
    kind, answerable = torch.tensor([0, 0, 1, 1, 1, 0]), label >= 0
    batch = {"label": label, "type": kind, "answerable": answerable}
    found = task.tally(output(logits), batch)
    known = {"label": label[answerable], "type": kind[answerable]}
    alone = task.tally(output(logits[answerable]), known)
    # The same sums as without those two examples, over six examples instead of four; the loss is over the four.
    assert found["loss"] == pytest.approx(alone["loss"])
    assert found["loss"][1] == 4
    assert found[task.metric] == (alone[task.metric][0], 6)
    for name, count in (("a", 3), ("b", 3)):
        assert found[f"{task.metric}/{name}"] == (alone[f"{task.metric}/{name}"][0], count)
    assert sum(weight for key, (_, weight) in found.items() if key.endswith("/confidence")) == 6
    right = task.predictions(output(logits), batch)
    assert right[~answerable].tolist() == [0, 0]
    assert right.sum() == alone[task.metric][0]
    assert "loss" not in task.tally(output(logits[1:2]), {name: column[1:2] for name, column in batch.items()})
    with pytest.raises(ValueError, match="every label must lie in"):
        task.tally(output(logits), {**batch, "answerable": torch.ones(6, dtype=torch.bool)})
    losses = example_losses(lambda _: output(logits), task, [batch])
    assert len(losses) == 4
    assert losses.sum().item() == pytest.approx(alone["loss"][0], rel=1e-5)


@pytest.mark.parametrize("label", [-100, -1, 4])
def test_labels_outside_the_vocabulary_are_named(label):
    batch = {"label": torch.tensor([0, label])}
    for call in (VQA(4).loss, VQA(4).tally):
        refuses(rf"every label must lie in \[0, 4\), got {label}", call, output(LOGITS), batch)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: VQA(4, types=("a", "a")), "types must be distinct"),
        (lambda: VQA(5).loss(output(LOGITS), {}), r"logits must have shape \(B, 5\), got \(2, 4\)"),
        (lambda: VQA(4, "bce").loss(output(LOGITS), {"type": 0}), r"needs batch\['target'\].*\['type'\]"),
        (
            lambda: VQA(4).loss(output(LOGITS), {"label": torch.zeros(3, dtype=torch.int64)}),
            r"label must have shape \(2,\), got \(3,\)",
        ),
        (
            lambda: VQA(4, types=("a",)).tally(
                output(LOGITS), {"label": torch.tensor([0, 1]), "type": torch.tensor([0, 1])}
            ),
            r"every type must lie in \[0, 1\), got 1",
        ),
    ],
)
def test_errors_name_what_is_wrong(call, message):
    refuses(message, call)


@pytest.mark.parametrize(
    ("task", "name", "answers"), [(NLVR2(), "nlvr2", 2), (Entailment(), "entailment", 3), (Choice(), "choice", 4)]
)
def test_tasks_of_few_answers(task, name, answers):
    assert tasks[name] is type(task)
    assert isinstance(task, Task)
    assert (task.name, task.head, task.answers, task.metric, task.single_label) == (
        name,
        name,
        answers,
        "accuracy",
        True,
    )
    rng = torch.Generator().manual_seed(0)
    logits, label = torch.randn(5, answers, generator=rng), torch.tensor([0, 1, 1, 0, 1])
    rows = [math.log(sum(math.exp(z - row[y]) for z in row)) for row, y in zip(logits.tolist(), label, strict=True)]
    assert task.loss(output(logits), {"label": label}).item() == pytest.approx(sum(rows) / 5, rel=1e-5)
    right = [max(range(answers), key=row.__getitem__) == y for row, y in zip(logits.tolist(), label, strict=True)]
    tally = task.tally(output(logits), {"label": label})
    assert tally["accuracy"] == (sum(right), 5)
    assert tally["loss"] == pytest.approx((sum(rows), 5), rel=1e-5)
    assert task.predictions(output(logits), {"label": label}).tolist() == [float(r) for r in right]
    assert task.labels({"label": label}) is label
    with pytest.raises(ValueError, match=rf"logits must have shape \(B, {answers}\), got \(5, {answers + 1}\)"):
        task.loss(output(torch.zeros(5, answers + 1)), {"label": label})
    with pytest.raises(ValueError, match=rf"every label must lie in \[0, {answers}\), got {answers}"):
        task.tally(output(logits), {"label": label + answers - 1})
    refuses(f"objective must be 'ce' for {name}, got 'bce'", type(task), objective="bce")


def test_tasks_refuse_other_numbers_of_answers():
    refuses(r"answers must be 2 for nlvr2 .*got 3", NLVR2, 3)
    refuses(r"answers must be 3 for entailment .*got 2", Entailment, 2)
    refuses("answers must be at least 2, got 1", Choice, 1)
    scored, batch = output(torch.zeros(2, 3)), {"label": torch.tensor([0, 1])}
    assert Choice(3).tally(scored, batch)["accuracy"] == (1, 2)
    for call in (Choice().loss, Choice().tally):
        refuses(r"logits must have shape \(B, 4\), got \(2, 3\)", call, scored, batch)


def test_the_headline_may_be_the_other_metric_of_the_batch() -> None:
    scored = output(torch.tensor([[2.0, 0, 0], [0, 2, 0], [0, 0, 2]]))
    target = torch.tensor([[1.0, 0.3, 0], [0.6, 0.3, 0], [0, 0, 0]])
    batch = {"label": torch.tensor([0, 0, 1]), "target": target, "type": torch.tensor([0, 1, 1])}
    soft, strict = [1.0, 0.3, 0.0], [1.0, 0.0, 0.0]
    cases: tuple[tuple[Objective, Headline, list[float]], ...] = (
        ("ce", "", strict), ("ce", "vqa_accuracy", soft), ("bce", "", soft), ("bce", "accuracy", strict),
    )  # fmt: skip
    for objective, headline, scores in cases:
        task = VQA(3, objective, ("a", "b"), headline=headline)
        name = "accuracy" if scores is strict else "vqa_accuracy"
        tally = task.tally(scored, batch)
        assert task.metric == name
        assert task.predictions(scored, batch).tolist() == pytest.approx(scores)
        # Both are there either way, and the headline also by type.
        assert (tally["accuracy"][0], tally["vqa_accuracy"][0]) == (1.0, pytest.approx(1.3))
        assert tally[f"{name}/b"] == (pytest.approx(scores[1]), 2)
    with pytest.raises(ValueError, match="headline 'accuracy' needs batch\\['label'\\]"):
        VQA(3, "bce", headline="accuracy").predictions(scored, {"target": target})
    refuses("headline must be one of '', accuracy, vqa_accuracy, got 'best'", VQA, 3, headline="best")


def test_ranks_count_what_is_in_front_of_the_best_relevant_item() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 5.0, 4.0, 3.0], [1.0, 2.0, 3.0, 4.0]])
    relevant = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]]).bool()
    assert ranks_of_relevant(scores, relevant).tolist() == [2.0, 4.0, 3.0, float("inf")]


def test_loss_of_different_texts_is_that_of_the_librarys_clip() -> None:
    from transformers.models.clip.modeling_clip import image_text_contrastive_loss

    scores = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([4, 8, 0, 2, 7, 5])
    found = Retrieval(9).loss(Output(scores, scores), {"label": labels})
    torch.testing.assert_close(found, image_text_contrastive_loss(scores[:, labels].T))


def test_equal_texts_of_a_batch_are_all_right() -> None:
    """Two pictures of one text and one of another: by hand, from the six probabilities."""
    scores = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 3.0]])
    labels = torch.tensor([0, 0, 1])
    pairs = scores[:, labels]
    by_rows, by_columns = pairs.log_softmax(1), pairs.log_softmax(0)
    rows = (by_rows[0, :2].mean() + by_rows[1, :2].mean() + by_rows[2, 2]) / 3
    columns = (by_columns[:2, 0].mean() + by_columns[:2, 1].mean() + by_columns[2, 2]) / 3
    torch.testing.assert_close(Retrieval(2).loss(Output(scores, scores), {"label": labels}), -(rows + columns) / 2)


def test_recalls_by_hand() -> None:
    """Three pictures of texts 1, 1 and 3; text 1 is asked about once, and finds any of its two pictures."""
    scores = torch.tensor([[0.0, 5.0, 1.0, 2.0], [9.0, 3.0, 8.0, 9.0], [0.0, 4.0, 0.0, 1.0]])
    batch = {"label": torch.tensor([1, 1, 3])}
    found = Retrieval(4).tally(Output(scores, scores), batch)
    assert found["tr@1"] == (1.0, 3.0)  # ranks 1, 4 and 2
    assert found["tr@5"] == (3.0, 3.0)
    assert found["ir@1"] == (1.0, 2.0)  # text 1: picture 0 first; text 3: picture 2 comes third
    assert found["ir@5"] == (2.0, 2.0)
    assert found["pictures"] == (6.0, 2.0)
    assert Retrieval(4).predictions(Output(scores, scores), batch).tolist() == [1.0, 0.0, 0.0]
    assert set(found) <= set(Retrieval(4).measures)


def test_a_larger_batch_has_more_negatives() -> None:
    scores = torch.zeros(8, 8)
    whole = Retrieval(8).loss(Output(scores, scores), {"label": torch.arange(8)})
    half = Retrieval(8).loss(Output(scores[:4], scores[:4]), {"label": torch.arange(4)})
    assert whole.item() == pytest.approx(torch.tensor(8.0).log().item())
    assert half.item() == pytest.approx(torch.tensor(4.0).log().item())


@pytest.mark.parametrize(
    ("scores", "batch", "message"),
    [
        (torch.zeros(2, 3), {"x": torch.zeros(2)}, "needs batch\\['label'\\]"),
        (torch.zeros(2, 5), {"label": torch.zeros(2, dtype=torch.int64)}, "scores of 3 texts"),
        (torch.zeros(1, 3), {"label": torch.tensor([3])}, "must lie in \\[0, 3\\), got \\[3\\]"),
    ],
)
def test_bad_input_says_what_was_expected(scores: torch.Tensor, batch: dict[str, torch.Tensor], message: str) -> None:
    refuses(message, Retrieval(3).loss, Output(scores, scores), batch)
    refuses("answers must be at least 2, got 1", Retrieval, 1)
