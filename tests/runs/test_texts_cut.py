"""Texts longer than a model reads are counted for every dataset and tokenizer; pictures that are not there."""

import numpy as np
import pytest

from confed.data.examples import Examples
from confed.data.picture_tables import NoPictures
from confed.models.caption_tokenizer import AnswerTokenizer
from confed.models.tokenizer import WordTokenizer
from confed.recipes.recipe import load_recipe
from confed.runs.build import prepare

FEW = ["study.methods=[]", "data.train=8", "data.validation=4", "data.test=4", "run.gallery=0", "model.name=vilt_tiny"]


def test_questions_that_lose_their_end_are_counted_and_said():
    with pytest.warns(UserWarning, match=r"\d+ of \d+ different texts of 'scenes' .*max_length = 6 .*lose their end"):
        _, run_data = prepare(load_recipe("fedvqa_scenes", [*FEW, "model.max_length=6"]))
    data = run_data.dataset
    parts = [part for split in data.clients.values() for part in (split.train, split.validation, split.test)]
    texts = {text for part in (*parts, *data.unseen.values()) for text in part.questions}
    # Six positions are four words between [CLS] and [SEP]; punctuation is no word.
    long = sum(len(text.replace("?", " ").replace(",", " ").split()) > 4 for text in texts)
    assert run_data.texts_cut == (long, len(texts))
    assert 0 < long < len(texts)


def test_nothing_is_said_where_all_texts_fit():
    _, run_data = prepare(load_recipe("fedvqa_scenes", [*FEW, "model.max_length=16"]))  # warnings are errors here
    assert run_data.texts_cut[0] == 0


def test_a_tokenizer_of_questions_and_answers_counts_too():
    tokenizer = AnswerTokenizer(WordTokenizer(["is", "it", "red"], 4))
    assert tokenizer.shortened(["is it", "is it red", "red"]) == 1


def test_examples_without_pictures_need_no_table_of_any():
    def made(images: NoPictures | np.ndarray, index: list[int], there: list[bool]) -> Examples:
        n = len(index)
        return Examples(
            images, np.array(index), ["q"] * n, ["a"] * n, ["t"] * n, [str(i) for i in range(n)],
            present={"image": np.array(there)},
        )  # fmt: skip

    assert len(made(NoPictures(0), [0, 0], [False, False])) == 2
    pictures = np.zeros((1, 2, 2, 3), np.uint8)
    assert len(made(pictures, [0, 7], [True, False])) == 2  # of no meaning where there is none
    with pytest.raises(ValueError, match=r"image_index must lie in \[0, 1\), got 0 to 7"):
        made(pictures, [0, 7], [True, True])
