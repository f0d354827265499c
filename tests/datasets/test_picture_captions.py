"""Captions, texts and documents in files as others publish them, near duplicates, and what datasets make of them."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from confed.data.caption_batches import groups
from confed.data.caption_files.captions import Piece, caption_records
from confed.data.caption_files.shards import NearDuplicates, ShardPictures, chunks, shard_pairs, story_lines, text_lines
from confed.data.examples import Examples
from confed.data.ragged import PackedTexts
from confed.data.readable import leave_out_unreadable
from confed.datasets.caption_corpus import caption_corpus, turns_of
from confed.datasets.picture_captions import coco_captions, flickr30k, kind_of, known_words
from confed.runs.encode import load_run_data
from refusals import refuses


def jpeg(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((20, 30, 3), shade, np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


# Captions of photographs ----------------------------------------------------------------------------------------------

KARPATHY = {
    "images": [
        {"filename": f"{k}.jpg", "filepath": "val2014", "cocoid": k, "split": split, "imgid": k,
         "sentences": [{"raw": f"A dog number {k}.", "tokens": []}, {"raw": "some dogs", "tokens": []}]}
        for k, split in enumerate(["train"] * 6 + ["restval"] * 2 + ["val", "test", "test"])
    ],
    "dataset": "coco",
}  # fmt: skip
COCO = {
    "info": {},
    "images": [{"id": k, "file_name": f"{k}.jpg"} for k in range(6)],
    "annotations": [{"id": 10 * k + n, "image_id": k, "caption": f"a cat {n}"} for n in range(2) for k in range(5)],
}


def written(folder: Path, content: object, name: str = "captions.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / name


def test_the_layouts_of_captions_are_told_apart(tmp_path: Path):
    karpathy = list(caption_records(written(tmp_path, KARPATHY)))
    assert [record.split for record in karpathy][-3:] == ["val", "test", "test"]
    assert karpathy[0].picture == "val2014/0.jpg"
    assert karpathy[0].captions == ("A dog number 0.", "some dogs")
    coco = list(caption_records(written(tmp_path, COCO)))
    assert [record.name for record in coco] == [f"coco-{k}" for k in range(5)]  # the sixth has no caption
    assert coco[3].captions == ("a cat 0", "a cat 1")
    turned = {key: COCO[key] for key in ("annotations", "images")}
    assert [r.captions for r in caption_records(written(tmp_path, turned))] == [r.captions for r in coco]
    tokens = "1.jpg#0\tA man .\n1.jpg#1\tTwo men .\n2.jpg#0\tA dog .\n"
    found = list(caption_records(written(tmp_path, tokens, "results.token")))
    assert [(record.picture, record.captions) for record in found] == [
        ("1.jpg", ("A man .", "Two men .")),
        ("2.jpg", ("A dog .",)),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "expected an object with a list under 'images'"),
        ({"images": 3}, "expected an object with a list under 'images'"),
        ({"pictures": []}, "expected an object with a list under 'images'"),
        ({"images": [{"id": 1, "file_name": "a.jpg"}]}, "got no 'annotations'"),
        ({**COCO, "annotations": [{"id": 1, "image_id": 99, "caption": "x"}]}, "picture 99"),
        ({**COCO, "annotations": [{"id": 1, "image_id": 1, "caption": "  "}]}, "row 1: expected a text as 'caption'"),
        ({"images": [{"filename": "a.jpg", "split": "train", "sentences": []}]}, "row 1: expected a list of sentences"),
        ({"images": [{**KARPATHY["images"][0], "filename": "../a.jpg"}]}, "a way out of its folder"),
        ({"images": [KARPATHY["images"][0]] * 2}, "that of row 1 already"),
        (json.dumps(KARPATHY)[:400], "is it cut off"),
        (json.dumps(COCO)[:300], "is it cut off"),
    ],
)  # fmt: skip
def test_captions_of_a_wrong_layout_are_refused(tmp_path: Path, content: object, message: str):
    with pytest.raises(ValueError, match=message):
        list(caption_records(written(tmp_path, content)))


@pytest.mark.parametrize(
    ("lines", "message"),
    [("1.jpg A man\n", "row 1: expected 'file.jpg#n"),
     ("1.jpg#0\ta\n2.jpg#0\tb\n1.jpg#1\tc\n", "row 3: the picture '1.jpg' is that of row 1")],
)  # fmt: skip
def test_lists_of_tokens_that_are_faulty_are_refused(tmp_path: Path, lines: str, message: str):
    refuses(message, list, caption_records(written(tmp_path, lines, "results.token")))


def photographs(root: Path, names: list[str]) -> None:
    for k, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(jpeg(10 * k))


def test_karpathys_split_is_kept(tmp_path: Path):
    written(tmp_path, KARPATHY, "dataset_coco.json")
    photographs(tmp_path, [f"val2014/{k}.jpg" for k in range(11)])
    data = coco_captions(tmp_path, clients=2, validation=0.25, min_count=1, image_size=8, public=0.25)
    assert len(data.unseen["test"]) == 2
    assert list(data.unseen["test"].captions or ()) == [
        ("A dog number 9.", "some dogs"),
        ("A dog number 10.", "some dogs"),
    ]
    own = [row for split in data.clients.values() for row in {*split.train.image_index.tolist()}]
    own += [row for split in data.clients.values() for row in split.validation.image_index.tolist()]
    assert len(own) == len({*own}) == 6  # of eight, two are public; those of "val" are nobody's
    assert {*own} < {*range(8)}
    assert len(data.public) == 4
    assert all(len(split.test) == 0 for split in data.clients.values())
    picture = data.clients["client-00"].train.images[3]
    assert picture.shape == (8, 8, 3)
    assert int(picture[0, 0, 0]) == 30
    written(tmp_path, json.dumps(KARPATHY).replace("9.jpg", "gone.jpg"), "dataset_coco.json")
    with pytest.raises(ValueError, match=r"all 11 pictures with captions, got all but 1: val2014/gone\.jpg"):
        coco_captions(tmp_path, clients=2, min_count=1, image_size=8)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.filterwarnings("ignore:coco_captions. 1 of")
@pytest.mark.parametrize("held", [True, False])
def test_a_damaged_photograph_leaves_out_its_captions_alone(
    tmp_path: Path, held: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("confed.datasets.picture_captions.HELD", 1 << 28 if held else 0)
    written(tmp_path, KARPATHY, "dataset_coco.json")
    photographs(tmp_path, [f"val2014/{k}.jpg" for k in range(11)])
    options: dict[str, Any] = {"clients": 2, "min_count": 1, "image_size": 8, "validation": 0.0}
    whole = coco_captions(tmp_path, **options)
    file = tmp_path / "val2014" / "3.jpg"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"1 of 11 pictures .* cannot be read.*3\.jpg"):
        leave_out_unreadable(coco_captions(tmp_path, **options))
    data = leave_out_unreadable(coco_captions(tmp_path, **options, unreadable=0.1))
    assert data.unreadable is not None
    (owner,) = (name for name, split in whole.clients.items() if 3 in split.train.image_index)
    gone = int((whole.clients[owner].train.image_index == 3).sum())
    assert data.unreadable.examples == {owner: {"train": gone}}
    for name, split in data.clients.items():
        before = whole.clients[name].train
        rows = np.flatnonzero(before.image_index != 3).tolist()
        assert list(split.train.questions) == [before.questions[row] for row in rows]
        shown = split.train.images[split.train.image_index]
        np.testing.assert_array_equal(shown, before.images[before.image_index[rows]])
    assert isinstance(data.unseen["test"].images, np.ndarray) == held


def test_kinds_follow_from_what_captions_name():
    assert kind_of(["Two dogs and a car.", "a dog"]) == "animal"
    assert kind_of(["hot dog stand", "a pizza"]) == "food"
    assert kind_of(["something"]) == "other"
    assert kind_of(["a car beside two dogs on a chair", "a dog"]) == "animal"
    assert kind_of(["a chair, dogs and a car"]) == "furniture", "of equal ones the one named first"
    assert known_words(["a dog", "a dog, a cat"], 2) == ("a", "dog")
    refuses("min_count", known_words, ["a"], 2)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_orders_do_not_depend_on_hashes(tmp_path: Path, hash_seed: str):
    rows = [{"q": "what?", "label": "cat" if k % 3 else "dog", "img": "a.png", "hospital_id": k % 2, "team_id": k % 2,
             "group_id": k % 2, "box_id": k % 2} for k in range(8)]  # fmt: skip
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "a.png").write_bytes(jpeg(9))
    code = (
        "import sys; from pathlib import Path; from confed.datasets.picture_captions import kind_of; "
        "from confed.prepare.own_data import recognise; print(kind_of(['a cup, a car, dogs and a chair'])); "
        "print('; '.join(recognise(Path(sys.argv[1]))[0][0].saw[-3:]))"
    )
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, str(tmp_path)]
    kind, saw = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert kind == "kitchen"
    assert [name in saw for name in ("hospital_id", "'team_id'", "'group_id'", "'box_id'")] == [False, True, True, True]
    assert saw.index("'team_id'") < saw.index("'group_id'") < saw.index("'box_id'")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"captions": "no.json"}, "got neither"), ({"validation": 1.0}, "validation must lie in"),
     ({"partition": "other"}, "of iid, kinds"), ({"clients": 0}, "clients"), ({"shots": 99}, "shots: expected at most"),
     ({"validation": 0.5, "test_share": 0.5}, "leave pictures")],
)  # fmt: skip
def test_photographs_refuse_what_is_out_of_range(tmp_path: Path, options: dict[str, Any], message: str):
    written(tmp_path, COCO, "captions_mini.json")
    photographs(tmp_path, [f"{k}.jpg" for k in range(6)])
    given = {"captions": "captions_mini.json", "clients": 1, "image_size": 8, "min_count": 1, **options}
    refuses(message, coco_captions, tmp_path, **given)


def test_real_captions_of_coco(real_data: Path):
    data = coco_captions(
        real_data / "coco_mini_train", captions="captions_train2017_mini.json", clients=3, test_share=0.2, min_count=2,
        image_size=16, shots=1,
    )  # fmt: skip
    assert (
        sum(len(split.train) + 5 * len(split.validation) + 5 * len(split.test) for split in data.clients.values())
        == 250
    )
    assert sum(len(split.test) for split in data.clients.values()) >= 9
    assert {len(own) for split in data.clients.values() for own in split.test.captions or ()} == {5}
    skewed = coco_captions(
        real_data / "coco_mini_train", "kinds", captions="captions_train2017_mini.json", clients=2, minimum=8,
        min_count=2, image_size=16,
    )  # fmt: skip
    assert {"animal", "vehicle"} & {kind for split in skewed.clients.values() for kind in split.train.types}


def test_the_sample_of_flickr30k(real_data: Path, tmp_path: Path):
    file = real_data / "format_samples" / "flickr30k" / "dataset_flickr30k.json"
    records = list(caption_records(file))
    assert records[0].captions[0] == "A woman holds an umbrella."
    written(tmp_path, file.read_text(), file.name)
    photographs(tmp_path / "images", [record.picture for record in records])
    data = flickr30k(tmp_path, clients=1, validation=0.0, min_count=1, image_size=8)
    assert {"umbrella", "woman"} <= {*data.words}
    assert len(data.unseen["test"]) == sum(record.split == "test" for record in records)


# Texts and documents --------------------------------------------------------------------------------------------------


def packed(text: str, frames: int = 1) -> bytes:
    zstd: Any = import_module("backports.zstd")
    size = -(-len(text) // frames)
    return b"".join(zstd.compress(text[k * size : (k + 1) * size].encode()) for k in range(frames))


def test_texts_are_read_line_by_line_also_compressed(tmp_path: Path):
    lines = "".join(json.dumps({"text": f"Öl number {k}", "meta": {}}) + "\n" for k in range(500))
    plain = written(tmp_path, lines, "a.jsonl")
    wanted = [(k + 1, f"Öl number {k}") for k in range(500)]
    assert list(text_lines(plain)) == wanted
    for frames in (1, 3):
        (tmp_path / "b.jsonl.zst").write_bytes(packed(lines, frames))
        assert list(text_lines(tmp_path / "b.jsonl.zst")) == wanted
    (tmp_path / "b.jsonl.zst").write_bytes(packed(lines)[:-9])
    refuses(r"b\.jsonl\.zst.*cut off", list, text_lines(tmp_path / "b.jsonl.zst"))
    (tmp_path / "b.jsonl.zst").write_bytes(b"nothing of the kind")
    refuses("complete compressed file", list, text_lines(tmp_path / "b.jsonl.zst"))


def test_texts_of_a_pile_take_no_memory(tmp_path: Path):
    resource = import_module("resource")
    line = json.dumps({"text": "word " * 4000}) + "\n"
    zstd: Any = import_module("backports.zstd")
    with zstd.open(tmp_path / "big.jsonl.zst", "wb") as stream:
        for _ in range(1500):  # 30 MB
            stream.write(line.encode())
    count = sum(1 for _ in islice(text_lines(tmp_path / "big.jsonl.zst"), 100))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = sum(1 for _ in text_lines(tmp_path / "big.jsonl.zst"))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert count == 1500
    assert after - before < 8 * 1024  # KiB


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "row 2: expected one JSON object.*cut off"), ("[1]", "row 2: expected an object"),
     ('{"words": 1}', "row 2: expected a text as 'text'"), ('{"text": " "}', "row 2: expected a text")],
)  # fmt: skip
def test_faulty_lines_are_named(tmp_path: Path, line: str, message: str):
    file = written(tmp_path, '{"text": "a"}\n' + line + "\n", "a.jsonl")
    refuses(message, list, text_lines(file))
    refuses("does not exist", list, text_lines(tmp_path / "gone.jsonl"))


def test_documents_of_both_layouts(tmp_path: Path):
    lines = [
        {"images": [None, "a.jpg", None], "texts": ["Hello", None, "a dog"]},
        {"text_list": ["One.", "Two."], "image_info": [{"image_name": "b.jpg", "matched_text_index": 1}]},
    ]
    file = written(tmp_path, "\n".join(map(json.dumps, lines)), "d.jsonl")
    first, second = story_lines(file)
    assert first.pieces == (Piece(text="Hello"), Piece(picture="a.jpg"), Piece(text="a dog"))
    assert second.pieces == (Piece(text="One."), Piece(picture="b.jpg"), Piece(text="Two."))
    faults: list[tuple[object, str]] = [
        ({"images": ["a.jpg"], "texts": ["b"]}, "a picture or a text at each place"),
        ({"images": [], "texts": ["b"]}, "lists of one length"),
        ({"images": ["a.jpg"], "texts": [None]}, "a text at least"),
        ({"images": ["../a.jpg", None], "texts": [None, "b"]}, "a way out"),
        ({"text_list": ["a"], "image_info": [{"image_name": "b.jpg", "matched_text_index": 4}]}, "below 1"),
        ({"story": 1}, "text_list and image_info"),
    ]
    for line, message in faults:
        refuses(message, list, story_lines(written(tmp_path, json.dumps(line), "d.jsonl")))


def test_documents_become_turns():
    def pieces(*given: str) -> list[Piece]:
        return [Piece(picture=text) if text.endswith(".jpg") else Piece(text=text) for text in given]

    assert turns_of(pieces("Hi", "a.jpg", "one", "more", "b.jpg", "two"), 5, 3) == [
        [("", "Hi"), ("a.jpg", "one more"), ("b.jpg", "two")]
    ]
    assert turns_of(pieces("a.jpg", "one two three", "b.jpg"), 2, 3) == [[("a.jpg", "one two")]]
    assert turns_of(pieces("a.jpg", "b.jpg", "two", "c.jpg", "three"), 9, 2) == [
        [("a.jpg", ""), ("b.jpg", "two")],
        [("c.jpg", "three")],
    ]
    assert turns_of(pieces("only", "texts"), 9, 2) == []
    assert chunks("a b c d e", 2) == ["a b", "c d", "e"]


# Shards ---------------------------------------------------------------------------------------------------------------


def tar(file: Path, members: dict[str, bytes]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file


def pair_members(count: int, first: int = 0) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for k in range(first, first + count):
        members[f"{k:05d}.jpg"] = jpeg(k)
        members[f"{k:05d}.json"] = json.dumps({"caption": f"a dog and thing number {k}", "url": ""}).encode()
    return members


def parquet(file: Path, columns: dict[str, list[Any]], group: int = 2) -> Path:
    arrow: Any = import_module("pyarrow")
    file.parent.mkdir(parents=True, exist_ok=True)
    import_module("pyarrow.parquet").write_table(arrow.table(columns), file, row_group_size=group)
    return file


def test_shards_give_captions_at_once_and_pictures_when_asked(tmp_path: Path):
    one = tar(tmp_path / "a.tar", pair_members(3))
    two = parquet(
        tmp_path / "b.parquet",
        {"image": [{"bytes": jpeg(100 + k), "path": ""} for k in range(5)], "caption": [f"cat {k}" for k in range(5)]},
    )
    shown = [*shard_pairs(one), *shard_pairs(two)]
    assert [pair.caption for pair in shown] == [f"a dog and thing number {k}" for k in range(3)] + [
        f"cat {k}" for k in range(5)
    ]
    pictures = ShardPictures([pair.place for pair in shown], PackedTexts.of([pair.name for pair in shown]), 6)
    assert pictures.shape == (8, 6, 6, 3)
    order = np.array([7, 0, 4, 2])
    assert pictures[order][:, 0, 0, 0].tolist() == [104, 0, 101, 2]
    assert int(pictures[5][0, 0, 0]) == 102
    assert len(pictures[np.zeros(0, np.int64)]) == 0
    text = tar(tmp_path / "c.tar", {"x/1.png": jpeg(1), "x/1.txt": b"a cup\n"})
    assert [(pair.name, pair.caption) for pair in shard_pairs(text)] == [("x/1", "a cup")]


def cut(file: Path, share: float) -> Path:
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    return file


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: cut(tar(f / "a.tar", pair_members(6)), 0.5), "cut off|complete, uncompressed"),
        (lambda f: tar(f / "a.tar", {"1.jpg": jpeg(1)}), "expected a caption .* of '1', got none"),
        (lambda f: tar(f / "a.tar", {"1.txt": b"a"}), "expected a picture of '1', got none"),
        (lambda f: tar(f / "a.tar", {"1.jpg": jpeg(1), "1.txt": b" "}), "captions that are not empty"),
        (lambda f: tar(f / "a.tar", {"1.jpg": jpeg(1), "1.json": b"{"}), "a caption in UTF-8"),
        (lambda f: cut(parquet(f / "a.parquet", {"image": [jpeg(1)], "caption": ["a"]}), 0.7), "complete Parquet"),
        (lambda f: parquet(f / "a.parquet", {"pixels": [jpeg(1)], "caption": ["a"]}), "a column of pictures"),
        (lambda f: parquet(f / "a.parquet", {"image": [jpeg(1)], "caption": [None]}), "row 1: expected a text"),
        (lambda f: written(f, "a", "a.zip"), r"must be one of \.tar, \.parquet"),
        (lambda f: f / "gone.tar", "does not exist"),
        (lambda f: f / "gone.parquet", "does not exist"),
    ],
)
def test_shards_that_are_faulty_are_refused(tmp_path: Path, make: Callable[[Path], Path], message: str):
    refuses(message, list, shard_pairs(make(tmp_path)))


# Near duplicates and the whole corpus ---------------------------------------------------------------------------------


def test_near_duplicates_are_left_out_and_the_first_stays():
    text = " ".join(f"word{k}" for k in range(60))
    near = text.replace("word30", "other")
    far = " ".join(f"thing{k}" for k in range(60))
    runs = [{tuple(t.split()[i : i + 3]) for i in range(58)} for t in (text, near)]
    assert len(runs[0] & runs[1]) / len(runs[0] | runs[1]) > 0.85  # by hand: 55 of 61 runs
    seen = NearDuplicates()
    texts = [text, far, near, text.upper() + "!", "", "short"]
    assert [one for one in texts if seen.is_new(one)] == [text, far, "", "short"]
    assert seen.dropped == 2


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    members = pair_members(20)
    members["90000.jpg"], members["90000.txt"] = jpeg(9), b"a caption of far too many words " * 9
    tar(tmp_path / "pairs" / "a.tar", members)
    parquet(
        tmp_path / "pairs" / "b.parquet",
        {"jpg": [jpeg(k) for k in range(9)], "text": [f"cat {k} " * 3 for k in range(9)]},
    )
    texts = [f"text {k} " + " ".join(f"w{k}x{j}" for j in range(30)) for k in range(6)]
    written(tmp_path / "texts", "".join(json.dumps({"text": t}) + "\n" for t in [*texts, texts[0]]), "t.jsonl")
    line = {"images": ["d.jpg", None, "e.jpg", None], "texts": [None, "a dog", None, "a cat"]}
    written(tmp_path / "documents", "".join(json.dumps(line) + "\n" for _ in range(2)), "d.jsonl")
    photographs(tmp_path / "documents" / "images", ["d.jpg", "e.jpg"])
    return tmp_path


@pytest.mark.usefixtures("own_cache")
def test_a_corpus_in_shards_becomes_a_federation(corpus: Path):
    options: dict[str, Any] = {"clients": 1, "min_count": 1, "image_size": 8, "test_share": 0.2, "validation": 0.1}
    data = caption_corpus(corpus, **options)
    client = data.clients["client-00"]
    assert Counter(kind for kind in client.train.types if kind in ("text", "document")) == {"text": 12, "document": 1}
    assert "2 left out" in data.facts["near duplicates"]
    assert data.facts["long captions"].startswith("1 picture")
    pairs = {name: split for name, split in vars(client).items() if name != "train"}
    assert sum(map(len, pairs.values())) + len(client.train) - 13 == 29
    assert client.train.before is not None
    row = list(client.train.types).index("document")
    assert [turn.text for turn in client.train.before[row]] == ["a dog"]
    assert client.train.questions[row] == "a cat"
    shades = [
        client.train.images[n][0, 0, 0] for n in (client.train.before[row][0].picture, client.train.image_index[row])
    ]
    assert shades == [0, 10]
    everything = caption_corpus(corpus, **{**options, "public": 0.5, "shots": 1})
    assert len(everything.public) == 14 + 6
    assert everything.clients["client-00"].test.before is not None
    source = json.dumps({"name": "caption_corpus", "root": str(corpus), **options})
    made: Any = load_run_data(source, json.dumps({"name": "caption_transformer_tiny", "max_length": 24}), 0)
    batch = next(iter(made.clients["client-00"].train(32, torch.Generator().manual_seed(0))))
    assert [len(part["text"]) for part in groups(batch)] == [14, 14, 4]


def test_a_corpus_that_is_not_whole_is_refused(corpus: Path):
    with pytest.raises(ValueError, match="got none"):
        caption_corpus(corpus / "texts")
    faults: list[tuple[dict[str, Any], str]] = [
        ({"words": 0}, "words"),
        ({"test_share": 1.0}, r"test_share must lie in \[0, 1\)"),
        ({"clients": 60}, "pictures to train on, got"),
    ]
    for options, message in faults:
        with pytest.raises(ValueError, match=message):
            caption_corpus(corpus, **options)
    with pytest.raises(ValueError, match="unreadable must lie in"):
        caption_corpus(corpus, unreadable=2.0)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("check", ["decoded", "present"])
def test_unreadable_pictures_leave_out_their_examples(corpus: Path, check: str):
    options: dict[str, Any] = {"clients": 1, "min_count": 1, "image_size": 8, "test_share": 0.2, "check": check}
    whole = leave_out_unreadable(caption_corpus(corpus, **options))
    assert whole.unreadable is not None
    assert not whole.unreadable.pictures
    before = whole.clients["client-00"]
    pixels = _pixels(before.train) | _pixels(before.test)  # before the files are others
    damaged = b"" if check == "present" else b"no picture"
    members = pair_members(20) | {"00003.jpg": damaged, "00007.jpg": damaged}
    tar(corpus / "pairs" / "a.tar", members)
    shown = [damaged if k == 5 else jpeg(k) for k in range(9)]
    parquet(corpus / "pairs" / "b.parquet", {"jpg": shown, "text": [f"cat {k} " * 3 for k in range(9)]})
    (corpus / "documents" / "images" / "d.jpg").unlink()  # shown before the picture that is described
    with pytest.raises(ValueError, match=r"4 of 31 pictures in .* cannot be read, more than the share of 0\.01"):
        leave_out_unreadable(caption_corpus(corpus, **options))
    with pytest.warns(UserWarning, match="4 of 31 pictures cannot be read and are left out with 4 examples"):
        data = leave_out_unreadable(caption_corpus(corpus, **options, unreadable=0.2))
    assert data.unreadable is not None
    assert set(data.unreadable.pictures) == {"a/00003", "a/00007", "b/b/00000005", "d.jpg"}
    after = data.clients["client-00"]
    assert Counter(kind for kind in after.train.types if kind in ("text", "document")) == {"text": 12}
    lost = {"a dog and thing number 3", "a dog and thing number 7", "cat 5 cat 5 cat 5", "a cat"}
    told = list(zip(before.train.questions, before.train.names, strict=True))
    assert list(zip(after.train.questions, after.train.names, strict=True)) == [t for t in told if t[0] not in lost]
    assert 0 < len(after.test) <= len(before.test)
    for part in (after.train, after.test):
        assert {name: pixels[name] for name in part.names} == _pixels(part)


def _pixels(part: Examples) -> dict[str, bytes]:
    """The picture of each example by its name; nothing where there is none."""
    rows = zip(part.names, part.types, part.image_index.tolist(), strict=True)
    return {name: b"" if kind == "text" else part.images[row].tobytes() for name, kind, row in rows}
