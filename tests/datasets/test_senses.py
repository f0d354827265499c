"""The made-up dataset of things seen, heard and read about, and folders of sensor series with texts."""

import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confed.data.examples import Examples, presence
from confed.data.modalities import SIX_CLIENTS as OWNED
from confed.data.modalities import SUBSETS, check_ownership
from confed.data.modality_names import set_names
from confed.datasets.senses import modalities
from confed.datasets.sensor_series import sensor_series
from confed.recipes.recipe import load_recipe
from confed.runs.run import run
from refusals import refuses

# Senses -----------------------------------------------------------------------------------------------------


def looked_at(own: Examples) -> Tensor:
    """Of both halves of each picture: mean redness, how much differs from the background, and that in the middle."""
    pictures = own.images[own.image_index].astype(np.float32)
    red = (pictures[..., 0] - pictures[..., 2]) / 100
    away = (np.abs(pictures - np.median(pictures, axis=(1, 2), keepdims=True)).mean(axis=3) > 40).astype(np.float32)
    seen = [red[:, :, :16], red[:, :, 16:], away[:, :, :16], away[:, :, 16:]]
    # A ball is filled, a box is open: of what lies between its outer rows, how much is there.
    fill = away[:, :, :16].sum(axis=(1, 2)) / np.maximum(away[:, :, :16].any(axis=2).sum(axis=1), 1) / 10
    return torch.tensor(np.column_stack([*(part.mean(axis=(1, 2)) * 5 for part in seen), fill])).float()


def heard(own: Examples) -> Tensor:
    """Energies of 20 bands, and of the first and the second half of the sound."""
    assert own.sounds is not None
    assert own.sound_index is not None
    waves, _ = own.sounds[torch.from_numpy(own.sound_index)]
    spectrum = torch.fft.rfft(waves).abs().square()
    bands = torch.stack([part.mean(dim=1) for part in spectrum[:, 60:1500].chunk(20, dim=1)], dim=1)
    halves = torch.stack([part.square().mean(dim=1) for part in waves.split(int(0.22 * 8000), dim=1)[:2]], dim=1)
    return torch.cat([bands, halves], dim=1).clamp_min(1e-6).log()


def read(own: Examples) -> Tensor:
    words = ("one", "single", "two", "pair", "red", "crimson", "blue", "navy", "ball", "sphere", "box", "cube")
    return torch.tensor([[float(word in text.split()) for word in words] for text in own.questions])


def scores(inputs: Tensor, truth: Tensor, tests: Tensor) -> Tensor:
    """Log-probabilities of a linear classifier for each of the three facts, added up to those of the answers."""
    mean, deviation = inputs.mean(0), inputs.std(0) + 1e-6
    inputs, tests = (inputs - mean) / deviation, (tests - mean) / deviation
    net = nn.Linear(inputs.shape[1], 3)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    facts = torch.stack([truth // 4, truth // 2 % 2, truth % 2], dim=1).float()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03, weight_decay=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(net(inputs), facts).backward()
        optimizer.step()
    with torch.no_grad():
        yes = nn.functional.logsigmoid(net(tests))
        no = nn.functional.logsigmoid(-net(tests))
    each = torch.arange(8)
    bits = torch.stack([each // 4, each // 2 % 2, each % 2], dim=1).bool()
    return torch.where(bits, yes.unsqueeze(1), no.unsqueeze(1)).sum(dim=2)


def test_one_modality_tells_two_thirds_and_three_nearly_all() -> None:
    dataset = modalities(validation=1, test=300)
    client = dataset.clients["image_text_audio"]
    truth, tests = (
        torch.tensor([dataset.answers.index(a) for a in own.answers]) for own in (client.train, client.test)
    )
    alone = [scores(see(client.train), truth, see(client.test)) for see in (looked_at, heard, read)]
    accuracy = [float((each.argmax(1) == tests).float().mean()) for each in alone]
    together = float((torch.stack(alone).sum(0).argmax(1) == tests).float().mean())
    assert all(0.55 < each < 0.7 for each in accuracy), accuracy
    assert 0.86 < together < 0.97


def test_clients_places_and_seeds() -> None:
    one, other = (modalities(train=24, validation=8, test=16, seed=seed) for seed in (0, 1))
    check_ownership(one)
    assert dict(one.modalities) == dict(OWNED)
    assert [own.types[0] for own in one.unseen.values()] == ["+".join(shown) for shown in SUBSETS]
    for name, client in one.clients.items():
        assert set(set_names(presence(client.train))) == {"+".join(OWNED[name])}
        assert client.test.questions == other.clients[name].test.questions
        assert client.train.answers != other.clients[name].train.answers
    assert len({tuple(own.answers) for own in one.unseen.values()}) == 1


def test_styles_differ_between_clients_unless_data_are_iid() -> None:
    levels = {}
    for split in ("clients", "iid"):
        dataset = modalities(split, train=16, validation=8, test=8)
        seeing = [c.train for c in dataset.clients.values() if presence(c.train)[0, 0]]
        levels[split] = [float(np.median(own.images)) for own in seeing]
    assert max(levels["clients"]) - min(levels["clients"]) > 50
    assert max(levels["iid"]) - min(levels["iid"]) < 5


SMALL = {"train": 32, "validation": 4, "test": 16}


def test_five_facts_change_answers_pictures_sounds_and_words() -> None:
    dataset = modalities(facts=5, clear=0.0, blurred=0.0, **SMALL)
    assert len(dataset.answers) == 32
    assert {"red", "striped", "even", "tiny"} <= set(dataset.words)
    own = dataset.clients["image_text_audio"].train
    assert own.sounds is not None
    big, striped = (np.array([word in answer for answer in own.answers]) for word in ("big", "striped"))
    told = [set(text.split()) for text in own.questions]
    assert [bool(words & {"big", "large"}) for words in told] == big.tolist()
    assert [bool(words & {"striped", "banded"}) for words in told] == striped.tolist()
    # One thing alone, so that its number does not count: a big one covers more, and sounds longer.
    one = np.array(["one" in answer for answer in own.answers])
    level = np.median(own.images, axis=(1, 2), keepdims=True)
    covered = (np.abs(own.images.astype(float) - level).mean(axis=3) > 30).sum(axis=(1, 2))
    assert covered[one & big].min() > covered[one & ~big].max() * 0.9
    waves, _ = own.sounds[torch.arange(len(own))]
    loud = (waves.abs() > 0.25).sum(dim=1).numpy()
    assert loud[one & big].mean() > 1.5 * loud[one & ~big].mean()


def test_without_options_examples_are_those_of_version_0_2() -> None:
    # Answers and the sum of all pixels, as they were before there were more facts and distortions.
    first = modalities(**SMALL).clients["image_text_audio"].train
    assert first.answers[:3] == ["one red box", "two blue ball", "one blue box"]
    assert int(first.images.astype(np.int64).sum()) == 13_994_240


def test_a_distortion_turns_all_colours_by_one_rotation() -> None:
    def things(distortion: float, client: str) -> np.ndarray:
        """Mean colours of the background and of a red and a blue ball's middle, about grey, (3, 3)."""
        options = {"clear": 0.0, "blurred": 0.0, "facts": 3, "distortion": distortion}
        own = modalities("iid", **options, **SMALL).clients[client].train
        balls = [[a.endswith(f"{colour} ball") for a in own.answers] for colour in ("red", "blue")]
        means = [own.images[np.array(ball)][:, 14:18, 7:9].mean(axis=(0, 1, 2)) for ball in balls]
        return np.array([own.images[:, :3].mean(axis=(0, 1, 2)), *means]) - 127.5

    for client in ("only_image", "image_text"):
        plain, turned = things(0.0, client), things(0.3, client)
        # Lengths and angles stay as they are, and colours do not.
        assert np.allclose(plain @ plain.T, turned @ turned.T, atol=800)
        assert np.abs(plain - turned).max() > 20
    assert np.abs(things(0.3, "only_image") - things(0.3, "image_text")).max() > 20


def test_distorted_words_are_distinct_and_differ_by_client() -> None:
    plain, changed = (modalities(distortion=d, **SMALL).clients for d in (0.0, 1.0))
    stands: dict[str, dict[str, str]] = {}
    for name in ("only_text", "image_text_audio"):
        pairs: dict[str, str] = {}
        for before, after in zip(plain[name].train.questions, changed[name].train.questions, strict=True):
            one, other = (
                text.removeprefix("there was").replace("pair of", "pair-of").split() for text in (before, after)
            )
            for word, instead in zip(one, other, strict=True):
                assert pairs.setdefault(word, instead) == instead
        assert len(set(pairs.values())) == len(pairs)
        assert all(word != instead for word, instead in pairs.items())
        stands[name] = pairs
    common = stands["only_text"].keys() & stands["image_text_audio"].keys()
    assert any(stands["only_text"][word] != stands["image_text_audio"][word] for word in common)


def test_seeds_and_styles_change_answers_and_no_distortion() -> None:
    one, other = (modalities("both", alpha=0.2, distortion=1.0, **SMALL, seed=seed).clients for seed in (0, 1))
    assert one["only_text"].test.questions == other["only_text"].test.questions
    counts = [sorted(client.test.answers) for client in one.values()]
    assert len(set(map(tuple, counts))) == len(one)
    styled = modalities("both", **SMALL).clients
    dark, light = (float(np.median(styled[name].train.images[:])) for name in ("only_image", "image_text"))
    assert light - dark > 50


def test_ceilings_are_those_of_counted_and_of_simulated_readers() -> None:
    usual = modalities(**SMALL).ceilings
    alone, pair = 0.96**2 * 0.7, usual["image_text"]
    assert usual["only_image"] == pytest.approx(alone)
    assert usual["only_audio"] == pytest.approx(alone)
    # Of two clear tellers and a blurred one the majority is right; a caption may leave its word out.
    assert usual["image_text_audio"] == pytest.approx(0.97, abs=0.005)
    rng, n = np.random.default_rng(0), 200_000
    truth = rng.integers(0, 2, (n, 3))
    seen = np.where(rng.random((n, 3)) < [0.3, 0.04, 0.04], 1 - truth, truth)
    gone = rng.random((n, 3)) < [0.08, 0.6, 0.08]
    assert (np.where(gone, seen, truth) == truth).all(axis=1).mean() == pytest.approx(pair, abs=0.003)


def test_skewed_answers_raise_the_ceiling_and_clear_ones_reach_1() -> None:
    even, skewed = (modalities("dirichlet", alpha=alpha, **SMALL).ceilings for alpha in (1e4, 0.1))
    assert skewed["only_image"] > even["only_image"] + 0.02
    perfect = modalities("dirichlet", clear=0.0, blurred=0.0, facts=5, **SMALL).ceilings
    assert min(perfect.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": 0}, "test must be at least 1"),
        ({"seed": -1}, "negative"),
        ({"facts": 6}, r"facts must lie in \[3, 5\], got 6"),
        ({"blurred": -0.1}, r"blurred must lie in \[0, 0.5\]"),
    ],
)
def test_senses_out_of_range(options: dict[str, float], message: str) -> None:
    refuses(message, modalities, **options)


# Series -----------------------------------------------------------------------------------------------------

ROWS = """id,client,split,series,text,label
a1,north,train,s1,warm day,good
a2,north,train,s2,,bad
a3,north,train,s3,grey,bad
a4,north,test,s1,,good
b1,south,train,,cold night,bad
b2,south,validation,,warm,good
c1,east,test,s2,cold,bad
"""


def series_folder(root: Path, rows: str = ROWS, **files: str) -> Path:
    (root / "series").mkdir(parents=True)
    (root / "examples.csv").write_text(rows)
    given = {"s1": "heat,light\n1,2\n3,4\n", "s2": "heat, light\n5,6\n", "s3": "heat,light\n0,0\n2,2\n4,0\n", **files}
    for name, text in given.items():
        (root / "series" / f"{name}.csv").write_text(text)
    return root


def test_a_folder_of_series_and_texts(tmp_path: Path) -> None:
    dataset = sensor_series(series_folder(tmp_path), unseen=["east"], validation=0.34, standardise=False)
    assert dict(dataset.modalities) == {"north": ("text", "series"), "south": ("text",)}
    north, south = dataset.clients.values()
    assert len(north.train) == 2
    assert len(north.validation) == 1
    assert south.train.names == ["b1"]
    assert south.train.series is not None
    assert not presence(south.train)[:, 3].any()
    assert dataset.unseen["east"].types == ["text+series"]
    assert dataset.answers == ("bad", "good")
    assert north.test.series is not None
    assert north.test.series_index is not None
    values, steps = north.test.series[torch.from_numpy(north.test.series_index)]
    assert values.tolist() == [[[1, 2], [3, 4]]]
    assert steps.tolist() == [2]


def test_channels_are_standardised_by_training_steps_alone(tmp_path: Path) -> None:
    rows = ROWS.replace("a2,north,train", "a2,north,validation").replace("a3,north,train", "a3,north,test")
    dataset = sensor_series(series_folder(tmp_path, rows), unseen=["east"])
    own = dataset.clients["north"].train
    assert own.series is not None
    # The training steps are those of s1: heat 1 and 3, light 2 and 4.
    assert own.series.values[:2].tolist() == [[-1, -1], [1, 1]]
    assert own.series.values[2].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("change", "files", "message"),
    [
        (("a1,north,train", "a1,north,first"), {}, "row 2: split must be one of train, validation, test, got 'first'"),
        (("a2,north", "a1,north"), {}, "row 3: the id 'a1' is that of row 2 already"),
        (
            ("a2,north,train,s2,,bad", "a2,north,train,,,bad"),
            {},
            "row 3: expected an id, and a series or a text, got .*'a2'",
        ),
        (("label", "answer"), {}, "expected the columns .*label, got id, .*answer"),
        (("s2,cold", "s9,cold"), {}, "s9.csv does not exist"),
        (("", ""), {"s2": "heat,light\n"}, "s2.csv: expected a row at least, got none"),
        (("", ""), {"s2": "heat,wind\n1,2\n"}, "expected the channels heat, light, got heat, wind"),
        (("", ""), {"s2": "heat,light\n1,x\n"}, "s2.csv, row 2: expected numbers"),
        (("", ""), {"s2": "heat,light\n1\n"}, "s2.csv, row 2: expected 2 cells"),
    ],
)
def test_faulty_series_folders(tmp_path: Path, change: tuple[str, str], files: dict[str, str], message: str) -> None:
    rows = ROWS.replace(*change) if change[0] else ROWS
    refuses(message, sensor_series, series_folder(tmp_path, rows, **files))


def test_who_owns_what_can_be_said_and_must_fit(tmp_path: Path) -> None:
    root = series_folder(tmp_path)
    with pytest.raises(ValueError, match=r"'south' declares series and has no training example with it"):
        check_ownership(sensor_series(root, unseen=["east"], modalities={"south": ("text", "series")}))
    with pytest.raises(ValueError, match=r"data.modalities must be distinct names out of north, south, got .'west'"):
        sensor_series(root, unseen=["east"], modalities={"west": ("text",)})
    refuses(r"unseen must be distinct names out of .*got .'west'", sensor_series, root, unseen=["west"])
    refuses("expected a training example of client 'east'", sensor_series, root)


def test_the_packaged_recipe_runs_on_its_examples_folder(tmp_path: Path) -> None:
    told = (files("confed.recipes") / "sensors.toml").read_text()
    blocks = re.findall(r"(?:^#       \S.*\n)+", told, re.MULTILINE)
    rows, values = ("".join(line[8:] for line in block.splitlines(keepends=True)) for block in blocks)
    more = ["b2,hall south,train,,all is well,sound", "b3,hall south,test,,all is well,sound",
            "b4,hall south,validation,,smells,worn", "a3,hall north,validation,pump-18,,sound"]  # fmt: skip
    folder = tmp_path / "data"
    (folder / "series").mkdir(parents=True)
    (folder / "examples.csv").write_text(rows + "\n".join(more) + "\n")
    for name in ("pump-17", "pump-18"):
        (folder / "series" / f"{name}.csv").write_text(values)
    recipe = load_recipe("sensors", [f"data.root={folder}", "run.rounds=1", "run.workers=1", "model.layers=1"])
    summary = run(recipe.method("modality_transformer"), tmp_path / "run")
    assert set(summary["personal"]) == {"hall north", "hall south"}
    refuses(r"data\.root", load_recipe, "sensors")
