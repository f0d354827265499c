"""The multi-label task: loss and tallies by hand."""

import math

import numpy as np
import pytest
import torch

from confed.federation.protocols import Output, Task
from confed.metrics.multilabel import multilabel_metrics
from confed.metrics.scores import summarise
from confed.registry import tasks
from confed.tasks.multilabel import UNKNOWN, Multilabel, label_states
from refusals import refuses

# Logits, labels and states of two examples of three labels; log 3 is a probability of 3/4.
LOGITS = torch.tensor([[math.log(3), -math.log(3), 0.0], [-math.log(3), math.log(3), -math.log(3)]])
LABELS = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
KNOWN = torch.tensor([[-1, 1, -1], [0, -1, -1]], dtype=torch.int8)


def output(logits):
    return Output(logits, torch.zeros(len(logits), 1))


def test_is_registered_and_implements_the_protocol():
    assert tasks["multilabel"] is Multilabel
    assert isinstance(Multilabel(3), Task)
    assert Multilabel(3).metric == "example_f1"


def test_multilabel_loss_equals_a_computation_by_hand():
    # -log of the probability of the truth: 3/4, 1/4, 1/2 and 3/4, 1/4, 3/4.
    entries = np.log([[4 / 3, 4, 2], [4 / 3, 4, 4 / 3]])
    batch = {"labels": LABELS}
    assert Multilabel(3).loss(output(LOGITS), batch).item() == pytest.approx(entries.sum())
    assert Multilabel(3, reduction="mean").loss(output(LOGITS), batch).item() == pytest.approx(entries.sum() / 2)
    assert Multilabel(3, reduction="labels").loss(output(LOGITS), batch).item() == pytest.approx(entries.mean())
    # Unknown: the first and third label of one, the second and third of the other.
    some = entries[0, 0] + entries[0, 2] + entries[1, 1] + entries[1, 2]
    batch["known"] = KNOWN
    assert Multilabel(3).loss(output(LOGITS), batch).item() == pytest.approx(some)
    assert Multilabel(3, reduction="mean").loss(output(LOGITS), batch).item() == pytest.approx(some / 2)
    assert Multilabel(3, reduction="labels").loss(output(LOGITS), batch).item() == pytest.approx(some / 4)


def test_known_labels_have_no_gradient_and_no_loss():
    logits = LOGITS.clone().requires_grad_()
    Multilabel(3).loss(output(logits), {"labels": LABELS, "known": KNOWN}).backward()
    assert logits.grad is not None
    # The derivative of the rest: probability minus truth.
    expected = torch.tensor([[-0.25, 0, 0.5], [0, 0.75, 0.25]])
    torch.testing.assert_close(logits.grad, expected)
    absurd = LOGITS.masked_fill(KNOWN != UNKNOWN, float("nan"))
    assert Multilabel(3).loss(output(absurd), {"labels": LABELS, "known": KNOWN}).isfinite()
    for reduction in ("sum", "mean", "labels"):
        task = Multilabel(3, reduction=reduction)
        assert task.loss(output(LOGITS), {"labels": LABELS, "known": LABELS.to(torch.int8)}).item() == 0


def test_multilabel_tally_equals_a_computation_by_hand():
    task = Multilabel(3, types=("day", "night"))
    batch = {"labels": LABELS, "type": torch.tensor([1, 0])}
    tally = task.tally(output(LOGITS), batch)
    # Predicted: labels 0 and 2 (probability one half) of the first, label 1 of the second.
    assert tally["example_f1"] == (0.5, 2)
    assert tally["example_f1/night"] == (0.5, 1)
    assert tally["example_f1/day"] == (0, 1)
    assert tally["exact_match"] == (0, 2)
    assert tally["label_accuracy"] == (3, 6)
    assert (tally["O-P"], tally["O-R"], tally["O-F1"]) == ((1, 3), (1, 2), (2, 5))
    assert tally["loss"] == pytest.approx((np.log([4 / 3, 4, 2, 4 / 3, 4, 4 / 3]).sum(), 2))
    known = torch.tensor([[-1, 1, 0], [0, -1, -1]], dtype=torch.int8)
    some = task.tally(output(LOGITS), {**batch, "known": known})
    assert some["exact_match"] == (1, 2)
    assert some["label_accuracy"] == (2, 3)
    assert (some["O-P"], some["O-R"]) == ((1, 2), (1, 1))
    assert task.tally(output(LOGITS[:0]), {"labels": LABELS[:0]}) == {}


def test_nothing_predicted_and_nothing_there_is_right():
    task, batch = Multilabel(2), {"labels": torch.zeros(1, 2)}
    assert task.predictions(output(torch.full((1, 2), -9.0)), batch).tolist() == [1.0]
    tally = task.tally(output(torch.full((1, 2), -9.0)), batch)
    assert tally["example_f1"] == (1, 1)
    assert tally["O-F1"] == (0, 0)
    assert summarise(tally).keys() == {"loss", "example_f1", "exact_match", "label_accuracy"}


def added(task, parts):
    tally, counts = {}, {}
    for logits, batch in parts:
        for key, (total, weight) in task.tally(output(logits), batch).items():
            before = tally.get(key, (0.0, 0.0))
            tally[key] = (before[0] + total, before[1] + weight)
        for key, value in task.counts(output(logits), batch).items():
            counts[key] = counts.get(key, 0) + value
    return summarise(tally), counts


def test_batches_add_up_to_the_metrics_of_all_examples():
    rng = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(50, 7, generator=rng), (torch.rand(50, 7, generator=rng) < 0.3).float()
    labels[:, 4] = 0
    known = label_states(labels, torch.arange(50), key=1)
    for undefined in ("zero", "omit"):
        task = Multilabel(7, undefined=undefined)
        cut = [slice(0, 16), slice(16, 32), slice(32, 50)]
        parts = [(logits[c], {"labels": labels[c], "known": known[c]}) for c in cut]
        tallied, counts = added(task, parts)
        exact = multilabel_metrics(logits.sigmoid(), labels, known == UNKNOWN, undefined=undefined)
        values = task.values(counts)
        for key in ("C-P", "C-R", "C-F1", "O-P", "O-R", "O-F1"):
            assert values[key] == pytest.approx(exact[key])
        for key in ("O-P", "O-R", "O-F1"):
            assert tallied[key] == pytest.approx(exact[key])
        for key in ("C-AP", "O-AP"):
            assert values[f"{key}-binned"] == pytest.approx(exact[key], abs=0.02)
        whole = {"labels": labels, "known": known}
        assert multilabel_metrics(*task.scores(output(logits), whole), undefined=undefined) == exact
        mean = task.predictions(output(logits), whole).mean().item()
        assert tallied[task.metric] == pytest.approx(mean, abs=1e-6)


def test_counts_have_the_tasks_thresholds():
    task, batch = Multilabel(3, threshold=0.7, thresholds=4), {"labels": LABELS}
    counts = task.counts(output(LOGITS), batch)
    assert counts["predicted"].tolist() == [1, 1, 0]  # 3/4 twice; one half is below
    assert task.tally(output(LOGITS), batch)["O-P"] == (1, 2)
    # Bins of a third each.
    assert counts["bins"].tolist() == [
        [[1, 0, 1], [1, 0, 1], [1, 1, 0]],
        [[0, 0, 1], [1, 0, 0], [0, 0, 0]],
    ]


def test_a_diverged_model_has_metrics():
    task, batch = Multilabel(3), {"labels": LABELS}
    broken = torch.full((2, 3), float("nan"))
    with pytest.warns(RuntimeWarning, match="6 of 6 label scores of a batch are NaN"):
        tally = task.tally(output(broken), batch)
    assert math.isnan(tally["loss"][0])
    assert tally["nan_logits"] == (6, 6)
    assert tally.keys() <= task.measures.keys(), "a server takes declared scores only"
    assert (tally["O-P"], tally["O-R"][0]) == ((0, 0), 0)
    assert all(map(math.isfinite, multilabel_metrics(*task.scores(output(broken), batch)).values()))
    assert task.counts(output(broken), batch)["predicted"].tolist() == [0, 0, 0]
    assert task.predictions(output(broken), {"labels": torch.zeros(2, 3)}).tolist() == [1, 1]  # nothing predicted


def test_single_nan_logits_are_counted_and_predict_nothing():
    """Of the unknown labels only; infinite logits stay certain."""
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan, inf, -inf], [nan, 2.0, nan]])
    batch = {"labels": torch.ones(2, 3), "known": torch.tensor([[-1, -1, -1], [1, -1, -1]], dtype=torch.int8)}
    task = Multilabel(3)
    with pytest.warns(RuntimeWarning, match="2 of 5 label scores of a batch are NaN, which a diverged model gives"):
        tally = task.tally(output(logits), batch)
    assert tally["nan_logits"] == (2, 5)
    assert tally["O-R"] == (2, 5)
    assert task.scores(output(logits), batch)[0].tolist() == [[0, 1, 0], [0, pytest.approx(0.880797, abs=1e-6), 0]]
    assert "nan_logits" not in task.tally(output(LOGITS), {"labels": LABELS})


def test_half_precision_is_widened():
    batch = {"labels": LABELS}
    for kind in (torch.float16, torch.bfloat16):
        low = LOGITS.to(kind)
        assert Multilabel(3).loss(output(low), batch).dtype == torch.float32
        assert Multilabel(3).tally(output(low), batch) == Multilabel(3).tally(output(low.float()), batch)


def test_faulty_input_is_named():
    task = Multilabel(3)
    refuses(r"logits must have shape \(B, 3\), got \(2, 4\)", task.loss, output(torch.zeros(2, 4)), {"labels": LABELS})
    refuses("need batch\\['labels'\\], got keys \\['label'\\]", task.loss, output(LOGITS), {"label": LABELS})
    with pytest.raises(ValueError, match=r"known must have shape \(2, 3\), got \(1, 3\)"):
        task.tally(output(LOGITS), {"labels": LABELS, "known": KNOWN[:1]})
    with pytest.raises(ValueError, match=r"every entry of labels must be one of \(0, 1\), got 0.5"):
        task.loss(output(LOGITS), {"labels": LABELS / 2})
    with pytest.raises(ValueError, match=r"every entry of known must be one of \(-1, 0, 1\), got 2"):
        task.loss(output(LOGITS), {"labels": LABELS, "known": KNOWN.abs() * 2})
    with pytest.raises(ValueError, match=r"every type must lie in \[0, 1\), got 3"):
        Multilabel(3, types=("a",)).tally(output(LOGITS), {"labels": LABELS, "type": torch.tensor([0, 3])})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.0}, r"threshold must lie in \(0, 1\), got 1.0"),
        ({"thresholds": 1}, "thresholds must be at least 2, got 1"),
        ({"types": ("a", "a")}, "types must be distinct"),
    ],
)
def test_faulty_options_are_named(options, message):
    refuses(message, Multilabel, **{"answers": 3, **options})
