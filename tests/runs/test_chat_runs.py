"""Runs of the task chat on question sets: results, gallery, methods that compare scores, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from confed import load_exported
from confed.cli import main
from confed.data.caption_batches import unpack_texts
from confed.inference.ask import Talk
from confed.inference.evaluate import evaluate
from confed.inference.export import export
from confed.recipes.recipe import Recipe, load_recipe
from confed.report.report import write_report
from confed.results.folder import RunFolder
from confed.runs.run import prepare, run
from refusals import refuses
from tiny_runs import CHAT, changed

TINY = changed(
    CHAT, max_new_tokens=3, train=6, validation=2, test=4, batch_size=3, lr="1e-2", rounds=2, gallery=1,
    without='["home", "commercial", "sports"]',
)  # fmt: skip

OWN = """
[data]
name = "chat_records"
root = "ROOT"
image_size = 16
validation = 0.2
[local]
batch_size = 3
lr = 1e-2
[run]
rounds = 1
gallery = 2
evaluate_every = 0
"""


def tiny(folder: Path, *more: str) -> Recipe:
    (folder / "tiny.toml").write_text(TINY)
    return load_recipe(folder / "tiny.toml", more)


def losses_of(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, RunFolder(folder).metrics.read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_models_that_write_no_free_answers_are_refused() -> None:
    recipe = load_recipe("fedvqa_scenes", ["algorithm.name=fedavg", "task.name=chat", "study.methods=[]"])
    refuses(r"the model .vilt_mini. writes no free answers: set model.name", prepare, recipe)


def test_global_and_personal_models_write_answers_that_are_shown(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    summary = run(tiny(tmp_path), folder.root)
    assert summary["metric"] == "exact"
    assert set(summary["personal"]) == set(summary["global_seen"]) == {"transport", "educational", "natural"}
    assert set(summary["matrix"]) == set(summary["personal"])
    shown = json.loads(folder.gallery.read_text())
    assert shown
    for sample in shown:
        for view in ("global", "personal"):
            assert isinstance(sample[view]["answer"], str)
            assert 0 <= sample[view]["score"] <= 1
    write_report(folder.root)


def test_training_and_test_rows_have_what_their_pass_reads(tmp_path: Path) -> None:
    _, data = prepare(tiny(tmp_path))
    train, _, test = data.clients["transport"].tables
    assert {"answer_tokens", "answer_weight"} <= set(train.columns)
    assert "references" not in train.columns
    assert "answer_tokens" not in test.columns
    examples = data.dataset.clients["transport"].test
    references = unpack_texts(test.columns["references"])
    assert [set(own) for own in references] == [
        set(given) for given in examples.annotations or [[a] for a in examples.answers]
    ]
    # Rows of all clients can be put together.
    assert len({table.tables[0].columns["text"].shape[1] for table in data.clients.values()}) == 1


@pytest.mark.parametrize(
    "algorithm", ["central", "fedp3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sp", "st", "moon"))]
)
def test_methods_of_features_or_scores_run_on_chosen_answers(algorithm: str, tmp_path: Path) -> None:
    losses, central = [], algorithm == "central"
    for weight in (0.0,) if central else (0.0, 30.0):
        own = [] if central else [f"algorithm.{'mu' if algorithm == 'moon' else 'lam'}={weight}"]
        own += ["algorithm.projection=false"] if algorithm == "moon" else []
        recipe = tiny(tmp_path, f"algorithm.name={algorithm}", *own, "task.metric=choice", "run.gallery=0")
        summary = run(recipe, tmp_path / str(weight))
        assert summary["metric"] == "choice"
        losses.append(losses_of(tmp_path / str(weight)))
    # The term is there from the second round on.
    assert central or losses[0] != losses[1]


def test_distillation_of_tokens_runs_and_of_scores_needs_choice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="FedMD compares scores of answers, and the model writes them freely"):
        prepare(
            tiny(
                tmp_path,
                "algorithm.name=fedmd",
                "algorithm.public=home",
                "data.unseen=['home']",
                "run.without=['sports']",
            )
        )
    assert run(tiny(tmp_path, "algorithm.name=fedkd", "run.gallery=0"), tmp_path / "fedkd")["metric"] == "exact"


REFUSED = {
    "fedp3": ("algorithm.name=fedp3", "FedP³ compares scores of answers, and the model writes them freely: set task.m"),
    "dkd": ("algorithm.name=dkd", "DKD treats the right answer apart from the others"),
    "moon": ("algorithm.name=moon", "MOON"),
    "metric": ("task.metric=bleu", "task.metric: Input should be 'exact', 'vqa', 'anls', 'f1', 'cider' or 'choice'"),
    "length": ("model.max_length=20", "tokens without its pictures', more than model.max_length = 20: raise it, or"),
}  # fmt: skip


@pytest.mark.parametrize(("override", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_before_the_first_round(override: str, message: str, tmp_path: Path) -> None:
    refuses(re.escape(message), lambda: prepare(tiny(tmp_path, override)))


def own_data(folder: Path) -> str:
    """Conversations of one and two turns, with none, one or two pictures, of two clients."""
    rng = np.random.default_rng(0)
    (folder / "own").mkdir()
    lines: list[dict[str, Any]] = []
    for number in range(16):
        Image.fromarray(rng.integers(0, 256, (9, 8, 3), np.uint8)).save(folder / "own" / f"{number}.png")
        turns = [("user", "What?"), ("assistant", "cat"), ("user", "<image> And this?"), ("assistant", "dog")]
        said = [("user", "<image> What?"), *turns[1:]] if number % 2 else [turns[0], ("assistant", "a bird")]
        shown = [f"{number}.png", f"{number - 1}.png"] if number % 2 else [] if number % 8 == 2 else [f"{number}.png"]
        messages = [{"role": role, "content": text} for role, text in said]
        lines.append({"images": shown, "messages": messages, "client": "ab"[number // 2 % 2]})
    (folder / "own" / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder / "own")


@pytest.mark.parametrize(
    "family", ["llava", *(pytest.param(name, marks=pytest.mark.slow) for name in ("idefics3", "gemma3"))]
)
def test_own_conversations_with_several_pictures_run(family: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.partition("[data]")[0] + OWN.replace("ROOT", own_data(tmp_path)))
    recipe = load_recipe(tmp_path / "tiny.toml", [f"model.source=tiny:{family}", "task.metric=f1", "data.turns=last"])
    folder = RunFolder(tmp_path / "run")
    summary = run(recipe, folder.root)
    assert set(summary["personal"]) == {"a", "b"}
    shown = json.loads(folder.gallery.read_text())
    assert {sample["place"] for sample in shown} == {"a", "b"}
    assert any("assistant: cat\nuser: [picture] And this?" in sample["question"] for sample in shown)
    write_report(folder.root)


def test_conversations_are_pooled_and_need_the_task_chat(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.partition("[data]")[0] + OWN.replace("ROOT", own_data(tmp_path)))
    assert run(load_recipe(tmp_path / "tiny.toml", ["algorithm.name=central"]), tmp_path / "run")["metric"] == "exact"
    recipe = load_recipe(tmp_path / "tiny.toml", ["task.name=generation"])
    refuses(r"'chat_records' has conversations of several turns or pictures: set task.name", prepare, recipe)


def test_pictures_without_as_many_tokens_as_features_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from confed.models.hf.prompts import Placeholder

    real = Placeholder.tokens
    monkeypatch.setattr(Placeholder, "tokens", lambda self, picture: [*real(self, picture), 4])
    monkeypatch.setattr(Placeholder, "fault", lambda self, conversation: "")
    refuses(r"has 17 tokens in a prompt and 16 features of the picture encoder", prepare, tiny(tmp_path))


def test_loss_of_written_answers_falls(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    alone = 'run.without=["home", "commercial", "sports", "natural", "educational"]'
    run(tiny(tmp_path, "run.rounds=4", "run.gallery=0", "local.epochs=3", "local.lr=3e-2", alone), folder.root)
    losses = losses_of(folder.root)
    first, last = (sum(found.values()) / len(found) for found in (losses[0], losses[-1]))
    assert last < first - 0.1


def test_a_finished_run_is_asked_exported_and_evaluated(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.partition("[data]")[0] + OWN.replace("ROOT", own_data(tmp_path)))
    folder = RunFolder(tmp_path / "run")
    summary = run(load_recipe(tmp_path / "tiny.toml", ["run.controls=all"]), folder.root)
    assert summary["controls"]  # pictures change places between examples that show as many
    question, picture = "What?", tmp_path / "own" / "1.png"
    said = Talk(folder.root, [picture]).ask(question)
    export(folder.root, tmp_path / "out")
    assert load_exported(tmp_path / "out").ask(picture, question)["answers"] == [{"answer": said}]
    found = evaluate(folder.root, [f"root={tmp_path / 'own'}"])
    assert not any("count as wrong" in note for note in found.notes)


def test_server_with_a_card_and_a_site_prepare_a_run(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.partition("[data]")[0] + OWN.replace("ROOT", own_data(tmp_path)))
    with pytest.raises(SystemExit, match="0"):
        main(["federation", "card", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "card.json")])
    server = f'[data]\nname = "card"\nfile = "{tmp_path / "card.json"}"\n[run]\nrounds = 1\n'
    (tmp_path / "server.toml").write_text(TINY.partition("[data]")[0] + server)
    for metric in ("exact", "vqa", "choice"):
        _, data = prepare(load_recipe(tmp_path / "server.toml", [f"task.metric={metric}"]))
        assert list(data.clients) == ["a", "b"]
    _, data = prepare(load_recipe(tmp_path / "tiny.toml", [f"data.card={tmp_path / 'card.json'}"]))
    assert list(data.clients) == ["a", "b"]
