"""FedDAT's four benchmarks on the built-in data: what they hold, against plain re-computations, and their recipes."""

import hashlib
import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from confed.data.encode import encode
from confed.data.examples import Examples, FederatedDataset
from confed.datasets.scenes import COLOURS, NOUNS, SCENES, SIZES, scenes
from confed.datasets.scenes.domains import DOMAINS, UNANSWERABLE, annotate, blur, paint
from confed.datasets.scenes.graph import Object, Tags, fingerprint
from confed.datasets.scenes.making import Knobs, Made
from confed.datasets.scenes.presets import ENTAILMENT, FUNCTIONS, PAIRS, PRESETS, entails, hide
from confed.datasets.scenes.questions import Program, parse, phrase, skeletons
from confed.federation.local import Schedule
from confed.inference.ask import ask
from confed.models.vilt import mini_tokenizer
from confed.recipes.recipe import load_recipe
from confed.report.figures.results import judged_curves
from confed.report.report import write_report
from confed.report.tables.methods import results_table
from confed.report.tables.table import to_markdown
from confed.results.history import evaluations
from confed.results.runs import load
from confed.results.summary import Summary
from confed.runs.run import run
from refusals import refuses

small = partial(scenes, train=100, validation=24, test=80)
RECIPES = ("feddat_scenes", "feddat_domain", "feddat_function", "feddat_scene", "feddat_task")


def parts(dataset: FederatedDataset) -> list[Examples]:
    return [part for s in dataset.clients.values() for part in (s.train, s.validation, s.test)]


def digest(*some: Examples) -> str:
    sha = hashlib.sha256()
    for part in some:
        sha.update(part.images.tobytes() + part.image_index.tobytes())
        texts = [*part.questions, *part.answers, *part.types, *part.names]
        sha.update("|".join([*texts, *map(str, part.annotations or ()), *map(str, part.choices or ())]).encode())
    return sha.hexdigest()


def knobs(**changes) -> Knobs:
    return Knobs(**{"train": 100, "validation": 24, "test": 80, **changes})


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, dict[str, Made]]]:
    return {name: PRESETS[name].make(knobs()) for name in ("domain", "function", "task")}


@pytest.fixture(scope="module")
def datasets() -> dict[str, FederatedDataset]:
    found = {name: small(preset=name) for name in ("domain", "function", "task")}
    return found | {"scene": small(preset="scene", pools=100)}


def graph(tags: Tags, picture: int) -> list[tuple[int, str, str, str]]:
    """Cell, noun, colour, size of every thing, read from the arrays."""
    return [
        (cell, NOUNS[tags.noun[picture, cell] - 1], COLOURS[tags.colour[picture, cell] - 1],
         SIZES[tags.size[picture, cell] - 1])
        for cell in range(16) if tags.noun[picture, cell]
    ]  # fmt: skip


def quarter(cell: int) -> str:
    return ("top" if cell < 8 else "bottom") + (" left" if cell % 4 < 2 else " right")


def answer(family: str, words: list[str], things: list[tuple[int, str, str, str]]) -> str | None:  # noqa: PLR0911
    """A question's answer, from its family and the nouns and colours in it."""
    named = [thing for thing in things if thing[1] == words[-1]]
    painted = [sum(colour == word for _, _, colour, _ in things) for word in words]
    if family == "exist":
        return "yes" if any((colour, noun) == tuple(words) for _, noun, colour, _ in things) else "no"
    if family == "count":
        return str(painted[0])
    if family == "morethan":
        return "yes" if painted[0] > painted[1] else "no"
    if family == "qnoun":
        nouns = [noun for _, noun, colour, _ in things if colour == words[0]]
        return nouns[0] if len(nouns) == 1 else None
    if family == "same":
        pair = [[colour for _, noun, colour, _ in things if noun == word] for word in words]
        return ("yes" if pair[0] == pair[1] else "no") if all(len(one) == 1 for one in pair) else None
    if len(named) != 1:
        return None
    cell, _, colour, size = named[0]
    if family == "rel":
        return next((c for at, _, c, _ in things if at == cell + 1 and at % 4), None)
    return {"qcolor": colour, "qsize": size, "qpos": quarter(cell)}[family]


def arguments(question: str) -> list[str]:
    return [word for word in re.findall(r"\w+", question) if word in COLOURS or word in NOUNS]


def test_the_clients_of_each_benchmark(datasets):
    assert {name: list(d.clients) for name, d in datasets.items()} == {
        "domain": ["blurred", "photos", "art", "relations", "abstract"],
        "function": ["object", "attribute", "relation", "logic", "number"],
        "task": ["vqa", "pairs", "entailment", "choice"],
        "scene": list(SCENES),
    }
    for name, dataset in datasets.items():
        assert not dataset.unseen
        assert list(dataset.answer_sets) == list(dataset.clients)
        assert dict(dataset.tasks) == (
            {"pairs": "nlvr2", "entailment": "entailment", "choice": "choice"} if name == "task" else {}
        )
        assert dataset.facts["oracle"].startswith("100.0 %")
        assert set(dataset.answers) == {a for pool in dataset.answer_sets.values() for a in pool}
        assert {word for d in parts(dataset) for q in d.questions for word in q.rstrip("?").split()} <= {*dataset.words}
        for client, split in dataset.clients.items():
            assert len(split.train) == 100  # nobody's training answers are outside its own pool
            assert 64 <= len(split.test) <= 80
            for part in (split.train, split.validation, split.test):
                assert set(part.answers) <= set(dataset.answer_set(client))
                assert max(len(question.split()) for question in part.questions) <= 13
    assert len({frozenset(pool) for pool in datasets["domain"].answer_sets.values()}) == 5
    assert len({frozenset(pool) for pool in datasets["scene"].answer_sets.values()}) == 6


def test_answers_follow_from_words_and_graphs(made):
    unanswerable = 0
    for preset in ("domain", "function"):
        for client, roles in made[preset].items():
            for part in roles.values():
                examples = part.examples
                assert part.truth() == list(examples.answers)
                rows = zip(examples.questions, examples.answers, examples.types, examples.image_index, strict=True)
                for question, given, family, picture in rows:
                    found = answer(family, arguments(question), graph(part.tags, int(picture)))
                    assert (found or UNANSWERABLE) == given
                    unanswerable += given == UNANSWERABLE
                    assert given != UNANSWERABLE or client == "blurred"
    assert unanswerable > 10
    for client, families in FUNCTIONS.items():
        assert set(made["function"][client]["train"].examples.types) == set(families)
    for client, domain in DOMAINS.items():
        assert set(made["domain"][client]["train"].examples.types) == set(domain.templates)


def test_domains_have_wordings_of_their_own(made):
    def shapes(client: str) -> set[str]:
        questions = made["domain"][client]["train"].examples.questions
        return {" ".join("#" if w in COLOURS or w in NOUNS else w for w in q[:-1].split()) for q in questions}

    for first, second in itertools.combinations(DOMAINS, 2):
        assert not shapes(first) & shapes(second)


def test_binary_answers_are_balanced(datasets):
    for dataset in datasets.values():
        for part in parts(dataset):
            for family in {*part.types} & {"exist", "same", "morethan", *PAIRS}:
                answers = Counter(a for a, t in zip(part.answers, part.types, strict=True) if t == family)
                total = answers.total()
                assert abs(2 * answers.most_common(1)[0][1] - total) <= 2 + 0.04 * total, (family, answers)
    for client, share in (("pairs", 0.52), ("entailment", 0.36), ("choice", 0.28)):
        for part in (datasets["task"].clients[client].train, datasets["task"].clients[client].test):
            assert Counter(part.answers).most_common(1)[0][1] <= share * len(part) + 2


def test_statements_about_two_pictures(made):
    for part in made["task"]["pairs"].values():
        examples = part.examples
        assert examples.image_index.shape == (len(examples), 2)
        assert (examples.image_index[:, 0] + 1 == examples.image_index[:, 1]).all()
        for text, given, (a, b) in zip(examples.questions, examples.answers, examples.image_index, strict=True):
            left, right = graph(part.tags, int(a)), graph(part.tags, int(b))
            word = arguments(text)[0]
            with_word = [[thing for thing in side if word in thing] for side in (left, right)]
            if "both" in text or "each" in text:
                true = bool(with_word[0]) and bool(with_word[1])
            elif "one" in text:
                true = bool(with_word[0]) != bool(with_word[1])
            elif "more" in text:
                true = len(with_word[0]) > len(with_word[1])
            else:
                true = len(with_word[0]) + len(with_word[1]) == int(re.findall(r"\d", text)[0])
            assert given == str(true).lower(), text


def claims(text: str, things: list[tuple[int, str, str]]) -> bool:
    """Whether a statement about one whole picture (cell, noun, colour) is true."""
    word = arguments(text)[0]
    where = re.findall(r"(?:top|bottom) (?:left|right)", text)
    if where:
        return any(word in thing and quarter(thing[0]) == where[0] for thing in things)
    count, number = sum(word in thing for thing in things), int(re.findall(r"\d", text)[0])
    return count >= number if "least" in text else count <= number


def test_a_verdict_is_what_all_hidden_contents_agree_on(made):
    verdicts = Counter()
    for part in made["task"]["entailment"].values():
        examples = part.examples
        dark = (part.examples.images == 20).all(axis=3).reshape(-1, 4, 16, 4, 16).mean(axis=(2, 4)) > 0.5
        for text, given, picture in zip(
            examples.questions, examples.answers, map(int, examples.image_index), strict=True
        ):
            (hidden,) = np.flatnonzero(dark[picture].ravel())  # the cross-hatched square
            seen = [(cell, noun, colour) for cell, noun, colour, _ in graph(part.tags, picture)]
            assert hidden not in [cell for cell, _, _ in seen]
            worlds = [seen, *([*seen, (int(hidden), n, c)] for n in NOUNS for c in COLOURS)]
            found = {claims(text, world) for world in worlds}
            expected = "neutral" if len(found) == 2 else "entailed" if found == {True} else "contradicted"
            assert given == expected, text
            verdicts[given] += 1
    assert max(verdicts.values()) <= 0.36 * verdicts.total()


def test_one_of_four_answers_is_right(made):
    for part in made["task"]["choice"].values():
        examples = part.examples
        assert examples.choices is not None
        rows = zip(
            examples.questions, examples.answers, examples.types, examples.image_index, examples.choices, strict=True
        )
        for question, given, family, picture, offered in rows:
            right = answer(family, arguments(question), graph(part.tags, int(picture)))
            assert len(set(offered)) == 4
            assert offered[int(given)] == right


def test_hiding_leaves_the_rest_of_a_picture():
    pictures = np.full((2, 64, 64, 3), 200, np.uint8)
    hidden = hide(pictures, np.array([0, 11]))
    assert (hidden[0, 16:] == 200).all()
    assert (hidden[0, :16, 16:] == 200).all()
    assert (hidden[0, :16, :16] < 200).all()
    assert (hidden[1, 32:48, 48:] < 200).all()
    assert (hidden != 200).sum() == 2 * 16 * 16 * 3
    assert (pictures == 200).all()


def test_statements_can_be_read_back():
    for forms in (PAIRS, ENTAILMENT):
        for family, texts in forms.items():
            letters = [[w for w in text.split() if w in set("CNKQ")] for text in texts]
            values = {"C": "red", "N": "dog", "K": "2", "Q": "bottom left"}
            for number, own in enumerate(letters):
                statement = Program(family, tuple(values[letter] for letter in own))
                assert parse(phrase(statement, number, templates=forms), skeletons(forms)) == statement
    refuses(r"expected a template .*, got 'a dog barks'", parse, "a dog barks", skeletons(PAIRS))
    visible = [Object(0, "dog", "red", "small")]
    assert entails(Program("at_least", ("2", "red")), visible, 5) == "neutral"
    assert entails(Program("noun_at", ("cat", "top left")), visible, 15) == "contradicted"


def test_blurring_and_painting_by_hand():
    picture = np.zeros((1, 64, 64, 3), np.uint8)
    picture[0, 10, 10] = 90
    blurred = blur(picture)
    assert (blurred[0, 9:12, 9:12] == 10).all()
    assert blurred.sum() == 9 * 10 * 3
    picture[0, 10, 10:12] = (100, 200, 0)
    painted = paint(picture)
    assert painted[0, 10, 10].tolist() == painted[0, 10, 11].tolist() == [112, 208, 16]
    assert painted[0, 11, 10].tolist() == [16, 16, 16]


def test_some_clients_have_answers_of_ten_annotators(datasets):
    domain = datasets["domain"]
    assert {c for c, s in domain.clients.items() if s.train.annotations} == {"blurred", "abstract"}
    for client in ("blurred", "abstract"):
        test = domain.clients[client].test
        assert test.annotations is not None
        for given, truth in zip(test.annotations, test.answers, strict=True):
            assert len(given) == 10
            assert given.count(truth) >= 6
        table = encode(test, mini_tokenizer(domain.words), domain.answer_set(client), sorted({*test.types}))
        rows = torch.arange(len(test))
        target = table.batch(rows)["target"]
        assert (target[rows, table.columns["label"]] == 1).all()  # six of ten and more score 1
        assert ((target > 0).sum(1) > 1).float().mean() > 0.2
    assert all(s.train.annotations is None for s in small(preset="domain", annotators=0).clients.values())
    examples = domain.clients["photos"].train
    certain = annotate(examples, 0.0, np.random.default_rng(0))
    assert certain == [(truth,) * 10 for truth in examples.answers]


def test_equal_arguments_give_equal_bytes_and_tests_keep_theirs(datasets):
    for preset in ("domain", "task"):
        again, other = small(preset=preset), small(preset=preset, seed=1)
        assert digest(*parts(again)) == digest(*parts(datasets[preset]))
        for client, split in other.clients.items():
            first = datasets[preset].clients[client]
            assert digest(first.train) != digest(split.train)
            common = {*first.test.names} & {*split.test.names}
            assert len(common) >= 0.75 * len(first.test)
            kept = [dict(zip(t.names, t.questions, strict=True)) for t in (first.test, split.test)]
            assert all(kept[0][name] == kept[1][name] for name in common)


def test_roles_share_no_graph(made):
    for preset in ("function", "domain"):
        for roles in made[preset].values():
            marks = [set(fingerprint(part.tags).tolist()) for part in roles.values()]
            assert not any(a & b for a, b in itertools.combinations(marks, 2))


def test_more_shards_do_not_change_the_first_ones():
    sizes = partial(scenes, train=24, validation=8, test=8)
    for most, options, units in (
        (5, {"preset": "function"}, list(FUNCTIONS)),
        (3, {"preset": "scene", "pools": 100}, list(SCENES)),
    ):
        one, two, five = (sizes(**options, shards=n) for n in (1, 2, most))
        assert list(one.clients) == units
        assert list(two.clients) == [f"{unit}-{n}" for unit in units for n in (1, 2)]
        assert len(five.clients) == most * len(units)
        for unit in units:
            first = [d.clients[name].train for d, name in ((one, unit), (two, f"{unit}-1"), (five, f"{unit}-1"))]
            assert len({(tuple(e.questions), e.images.tobytes()) for e in first}) == 1
            second = [d.clients[f"{unit}-2"].train for d in (two, five)]
            assert digest(second[0]) == digest(second[1])
            assert list(second[0].questions) != list(first[0].questions)
        assert {len(s.train) for s in five.clients.values()} == {24}


def test_pools_of_the_most_frequent_answers():
    whole, cut = (scenes(preset="function", train=80, validation=24, test=24, pools=k) for k in (100, 5))
    for client, pool in cut.answer_sets.items():
        counts = Counter(whole.clients[client].train.answers)
        least = sorted(counts.values(), reverse=True)[: len(pool)][-1]
        assert len(pool) == min(5, len(counts))
        assert all(counts[a] >= least for a in pool)
        kept = [a for a in whole.clients[client].train.answers if a in pool]
        assert list(cut.clients[client].train.answers) == kept
    assert cut.widest == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "tasks"}, "preset must be one of scene, .*, task, got 'tasks'"),
        ({"preset": "task", "pools": 0}, "pools: expected at least 2 answers for the preset 'task'"),
        ({"preset": "function", "pools": 1}, r"pools: expected at least 2 answers or 0 .*, got 1"),
        ({"pools": -1}, "pools must not be negative, got -1"),
        (
            {"pools": 100, "unseen": ("home",)},
            "unseen: expected no place where clients have answers of their own, got .'home'",
        ),
        ({"preset": "task", "unseen": ("home",)}, "unseen: expected no place"),
        ({"preset": "task", "shards": 2}, "shards: expected the presets scene, domain or function .*got 'task'"),
        ({"clients_per_scene": 2, "shards": 2}, "shards: expected .*clients_per_scene = 2"),
        ({"shards": 0}, "shards must be at least 1, got 0"),
        ({"preset": "domain", "annotators": 3}, "annotators must be one of 0, 10, got 3"),
        ({"preset": "function", "clients_per_scene": 2}, "clients_per_scene: expected the preset 'scene'"),
        ({"preset": "task", "test": 0}, "test must be at least 1, got 0"),
        (
            {"preset": "function", "pools": 2, "train": 2, "validation": 1},
            r"client 'object': expected an answer out of .* to a (validation|test) question",
        ),
    ],
)
def test_bad_arguments_are_named(changes, message):
    refuses(message, scenes, **{"train": 8, "validation": 4, "test": 4, **changes})


# Recipes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_the_rows_of_the_tables(name):
    recipe = load_recipe(name)
    labels = {
        "clf_local": "clf-L",
        "adapter_local": "Adapter-L",
        "adapter": "Adapter",
        "feddat": "FedDAT",
        "full": "full*",
    }
    assert recipe.methods == tuple(labels)
    table = recipe.table or recipe.methods
    assert {row: recipe.label(row) for row in recipe.methods} == labels
    assert recipe.with_rows(table).methods == table  # every row is sound
    trained = {row: recipe.method(row).sections["model"]["trainable"] for row in table}
    expected = {
        "clf_local": "head", "lora": "lora", "prompt": "prompt", "bias": "bias", "adapter_local": "adapters",
        "adapter": "adapters", "adapter_equal": "adapters", "feddat": "adapters", "full_local": "all", "full": "all",
    }  # fmt: skip
    assert trained == {row: expected[row] for row in table}
    if name != "feddat_scenes":
        assert set(table) == set(expected)
        assert recipe.method("adapter_equal").local.epochs == 2 * recipe.method("feddat").local.epochs
    policy = {recipe.method(row).local.schedule for row in table}
    assert policy == {Schedule()}


def test_a_run_of_four_tasks_is_shown_and_asked(tmp_path: Path):
    sizes = ["data.train=24", "data.validation=8", "data.test=12", "run.rounds=1", "run.workers=1", "run.gallery=1"]
    recipe = load_recipe("feddat_task", [*sizes, "local.epochs=1", 'study.methods=["adapter"]']).method("adapter")
    folder = tmp_path / "run"
    summary = run(recipe, folder)
    assert list(summary["personal"]) == ["vqa", "pairs", "entailment", "choice"]
    # Clients have metrics of their own, and each its curve.
    of = {"vqa": "vqa_accuracy", "pairs": "accuracy", "entailment": "accuracy", "choice": "accuracy"}
    assert (summary["metric"], summary["metric_of"]) == ("score", of)
    read = load(folder).runs[0]
    lines = read.records.measured("global")
    curves = evaluations(read, "global")
    assert curves == {r: {p: places[p][of[p]] for p in of} for r, places in lines.items()}
    assert curves
    for place, metric in of.items():
        assert summary["test_metrics"]["global_seen"][place][metric] == summary["global_seen"][place]
    assert {"accuracy", "vqa_accuracy", "loss"} <= set(summary["test_metrics"]["personal"]["vqa"])
    (seeds,) = judged_curves(load(folder)).values()
    assert seeds == [{r: pytest.approx(np.mean([*places.values()])) for r, places in curves.items()}]
    content = {key: value for key, value in read.summary.content.items() if key != "metric_of"}
    older = replace(read, summary=Summary(content))
    assert evaluations(older, "global") == curves  # the metric by type of question is the headline's
    samples = {sample["place"]: sample for sample in json.loads((folder / "gallery.json").read_text())}
    assert "image2" in samples["pairs"]
    assert samples["pairs"]["answer"] in ("false", "true")
    assert samples["choice"]["answer"] in samples["choice"]["choices"]
    for view in ("global", "personal"):
        assert samples["choice"][view]["answer"] in samples["choice"]["choices"]
        assert samples["entailment"][view]["answer"] in ("entailed", "contradicted", "neutral")
    page = write_report(folder).read_text()
    assert "to choose from:" in page
    picture = tmp_path / "picture.png"
    Image.new("RGB", (64, 64)).save(picture)
    told = ask(folder, picture, "there is a dog in the top left", "entailment")
    assert {a["answer"] for a in told["answers"]} == {"entailed", "contradicted", "neutral"}
    refuses(r"name a client: .*vqa, pairs, entailment, choice", ask, folder, picture, "what is red?")


def test_tables_of_finetunings_say_what_learns_and_what_travels():
    def summary(label: str, trainable: str, trained: int, sent: int) -> Summary:
        return Summary({
            "label": label, "trainable": trainable, "personal": {"a": 0.5}, "clients": ["a"], "bytes_total": 8 * sent,
            "parameters": {"total": 10**6, "trained": trained, "sent": sent}, "seconds": 1.0,
        })  # fmt: skip

    rows = [("Adapter", [summary("Adapter", "adapters", 14573, 3288)]), ("full*", [summary("full*", "all", 900, 812)])]
    text = to_markdown(results_table(rows))
    assert "14.6 k" in text
    assert "3.29 k" in text
    assert "travels" in text
    assert "parameters" not in to_markdown(results_table(rows[:1])).lower()
