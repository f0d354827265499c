"""What a site finds out before it joins: the server, its certificate, keys, clock, versions; the data and the disk."""

import json
import shutil
import time
from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from command_line import confed
from confed.data.examples import FederatedDataset
from confed.deployment.demo import free_port
from confed.deployment.doctor import Finding, check_data, check_server
from confed.deployment.provision import SITES, Federation, card_of_recipe, make_key, provision, read_sites, write_card
from confed.engines.flower import probe as flower_visit
from confed.engines.flower.probe import About
from confed.engines.flower.superlink import open_superlink
from confed.engines.flower.supernode import read_public
from confed.recipes.recipe import load_recipe
from confed.registry import register_dataset
from refusals import refuses

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's and FastAPI's own

SMALL = (
    "algorithm.name=fedavg", "model.name=vilt_tiny", "model.width=16", "model.layers=1", "study.methods=[]",
    "study.table=[]",
)  # fmt: skip


class Torn:
    """Pictures of which every third cannot be opened."""

    dtype, ndim = np.dtype(np.uint8), 4

    def __init__(self, pictures: np.ndarray) -> None:
        self.pictures, self.shape = pictures, pictures.shape

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> np.ndarray:
        if index % 3 == 0:
            raise OSError("image file is truncated")
        return self.pictures[index]


@register_dataset
def torn(*, seed: int = 0) -> FederatedDataset:
    """Squares with faults: pictures that cannot be opened, and a test answer that nobody knows."""
    from toy_federation import squares

    whole = squares(seed=seed)
    warm = whole.clients["warm"]
    train = replace(warm.train, images=Torn(warm.train.images))  # type: ignore[arg-type]
    test = replace(warm.test, answers=["mauve", *warm.test.answers[1:]])
    clients = {**whole.clients, "warm": replace(warm, train=train, test=test)}
    return replace(whole, clients=clients, outside=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("federation") / "made"
    provision(root, Federation(("warm", "cold"), "localhost", 8443, "name = 'toy'\n"))
    return root


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    server = folder / "server"
    keys = [read_public(key) for key in read_sites(server / SITES).values()]
    with open_superlink(keys, certificate=server / "server.crt", key=server / "server.key") as (_, opened):
        yield opened


def marks(findings: Sequence[Finding]) -> dict[str, str]:
    return {finding.what: finding.mark for finding in findings}


def one(findings: Sequence[Finding], what: str) -> Finding:
    return next(finding for finding in findings if finding.what == what)


def test_a_site_that_can_join_is_told_so(folder: Path, port: int) -> None:
    own = folder / "sites" / "warm"
    findings = check_server(f"localhost:{port}", own / "key", own / "ca.crt")
    assert set(marks(findings).values()) == {"good"}
    assert set(marks(findings)) == {
        "key", "reachable", "certificate", "listed", "clock", "protocol", "version of flwr",
    }  # fmt: skip
    assert "for another 365 days" in one(findings, "certificate").text


def test_who_is_not_listed_or_trusts_another_is_told_what_to_do(folder: Path, port: int, tmp_path: Path) -> None:
    own, server = folder / "sites" / "warm", f"localhost:{port}"
    make_key(tmp_path / "key")
    stranger = check_server(server, tmp_path / "key", own / "ca.crt")
    assert marks(stranger)["listed"] == "bad"
    assert "into the server's sites.json" in one(stranger, "listed").advice
    provision(tmp_path / "other", Federation(("warm",), "localhost", 1, ""))
    other = check_server(server, own / "key", tmp_path / "other" / "server" / "ca.crt")
    assert marks(other)["certificate"] == "bad"
    assert "of another federation" in one(other, "certificate").advice
    assert "listed" not in marks(other)  # nothing is said to a server that nobody vouches for
    elsewhere = check_server(f"127.0.0.2:{port}", own / "key", own / "ca.crt")
    assert marks(elsewhere)["reachable"] == "bad" or "is not for '127.0.0.2'" in one(elsewhere, "certificate").advice
    bare = check_server(server, own / "key", None)
    assert marks(bare)["certificate"] == "mind"
    assert marks(bare)["listed"] == "bad"  # the server speaks TLS only


def test_nobody_there_is_told_apart_from_no_such_name(folder: Path) -> None:
    own = folder / "sites" / "warm"
    closed = one(check_server(f"localhost:{free_port()}", own / "key", own / "ca.crt"), "reachable")
    assert "nothing listens on port" in closed.advice
    unknown = one(check_server("no-such-host.invalid:1", own / "key", own / "ca.crt"), "reachable")
    assert "no machine is known as 'no-such-host.invalid'" in unknown.advice
    refuses("must be HOST:PORT, got 'server'", check_server, "server", own / "key", own / "ca.crt")


def test_keys_clocks_and_versions_are_looked_at(
    folder: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, server = folder / "sites" / "warm", f"localhost:{port}"
    assert marks(check_server(server, tmp_path / "nothing", own / "ca.crt"))["key"] == "bad"
    shutil.copy(own / "key", tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    assert f"chmod 600 {tmp_path / 'key'}" == one(check_server(server, tmp_path / "key", own / "ca.crt"), "key").advice
    monkeypatch.setattr(flower_visit, "about", lambda *_: About("0.0.1", "1.40.0", None, 400.0))
    findings = check_server(server, own / "key", own / "ca.crt")
    assert marks(findings)["clock"] == marks(findings)["protocol"] == "bad"
    assert marks(findings)["version of flwr"] == "mind"
    assert (
        one(findings, "protocol").advice
        == "install the file that the coordinator's README names, and check its SHA-256"
    )
    monkeypatch.setattr(flower_visit, "certificate_ends", lambda *_: time.time() + 5 * 86400)
    assert "ends in 5 days" in one(check_server(server, own / "key", own / "ca.crt"), "certificate").text


def test_data_pictures_and_answers_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(load_recipe("fedvqa_scenes", [*SMALL, "data.name=toy_federation:squares"]).to_toml())
    findings = check_data(file, "cold", tmp_path / "private")
    assert set(marks(findings).values()) == {"good"}
    assert one(findings, "train examples").text == "24"
    assert one(findings, "test pictures").text == "8 of 8 opened, all readable"
    assert "no client is called 'nobody'" in check_data(file, "nobody", tmp_path)[0].text
    assert marks(check_data(file, "cold", tmp_path, ["train=x"]))["data"] == "bad"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**30, 2**30, 2**20))
    assert marks(check_data(file, "cold", tmp_path / "private"))["disk"] == "bad"
    file.write_text(load_recipe("fedvqa_scenes", [*SMALL, "data.name=test_doctor:torn"]).to_toml())
    findings = check_data(file, "warm", tmp_path / "private")
    assert one(findings, "train pictures").text.startswith("8 of 24 cannot be read, such as number 0: OSError")
    assert marks(findings)["train answers"] == "good"
    strange = one(findings, "test answers")
    assert strange.mark == "mind"
    assert strange.text == "12.5% are outside the vocabulary of 4, such as 'mauve'"


def test_the_verb_prints_what_to_do(
    folder: Path, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(load_recipe("fedvqa_scenes", [*SMALL, "data.name=toy_federation:squares"]).to_toml())
    own = folder / "sites" / "warm"
    given = [
        "doctor", "--server", f"localhost:{port}", "--recipe", str(file), "--site", "warm", "--ca", str(own / "ca.crt"),
        "--unsigned", "--key", str(own / "key"), "--private", str(tmp_path),
    ]  # fmt: skip
    assert confed(*given) == 0
    assert "this site can join" in capsys.readouterr().out
    card = tmp_path / "card.json"
    write_card(card_of_recipe(load_recipe(str(file))), card)
    assert confed(*given, "--card", str(card)) == 0
    (torn := tmp_path / "torn.json").write_text(card.read_text()[:100])
    assert confed(*given, "--card", str(torn)) == 1
    assert "torn.json" in capsys.readouterr().out
    make_key(tmp_path / "key")
    assert confed(*given[:-3], str(tmp_path / "key"), "--json") == 1
    told = {line["what"]: line for line in json.loads(capsys.readouterr().out)}
    assert told["listed"]["mark"] == "bad"
