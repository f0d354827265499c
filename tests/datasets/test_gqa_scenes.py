"""GQA divided into scenes: the mapping, reading GQA's files, preparing, the dataset, a run from end to end."""

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from command_line import confed
from confed.data.encode import encode
from confed.data.examples import channels_first
from confed.data.picture_files import PictureFiles, find_pictures
from confed.data.table import concatenate_tables
from confed.data.vl_files.gqa_questions import question_files, questions_of
from confed.datasets.gqa_scenes import SCENARIOS, gqa_scenes
from confed.datasets.gqa_scenes.places import PUBLISHED, SCENES, category_name, read_predictions, scene_of
from confed.federation.protocols import Output
from confed.metrics.scores import summarise
from confed.models.scene_classifier import build_scene_classifier, classify, load_scene_classifier, prepare_picture
from confed.models.tokenizer import WordTokenizer
from confed.prepare.gqa_scenes import Options, prepare
from confed.recipes.recipe import load_recipe
from confed.system.events import Event, StepProgress
from confed.tasks.vqa import VQA
from refusals import refuses

# One category per scene, in the order of the scenes.
CATEGORIES = ("pharmacy", "campus", "crosswalk", "marsh", "ski_slope", "kitchen")
PER_SCENE = {"train": 4, "val": 2}


def entry(image: str, question: str, answer: str, kind: str = "query") -> dict[str, Any]:
    """A question in GQA's official layout."""
    return {
        "semantic": [{"operation": "select", "dependencies": [], "argument": "thing (1)"}],
        "entailed": [],
        "equivalent": [],
        "question": question,
        "imageId": image,
        "isBalanced": True,
        "groups": {"global": None, "local": "x"},
        "answer": answer,
        "semanticStr": "select: thing (1)",
        "annotations": {"answer": {}, "question": {}, "fullAnswer": {}},
        "types": {"detailed": "d", "semantic": "attr", "structural": kind},
        "fullAnswer": f"It is {answer}.",
    }


@pytest.fixture
def gqa(tmp_path: Path) -> Path:
    """36 pictures, six per scene, with two questions each; and one below the threshold, one in no scene."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "gqa"
    (folder / "images").mkdir(parents=True)
    lines, number = ["image,category,confidence"], 2354000
    for role, count in PER_SCENE.items():
        questions: dict[str, Any] = {}
        for scene, category in enumerate(CATEGORIES):
            for copy in range(count):
                image, number = str(number), number + 1
                pixels = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "images" / f"{image}.jpg")
                lines.append(f"{image},/{category[0]}/{category},0.{90 + copy}")
                color = ("red", "blue")[(scene + copy) % 2]
                questions[f"{image}1"] = entry(image, "What color is the thing?", color)
                questions[f"{image}2"] = entry(image, "Is it red?", "yes" if color == "red" else "no", "verify")
        for category, confidence in (("kitchen", 0.2), ("castle", 0.99)):
            image, number = str(number), number + 1
            pixels = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"{image}.jpg")
            lines.append(f"{image},{category},{confidence}")
            questions[f"{image}1"] = entry(image, "Where?", "nowhere")
        (folder / f"{role}_balanced_questions.json").write_text(json.dumps(questions))
    (folder / "predictions.csv").write_text("\n".join(lines) + "\n")
    return folder


def made(gqa: Path, out: Path, **options: Any) -> dict[str, Any]:
    return prepare(gqa, gqa / "images", out, Options(**options), predictions=gqa / "predictions.csv")


# The mapping ------------------------------------------------------------------------------------------------


def test_all_365_categories_have_a_place_in_the_official_order():
    names = list(scene_of())
    assert len(names) == len(set(names)) == 365
    # Position and name as in the list that the published networks were trained with.
    known = {0: "airfield", 15: "arena/hockey", 31: "bakery/shop", 62: "botanical_garden", 150: "forest/broadleaf",
             203: "kitchen", 232: "mountain", 284: "restaurant", 305: "ski_slope", 320: "subway_station/platform",
             342: "underwater/ocean_deep", 364: "zen_garden"}  # fmt: skip
    assert {number: names[number] for number in known} == known
    counts = Counter(scene_of().values())
    assert set(counts) == {*SCENES, None}
    assert min(counts[scene] for scene in SCENES) >= 30
    assert counts[None] < 120


def test_the_order_is_that_of_the_published_list(real_data: Path):
    official = (real_data / "text_assets" / "places365_categories.txt").read_text().split()
    assert [category_name(name) for name in official[::2]] == list(scene_of())
    assert official[1::2] == [str(number) for number in range(365)]


def test_the_papers_examples_are_in_the_papers_scenes():
    table = {
        "commercial": "restaurant restaurant_patio market/indoor market/outdoor pharmacy bakery/shop",
        "educational": "campus art_gallery music_studio",
        "transport": "airport_terminal subway_station/platform crosswalk galley",
        "natural": "forest/broadleaf forest_path forest_road bamboo_forest rainforest mountain mountain_path "
        "mountain_snowy marsh underwater/ocean_deep",
        "sports": "ballroom arena/hockey arena/performance arena/rodeo gymnasium/indoor ski_slope",
        "home": "kitchen bedroom bathroom closet",
    }
    assert tuple(table) == SCENES
    for scene, names in table.items():
        assert {name: scene_of()[name] for name in names.split()} == dict.fromkeys(names.split(), scene)
    assert sum(train for train, _ in PUBLISHED.values()) == 89531
    assert sum(test for _, test in PUBLISHED.values()) == 28843


# Reading ----------------------------------------------------------------------------------------------------


def test_question_files_are_read_in_windows_as_json_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = {f"{n}": entry(str(n % 7), f"Wie viele Bäume {n}?", '"quo, {ted}"', "verify") for n in range(50)}
    for number, (indent, window) in enumerate([(None, 1), (1, 7), (None, 1000), (2, 1 << 22)]):
        monkeypatch.setattr("confed.data.intake.stream._CHUNK", window)
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
        read = list(questions_of(file))
        assert [(q.id, q.image, q.question, q.answer, q.type) for q in read] == [
            (key, own["imageId"], own["question"], own["answer"], "verify") for key, own in content.items()
        ]
    (tmp_path / "empty.json").write_text(" { } ")
    assert list(questions_of(tmp_path / "empty.json")) == []


def test_the_samples_in_the_official_layout_are_read(real_data: Path):
    folder = real_data / "format_samples" / "gqa"
    questions = list(questions_of(folder / "train_balanced_questions.json"))
    assert questions[0].question == "What color is the cup?"
    assert (questions[0].answer, questions[0].image, questions[0].type) == ("white", "9000001", "query")
    refuses("expected one object", list, questions_of(folder / "lavis_style_train_balanced_questions.json"))


GOOD = json.dumps({"1": entry("7", "a?", "b")})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD[:-1], "cut off"),
        (GOOD[:-20], "question '1': .*cut off"),
        ("", "cut off"),
        ("[]", "expected one object"),
        (GOOD + "x", "nothing behind"),
        (GOOD[:-1] + ",}", "incomplete or no JSON"),
        ('{"1" 3}', "a key and ':', got '1'"),
        ('{"1": {} 3}', "expected a text as 'imageId'"),
        ('{"1": 3}', "question '1': expected an object, got 3"),
        (GOOD.replace('"answer": "b", ', ""), "test and challenge files have no answers"),
        (GOOD.replace('"a?"', '" "'), "expected a text as 'question'"),
    ],
)
def test_damaged_question_files_are_named(tmp_path: Path, text: str, message: str):
    (tmp_path / "q.json").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        list(questions_of(tmp_path / "q.json"))
    assert "q.json" in str(error.value)
    (tmp_path / "q.json").write_bytes(b'{"\xff": 1}')
    refuses("UTF-8", list, questions_of(tmp_path / "q.json"))


def test_parts_of_the_large_training_file_come_in_their_order(tmp_path: Path):
    folder = tmp_path / "questions1.2" / "train_all_questions"
    folder.mkdir(parents=True)
    for number in (10, 0, 2):
        (folder / f"train_all_questions_{number}.json").write_text("{}")
    refuses(r"expected val_all_questions\.json", question_files, tmp_path, "all")
    (tmp_path / "val_all_questions.json").write_text("{}")
    found = question_files(tmp_path, "all")
    assert [source.stem[-2:].strip("_") for source in found["train"]] == ["0", "2", "10"]
    refuses("does not exist", question_files, tmp_path / "nowhere")
    refuses("balanced, all", question_files, tmp_path, "some")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.csv", "image,category,confidence\n1,warehouse,0.5\n", "row 2: expected one of the 365 categories"),
        ("p.csv", "image,category,confidence\n1,kitchen,1.5\n", r"in \[0, 1\], got 1.5"),
        ("p.csv", "image,category,confidence\n1,kitchen,nan\n", r"in \[0, 1\], got nan"),
        ("p.csv", "image,category,confidence\n1,kitchen,x\n", "row 2: expected a confidence, got: could not convert"),
        (
            "p.csv",
            "image,category,confidence\n1,kitchen,1\n1.jpg,bedroom,1\n",
            "row 3: expected one line per image, got '1'",
        ),
        ("p.csv", "image,category\n1,kitchen\n", "expected a value for confidence or probability"),
        ("p.csv", "", "got none"),
        ("p.jsonl", '{"image": "1", "category": "kitchen", "conf', "row 1: expected one JSON object"),
        ("p.jsonl", "[1]\n", "row 1: expected an object"),
    ],
)
def test_damaged_predictions_are_named(tmp_path: Path, name: str, text: str, message: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_predictions(tmp_path / name)
    assert name in str(error.value)


def test_predictions_as_json_lines(tmp_path: Path):
    (tmp_path / "p.jsonl").write_text('{"image_id": 12, "label": "/f/forest/broadleaf", "probability": 0.25}\n')
    assert read_predictions(tmp_path / "p.jsonl") == {"12": ("forest/broadleaf", 0.25)}


# Preparing --------------------------------------------------------------------------------------------------


def test_prepare_counts_sorts_and_writes_the_same_bytes_again(gqa: Path, tmp_path: Path):
    manifest = made(gqa, tmp_path / "one")
    for scene in SCENES:
        for role, count in (("train", 8), ("test", 4)):
            facts = manifest["scenes"][scene][role]
            assert (facts["questions"], facts["pictures"], facts["outside_vocabulary"]) == (count, count // 2, 0)
            assert facts["published"] == PUBLISHED[scene][role == "test"]
            lines = (tmp_path / "one" / scene / f"{role}.jsonl").read_text().splitlines()
            assert len(lines) == count
    first = json.loads((tmp_path / "one" / "commercial" / "train.jsonl").read_text().splitlines()[0])
    assert first == {
        "question_id": "23540001", "image_id": "2354000", "question": "What color is the thing?", "answer": "red",
        "type": "query",
    }  # fmt: skip
    pictures = manifest["pictures"]
    assert (pictures["asked_about"], pictures["kept"]) == (40, 36)
    assert (pictures["below_threshold"], pictures["in_no_scene"]) == (2, 2)
    # 12 training pictures of each colour, so all four answers are equally frequent: ties by name.
    assert json.loads((tmp_path / "one" / "answers.json").read_text()) == ["blue", "no", "red", "yes"]
    again = made(gqa, tmp_path / "two")
    assert again == manifest
    for file in [*manifest["files"], "manifest.json"]:
        content = (tmp_path / "one" / file).read_bytes()
        assert content == (tmp_path / "two" / file).read_bytes()
        if file != "manifest.json":
            assert manifest["files"][file] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for name in ("train_balanced_questions.json", "val_balanced_questions.json", "predictions.csv"):
        assert manifest["sources"][name]["sha256"] == hashlib.sha256((gqa / name).read_bytes()).hexdigest()


def test_a_small_vocabulary_drops_training_questions_only(gqa: Path, tmp_path: Path):
    manifest = made(gqa, tmp_path / "out", answers=2)  # blue, no: half of all questions
    assert (manifest["answers"], manifest["distinct_answers"]) == (2, 4)
    facts = manifest["scenes"]["home"]
    assert (facts["train"]["questions"], facts["train"]["outside_vocabulary"]) == (4, 4)
    assert (facts["test"]["questions"], facts["test"]["outside_vocabulary"]) == (4, 2)
    dropped = gqa_scenes(tmp_path / "out", image_size=8, validation=0.5, unanswerable="drop")
    assert dropped.answers == ("blue", "no")
    assert (len(dropped.unseen["home"]), dropped.outside) == (2, False)
    assert "left out: transport 2 of 4" in dropped.facts["outside the vocabulary"]
    data = gqa_scenes(tmp_path / "out", image_size=8, validation=0.5)
    assert "counted as wrong: transport 2 of 4" in data.facts["outside the vocabulary"]
    assert "home 2 of 4" in data.facts["outside the vocabulary"]
    refuses("unanswerable must be one of wrong, drop, got 'skip'", gqa_scenes, tmp_path / "out", unanswerable="skip")
    # Only test questions may be unanswerable; a model that always says "no" gets those right whose answer it is.
    for split in data.clients.values():
        assert {*split.train.answers, *split.validation.answers} <= set(data.answers)
    home = data.unseen["home"]
    table = encode(home, WordTokenizer(data.words), data.answers, ("query", "verify"), outside=True)
    assert table.columns["label"].tolist() == [{"blue": 0, "no": 1}.get(answer, -1) for answer in home.answers]
    logits = torch.tensor([[0.0, 1.0]]).repeat(4, 1)
    values = summarise(VQA(2, types=("query", "verify")).tally(Output(logits, logits), table.batch(torch.arange(4))))
    assert values["accuracy"] == home.answers.count("no") / 4 == 0.25
    with pytest.raises(ValueError, match=r"example 'gqa-\d+': the answer .* is not in the voc"):
        encode(home, WordTokenizer(data.words), data.answers, ("query", "verify"))


def test_a_cap_and_a_threshold(gqa: Path, tmp_path: Path):
    manifest = made(gqa, tmp_path / "one", train_cap=3, seed=1)
    train = manifest["scenes"]["sports"]["train"]
    assert (train["questions"], train["beyond_cap"]) == (3, 5)
    drawn = {(tmp_path / "one" / "sports" / "train.jsonl").read_text()}
    for seed in range(2, 6):
        made(gqa, tmp_path / "two", train_cap=3, seed=seed)
        drawn.add((tmp_path / "two" / "sports" / "train.jsonl").read_text())
    assert len(drawn) > 1
    # Confidences are 0.90 to 0.93 in training and 0.90 and 0.91 in validation pictures.
    high = made(gqa, tmp_path / "high", threshold=0.91)
    assert high["scenes"]["home"]["train"]["pictures"] == 3
    assert high["scenes"]["home"]["test"]["pictures"] == 1
    with pytest.raises(ValueError, match="the scene 'commercial': expected a test question, got none"):
        made(gqa, tmp_path / "higher", threshold=0.92)
    assert not (tmp_path / "higher" / "manifest.json").exists()


def test_missing_pictures_and_predictions(gqa: Path, tmp_path: Path):
    (gqa / "images" / "2354000.jpg").unlink()
    refuses(r"1 of 40 pictures are missing \(2.5%, at most 1.0% may be\): 2354000", made, gqa, tmp_path / "out")
    manifest = made(gqa, tmp_path / "out", max_missing=0.03)
    assert manifest["pictures"]["missing"] == 1
    assert manifest["pictures"]["first_missing"] == ["2354000"]
    # The list has them all.
    gone = ["2354000", "2354001", "2354002", "2354004", "2354005", "2354006"]
    for image in gone[1:]:
        (gqa / "images" / f"{image}.jpg").unlink()
    several = made(gqa, tmp_path / "several", max_missing=0.5)
    content = (tmp_path / "several" / "missing.txt").read_bytes()
    assert content.decode().splitlines() == gone
    assert several["files"]["missing.txt"] == {"bytes": 48, "sha256": hashlib.sha256(content).hexdigest()}
    for image in gone:
        Image.new("RGB", (4, 4)).save(gqa / "images" / f"{image}.jpg")
    assert "missing.txt" not in made(gqa, tmp_path / "several")["files"]
    assert not (tmp_path / "several" / "missing.txt").exists()
    (gqa / "images" / "2354000.jpg").unlink()
    assert manifest["scenes"]["commercial"]["train"]["pictures"] == 3
    lines = (gqa / "predictions.csv").read_text().splitlines()
    (gqa / "predictions.csv").write_text("\n".join(lines[:-4]) + "\n")
    refuses("4 of 39 pictures have no scene prediction", made, gqa, tmp_path / "out", max_missing=0.03)
    with pytest.raises(ValueError, match="nowhere does not exist"):
        prepare(gqa, gqa / "nowhere", tmp_path / "out", predictions=gqa / "predictions.csv")
    asked = "--predictions FILE.*--weights FILE.*got"
    refuses(rf"{asked} neither", prepare, gqa, gqa / "images", tmp_path / "out")
    with pytest.raises(ValueError, match=rf"{asked} both"):
        prepare(gqa, gqa / "images", tmp_path / "out", predictions=gqa / "predictions.csv", weights=gqa / "w")


def test_a_call_that_fails_leaves_what_is_there(gqa: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    made(gqa, tmp_path / "good")
    before = {file: file.read_bytes() for file in (tmp_path / "good").rglob("*") if file.is_file()}
    for out in ("good", "new"):
        arguments = ["--gqa", gqa, "--images", gqa / "images", "--out", tmp_path / out, "--threshold", "1.0"]
        assert confed("data", "prepare", "gqa-scenes", *arguments, "--predictions", gqa / "predictions.csv") == 2
        assert "the scene 'commercial': expected a train question" in capfd.readouterr().err.replace("\n", " ")
        assert confed("data", "prepare", "gqa-scenes", *arguments, "--weights", gqa / "none.safetensors") == 2
    assert {file: file.read_bytes() for file in (tmp_path / "good").rglob("*") if file.is_file()} == before
    assert gqa_scenes(tmp_path / "good", image_size=8).name == "gqa_scenes"
    assert not (tmp_path / "new").exists()


def test_the_folder_has_a_default_and_missing_files_are_named(
    gqa: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    arguments = ["data", "prepare", "gqa-scenes", "--gqa", gqa, "--images", gqa / "images"]
    assert confed(*arguments) == 2
    shown = capfd.readouterr().err
    assert "--predictions FILE" in shown
    assert "confed weights convert places365" in shown
    assert confed(*arguments, "--predictions", gqa / "predictions.csv") == 0
    assert (tmp_path / "gqa_scenes" / "manifest.json").is_file()
    (gqa / "val_balanced_questions.json").rename(gqa / "testdev_balanced_questions.json")
    named = r"expected val_balanced_questions\.json.*got testdev_balanced_questions\.json, train_balanced_questions"
    refuses(named, question_files, gqa)
    refuses(r"expected train_balanced_questions\.json.*got no question file", question_files, gqa / "images")


def test_repeated_questions_shared_images_and_bad_options(gqa: Path, tmp_path: Path):
    file = gqa / "val_balanced_questions.json"
    content = json.loads(file.read_text())
    image = next(iter(content.values()))["imageId"]
    file.write_text(json.dumps(content)[:-1] + f', "23540001": {json.dumps(entry(image, "a?", "b"))}}}')
    refuses("question ids that differ, got '23540001' twice", made, gqa, tmp_path / "out")
    file.write_text(json.dumps({**content, "5": entry("2354000", "a?", "b")}))
    refuses("images of their own, got 1 in both, '2354000'", made, gqa, tmp_path / "out")
    for options, message in [
        ({"threshold": 1.1}, "threshold must lie in"),
        ({"answers": 0}, "answers must be at least 1, got 0"),
        ({"train_cap": 0}, "train_cap must be at least 1, got 0"),
    ]:
        refuses(message, Options, **options)


# The dataset ------------------------------------------------------------------------------------------------


@pytest.fixture
def root(gqa: Path, tmp_path: Path) -> Path:
    made(gqa, tmp_path / "root")
    return tmp_path / "root"


def test_scenarios_are_the_papers(root: Path):
    for scenario, (clients, unseen) in SCENARIOS.items():
        data = gqa_scenes(root, scenario=scenario, validation=0.25, image_size=16)  # type: ignore[arg-type]
        assert (tuple(data.clients), tuple(data.unseen)) == (clients, unseen)
        for split in data.clients.values():
            assert [len(part) for part in (split.train, split.validation, split.test)] == [6, 2, 4]
            pictures = [set(p.image_index.tolist()) for p in (split.train, split.validation, split.test)]
            assert not pictures[0] & pictures[1]
            assert not pictures[0] & pictures[2]
        assert all(len(test) == 4 for test in data.unseen.values())
    assert SCENARIOS["A"] == (("transport", "sports", "educational", "natural"), ("home", "commercial"))
    own = gqa_scenes(root, clients=("home",), unseen=("sports",), max_train=3, max_test=2, image_size=16)
    assert (list(own.clients), list(own.unseen)) == (["home"], ["sports"])
    assert (len(own.clients["home"].train), len(own.unseen["sports"])) == (3, 2)


def test_pictures_are_read_when_a_batch_asks_for_them(root: Path, gqa: Path):
    data = gqa_scenes(root, image_size=16, validation=0.25)
    test = data.clients["natural"].test
    table = encode(test, WordTokenizer(data.words), data.answers, ("query", "verify"))
    whole = table.batch(torch.arange(4))
    row = json.loads((root / "natural" / "test.jsonl").read_text().splitlines()[2])
    with Image.open(gqa / "images" / f"{row['image_id']}.jpg") as image:
        wanted = np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(whole["image"][2].permute(1, 2, 0).numpy(), wanted)
    assert whole["image"].dtype == torch.uint8
    # Threads change nothing, and two clients' tables share the one table of files.
    torch.set_num_threads(3)
    try:
        assert torch.equal(table.batch(torch.arange(4))["image"], whole["image"])
    finally:
        torch.set_num_threads(1)
    other = encode(
        data.clients["sports"].test, WordTokenizer(data.words), data.answers, ("query", "verify"), table.images
    )
    together = concatenate_tables([table, other])
    assert torch.equal(together.batch(torch.arange(8))["image"][:4], whole["image"])
    first = torch.zeros(1, dtype=torch.int64)
    mine = replace(table.take(1), images=channels_first(np.zeros((1, 16, 16, 3), np.uint8)), image_index=first)
    refuses("in memory only", concatenate_tables, [mine, table])
    (gqa / "images" / f"{row['image_id']}.jpg").write_bytes(b"no picture")
    refuses(rf"{row['image_id']}\.jpg", table.batch, torch.arange(4))


def test_picture_files_are_found_by_stem_and_read_when_asked(tmp_path: Path):
    for name in ("a.jpg", "a.png", "b.PNG", "c.txt"):
        Image.new("RGB", (6, 4), "red").save(tmp_path / name, format="PNG")
    found = find_pictures(tmp_path)
    assert {stem: file.name for stem, file in found.items()} == {"a": "a.jpg", "b": "b.PNG"}
    assert find_pictures(tmp_path, ["b", "x"]) == {"b": found["b"]}
    files = PictureFiles(list(found.values()), 2)
    assert (len(files), files.shape, files[1].shape) == (2, (2, 2, 2, 3), (2, 2, 3))
    assert files[np.array([], dtype=np.int64)].shape == (0, 2, 2, 3)


def test_a_folder_that_does_not_fit_its_manifest(root: Path, gqa: Path, tmp_path: Path):
    refuses(r"manifest.json does not exist; .*confed data prepare gqa-scenes", gqa_scenes, tmp_path)
    for keywords, message in [
        ({"clients": ("home", "beach")}, "out of commercial"),
        ({"clients": ("home",), "unseen": ("home",)}, "clients and unseen must be distinct names"),
        ({"unseen": ("home",)}, "unseen: expected clients"),
        ({"scenario": "C"}, "scenario must be one of A, B"),
    ]:
        refuses(message, gqa_scenes, root, **keywords)
    (root / "images").mkdir()
    # Four clients bring six pictures each, two unseen scenes their two test pictures.
    refuses("all 28 pictures, got all but 28", gqa_scenes, root)
    assert gqa_scenes(root, images=gqa / "images", image_size=4).name == "gqa_scenes"
    (root / "images").rmdir()
    (root / "home" / "test.jsonl").write_text("{}\n")
    refuses(r"home/test.jsonl: expected the file of the manifest", gqa_scenes, root)
    (root / "home" / "test.jsonl").unlink()
    refuses(r"home/test.jsonl does not exist", gqa_scenes, root)
    (root / "manifest.json").write_text("{}")
    refuses("expected an object with files, images, options", gqa_scenes, root)


# The scene classifier ---------------------------------------------------------------------------------------


def test_pictures_are_prepared_as_the_published_example_does():
    ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 256, axis=0).repeat(3, axis=2)
    prepared = prepare_picture(ramp)
    assert prepared.shape == (3, 224, 224)
    # Column 16 of the squeezed picture is the first of the crop.
    wanted = (16 / 255 - 0.485) / 0.229, (239 / 255 - 0.406) / 0.225
    assert prepared[0, 5, 0].item() == pytest.approx(wanted[0], abs=1e-6)
    assert prepared[2, 7, 223].item() == pytest.approx(wanted[1], abs=1e-6)


def fitted(gqa: Path, file: Path) -> None:
    """A ResNet-18 with random weights whose last layer is fitted to name the scenes of ``predictions.csv``."""
    model: Any = build_scene_classifier("resnet18")
    rng = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, empty in model.state_dict().items():
        if empty.ndim > 1:
            tensors[name] = torch.randn(empty.shape, generator=rng) * (2 / empty[0].numel()) ** 0.5
        else:
            one = name.endswith(("normalization.weight", "running_var"))
            tensors[name] = torch.full(empty.shape, float(one), dtype=empty.dtype)
    model.load_state_dict(tensors, assign=True)
    guesses = read_predictions(gqa / "predictions.csv")
    pictures = []
    for image in guesses:
        with Image.open(gqa / "images" / f"{image}.jpg") as picture:
            pictures.append(prepare_picture(np.asarray(picture)))
    with torch.inference_mode():
        features = model.resnet(torch.stack(pictures)).pooler_output.flatten(1).double()
    logits = torch.zeros(len(guesses), 365, dtype=torch.float64)
    for row, guess in enumerate(guesses.values()):
        # A logit of 20 beside 364 zeros is a probability of almost 1; nothing but zeros is 1 / 365.
        logits[row, list(scene_of()).index(guess.category)] = 20.0 if guess.confidence > 0.5 else 0.0
    tensors["classifier.1.weight"] = (torch.linalg.pinv(features) @ logits).T.float().contiguous()
    tensors["classifier.1.bias"] = torch.zeros(365)
    save_file(tensors, file, metadata={"architecture": "resnet18"})


def test_prepare_with_a_classifier_continues_its_predictions(
    gqa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Small pictures are enough here, and quick.
    monkeypatch.setattr("confed.models.scene_classifier._RESIZED", 72)
    monkeypatch.setattr("confed.models.scene_classifier._CROPPED", 64)
    given, weights, out = made(gqa, tmp_path / "given"), tmp_path / "resnet18.safetensors", tmp_path / "out"
    fitted(gqa, weights)
    read: list[int] = []

    def counted(model: Any, files: Any, **keywords: Any) -> Any:
        read.append(len(files))
        return classify(model, files, **keywords, batch_size=16)

    monkeypatch.setattr("confed.models.scene_classifier.classify", counted)
    watched: list[Event] = []
    manifest = prepare(gqa, gqa / "images", out, weights=weights, progress=watched.append)
    assert manifest["files"] == given["files"]
    assert manifest["pictures"] == given["pictures"]
    assert watched == [StepProgress("naming scenes", done, 40) for done in (16, 32, 40)]
    (file,) = out.glob("places365-*.csv")
    assert hashlib.sha256(weights.read_bytes()).hexdigest().startswith(file.stem.removeprefix("places365-"))
    guesses = read_predictions(file)
    assert sorted(guesses) == list(guesses) == sorted(path.stem for path in (gqa / "images").iterdir())
    assert min(guess.confidence for guess in guesses.values()) == pytest.approx(1 / 365, abs=1e-3)

    # A run that was killed in the middle of a line goes on with the pictures it lacks.
    whole = file.read_text()
    file.write_text(whole[: 7 * len(whole) // 8])
    for _ in range(2):
        assert prepare(gqa, gqa / "images", out, weights=weights)["files"] == given["files"]
        assert list(read_predictions(file)) == list(guesses)
    assert read[0] == 40
    assert 0 < read[1] < 10
    assert read[2] == 0


def test_weights_that_are_none(tmp_path: Path):
    refuses("found none", load_scene_classifier, tmp_path / "none")
    (tmp_path / "w.safetensors").write_bytes(b"nothing")
    refuses("must be a complete safetensors file", load_scene_classifier, tmp_path / "w.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"name an architecture.*confed weights convert places365"):
        load_scene_classifier(tmp_path / "w.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors", metadata={"architecture": "resnet18"})
    refuses("tensors of a resnet18", load_scene_classifier, tmp_path / "w.safetensors")
    refuses("resnet18, resnet50, got 'vgg'", build_scene_classifier, "vgg")


# From end to end --------------------------------------------------------------------------------------------


def test_from_questions_and_pictures_to_a_trained_round(gqa: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    root = tmp_path / "prepared"
    arguments = ["--gqa", gqa, "--images", gqa / "images", "--out", root, "--predictions", gqa / "predictions.csv"]
    assert confed("data", "prepare", "gqa-scenes", *arguments) == 0
    out, _ = capfd.readouterr()
    assert "19573" in out
    assert "40 asked about, 0 missing" in out
    assert confed("data", "prepare", "gqa-scenes", *arguments, "--json") == 0
    assert json.loads(capfd.readouterr().out)["pictures"]["kept"] == 36
    assert confed("data", "prepare", "gqa-scenes", *arguments, "--threshold", "2") == 2
    assert "threshold must lie in [0, 1], got 2.0" in capfd.readouterr().err
    for letter in ("a", "b"):
        recipe = load_recipe(f"fedvqa_gqa_{letter}", ["data.root=somewhere"])
        assert (recipe.run.rounds, recipe.local.epochs, recipe.local.batch_size, recipe.local.lr) == (5, 2, 32, 1e-4)
        assert recipe.sections["algorithm"]["lam"] == 1.0
        assert recipe.sections["algorithm"]["top_n"] == 20
        assert recipe.sections["data"]["scenario"] == letter.upper()
    run = ["fedvqa_gqa_a", f"data.root={root}", "data.image_size=32", "data.validation=0.25", "model.name=vilt_tiny",
           "model.image_size=32", "run.rounds=1", "local.epochs=1", "run.threads=1", "run.device=cpu",
           "study.methods=[]", "algorithm.top_n=3", "run.gallery=1"]  # fmt: skip
    assert confed("run", *run, "--out", tmp_path / "run") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["personal"]) >= set(SCENARIOS["A"][0])
    assert confed("run", *run, "run.workers=2", "--out", tmp_path / "again") == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (tmp_path / "again" / "metrics.jsonl").read_bytes()
