"""Models by name on a hub: the commit that a recipe is pinned to, gated ones, names that nobody has."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from confed.deployment.server import common_ground
from confed.engines.perform import Workspace
from confed.engines.remote.protocol import Fingerprint, fingerprint
from confed.models import create_model, create_tokenizer
from confed.models.hf import _processor
from confed.models.hf.tiny import tiny
from confed.models.hub_names import commit_of
from confed.recipes.recipe import Recipe, load_recipe
from confed.runs.run import prepare, run
from confed.runs.same_recipe import differing_settings, pinned
from refusals import refuses

NAME, OLD, NEW = "someone/some-vlm", "a" * 40, "b" * 40
SMALL = (
    "model.name=hf", f"model.source={NAME}", "task.name=chat", "algorithm.name=fedavg", "study.methods=[]",
    "data.train=2", "data.validation=1", "data.test=1", "data.unseen=[]", "run.rounds=1", "run.gallery=0",
    "run.without=['home', 'commercial', 'natural', 'educational', 'transport']", "run.controls=none",
    "local.epochs=1", "model.peft={rank=1}", "task.max_new_tokens=1", "run.workers=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a hub's client keeps of two commits of a model, the newer one of which is the default branch."""
    root = tmp_path_factory.mktemp("hub")
    place = root / f"models--{NAME.replace('/', '--')}"
    for seed, commit in enumerate((OLD, NEW)):
        body, processor = tiny("llava", seed)
        body.save_pretrained(place / "snapshots" / commit)  # type: ignore[operator]
        processor.save_pretrained(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(NEW)
    return root


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    _processor.cache_clear()


def recipe(*more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [*SMALL, *more])


@pytest.mark.usefixtures("offline")
def test_a_missing_revision_is_the_default_branchs_commit() -> None:
    assert commit_of(NAME) == NEW
    assert pinned(recipe()).sections["model"]["revision"] == NEW
    for given in (recipe(f"model.revision={OLD}"), recipe("model.source=tiny:llava"), load_recipe("fedvqa_scenes")):
        assert pinned(given) is given
    assert commit_of("someone/nothing") == ""


@pytest.mark.usefixtures("offline")
def test_a_run_writes_the_commit_and_reads_that_one_again(tmp_path: Path) -> None:
    import torch

    run(recipe(), tmp_path / "run")
    written = load_recipe(tmp_path / "run" / "recipe.toml")
    assert written.sections["model"]["revision"] == NEW
    assert not differing_settings(written, recipe())  # which leaves it open
    assert "model.revision" in differing_settings(written, recipe(f"model.revision={OLD}"))
    for seed, commit in enumerate((OLD, NEW)):
        model: Any = create_model("hf", answers=0, vocab_size=0, source=NAME, revision=commit)
        plain, _ = tiny("llava", seed)
        name = "model.language_model.embed_tokens.weight"
        assert torch.equal(model.body.state_dict()[name], plain.state_dict()[name])


@pytest.mark.usefixtures("offline")
def test_an_unknown_name_or_revision_is_refused_in_a_line() -> None:
    for options in ({"source": "someone/nothing"}, {"source": NAME, "revision": "c" * 40}):
        with pytest.raises(ValueError, match=f"no processor could be read from '{options['source']}': ") as found:
            create_tokenizer("hf", (), **options)
        assert "\n" not in str(found.value)


@pytest.mark.usefixtures("offline")
def test_a_site_of_another_revision_is_refused_at_the_handshake() -> None:
    def party(revision: str, *, told: bool = True) -> Fingerprint:
        given = recipe(f"model.revision={revision}")
        setup, data = prepare(given)
        return fingerprint(setup, Workspace(setup.model()), common_ground(given, data) if told else "")

    server = party(NEW)
    assert server.differences(party(NEW).scalars(), "the server", "the site") is None
    problem = server.differences(party(OLD).scalars(), "the server", "the site") or ""
    assert problem.startswith("the recipe (method, model with its revision, ")
    assert "frozen backbone (a revision has its own), must be the same: the server has" in problem
    # Weights are compared, too, where both say the same of them.
    problem = party(NEW, told=False).differences(party(OLD, told=False).scalars(), "the server", "the site") or ""
    assert problem.startswith("the values that the model starts from")


def refusing(*given: Any, **named: Any) -> str:
    from huggingface_hub.errors import GatedRepoError

    raise GatedRepoError.__new__(GatedRepoError)  # without the hub's response


@pytest.mark.parametrize(
    "read",
    [
        lambda: create_tokenizer("hf", (), source="google/gemma-3-4b-it"),
        lambda: create_model("hf", answers=0, vocab_size=0, source="google/gemma-3-4b-it"),
    ],
    ids=["processor", "weights"],
)
def test_a_gated_model_says_where_its_licence_is(read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", refusing)
    _processor.cache_clear()
    message = (
        "the model 'google/gemma-3-4b-it' is gated: accept its licence at https://huggingface.co/google/gemma-3-4b-it"
    )
    refuses(re.escape(message), read)
