"""Exports on a stand-in of the hub: what is uploaded, what stays at home, asking by name, and one line per error."""

import json
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

import confed
from command_line import confed as command
from confed.inference.finished_run import FinishedRun
from confed.inference.hub import HubName, card, fetch, hub_name, publish
from confed.inference.load import load_exported
from confed.results.summary import Summary
from hub_server import Hub
from refusals import refuses
from tiny_runs import TINY

SHORT = {"run.rounds": 1, "run.controls": "none", "run.evaluate_every": 0}
NOISE = {"algorithm.update_privacy": {"clip": 1.0, "noise": 0.8, "at": "client"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> confed.Run:
    folder = tmp_path_factory.mktemp("hub") / "run"
    named = {"study.methods": [], "algorithm.name": "fedavg"}
    return confed.run("fedvqa_scenes", {**TINY, **SHORT, **NOISE, **named}, folder=folder, progress=False)


def test_only_the_shared_model_is_uploaded_unless_asked(run: confed.Run, hub: Hub, tmp_path: Path) -> None:
    target, named = tmp_path / "exported", Path(shutil.copytree(run.folder, tmp_path / "named"))
    changes = {"run.without": ["both"], "run.rounds": 2, "run.joins": {"warm": 1}, "run.leaves": {"cold": 2}}
    changes |= {"data.missing": {"image": 0.0, "warm": {"text": 0.0}}}
    (named / "recipe.toml").write_text(run.recipe.changed(changes).to_toml())
    assert command("export", named, target, "--hub", "me/shared") == 0
    repository = hub.repositories["me/shared"]
    files = repository.commits[repository.head]
    assert files == {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    assert not any(name.startswith("clients/") for name in files)
    assert json.loads(files["confed.json"])["clients"] == []
    for text in (files["recipe.toml"].decode(), files["README.md"].decode().split("```toml\n")[1].split("```")[0]):
        recipe = tomllib.loads(text)
        assert [recipe["run"][key] for key in ("joins", "leaves", "without")] == [{}, {}, []]
        assert recipe["data"]["missing"] == {"image": 0.0}
    told = b"".join(content for name, content in files.items() if not name.endswith(".safetensors"))
    assert not any(f'"{name}"'.encode() in told or f"`{name}`".encode() in told for name in run.clients)
    assert not repository.private


def test_model_card_states_results_recipe_digests_and_privacy(run: confed.Run, hub: Hub, tmp_path: Path) -> None:
    command("export", run.folder, tmp_path / "a", "--hub", "me/card")
    repository = hub.repositories["me/card"]
    text = repository.commits[repository.head]["README.md"].decode()
    _, head, body = text.split("---\n", 2)
    facts = yaml.safe_load(head)
    assert facts["library_name"] == "confed"
    assert {"federated-learning", "fedavg"} <= set(facts["tags"])
    values = [metric["value"] for result in facts["model-index"][0]["results"] for metric in result["metrics"]]
    assert round(run.summary["global_seen_mean"], 6) in values
    assert f"| global model, clients' test data | {100 * run.summary['global_seen_mean']:.1f} |" in body
    most = max(run.summary["update_privacy"]["epsilon"].values())
    assert f"ε = {most:.3g}" in body
    assert "confed predict hf:me/card" in body
    assert run.summary["digests"]["data"] in body
    assert tomllib.loads(body.split("```toml\n")[1].split("```")[0]) == tomllib.loads(run.recipe.to_toml())
    assert "no personal models" in body
    assert "personal data" not in body


def test_names_of_clients_are_text_in_the_card_and_its_command(run: confed.Run) -> None:
    name = "a `$(touch x)` | b's <img src=x>"
    finished = FinishedRun(run.folder)
    finished.summary = Summary({**finished.summary.content, "personal": {name: 0.5}})
    facts = {"clients": [name], "own_heads": False, "global": False, "backbone": {"source": None, "copied": True}}
    text = card(finished, {**facts, "backbone": {**facts["backbone"], "sha256": "0"}}, "", "me/x")
    (line,) = [line for line in text.splitlines() if line.startswith("confed predict")]
    assert shlex.split(line)[-2:] == ["--client", name]
    escaped = r"a \`$(touch x)\` \| b's \<img src=x>"
    assert f"| personal model, {escaped} | 50.0 |" in text
    assert f"chooses a personal model: {escaped}." in text


def test_personal_models_are_private_marked_and_warned_of(
    run: confed.Run, hub: Hub, tmp_path: Path, picture: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("export", run.folder, tmp_path / "b", "--hub", "me/all", "--private", "--personal")
    assert command(*words) == 0
    assert "personal models are uploaded" in capfd.readouterr().err
    repository = hub.repositories["me/all"]
    assert repository.private
    files = repository.commits[repository.head]
    assert {f"clients/{name}/config.json" for name in run.clients} <= set(files)
    card = files["README.md"].decode()
    assert "**Warning: this repository holds personal models, which are personal data.**" in card
    assert f"| personal model, warm | {100 * run.summary['personal']['warm']:.1f} |" in card
    for client in ("warm", None):
        option = () if client is None else ("--client", client)
        ask = ("--image", picture, "--question", "which colour is this?", "--json", *option)
        assert command("predict", "hf:me/all", *ask) == 0
        found = json.loads(capfd.readouterr().out)
        assert command("predict", run.folder, *ask) == 0
        assert found == json.loads(capfd.readouterr().out)
    assert command("predict", "hf:me/all", *ask, "--client", "nobody") == 2
    assert "no client is called 'nobody'; there are warm, cold, both" in capfd.readouterr().err


def test_new_export_replaces_the_models_of_an_earlier_one(run: confed.Run, hub: Hub, tmp_path: Path) -> None:
    command("export", run.folder, tmp_path / "c", "--hub", "me/both", "--personal")
    first = hub.repositories["me/both"].head
    hub.repositories["me/both"].commits[first]["notes.md"] = b"mine"
    command("export", run.folder, tmp_path / "d", "--hub", "me/both")
    files = hub.repositories["me/both"].commits[hub.repositories["me/both"].head]
    assert not any(name.startswith("clients/") for name in files)
    assert files["notes.md"] == b"mine"
    older = fetch(HubName("me/both", first))  # the revision that was asked for
    assert load_exported(older, "warm").answers == load_exported(fetch(HubName("me/both"))).answers


def test_cached_export_is_found_without_the_hub(
    run: confed.Run, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("export", run.folder, tmp_path / "e", "--hub", "me/cached")
    there = fetch(hub_name("hf:me/cached"))
    monkeypatch.setenv("HF_ENDPOINT", "http://ann:secret@127.0.0.1:9")
    assert fetch(hub_name("me/cached")) == there
    with pytest.raises(
        RuntimeError, match=r"^http://127.0.0.1:9 cannot be reached, and hf:me/other is not in the cache"
    ) as error:
        fetch(hub_name("me/other"))
    assert "secret" not in str(error.value)


def test_every_error_of_a_download_is_one_line(
    hub: Hub, picture: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/gated").gated = True
    empty = hub.add("me/empty")
    empty.commit({"README.md": b"# nothing"}, "a card")
    hub.add("me/secret", private=True)
    monkeypatch.delenv("HF_TOKEN")
    for name, message in [
        ("hf:me/none", "no repository me/none on the hub, or a private one"),
        ("hf:me/secret", "no repository me/secret on the hub, or a private one"),
        ("hf:me/gated", "me/gated is gated: ask for access on its page"),
        ("hf:me/empty@v9", "me/empty has no revision 'v9'"),
        ("hf:me/empty", "hf:me/empty holds no export of confed: it has no confed.json"),
        ("hf:me", "must be OWNER/NAME or OWNER/NAME@REVISION, got 'hf:me'"),
        ("hf:../../x", "must be OWNER/NAME"),
    ]:
        assert command("predict", name, "--image", picture, "--question", "what?") == 2, name
        err = capfd.readouterr().err
        assert message in err
        assert len(err.splitlines()) == 1, err


def test_too_large_a_repository_is_not_fetched(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confed.inference.hub.MOST_BYTES", 1000)
    files = {"confed.json": b"{}", "code.py": b" " * 2000}  # which is not fetched
    hub.add("me/small").commit(files, "small")
    assert (fetch(HubName("me/small")) / "confed.json").is_file()
    hub.add("me/large").commit({**files, "global/model.safetensors": b" " * 2000}, "large")
    refuses(r"hf:me/large has .* GiB, at most", fetch, HubName("me/large"))
    assert not any(path.startswith("/me/large/resolve") for _, path in hub.requests)


def test_every_error_of_an_upload_is_one_line(
    run: confed.Run, hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/public")
    number = iter(range(100))

    def refused(*words: str) -> str:
        assert command("export", run.folder, tmp_path / str(next(number)), *words) == 2
        (line,) = capfd.readouterr().err.splitlines()
        return line

    assert "me/public is there already and public" in refused("--hub", "me/public", "--private")
    assert hub.repositories["me/public"].messages == ["initial commit"]
    assert "the hub refuses others/x (403): the token needs write access" in refused("--hub", "others/x")
    assert "leave @v1 out" in refused("--hub", "me/x@v1")
    assert "--personal goes with --hub" in refused("--personal")
    assert "--private goes with --hub" in refused("--private")
    assert "--hub goes without --merged" in refused("--hub", "me/x", "--merged")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the hub refuses me/x (401): the token needs write access" in refused("--hub", "me/x")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    before = len(hub.requests)
    assert "no token to upload me/x with" in refused("--hub", "me/x")
    assert len(hub.requests) == before
    refuses(r"it has no confed\.json", publish, run.folder, HubName("me/x"))


def test_method_without_a_global_model_needs_the_word(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    local = confed.run("fedvqa_scenes", {**TINY, **SHORT}, method="local", folder=tmp_path / "run", progress=False)
    assert command("export", local.folder, tmp_path / "x", "--hub", "me/local") == 2
    assert "has no global model that can answer, and personal models are personal data" in capfd.readouterr().err
    assert "me/local" not in hub.repositories
    assert command("export", local.folder, tmp_path / "x", "--hub", "me/local", "--personal") == 0
