"""FedDAT's benchmarks from folders in the official layout: clients, pools, down-sampling, and what goes wrong."""

import json
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from confed.data.encode import encode
from confed.data.examples import FederatedDataset
from confed.data.options import Options
from confed.data.picture_files import PictureFiles
from confed.data.vl_files.records import Record
from confed.datasets.feddat_benchmarks import (
    Source,
    assemble,
    feddat_domain,
    feddat_function,
    feddat_scene,
    feddat_task,
)
from confed.models.tokenizer import WordTokenizer
from confed.recipes.recipe import load_recipe
from confed.registry import datasets
from confed.runs.run import run
from reader_folders import picture, write
from refusals import refuses

SCENES = ["a#ShopAndDining", "b#Workplace", "c#HomeOrHotel", "d#Transportation", "e#SportAndLeisure", "f#Outdoors"]
FUNCTIONS = ("attribute", "knowledge", "logical", "object", "relation")
PICTURES = 12
WORDS = ("red", "red", "red", "blue", "blue", "green")
"""Answers in turn: of every six questions three are red, two blue, one green."""


def annotators(answer: str) -> list[dict[str, str]]:
    return [{"answer": a, "answer_confidence": "yes"} for a in [answer] * 4 + ["blue"] * 3 + ["nobody says this"] * 3]


def clove(root: Path, setting: str, stages: Sequence[str], questions: int = 60) -> None:
    for number in range(PICTURES):
        picture(root / f"gqa/images/{number}.jpg", number)
    for stage in stages:
        for split in ("train", "val"):
            rows = [
                {
                    "question": f"What color is thing {i}?", "question_id": f"{split}{i}", "stage": stage,
                    "answer": WORDS[i % 6], "answers": [WORDS[i % 6]] * 10, "image_id": str(i % PICTURES),
                    "raw_question_type": {"structural": "query"},
                }
                for i in range(questions)
            ]  # fmt: skip
            write(root / f"clove/json/{setting}/fcl_mmf_{stage}_{split}.json", rows)


def right(number: int) -> str:
    """One answer more than the words, rarer than they are."""
    return "pink" if number % 30 == 5 else WORDS[number % 6]


def vqa(folder: Path, split: str, stems: tuple[str, str], places: Path, names: str, questions: int = 60) -> None:
    first = 1000 * split.startswith("val")  # ids of the splits differ, as in the official files
    asked = [{"question_id": first + i, "image_id": i % PICTURES, "question": f"Is it {i}?"} for i in range(questions)]
    answered = [
        {"question_id": first + i, "image_id": i % PICTURES, "answer_type": "other",
         "multiple_choice_answer": right(i), "answers": annotators(right(i))}
        for i in range(questions)
    ]  # fmt: skip
    write(folder / f"{stems[0]}_{split}_questions.json", {"questions": asked})
    write(folder / f"{stems[1]}_{split}_annotations.json", {"annotations": answered})
    for number in range(PICTURES):
        picture(places / names.format(split, number), number)


@pytest.fixture(scope="module")
def domain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("domain")
    for split in ("train", "val", "test"):
        rows = [
            {"image": f"{split}{i % PICTURES}.jpg", "question": f"what stand at {i}", "answer": WORDS[i % 6],
             "need_external_knowledge": i % 2 == 0}
            for i in range(60)
        ]  # fmt: skip
        write(root / f"aqua/{split}.json", rows)
        for number in range(PICTURES):
            picture(root / f"aqua/images/{split}{number}.jpg", number)
    for split in ("train2015", "val2015"):
        vqa(root / "vqa_abstract", split, ("OpenEnded_abstract_v002", "abstract_v002"),
            root / f"vqa_abstract/{split}", "abstract_v002_{}_{:012d}.png")  # fmt: skip
    for split in ("train", "val"):
        names = [f"VizWiz_{split}_{number:08d}.jpg" for number in range(30)]
        rows = [
            {"image": name, "question": "What is it?", "answers": annotators(WORDS[i % 6]), "answer_type": "other"}
            for i, name in enumerate(names)
        ]
        write(root / f"vizwiz/{split}.json", rows)
        for name in names:
            picture(root / "vizwiz" / split / name)
        write(
            root / f"gqa/{split}_balanced_questions.json",
            {
                f"{split}{i}": {"imageId": f"n{i % PICTURES}", "question": f"Is {i}?", "answer": WORDS[i % 6]}
                for i in range(60)
            },
        )
    for number in range(PICTURES):
        picture(root / f"gqa/images/n{number}.jpg")
    for split, year, first in (("train", "train2014", 0), ("test", "val2014", 100)):  # COCO gives a number once
        folder = root / "cocoqa" / split
        folder.mkdir(parents=True)
        columns = {
            "img_ids": [str(first + i % PICTURES) for i in range(60)], "questions": [f"what is {i}" for i in range(60)],
            "answers": [WORDS[i % 6] for i in range(60)], "types": [str(i % 4) for i in range(60)],
        }  # fmt: skip
        for name, column in columns.items():
            (folder / f"{name}.txt").write_text("\n".join(column) + "\n")
        for number in range(PICTURES):
            picture(root / f"coco/{year}/COCO_{year}_{first + number:012d}.jpg")
    return root


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("task")
    for split in ("train2014", "val2014"):
        vqa(root / "vqa_v2", split, ("v2_OpenEnded_mscoco", "v2_mscoco"), root / f"coco/{split}", "COCO_{}_{:012d}.jpg")
    for split in ("train", "dev", "test1"):
        rows = [
            {"identifier": f"{split}-{i % 5}-0-{i}", "sentence": "Two dogs.", "label": str(i % 3 == 0), "directory": 4}
            for i in range(20)
        ]
        write(root / f"nlvr2/data/{split}.json", rows, lines=True)
        folder = root / "nlvr2/images" / ("train/4" if split == "train" else split)
        for number in range(5):
            picture(folder / f"{split}-{number}-0-img0.png", 10)
            picture(folder / f"{split}-{number}-0-img1.png", 20)
    labels = ("entailment", "neutral", "contradiction")
    for split in ("train", "dev", "test"):
        rows = [
            {"Flickr30K_ID": str(i % 3), "gold_label": labels[i % 3], "pairID": f"{split}{i}", "sentence2": "A dog."}
            for i in range(30)
        ]
        write(root / f"snli_ve/snli_ve_{split}.jsonl", rows, lines=True)
    for number in range(3):
        picture(root / f"flickr30k/flickr30k_images/{number}.jpg")
    for split in ("train", "val"):
        rows = [
            {"annot_id": f"{split}-{i}", "objects": ["person", "cup"], "question": ["Why", "does", [0], "wave", "?"],
             "answer_choices": [[[1], "is", "hot"], ["no"], ["yes"], ["maybe"]], "answer_label": i % 4,
             "img_fn": f"movie/{i % 5}@0.jpg"}
            for i in range(40)
        ]  # fmt: skip
        write(root / f"vcr/annotation/{split}.jsonl", rows, lines=True)
    for number in range(5):
        picture(root / f"vcr/vcr1images/movie/{number}@0.jpg")
    return root


def table_of(data: FederatedDataset) -> Any:
    (table,) = {id(e.images): e.images for s in data.clients.values() for e in (s.train, s.validation, s.test)}.values()
    return table


def test_the_domain_benchmark_keeps_answers_of_the_pool(domain: Path):
    data = feddat_domain(domain, answers=2, max_train=20, max_test=8, image_size=4)
    assert list(data.clients) == ["art", "abstract", "vizwiz", "cocoqa", "gqa"]
    assert set(data.answer_sets.values()) == {("red", "blue")}
    assert data.tasks == {}
    for name, split in data.clients.items():
        # Green is outside the pools: of sixty questions fifty are left, of VizWiz's thirty twenty-five.
        assert set(split.train.answers) == {"red", "blue"}
        assert (len(split.train), len(split.test)) == (20, 8)
        assert 0 < len(split.validation) <= 8
        assert (split.train.annotations is not None) == (name in ("abstract", "vizwiz"))
        if name != "art":  # whose validation split is official
            pictures = [set(part.image_index.tolist()) for part in (split.train, split.validation)]
            assert not pictures[0] & pictures[1]
    assert data.clients["vizwiz"].test.names[0].startswith("vizwiz-val")
    assert "50 of 60 train, 50 of 60 validation, 50 of 60 test" in data.facts["art (official files)"]
    assert "official validation split" in data.facts["gqa (official files)"]
    # Only here GQA's two files ask about the same pictures; all others have their own.
    tested = sum(len(set(split.test.image_index.tolist())) for split in data.clients.values())
    twice = seen(data, "gqa")
    assert twice > 0
    assert data.facts["pictures seen in training"] == (
        f"of {tested} test pictures {twice} by the same client, {twice} by some client"
    )
    table = table_of(data)
    assert isinstance(table, PictureFiles)
    assert table[np.array([0])].shape == (1, 4, 4, 3)


def seen(data: FederatedDataset, client: str) -> int:
    """Test pictures of a client that are training pictures of it, too."""
    split = data.clients[client]
    return sum(number in split.train.image_index for number in {int(n) for n in split.test.image_index})


def test_validation_that_would_be_empty(tasks: Path):
    message = r"vcr: validation = 0.01 holds out none of the 5 training pictures"
    refuses(message, feddat_task, tasks, clients=("vcr",), share=1.0, validation=0.01, image_size=4)


def test_one_dataset_is_in_memory_at_a_time(tmp_path: Path):
    class Question(str):
        """A text that can be watched."""

    alive: list[weakref.ref[Question]] = []

    def read(split: str) -> Iterator[Record]:
        if split == "train":
            assert sum(question() is not None for question in alive) <= 3 * 2  # those that were drawn
        for i in range(20):
            question = Question(f"{split} {i}")
            alive.append(weakref.ref(question))
            yield Record(tmp_path / "f", i, f"{split}{i}", (f"{i}.png",), question, "yes")

    for number in range(20):
        picture(tmp_path / f"{number}.png")
    source = Source(read, ("train", "test"), ("{name}",))
    options = Options(tmp_path, image_size=4, validation=0.1, max_train=2, max_test=2)
    assert len(assemble("two", options, {"a": source, "b": source}, (), 100, "made up").clients) == 2


def test_words_of_test_questions_alone_are_unknown(tmp_path: Path):
    def asked(question: str) -> list[Record]:
        return [Record(tmp_path / "f", i, str(i), (f"{i}.png",), question, "yes", choices=("on",)) for i in range(20)]

    for number in range(20):
        picture(tmp_path / f"{number}.png")
    questions = {"train": "is it red", "val": "is it teal", "test": "is it mauve"}
    source = Source(lambda split: asked(questions[split]), tuple(questions), ("{name}",))
    data = assemble("one", Options(tmp_path, image_size=4), {"a": source}, (), 100, "made up")
    assert set(data.words) == {"is", "it", "red", "on"}
    tokenizer = WordTokenizer(data.words)
    ids, _ = tokenizer(["is it mauve", "is it teal"])
    assert torch.equal(ids[0], ids[1])  # both end in [UNK]


def test_annotators_become_soft_scores(domain: Path):
    data = feddat_domain(domain, clients=("vizwiz",), answers=2, image_size=4)
    own = data.clients["vizwiz"].train
    encoded = encode(own, WordTokenizer(data.words), data.answer_set("vizwiz"), sorted(set(own.types)))
    # Four annotators say red and three blue, or seven say blue: the challenge's scores for 4, 3 and 7 of ten.
    expected = {"red": [1.0, 0.9], "blue": [0.0, 1.0]}
    target = next(encoded.batches(len(encoded)))["target"]
    np.testing.assert_allclose(target.numpy(), [expected[a] for a in own.answers], atol=1e-6)


def test_the_seed_chooses_what_is_trained_on_and_never_the_test(domain: Path):
    one, same, other = (feddat_domain(domain, max_train=20, max_test=8, image_size=4, seed=s) for s in (1, 1, 2))
    for name in one.clients:
        a, b, c = one.clients[name], same.clients[name], other.clients[name]
        assert a.train.names == b.train.names != c.train.names
        assert a.validation.names == b.validation.names
        assert a.test.names == b.test.names == c.test.names
        assert not set(a.validation.names) & {*a.test.names, *a.train.names}
    alone = feddat_domain(domain, clients=("vizwiz",), max_train=20, max_test=8, image_size=4, seed=1)
    assert alone.clients["vizwiz"].train.names == one.clients["vizwiz"].train.names


def test_function_and_scene(tmp_path: Path):
    clove(tmp_path, "function", FUNCTIONS)
    data = feddat_function(tmp_path, max_train=None, max_test=None, image_size=4)
    assert list(data.clients) == list(FUNCTIONS)
    split = data.clients["logical"]
    assert len(split.train) + len(split.validation) == 60  # one of twelve pictures is held out
    assert (len(split.validation), len(split.test)) == (5, 60)
    clove(tmp_path, "scene", SCENES)
    scenes = feddat_scene(tmp_path, image_size=4)
    assert list(scenes.clients) == [scene[2:] for scene in SCENES]
    assert list(feddat_scene(tmp_path, clients=("Outdoors", "Workplace"), image_size=4).clients) == [
        "Workplace", "Outdoors",
    ]  # fmt: skip


def test_shards_for_many_clients(tmp_path: Path):
    clove(tmp_path, "function", FUNCTIONS, questions=120)
    two = feddat_function(tmp_path, shards=2, max_train=None, image_size=4, validation=0.5)
    five = feddat_function(tmp_path, shards=5, max_train=None, image_size=4, validation=0.5)
    assert (len(two.clients), len(five.clients)) == (10, 25)
    assert two.clients["object-2"].train.names == five.clients["object-2"].train.names
    own = [five.clients[f"object-{k}"] for k in range(1, 6)]
    names = Counter(name for s in own for part in (s.train, s.validation) for name in part.names)
    assert len(names) == 120
    assert set(names.values()) == {1}
    # Twelve pictures of ten questions among five clients.
    assert {len(s.train) + len(s.validation) for s in own} == {20, 30}
    assert len({tuple(s.test.names) for s in own}) == 1
    refuses(r"shards must lie in .1, 5., got 6", feddat_function, tmp_path, shards=6)


def test_the_task_benchmark_has_heads_and_answers_of_each_client(tasks: Path):
    data = feddat_task(tasks, answers=2, shots=5, test_shots=2, share=0.2, validation=0.2, image_size=4)
    assert data.tasks == {"nlvr2": "nlvr2", "snli_ve": "entailment", "vcr": "choice"}
    assert data.answer_sets["nlvr2"] == ("False", "True")
    assert data.answer_sets["snli_ve"] == ("entailment", "contradiction", "neutral")
    assert data.answer_sets["vcr"] == ("0", "1", "2", "3")
    assert data.widest == 4
    pairs, entailment, choice, vqa2 = (data.clients[n] for n in ("nlvr2", "snli_ve", "vcr", "vqa"))
    assert Counter(pairs.train.answers) == {"False": 5, "True": 5}
    assert Counter(pairs.test.answers) == {"False": 2, "True": 2}
    assert pairs.test.names[0].startswith("nlvr2-test1-")
    left, right = table_of(data)[pairs.train.image_index[0]]
    assert (int(left[0, 0, 0]), int(right[0, 0, 0])) == (10, 20)
    assert Counter(entailment.train.answers) == dict.fromkeys(data.answer_sets["snli_ve"], 5)
    assert len(choice.test) == 8
    assert choice.train.choices is not None
    assert choice.train.choices[0] == ("cup 2 is hot", "no", "yes", "maybe")
    assert choice.train.questions[0] == "Why does person 1 wave ?"
    assert len(vqa2.test) == 10  # a fifth of the fifty with an answer of the pool
    assert vqa2.test.annotations is not None
    assert {"hot", "maybe", "wave"} <= set(data.words)


def test_missing_pictures_are_named_with_file_and_row(tmp_path: Path):
    clove(tmp_path, "function", ("object",))
    (tmp_path / "gqa/images/3.jpg").unlink()
    with pytest.raises(
        ValueError, match=r"fcl_mmf_object_\w+\.json, row \d+: expected the picture '3\.jpg', got none; looked"
    ):
        feddat_function(tmp_path, clients=("object",))
    (tmp_path / "gqa/images/3.jpg").write_bytes(b"no picture")
    data = feddat_function(tmp_path, clients=("object",), image_size=4)
    with pytest.raises(ValueError, match=r"3\.jpg"):
        _ = table_of(data)[np.arange(PICTURES)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": ("art", "gqa2")}, "clients must be distinct names out of art, abstract.*gqa2"),
        ({"clients": ("art", "art")}, "clients must be distinct"),
        ({"clients": ("art",), "answers": 0}, "data.answers must be at least 1, got 0"),
        ({"clients": ("art",), "validation": 0.0}, r"validation must lie in \(0, 1\), got 0.0"),
    ],
)
def test_options_out_of_range_are_refused(domain: Path, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        datasets["feddat_domain"](domain, **options)


def test_a_root_that_is_not_there(tmp_path: Path):
    refuses(r"the folder .*nowhere does not exist", feddat_scene, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"The questions of vcr: expected .*annotation/train\.jsonl or .*train\.jsonl"):
        feddat_task(tmp_path, clients=("vcr",))


def test_questions_that_share_no_answer_with_their_pool(tmp_path: Path):
    clove(tmp_path, "function", ("object",))
    file = tmp_path / "clove/json/function/fcl_mmf_object_val.json"
    rows = [row | {"answer": "far", "answers": ["far"] * 10} for row in json.loads(file.read_text())]
    write(file, rows)
    message = (
        r"object: none of the 60 test questions has an answer of the answer set of 3.*'far' \(.*val\.json, row 1\)"
    )
    refuses(message, feddat_function, tmp_path, clients=("object",))
    write(tmp_path / "clove/json/function/fcl_mmf_object_train.json", [])
    refuses("object: expected training questions with answers, got 0", feddat_function, tmp_path, clients=("object",))


@pytest.mark.parametrize("name", ["domain", "function", "scene", "task"])
def test_the_recipes_have_the_papers_numbers(name: str):
    recipe = load_recipe(f"feddat_{name}_official", ["data.root=somewhere"])
    assert (recipe.run.rounds, recipe.local.epochs, recipe.local.lr) == (20, 1, 1e-4)
    assert recipe.sections["data"]["name"] == f"feddat_{name}"
    for row in recipe.table:
        recipe.check_row(row)
    assert recipe.table[0] == "clf_local"
    assert {"feddat", "adapter", "lora", "prompt", "bias", "full"} <= set(recipe.table)


@pytest.mark.parametrize(("name", "row"), [("domain", "adapter"), ("task", "feddat")])
def test_a_run_from_end_to_end(name: str, row: str, request: pytest.FixtureRequest, tmp_path: Path):
    root = request.getfixturevalue({"domain": "domain", "task": "tasks"}[name])
    changes = [
        f"data.root={root}", "data.image_size=16", "model.name=vilt_tiny", "model.image_size=16",
        "model.trainable=adapters", "local.batch_size=16", "local.precision=fp32", "run.rounds=1", "run.device=cpu",
        "run.threads=1", "run.gallery=0",
    ]  # fmt: skip
    few = ["data.answers=4", "data.shots=5", "data.test_shots=2", "data.share=0.5", "data.validation=0.2"]
    changes += few if name == "task" else ["data.answers=3", "data.max_train=16"]
    summary = run(load_recipe(f"feddat_{name}_official", changes).method(row), tmp_path / "run")
    clients = ["vqa", "nlvr2", "snli_ve", "vcr"] if name == "task" else ["art", "abstract", "vizwiz", "cocoqa", "gqa"]
    assert summary["clients"] == clients
    assert all(0 <= summary["global_seen"][client] <= 1 for client in clients)
