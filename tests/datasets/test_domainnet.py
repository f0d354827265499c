"""DomainNet's lists and pictures: a made-up copy of the official layout with tiny pictures."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from confed.data.readable import leave_out_unreadable
from confed.datasets.domainnet import DOMAINS, domainnet
from refusals import refuses

pytestmark = pytest.mark.usefixtures("own_cache")
NAMES = ("aircraft_carrier", "airplane", "zebra")
LABEL = {"aircraft_carrier": 0, "airplane": 1, "zebra": 343}
SHADE = {name: 60 * (number + 1) for number, name in enumerate(NAMES)}


@pytest.fixture
def root(tmp_path):
    """Per domain and class 10 training and 2 test pictures, of zebras only 4 for training."""
    (tmp_path / "splits").mkdir()
    for domain in DOMAINS:
        lines = {"train": [], "test": []}
        for name in NAMES:
            (tmp_path / domain / name).mkdir(parents=True)
            for number in range(12):
                role = "test" if number >= 10 else "train"
                if name == "zebra" and 4 <= number < 10:
                    continue
                path = f"{domain}/{name}/{domain}_{LABEL[name] + 1:03d}_{number:06d}.jpg"
                lines[role].append(f"{path} {LABEL[name]}")
                Image.fromarray(np.full((9, 12, 3), SHADE[name] + number, dtype=np.uint8)).save(tmp_path / path)
        for role, text in lines.items():
            (tmp_path / "splits" / f"{domain}_{role}.txt").write_text("\n".join(text) + "\n")
    return tmp_path


def test_clients_are_domains_and_pictures_fit_their_classes(root):
    data = domainnet(root, 2, image_size=8, validation=0.2)
    assert tuple(data.clients) == DOMAINS
    assert data.answers == ("aircraft_carrier", "airplane")  # the two most frequent
    assert data.words == ("is", "it", "what")
    split = data.clients["sketch"]
    assert [len(part) for part in (split.train, split.validation, split.test)] == [16, 4, 4]
    assert not {*split.train.names} & {*split.validation.names, *split.test.names}
    for part in (split.train, split.validation, split.test):
        assert {name.split("/")[0] for name in part.names} == {"sketch"} == set(part.types)
        for row, (name, answer) in enumerate(zip(part.names, part.answers, strict=True)):
            assert name.split("/")[1] == answer
            number = int(Path(name).stem.rsplit("_", 1)[1])
            assert abs(int(part.images[part.image_index[row]].mean()) - SHADE[answer] - number) <= 2  # JPEG


def test_given_classes_limits_unseen_and_pictures_on_demand(root):
    options = {
        "classes": ("zebra", "airplane"), "domains": ("real", "clipart"), "unseen": ("quickdraw",), "max_train": 5,
        "max_test": 3, "image_size": 8,
    }  # fmt: skip
    held, lazy = domainnet(root, **options), domainnet(root, **options, in_memory=False)
    assert held.answers == ("airplane", "zebra")  # in the order of their official labels
    assert list(held.clients) == ["real", "clipart"]
    assert [len(held.clients["real"].train), len(held.clients["real"].test), len(held.unseen["quickdraw"])] == [5, 3, 3]
    assert held.clients["real"].train.images.shape == (2 * (5 + 1 + 3) + 3, 8, 8, 3)  # no picture that nobody asks for
    for one, other in ((held.clients["real"].train, lazy.clients["real"].train), (held.unseen["quickdraw"], lazy.unseen["quickdraw"])):  # fmt: skip # noqa: E501
        assert one.names == other.names
        np.testing.assert_array_equal(one.images[one.image_index], other.images[other.image_index])
    again = domainnet(root, **options, seed=1)
    assert again.clients["real"].test.names == held.clients["real"].test.names
    assert again.clients["real"].train.names != held.clients["real"].train.names


def test_lists_may_lie_beside_the_domains(root):
    for file in list((root / "splits").iterdir()):
        file.rename(root / file.name)
    (root / "splits").rmdir()
    assert len(domainnet(root, 3, image_size=8).clients) == 6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("real/airplane/a.jpg", r"real_train\.txt line 25: expected \"domain/class/file\.jpg label\""),
        ("real/airplane/a.jpg x", r"line 25: expected \"domain/class"),
        ("real/../a.jpg 1", r"line 25: expected \"domain/class"),
        ("airplane/a.jpg 1", r"line 25: expected \"domain/class"),
        ("sketch/airplane/a.jpg 1", r"line 25: expected a picture of real and a label in .*, got 'sketch/"),
        ("real/zigzag/a.jpg 345", r"line 25: expected .* a label in 0\.\.344, got .* 345"),
        ("real/airplane/a.jpg 2", r"line 25: expected the label 1 that 'airplane' had before, got 2"),
        ("real/airplane/a.jpg 1", r"real/airplane/a\.jpg does not exist; it stands in .*real_train\.txt line \d+"),
        ("real/airplane/real_002_000003.jpg 1", r"line 25: expected every picture once"),
    ],
)
def test_malformed_lists_of_pictures_are_refused(root, line, message):
    with (root / "splits" / "real_train.txt").open("a") as file:
        file.write(line)
    refuses(message, domainnet, root, 2, image_size=8, max_train=None, validation=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 4}, "must lie in .2, 3., got 4"),
        ({"classes": 1}, "must lie in .2, 3., got 1"),
        ({"classes": ("zebra", "aeroplane")}, "classes must be distinct names.*'aeroplane'.; did you mean 'airplane'"),
        ({"domains": ("photo",)}, "domains must be distinct names out of clipart"),
        ({"domains": ("real",), "unseen": ("real",)}, "unseen must leave one of real"),
    ],
)
def test_options_out_of_range_are_refused(root, options, message):
    refuses(message, domainnet, root, **{"classes": 2, **options})


def test_missing_and_damaged_files(root):
    (root / "splits" / "real_test.txt").unlink()
    refuses(r"real_test\.txt does not exist", domainnet, root, 2)
    picture = root / "clipart" / "airplane" / "clipart_002_000011.jpg"
    picture.write_bytes(picture.read_bytes()[:40])
    refuses(r"clipart_002_000011\.jpg: expected a complete, readable picture", domainnet, root, 2, domains=("clipart",))
    refuses("nowhere does not exist", domainnet, root / "nowhere")


@pytest.mark.filterwarnings("ignore:domainnet. 1 of")
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_damaged_picture_leaves_out_its_example_alone(root, in_memory):
    options = {"classes": 2, "domains": ("clipart", "real"), "image_size": 8, "in_memory": in_memory}
    whole = domainnet(root, **options).clients
    picture = root / "clipart" / "airplane" / "clipart_002_000011.jpg"
    picture.write_bytes(picture.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"1 of 48 pictures .*clipart_002_000011\.jpg"):
        leave_out_unreadable(domainnet(root, **options))
    data = leave_out_unreadable(domainnet(root, **options, unreadable=0.1))
    assert data.unreadable is not None
    assert data.unreadable.examples == {"clipart": {"test": 1}}
    assert isinstance(data.clients["real"].train.images, np.ndarray) == in_memory
    for name, split in whole.items():
        for before, after in ((split.train, data.clients[name].train), (split.test, data.clients[name].test)):
            rows = [row for row, own in enumerate(before.names) if not own.endswith("clipart_002_000011.jpg")]
            assert after.names == [before.names[row] for row in rows]
            for number, row in enumerate(rows):
                one, other = before.images[int(before.image_index[row])], after.images[int(after.image_index[number])]
                np.testing.assert_array_equal(one, other)
