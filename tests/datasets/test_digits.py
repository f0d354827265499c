"""Spoken and written digits: pairing, splits, clues, damaged files; on a small folder made here, and the real one."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from confed.cli.dataset_description import describe
from confed.data.examples import Examples, FederatedDataset, presence
from confed.data.modalities import SIX_CLIENTS as OWNED
from confed.data.modalities import SUBSETS
from confed.data.modality_names import set_names
from confed.data.partitions import label_counts, label_shares
from confed.datasets.digits import DIGITS, TEST_TAKES, clue, clue_words, digits
from digit_files import write_digits, write_photographs
from refusals import refuses

ROLES = ("train", "validation", "test")
HEARING = {"only_audio": "ann", "image_audio": "bob", "image_text_audio": "cid"}
SPEAKERS = ("ann", "bob", "cid", "dee")
SMALL = {"train": 40, "validation": 20, "test": 30, "unseen": "dee"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits"), SPEAKERS)


def small(root: Path, split: str = "clients", **options: object) -> FederatedDataset:
    return digits(root, split, **{**SMALL, "rate": 100, **options})  # type: ignore[arg-type]


def pictures(own: Examples) -> list[int]:
    """The numbers of the pictures."""
    shown = own.images[own.image_index].astype(int)
    return (shown[:, 0, 0, 0] * 256 + shown[:, 0, 1, 0]).tolist()


def recordings(own: Examples) -> list[int]:
    """The numbers of the recordings, read from the sound itself."""
    assert own.sounds is not None
    assert own.sound_index is not None
    clips = [own.sounds.row(row) for row in own.sound_index.tolist()]
    return [int(clip[np.flatnonzero(clip)[0]]) - 1 for clip in clips]


def take(number: int) -> int:
    return number % 10


def speaker(number: int) -> str:
    return SPEAKERS[number // 100]


@pytest.mark.parametrize("split", ["clients", "iid", "dirichlet"])
def test_samples_are_of_their_digit_and_at_one_place(folder: Path, split: str) -> None:
    dataset = small(folder, split)
    seen: Counter[int] = Counter()
    heard: dict[int, set[tuple[str, str]]] = {}
    assert {name: dataset.modalities[name] for name in dataset.clients} == dict(OWNED)
    for name, client in dataset.clients.items():
        for role in ROLES:
            own: Examples = getattr(client, role)
            label = [int(answer) for answer in own.answers]
            assert len(own) == SMALL[role]
            assert set(set_names(presence(own))) == set(own.types) == {"+".join(OWNED[name])}
            if "image" in OWNED[name]:
                assert [number // 60 for number in pictures(own)] == label
                seen.update(pictures(own))
            if "audio" in OWNED[name]:
                assert [number // 10 % 10 for number in recordings(own)] == label
                assert all((take(number) < 5) == (role == "test") for number in recordings(own))
                for number in recordings(own):
                    heard.setdefault(number, set()).add((name, role))
    assert set(seen.values()) == {1}
    assert all(len(places) == 1 for places in heard.values())
    assert not {speaker(number) for number in heard} & {"dee"}


def test_each_client_that_hears_has_its_speaker_or_all_of_them(folder: Path) -> None:
    for split, expected in (("clients", 1), ("iid", 3)):
        dataset = small(folder, split)
        for name, who in HEARING.items():
            voices = {speaker(number) for role in ROLES for number in recordings(getattr(dataset.clients[name], role))}
            assert len(voices) == expected
            assert split != "clients" or voices == {who}


def test_unseen_places_show_one_set_each_of_the_same_samples(folder: Path) -> None:
    dataset = small(folder)
    assert [own.types[0] for own in dataset.unseen.values()] == ["+".join(shown) for shown in SUBSETS]
    everything = dataset.unseen["new_image_text_audio"]
    assert {speaker(number) for number in recordings(everything)} == {"dee"}
    for own in dataset.unseen.values():
        assert own.answers == everything.answers
        there = presence(own)[0]
        assert not there[0] or pictures(own) == pictures(everything)
        assert not there[1] or own.questions == everything.questions
        assert not there[2] or recordings(own) == recordings(everything)
    others = {number for client in dataset.clients.values() if client.test.types[0].startswith("image")
              for role in ROLES for number in pictures(getattr(client, role))}  # fmt: skip
    assert not others & set(pictures(everything))


def test_labels_are_even_or_each_clients_own(folder: Path) -> None:
    for split in ("clients", "iid"):
        for client in small(folder, split).clients.values():
            assert set(Counter(client.train.answers).values()) == {4}
    skewed = small(folder, "dirichlet", alpha=0.1)
    counts = {name: Counter(client.train.answers) for name, client in skewed.clients.items()}
    assert max(max(count.values()) for count in counts.values()) > 12
    assert len({tuple(sorted(count.items())) for count in counts.values()}) == 6


def test_test_samples_do_not_depend_on_the_seed_and_others_do(folder: Path) -> None:
    one, again, other = small(folder, seed=1), small(folder, seed=1), small(folder, seed=2)
    for name in OWNED:
        parts = [dataset.clients[name] for dataset in (one, again, other)]
        assert parts[0].test.questions == parts[2].test.questions
        assert parts[0].test.answers == parts[2].test.answers
        assert parts[0].train.answers == parts[1].train.answers
        assert parts[0].train.questions == parts[1].train.questions
        if "image" in OWNED[name]:
            assert pictures(parts[0].test) == pictures(parts[2].test)
            assert pictures(parts[0].train) == pictures(parts[1].train)
            assert pictures(parts[0].train) != pictures(parts[2].train)
        if "audio" in OWNED[name]:
            assert recordings(parts[0].test) == recordings(parts[2].test)
            assert recordings(parts[0].train) != recordings(parts[2].train)


def test_recordings_are_counted_and_come_behind_pauses(folder: Path) -> None:
    dataset = small(folder, pause=0.5)
    own = dataset.clients["only_audio"].test
    assert own.sounds is not None
    assert own.sound_index is not None
    silent = [int(np.flatnonzero(own.sounds.row(row))[0]) for row in own.sound_index.tolist()]
    assert 0 <= min(silent) < 10 < max(silent) <= 50
    assert "only_audio: ann: 40 in 40 train samples" in dataset.facts["independent recordings"]
    options = [f"root={folder}", "train=80", "test=30", "unseen=dee", "validation=20", "rate=100"]
    rows = describe("digits", options)["rows"]
    (row,) = [row for row in rows if (row["place"], row["role"]) == ("only_audio", "train")]
    # Of 50 recordings that are no test's, 10 are validation's.
    assert (row["sounds"], row["pictures"], row["modalities"], row["questions"]) == (40, 0, "audio", 80)


def test_other_rates_and_picture_sizes(folder: Path) -> None:
    with pytest.warns(UserWarning, match="400 of 400 sounds have 100 Hz: resampled to 200 Hz"):
        dataset = small(folder, rate=200, image_size=32)
    own = dataset.clients["image_audio"].train
    assert own.images.shape[1:] == (32, 32, 3)
    assert own.sounds is not None
    assert own.sounds.rate == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unseen": "eve"}, "unseen must be one of ann, bob, cid, dee, got 'eve'"),
        ({"train": 400}, r"the sizes ask for \d+ pictures of the digit 0, and there are 60"),
        ({"pause": -1}, r"data.pause must lie in \[0, 10\], got -1"),
        ({"split": "dirichlet", "alpha": 0.0}, "data.alpha must be positive, got 0.0"),
    ],
)
def test_options_out_of_range(folder: Path, options: dict[str, object], message: str) -> None:
    refuses(message, small, folder, **options)


def _spoken_by(source: Path, to: Path, speakers: int) -> Path:
    """The same files with the recordings of so many speakers, some of them of a new one who says what "ann" says."""
    to.mkdir()
    (to / "images.npz").write_bytes((source / "images.npz").read_bytes())
    with np.load(source / "audio.npz") as content:
        audio = {name: content[name] for name in content.files}
    # Takes are dealt out among the speakers, so that each has test takes and others.
    audio["speaker"] = ((audio["take"] + 10 * audio["speaker"].astype(int)) % (2 * speakers) // 2).astype(np.uint8)
    audio["take"] = np.arange(len(audio["take"])).astype(np.uint8) % 10
    order = np.lexsort((audio["digit"],))
    for digit in range(10):
        rows = order[audio["digit"][order] == digit]
        for number in range(speakers):
            own = rows[audio["speaker"][rows] == number]
            audio["take"][own] = np.arange(len(own)) + (TEST_TAKES - len(own) // 2)
    np.savez(to / "audio.npz", **audio)
    names = [{"name": f"p{number}"} for number in range(speakers)]
    (to / "meta.json").write_text(json.dumps({"sample_rate": 100, "speakers": names}))
    return to


def test_other_numbers_of_speakers(folder: Path, tmp_path: Path) -> None:
    more = _spoken_by(folder, tmp_path / "more", 5)
    dataset = digits(more, **{k: v for k, v in SMALL.items() if k != "unseen"}, rate=100)  # type: ignore[arg-type]
    # Nobody is called "theo": the last speaker is the unseen places'; the fourth one is with the first.
    told = dataset.facts["independent recordings"]
    assert "only_audio: p0, p3:" in told
    assert "image_audio: p1:" in told
    assert "image_text_audio: p2:" in told
    assert "p4" in dataset.facts["unseen"]
    assert dataset.facts["origin"] == str(more)
    assert "licence" not in dataset.facts
    few = _spoken_by(folder, tmp_path / "few", 3)
    refuses("at least 3 speakers beside 'p2', got 2; take split = 'iid'", small, few, unseen="p2")
    assert len(small(few, "iid", unseen="p2").clients) == 6


def test_missing_and_damaged_files_are_named(folder: Path, tmp_path: Path) -> None:
    refuses(r"nowhere does not exist; expected audio.npz", small, tmp_path / "nowhere")
    refuses(r"audio.npz does not exist", small, tmp_path)
    for name in ("audio.npz", "images.npz", "meta.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "meta.json").write_text('{"sample_rate": 8000, "speakers": [{"name": "ann"}]}')
    refuses(r"audio.npz: speakers must lie in .0, 1., got 0 to 3", small, tmp_path)
    (tmp_path / "meta.json").write_text("{}")
    refuses(r"meta.json: expected an object with sample_rate, speakers", small, tmp_path)
    np.savez(tmp_path / "images.npz", images=np.zeros((3, 28, 28), np.uint8), digit=np.array([1, 2, 11]))
    (tmp_path / "meta.json").write_bytes((folder / "meta.json").read_bytes())
    refuses(r"images.npz: digits must lie in .0, 10., got 1 to 11", small, tmp_path)


# Clues ------------------------------------------------------------------------------------------------------


def meant(text: str) -> int:
    """What a clue without misheard words says."""
    words = text.split()
    if words[:2] == ["the", "one"]:
        return DIGITS.index(words[3]) + {"after": 1, "before": -1}[words[2]]
    step, other = DIGITS.index(words[0]), DIGITS.index(words[3])
    return other + step if words[1] == "more" else other - step


def test_clues_without_noise_say_their_digit_and_never_name_it() -> None:
    rng = np.random.default_rng(0)
    for digit in range(10):
        told = {clue(digit, 0.0, rng) for _ in range(60)}
        assert {meant(text) for text in told} == {digit}
        assert len(told) >= 3
        assert set(" ".join(told).split()) <= set(clue_words())


def test_so_many_clues_have_a_word_misheard() -> None:
    rng = np.random.default_rng(1)
    told = [clue(6, 0.4, rng) for _ in range(4000)]
    hidden = np.mean(["something" in text for text in told])
    wrong = np.mean(["something" not in text and meant(text) != 6 for text in told])
    assert abs(hidden - 0.2) < 0.02
    assert abs(wrong - 0.2) < 0.02


def accuracy_of_reading(own: Examples, test: Examples) -> float:
    """Of a linear classifier over words and pairs of words."""

    def grams(text: str) -> list[str]:
        words = text.split()
        return [*words, *map(" ".join, itertools.pairwise(words))]

    number = {gram: i for i, gram in enumerate(sorted({g for text in own.questions for g in grams(text)}))}

    def table(texts: list[str]) -> torch.Tensor:
        rows = torch.zeros(len(texts), len(number))
        for row, text in enumerate(texts):
            rows[row, [number[gram] for gram in grams(text) if gram in number]] = 1
        return rows

    x, truth = table(list(own.questions)), torch.tensor([int(a) for a in own.answers])
    net = nn.Linear(len(number), 10)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, weight_decay=1e-3)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), truth).backward()
        optimizer.step()
    right = net(table(list(test.questions))).argmax(1) == torch.tensor([int(a) for a in test.answers])
    return float(right.float().mean())


# Shares of labels -------------------------------------------------------------------------------------------


def test_shares_are_balanced_both_ways_and_skewed() -> None:
    for alpha in (0.05, 0.5, None):
        shares = label_shares(4, 10, alpha, np.random.default_rng(3))
        assert np.allclose(shares.sum(axis=1), 1)
        assert np.allclose(shares.sum(axis=0), 0.4, atol=1e-2)
    assert label_shares(4, 10, 0.05, np.random.default_rng(3)).max() > 0.3
    assert label_shares(4, 10, 1000.0, np.random.default_rng(3)).max() < 0.12


def test_counts_by_largest_remainders() -> None:
    assert label_counts(7, [0.5, 0.3, 0.2]).tolist() == [4, 2, 1]  # 3.5, 2.1, 1.4
    assert label_counts(20, np.ones(10)).tolist() == [2] * 10
    assert label_counts(11, np.ones(3)).tolist() == [4, 4, 3]


# The real files ---------------------------------------------------------------------------------------------


def test_the_real_files(real_data: Path) -> None:
    root = real_data / "avdigits"
    if not root.is_dir():
        pytest.skip("no avdigits here")
    dataset = digits(root)
    for name, client in dataset.clients.items():
        assert len(client.test) == 500
        if "audio" in OWNED[name]:
            for own, count in ((client.train, 410), (client.validation, 40), (client.test, 50)):
                assert own.sounds is not None
                assert own.sound_index is not None
                assert own.sounds.independent(own.sound_index) == count
    assert "theo: 500 in 500 test samples" in dataset.facts["unseen"]
    client = dataset.clients["only_text"]
    assert 0.6 < accuracy_of_reading(client.train, client.test) < 0.8


def test_photographs_take_the_place_of_written_digits(folder: Path, tmp_path: Path) -> None:
    dataset = small(folder, photographs=write_photographs(tmp_path), image_size=16)
    seen = 0
    for name, client in dataset.clients.items():
        for role in ROLES:
            examples = getattr(client, role)
            if "image" in OWNED[name]:
                shown = examples.images[examples.image_index]
                assert shown.shape[1:] == (16, 16, 3)
                assert (shown[:, 0, 0, 0] // 20).tolist() == [int(answer) for answer in examples.answers]
                seen += len(shown)
    assert seen == 4 * (40 + 20 + 30)
    assert dataset.facts["origin"] == f"{folder}, photographs of {tmp_path}"
    assert "licence" not in dataset.facts


def test_photographs_are_of_ten_classes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 10 classes, one for each digit, got '11'"):
        small(folder, photographs=write_photographs(tmp_path, 11), image_size=16)
