"""Captions: metrics against the official code's values, the search against all texts, the model, and whole runs."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from confed.cli import app
from confed.data.caption_batches import groups, next_tokens, pack_texts, unpack_texts
from confed.federation.protocols import Output
from confed.inference.ask import ask
from confed.metrics.captions import Cider, bleu4, bleu_tally
from confed.models.caption_tokenizer import END, START, WrittenWords
from confed.models.caption_transformer import beam_search, caption_transformer_mini, caption_transformer_tiny
from confed.recipes.recipe import Recipe, load_recipe
from confed.report.html.gallery import gallery
from confed.report.html.media import ImageStore
from confed.report.html.page import Tabs
from confed.report.sections import captions as caption_sections
from confed.results.runs import load
from confed.runs.run import prepare, run
from confed.studies.pool import headline
from confed.tasks.captioning import Captioning
from refusals import refuses

REFERENCES = [
    ["a red car and a small dog", "there is a red car and a dog", "a car and a dog"],
    ["two blue boxes near a tree", "blue boxes stand near a green tree"],
    ["a large clock", "a clock on the wall", "one large clock", "a big clock"],
]
CAPTIONS = ["a red car and a dog", "two boxes near a tree near a tree", "a person"]


# Metrics --------------------------------------------------------------------------------------------------------------


def test_cider_and_bleu_are_those_of_the_official_evaluation():
    # Computed by the scorers of the COCO caption evaluation (pycocoevalcap 1.2) on the same texts.
    cider = Cider.of(REFERENCES)
    scores = [cider.score(c, r) for c, r in zip(CAPTIONS, REFERENCES, strict=True)]
    assert scores == pytest.approx([6.99823812, 2.49977234, 0.0], abs=1e-7)
    tally = bleu_tally(CAPTIONS, REFERENCES)
    assert tally == {
        "bleu/1": (12, 16),
        "bleu/2": (8, 13),
        "bleu/3": (6, 10),
        "bleu/4": (4, 8),
        "bleu/length": (16, 15),
    }
    assert bleu4(tally) == pytest.approx(0.6100034454458617, abs=1e-6)


def test_counts_of_bleu_add_up():
    whole = bleu_tally(CAPTIONS, REFERENCES)
    parts = [bleu_tally([c], [r]) for c, r in zip(CAPTIONS, REFERENCES, strict=True)]
    assert {k: tuple(map(sum, zip(*(p[k] for p in parts), strict=True))) for k in whole} == whole
    assert bleu_tally(["A red car, and a DOG."], REFERENCES[:1]) == bleu_tally(CAPTIONS[:1], REFERENCES[:1])
    assert bleu4({}) is None
    assert bleu4(bleu_tally(["nothing"], [["a dog"]])) == 0.0


def test_metrics_refuse_what_cannot_be_compared():
    refuses("at least one picture", Cider.of, [])
    refuses("one has none", Cider.of, [["a"], []])
    refuses("reference at least", bleu_tally, ["a"], [[]])
    refuses("needs a reference", Cider.of(REFERENCES).score, "a", [])


# Search ---------------------------------------------------------------------------------------------------------------


def chances(text: tuple[int, ...], row: int) -> Tensor:
    """Made-up scores of the next token, a function of the row and of the text so far."""
    rng = torch.Generator().manual_seed(sum(t * 7**i for i, t in enumerate(text)) + 1000 * row)
    return 2 * torch.randn(5, generator=rng)


def made_up(beams: int) -> Any:
    def step(texts: Tensor, parents: Tensor | None) -> Tensor:
        del parents
        return torch.stack([chances(tuple(text), i // beams) for i, text in enumerate(texts.tolist())])

    return step


def best_of_all(row: int, longest: int, penalty: float, never: tuple[int, ...] = ()) -> tuple[list[int], float]:
    """Every text of up to so many tokens, one by one."""
    found: tuple[list[int], float] = ([], -math.inf)
    for length in range(1, longest - 1):
        for words in itertools.product([t for t in (0, 1, 2, 4) if t not in never], repeat=length):
            text, total = [2], 0.0
            for token in (*words, 3):
                total += chances(tuple(text), row).log_softmax(0)[token].item()
                text.append(token)
            score = total / (length + 1) ** penalty
            if score > found[1]:
                found = (text, score)
    return found


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("never", [(), (0, 1)])
def test_a_wide_search_finds_the_best_of_all_texts(penalty: float, never: tuple[int, ...]):
    beams = 64  # as many as there are texts of three words
    found = beam_search(made_up(beams), 3, start=2, end=3, beams=beams, longest=5, penalty=penalty, never=never)
    for row in range(3):
        text, score = best_of_all(row, 5, penalty, never)
        assert found.tokens[row].tolist() == text + [0] * (5 - len(text))
        assert found.scores[row].item() == pytest.approx(score, abs=1e-5)


def test_a_search_of_width_one_is_greedy_and_always_ends():
    found = beam_search(made_up(1), 4, start=2, end=3, beams=1, longest=4, penalty=0.0)
    for row, text in enumerate(found.tokens.tolist()):
        assert text[0] == 2
        assert 3 in text[2:]  # never empty, never open
        first = chances((2,), row).clone()
        first[3] = -torch.inf
        assert text[1] == int(first.argmax())


@pytest.mark.parametrize(
    ("options", "message"), [({"beams": 0}, "beams"), ({"longest": 2}, "room"), ({"penalty": -1.0}, "length_penalty")]
)
def test_a_search_refuses_no_beams_and_no_room(options: dict[str, Any], message: str):
    refuses(message, beam_search, made_up(1), 1, start=2, end=3, **options)


# Model ----------------------------------------------------------------------------------------------------------------


def words() -> WrittenWords:
    return WrittenWords(["red", "blue", "car", "dog", "a", "and"], 8)


def pairs(n: int = 3, turns: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(4)
    text, mask = words()(["a red car", "a blue dog and a car", "dog"][:n])
    batch = {"image": torch.randint(0, 256, (n, 3, 32, 32), generator=rng, dtype=torch.uint8), "text": text}
    batch["text_mask"] = mask
    if turns:
        told, seen = words()(["a car", "blue"] * n)
        batch["before_text"], batch["before_text_mask"] = (t.view(n, 2, -1)[:, :turns] for t in (told, seen))
        batch["before_shown"] = torch.ones(n, turns, dtype=torch.bool)
        shape = (n, turns, 3, 32, 32)
        batch["before_image"] = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
    return batch


def model(**options: Any) -> Any:
    return caption_transformer_mini(1, words().vocab_size, picture_size=(32, 32), max_length=8, **options).eval()


def test_scores_are_of_the_next_token_and_of_the_past_alone():
    net, batch = model(), pairs()
    target, rows = next_tokens(batch)
    assert target.tolist()[:4] == [*words()(["a red car"])[0][0, 1:5].tolist()]
    assert rows.tolist() == [0] * 4 + [1] * 7 + [2] * 2
    before = net(batch)
    assert before.logits.shape == (13, words().vocab_size)
    assert before.features.shape == (3, 96)
    changed = dict(batch, text=batch["text"].clone())
    changed["text"][0, 2] = int(batch["text"][1, 2])  # the word "red": what follows "[CLS]" and "a" is scored before it
    after = net(changed)
    torch.testing.assert_close(after.logits[:2], before.logits[:2])
    assert (after.logits[2:4] - before.logits[2:4]).abs().max() > 1e-3
    torch.testing.assert_close(after.logits[4:], before.logits[4:])


def test_padding_turns_and_absent_pictures_are_not_seen():
    net, batch = model(), pairs(turns=1)
    wide = {**batch}
    wide["before_text"], wide["before_text_mask"] = (
        torch.cat([batch[key], torch.zeros(3, 2, 8, dtype=torch.int64)], 1)
        for key in ("before_text", "before_text_mask")
    )
    wide["before_shown"] = torch.tensor([[True, False, False]] * 3)
    wide["before_image"] = torch.cat([batch["before_image"], torch.full((3, 2, 3, 32, 32), 9, dtype=torch.uint8)], 1)
    torch.testing.assert_close(net(wide).logits, net(batch).logits)
    unseen = {**batch, "before_shown": torch.zeros(3, 1, dtype=torch.bool)}
    bare = {key: value for key, value in unseen.items() if key != "before_image"}
    assert torch.isfinite(net(unseen).logits).all()
    torch.testing.assert_close(net(unseen).logits, net(bare).logits)
    assert (net(batch).logits - net(bare).logits).abs().max() > 1e-3


def test_a_mixed_batch_is_its_parts():
    net, parts = model(), [pairs(2), pairs(3), pairs(2, turns=2)]
    del parts[0]["image"]
    mixed = {"index": torch.arange(7)}
    for prefix, part in zip(("texts.", "", "documents."), parts, strict=True):
        mixed |= {f"{prefix}{key}": value for key, value in part.items()}
    assert [sorted(part) for part in groups(mixed)] == [sorted(parts[0]), ["image", "index", "text", "text_mask"],
                                                         sorted(parts[2])]  # fmt: skip
    one = net(mixed)
    torch.testing.assert_close(one.logits, torch.cat([net(part).logits for part in parts]))
    torch.testing.assert_close(one.features, torch.cat([net(part).features for part in parts]))
    target, rows = next_tokens(mixed)
    assert target.tolist() == torch.cat([next_tokens(part)[0] for part in parts]).tolist()
    assert rows.unique().tolist() == list(range(7))
    # The sum of the parts' losses by tokens is that of the whole.
    task, sizes = Captioning(), [len(next_tokens(part)[0]) for part in parts]
    each = sum(task.loss(net(p), p) * n for p, n in zip(parts, sizes, strict=True)) / sum(sizes)
    torch.testing.assert_close(task.loss(one, mixed), torch.as_tensor(each))


@pytest.mark.parametrize("turns", [0, 2])
def test_writing_step_by_step_is_reading_the_whole_text(turns: int):
    net, batch = model(), pairs(turns=turns)
    for parameter in net.parameters():  # large values, so that texts differ
        parameter.data *= 1.5
    shown = {key: value for key, value in batch.items() if key not in ("text", "text_mask")}
    written = net.write(shown, beams=1, penalty=0.0)
    for row in range(3):
        one = {key: value[row : row + 1] for key, value in shown.items()}
        text = [START]
        best: list[int] = []
        score = -math.inf
        total = 0.0
        while len(text) < 8:
            ids = torch.tensor([[*text, END]])  # what follows the last token is scored under teacher forcing
            chance = net({**one, "text": ids, "text_mask": torch.ones_like(ids)}).logits[-1].log_softmax(0)
            chance[[0, 1, 2, 4]] = -torch.inf
            if len(text) > 1 and total + chance[END].item() > score:
                best, score = [*text, END], total + chance[END].item()
            chance[END] = -torch.inf
            total += chance.max().item()
            text.append(int(chance.argmax()))
        assert written[row].tolist() == best + [0] * (8 - len(best))


def test_models_that_write_need_texts_and_say_what_is_wrong():
    refuses("text and image, or text", caption_transformer_tiny, 1, 20, modalities=("image",))
    refuses("at least one of", model(), {"label": torch.zeros(2)})
    alone = caption_transformer_tiny(1, words().vocab_size, modalities=("text",), max_length=8)
    text = {key: value for key, value in pairs().items() if key != "image"}
    assert alone(text).logits.shape == (13, words().vocab_size)


# Task -----------------------------------------------------------------------------------------------------------------


def test_the_task_compares_what_was_written():
    task = Captioning(types=("near", "far")).reading(words(), REFERENCES)
    ids, _ = words()(["a red car and a dog", "dog", "a car"])
    batch = {"references": pack_texts(REFERENCES), "type": torch.tensor([0, 1, 1])}
    output = Output(ids, torch.zeros(3, 4))
    cider = Cider.of(REFERENCES)
    texts = ("a red car and a dog", "dog", "a car")
    scores = [cider.score(text, own) for text, own in zip(texts, REFERENCES, strict=True)]
    tally = task.tally(output, batch)
    assert tally["cider"] == (pytest.approx(sum(scores)), 3.0)
    assert tally["cider/near"] == (pytest.approx(scores[0]), 1.0)
    assert tally["bleu/length"][0] == 9.0
    assert task.predictions(output, batch).tolist() == pytest.approx(scores)
    assert [entry["answer"] for entry in task.written(output, batch)] == list(texts)


def test_texts_in_tensors_come_back():
    texts = [["ein Bär", "日本語"], ["x"], []]
    assert unpack_texts(pack_texts(texts)) == texts


def test_the_loss_is_the_mean_over_tokens():
    batch = pairs()
    target, _ = next_tokens(batch)
    logits = torch.zeros(len(target), 30)
    logits[torch.arange(4), target[:4]] = 9.0
    output = Output(logits, torch.zeros(3, 4))
    by_hand = (4 * -math.log(math.exp(9) / (math.exp(9) + 29)) + 9 * math.log(30)) / 13
    assert Captioning().loss(output, batch).item() == pytest.approx(by_hand, rel=1e-5)
    assert Captioning().predictions(output, batch).tolist() == [1.0, 0.0, 0.0]
    assert Captioning().tally(output, batch)["token_accuracy"] == (4.0, 13.0)


def test_the_task_says_what_is_wrong():
    batch, features = pairs(), torch.zeros(3, 4)
    refuses("model that writes", Captioning().loss, Output(torch.zeros(3, 2), features), batch)
    refuses("has no loss", Captioning().loss, Output(batch["text"], features), batch)
    refuses("reading", Captioning().tally, Output(batch["text"], features), batch)
    with pytest.raises(ValueError, match="the batch has none"):
        Captioning().reading(words(), REFERENCES).tally(Output(batch["text"], features), batch)
    refuses(r"need.*text", next_tokens, {"image": batch["image"]})
    refuses(r"task\.beams", Captioning, beams=0)
    refuses(r"task\.length_penalty", Captioning, length_penalty=-1.0)


# Runs -----------------------------------------------------------------------------------------------------------------

SMALL = [
    "model.name=caption_transformer_tiny", "data.train=12", "data.validation=3", "data.test=4", "data.texts=8",
    "data.documents=3", "data.references=2", 'data.unseen=["home","commercial","natural","sports"]', "data.shots=1",
    "run.rounds=2", "run.evaluate_every=2", "local.epochs=1", "run.workers=1", "task.beams=2",
]  # fmt: skip


def small(method: str, *overrides: str) -> Recipe:
    return load_recipe("captions_scenes", [*SMALL, *overrides]).method(method)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captions") / "run"
    run(small("modality_transformer"), folder)
    return folder


def test_the_personal_transformer_learns_captions(finished: Path):
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["metric"] == "cider"
    assert set(summary["personal"]) == {"transport", "educational"}  # the reader has nothing to be asked about
    assert set(summary["global_unseen"]) == {"home", "commercial", "natural", "sports"}
    assert set(summary["bleu4"]["global_seen"]) == {"transport", "educational"}
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["event"] == "round"]
    assert all(last < first for first, last in zip(losses[0].values(), losses[-1].values(), strict=True))


def test_ciders_are_no_percentages():
    line = headline({"metric": "cider", "personal_mean": 2.8166, "global_seen_mean": 1.013, "seconds": 86.0})
    assert line == "CIDEr-D personal 281.7, CIDEr-D global on seen 101.3, 86 s"


def test_the_report_shows_what_people_and_models_say(finished: Path):
    samples = json.loads((finished / "gallery.json").read_text())
    assert len(samples) >= 10
    assert all(sample["captions"] and "cider" in sample["global"] for sample in samples)
    study = load(finished)
    cards = gallery(study, Tabs(), ImageStore())
    assert "People say" in cards
    assert all(samples[row]["captions"][0] in cards and samples[row]["global"]["answer"] in cards for row in (0, -1))
    table = caption_sections.caption_table(study)
    assert [column.title for column in table.columns] == ["method", *["CIDEr-D", "BLEU-4"] * 3]
    summary = json.loads((finished / "summary.json").read_text())
    assert table.rows[0][1].value == pytest.approx(100 * summary["personal_mean"])
    assert "CIDEr-D" in caption_sections.section(study)


def test_a_run_says_what_it_sees(finished: Path, tmp_path: Path):
    file = tmp_path / "x.png"
    Image.fromarray(np.full((40, 60, 3), 90, np.uint8)).save(file)
    found = ask(finished, file, client="transport")
    assert found["model"] == "transport"
    assert found["caption"]
    shown = CliRunner().invoke(app, ["predict", str(finished), "--image", str(file)])
    assert shown.exit_code == 0
    assert shown.stdout.strip() == ask(finished, file)["caption"]
    refuses("no personal model", ask, finished, file, client="reader")
    refuses(r"gone\.png", ask, finished, tmp_path / "gone.png")


@pytest.mark.parametrize(
    "options", [[], ["--image", "x.png", "--question", "what?"], ["--image", "x.png", "--top", "3"]]
)
def test_predict_says_what_a_caption_needs(finished: Path, options: list[str]):
    failed = CliRunner().invoke(app, ["predict", str(finished), *options])
    assert failed.exit_code != 0
    assert "write captions" in str(failed.exception) + failed.output


def test_fedavg_learns_captions_and_one_place_can_hold_all(tmp_path: Path):
    plain = ("data.reader=false", "data.texts=0", "data.documents=0", "data.shots=0", "run.evaluate_every=0")
    summary = run(small("fedavg", *plain), tmp_path / "fedavg")
    assert 0 <= summary["global_seen_mean"] <= 10
    pooled, run_data = prepare(load_recipe("captions_scenes", [*SMALL, "algorithm.name=central"]))
    everybody = pooled.population.data("everyone")
    assert len(everybody) == sum(map(len, run_data.clients.values()))
    batch = next(iter(everybody.train(32, torch.Generator().manual_seed(0))))
    assert [len(part["text"]) for part in groups(batch)] == [14, 14, 4]
    # A document's own picture and those before it are its client's, also where all tables have become one.
    table, own = everybody.tables[0], run_data.clients["educational"].tables[0]  # type: ignore[attr-defined]
    row = int((own.columns["before_shown"].any(1)).nonzero()[0])
    first = len(run_data.clients["transport"].tables[0])
    one, other = own.batch(torch.tensor([row])), table.batch(torch.tensor([first + row]))
    assert all(torch.equal(one[key], other[key]) for key in ("image", "before_image", "text", "before_text"))


def test_clients_that_lose_pictures_learn_captions_all_the_same(tmp_path: Path):
    recipe = small("modality_transformer", "data.missing={image=0.3}", "run.rounds=1")
    run(recipe, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if line["event"] in ("round", "finish")]
    assert rounds
    assert not any(line["errors"] for line in rounds)
    assert set(rounds[0]["loss"]) == {"transport", "educational", "reader"}


@pytest.mark.parametrize("section", ["{text=0.5}", "{transport={text=0.5}}"])
def test_texts_that_are_learned_cannot_be_lost(section: str):
    key = "data.missing.transport.text" if "transport" in section else "data.missing.text"
    with pytest.raises(ValueError, match=rf"^{key}: texts are what is learned of 'scene_captions'"):
        prepare(small("fedavg", f"data.missing={section}"))


def test_recipes_say_what_does_not_fit_together():
    refuses("writes no captions", prepare, small("fedavg", "model.name=modal_transformer_tiny"))
    with pytest.raises(ValueError, match=r'task\.name = "captioning"'):
        prepare(load_recipe("captions_scenes", [*SMALL[:-1], "task.name=vqa"]).method("fedavg"))
    others = ["data.train=20", "data.validation=10", "data.test=10", 'study.methods=["fedavg"]', "study.table=[]"]
    with pytest.raises(ValueError, match="needs pictures with captions"):
        prepare(load_recipe("modalities", [*others, "task.name=captioning"]).method("fedavg"))
    with pytest.raises(ValueError, match=r'task\.name = "captioning"'):
        prepare(load_recipe("modalities", [*others, "model.name=caption_transformer_tiny"]).method("fedavg"))
    refuses("at most 8 tokens", prepare, small("fedavg", "model.max_length=8"))
