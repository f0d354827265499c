"""Built-in benchmark of visual question answering: small drawn pictures of six places.

Pictures of 64 x 64 pixels hold 3 to 6 things on a grid of 4 x 4 cells. Six scenes differ in background,
palette, things and colour frequencies; four of them take part and two are seen by no client. Two knobs set
what the clients share: ``conflict`` turns each scene's colour wheel another way, so that clients disagree
about the name of a colour and personal models pay; ``wording`` re-codes ten words for all clients, which the
pre-trained backbone has never read, so that learning together pays.
"""

from collections.abc import Iterable
from typing import Literal

from confed.data.examples import Examples, FederatedDataset
from confed.datasets.scenes.graph import COLOURS, NOUNS, SCENES, SIZES, Tags
from confed.datasets.scenes.making import SETTINGS, Knobs, make_public
from confed.datasets.scenes.presets import PRESETS, assemble
from confed.datasets.scenes.questions import ANSWERS, FAMILIES, WORDING_SHIFT, WORDS, oracle
from confed.registry import register_dataset

__all__ = [
    "ANSWERS",
    "COLOURS",
    "FAMILIES",
    "NOUNS",
    "SCENES",
    "SIZES",
    "WORDING_SHIFT",
    "WORDS",
    "Tags",
    "oracle",
    "public_split",
    "scenes",
]


@register_dataset
def scenes(
    setting: Literal["A", "B", "C"] = "C",
    preset: Literal["scene", "dirichlet", "quantity", "random", "domain", "function", "task"] = "scene",
    *,
    train: int | None = None,
    validation: int = 400,
    test: int = 1000,
    unseen: tuple[str, ...] | None = None,
    conflict: float | None = None,
    wording: bool | None = None,
    clients: int = 4,
    clients_per_scene: int = 1,
    shards: int = 1,
    pools: int | None = None,
    annotators: Literal[0, 10] = 10,
    types: Literal["families", "answers"] = "families",
    own_answers: float = 0.0,
    alpha: float = 0.5,
    questions_per_picture: int = 4,
    test_seed: int = 0,
    seed: int = 0,
) -> FederatedDataset:
    """The benchmark, generated on the spot; equal arguments give equal bytes.

    Args:
        setting: named difficulty. A: full colour conflict, 1,500 training questions per client, meant to
            favour personal models. B: half the conflict, 800, meant to favour nothing. C: half the conflict
            and the wording shift, 400, meant to favour learning together and then personalising.
        preset: how clients differ. "scene": one scene each. "dirichlet": plain pictures, answers per client
            from Dirichlet(alpha). "quantity": plain pictures, log-normal training sizes, at least 64. "random": plain
            pictures and wording, dealt out at random in equal shares, so that clients differ by chance alone. The four
            benchmarks of FedDAT in small: "domain": five clients with drawing styles, things, kinds of questions and
            wordings of their own, after VizWiz, COCO-QA, AQUA, GQA and VQA's abstract scenes. "function": plain
            pictures, each client its own kinds of questions. "task": plain pictures, one client each answers
            questions, judges statements about two pictures, judges statements about a picture of which a cell is
            hidden, and chooses between four answers. FedDAT's scenes are the preset "scene" with ``pools``.
        train: training questions per client; None takes the setting's.
        validation: validation questions per client.
        test: test questions per client; an unseen scene always has 1,000.
        unseen: scenes without a client; None takes the preset's: two, or none where clients have
            answer sets of their own.
        conflict: how far the scenes turn the colour wheel, 0 to 1; None takes the setting's.
        wording: whether the ten words are re-coded; None takes the setting's, but not for "random".
        clients: number of clients of the presets "dirichlet", "quantity" and "random".
        clients_per_scene: clients of the preset "scene" in each scene that takes part. With more than one they are
            called "transport-1" and so on, share the scene's style and things, and have colour frequencies and
            pictures of their own.
        shards: clients of the presets "scene", "domain" and "function" per scene, domain or function, alike but for
            their pictures and each of full size; more of them do not change the first ones.
        pools: answers of a client's own answer set: its most frequent training answers, at most so many. Examples
            with another answer are left out. 0: all clients share one vocabulary. None takes the preset's: 100 for
            "domain", "function" and "task", else 0. For "domain" and "function" 0 takes all clients' training answers,
            of which a client sees its own alone, so that centralised training has a row.
        annotators: simulated people who answer each question of the domains "blurred" and "abstract"; 0 for none.
        own_answers: of the preset "scene": share of the answers, but "yes" and "no", that each scene gives in words of
            its own, from 0 to 1. A client then knows many answers that nobody else gives, and training elsewhere
            forgets them. Above 0 all six scenes take part, as nobody knows the words of a scene without a client.
        types: what counts as a question's type: its family, or VQA's type of its answer: "yes/no", "number", "other".
        alpha: concentration of the preset "dirichlet"; smaller is more uneven.
        questions_per_picture: questions that share a picture.
        test_seed: decides test sets and what defines a client (colour frequencies, answer shares, sizes).
        seed: decides training and validation examples.

    Raises:
        ValueError: an argument is out of its range, or a scene, setting or preset is unknown.
    """
    _one_of("setting", setting, SETTINGS)
    _one_of("preset", preset, PRESETS)
    if unseen is None:
        unseen = () if pools or own_answers else PRESETS[preset].unseen
    if isinstance(unseen, str):
        raise ValueError(f"unseen must be a sequence of scenes such as ('home',), got the text {unseen!r}")
    for scene in unseen:
        _one_of("unseen scene", scene, SCENES)
    if preset == "scene" and set(unseen) == set(SCENES):
        raise ValueError(f"unseen must leave at least one of the {len(SCENES)} scenes for a client, got all of them")
    named = SETTINGS[setting]
    preset_wording = PRESETS[preset].wording
    usual = named.wording if preset_wording is None else preset_wording
    knobs = Knobs(
        conflict=named.conflict if conflict is None else conflict,
        wording=usual if wording is None else wording,
        train=named.train if train is None else train,
        validation=validation, test=test, unseen=tuple(unseen), clients=clients, alpha=alpha,
        questions_per_picture=questions_per_picture, test_seed=test_seed, seed=seed,
        clients_per_scene=clients_per_scene, shards=shards, pools=pools, annotators=annotators, types=types,
        own_answers=own_answers,
    )  # fmt: skip
    _one_of("types", types, ("families", "answers"))
    if types == "answers" and PRESETS[preset].tasks:
        raise ValueError(f"types = 'answers' is for questions that all have words as answers, not for {preset!r}")
    for label in ("train", "validation", "test", "clients", "clients_per_scene", "shards"):
        _at_least(label, getattr(knobs, label), 1)
    _check_pools(preset, knobs)
    _check_own_answers(preset, knobs)
    if clients_per_scene > 1 and preset != "scene":
        raise ValueError(
            f"clients_per_scene is for the preset 'scene', got {clients_per_scene} with {preset!r}; that preset's "
            "number of clients is the option clients"
        )
    _questions_per_picture(questions_per_picture)
    _at_least("test_seed", test_seed, 0)
    _at_least("seed", seed, 0)
    if not 0 <= knobs.conflict <= 1:
        raise ValueError(f"conflict must lie between 0 and 1, got {knobs.conflict}")
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    return assemble(preset, knobs)


def public_split(questions: int, seed: int, questions_per_picture: int = 4) -> tuple[Examples, Tags]:
    """Material for pre-training: all nouns, randomised styles, plain wording, no graph of any client.

    Raises ``ValueError``: a number is out of its range.
    """
    _at_least("questions", questions, 1)
    _at_least("seed", seed, 0)
    _questions_per_picture(questions_per_picture)
    made = make_public(questions, seed, questions_per_picture)
    return made.examples, made.tags


def _check_own_answers(preset: str, knobs: Knobs) -> None:
    """Check that scenes can have answers in words of their own."""
    if not 0 <= knobs.own_answers <= 1:
        raise ValueError(f"own_answers must lie between 0 and 1, got {knobs.own_answers}")
    if knobs.own_answers and preset != "scene":
        raise ValueError(f"own_answers is for the preset 'scene', got {knobs.own_answers} with {preset!r}")
    if knobs.own_answers and knobs.unseen:
        raise ValueError(
            f"unseen must be empty with own_answers, got {', '.join(knobs.unseen)}: nobody knows the words of a scene "
            "without a client"
        )


def _check_pools(preset: str, knobs: Knobs) -> None:
    """Check that answer sets, shards and unseen scenes go together."""
    kind = PRESETS[preset]
    size = kind.pools if knobs.pools is None else knobs.pools
    _at_least("pools", size, 0)
    if size == 1:
        raise ValueError("pools must be 0 (one vocabulary) or at least 2 answers, got 1")
    if kind.fixed and not size:
        raise ValueError(f"pools must be at least 2 for the preset {preset!r}, whose clients share no answers, got 0")
    if size and knobs.unseen:
        raise ValueError(
            f"unseen must be empty where clients have answer sets of their own, got {', '.join(knobs.unseen)}: nobody "
            "has a head for the answers of a scene without a client"
        )
    if knobs.shards > 1 and (not kind.divisible or knobs.clients_per_scene > 1):
        raise ValueError(
            f"shards are for the presets scene, domain and function with clients_per_scene = 1, got {knobs.shards} "
            f"with {preset!r} and clients_per_scene = {knobs.clients_per_scene}"
        )
    if knobs.annotators not in (0, 10):
        raise ValueError(f"annotators must be 0 or 10, got {knobs.annotators}")


def _one_of(label: str, value: object, valid: Iterable[str]) -> None:
    choices = list(valid)
    if value not in choices:
        raise ValueError(f"{label} must be one of {', '.join(map(str, choices))}, got {value!r}")


def _at_least(label: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{label} must be at least {least}, got {value}")


def _questions_per_picture(value: int) -> None:
    if not 1 <= value <= len(FAMILIES):
        raise ValueError(f"questions_per_picture must lie between 1 and {len(FAMILIES)}, got {value}")
