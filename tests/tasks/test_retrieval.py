"""Retrieval: recalls both ways by hand, and CLIP's loss against the library's."""

import pytest
import torch

from confed.federation.protocols import Output
from confed.metrics.retrieval import ranks_of_relevant
from confed.tasks.retrieval import Retrieval
from refusals import refuses


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
    refuses("at least 2 texts, got 1", Retrieval, 1)
