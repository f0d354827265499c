"""Built-in benchmark of visual question answering: small drawn pictures of six places.

Pictures of 64 x 64 pixels hold 3 to 6 things on a grid of 4 x 4 cells. Six scenes differ in background,
palette, things and colour frequencies; four of them take part and two are seen by no client. Two knobs set
what the clients share: ``conflict`` turns each scene's colour wheel another way, so that clients disagree
about the name of a colour and personal models pay; ``wording`` re-codes ten words for all clients, which the
pre-trained backbone has never read, so that learning together pays.
"""

from dataclasses import replace
from typing import Annotated, Literal

from confed.data.examples import Examples, FederatedDataset
from confed.data.refusals import check_distinct, left_for_clients, refuse
from confed.datasets.reader import reader
from confed.datasets.scenes.graph import COLOURS, NOUNS, SCENES, SIZES, Tags
from confed.datasets.scenes.making import SETTINGS, Knobs, make_public
from confed.datasets.scenes.presets import PRESETS, assemble
from confed.datasets.scenes.questions import ANSWERS, FAMILIES, WORDING_SHIFT, WORDS, oracle
from confed.federation.ranges import AT_LEAST_ONE, SHARE, check_value

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


@reader(
    "setting preset * train validation test unseen conflict wording clients clients_per_scene shards pools annotators "
    "types own_answers alpha questions_per_picture test_seed seed",
)  # fmt: skip
def scenes(
    knobs: Knobs,
    setting: Literal["A", "B", "C"] = "C",
    preset: Literal["scene", "dirichlet", "quantity", "random", "domain", "function", "task"] = "scene",
    train: Annotated[int | None, AT_LEAST_ONE] = None,
    unseen: tuple[str, ...] | None = None,
    conflict: Annotated[float | None, SHARE] = None,
    wording: bool | None = None,
) -> FederatedDataset:
    """The benchmark, generated on the spot; equal arguments give equal bytes.

    Raises ``ValueError``: an argument is out of its range, or a scene, setting or preset is unknown.

    Options:
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
        test: test questions per client; an unseen scene always has 1,000.
        unseen: scenes without a client; None takes the preset's: two, or none where clients have
            answer sets of their own.
        conflict: how far the scenes turn the colour wheel, 0 to 1; None takes the setting's.
        wording: whether the ten words are re-coded; None takes the setting's, but not for "random".
        test_seed: decides test sets and what defines a client (colour frequencies, answer shares, sizes).
    """
    kind, named = PRESETS[preset], SETTINGS[setting]
    if unseen is None:
        unseen = () if knobs.pools or knobs.own_answers else kind.unseen
    check_distinct("unseen", unseen, SCENES)
    if preset == "scene":
        left_for_clients(SCENES, unseen)
    usual_wording = named.wording if kind.wording is None else kind.wording
    knobs = replace(
        knobs,
        train=named.train if train is None else train,
        unseen=tuple(unseen),
        conflict=named.conflict if conflict is None else conflict,
        wording=usual_wording if wording is None else wording,
    )
    if knobs.types == "answers" and kind.tasks:
        refuse("data.types = 'answers'", "questions that all have words as answers", preset)
    _check_pools(preset, knobs)
    for option in ("own_answers", "clients_per_scene"):
        if getattr(knobs, option) > int(option == "clients_per_scene") and preset != "scene":
            refuse(f"data.{option}", "the preset 'scene'", preset, remedy="number of other clients: data.clients")
    return assemble(preset, knobs)


def public_split(questions: int, seed: int, questions_per_picture: int = 4) -> tuple[Examples, Tags]:
    """Material for pre-training: all nouns, randomised styles, plain wording, no graph of any client."""
    check_value(questions, Annotated[int, AT_LEAST_ONE], "questions")
    made = make_public(questions, seed, questions_per_picture)
    return made.examples, made.tags


def _check_pools(preset: str, knobs: Knobs) -> None:
    """Check that answer sets, shards and unseen scenes go together."""
    kind = PRESETS[preset]
    size = kind.pools if knobs.pools is None else knobs.pools
    if size == 1 or (kind.fixed and not size):
        one = "" if kind.fixed else " or 0 (one vocabulary)"
        refuse("pools", f"at least 2 answers{one} for the preset {preset!r}", size)
    if (size or knobs.own_answers) and knobs.unseen:
        remedy = "nobody knows the answers of a scene without a client"
        refuse("unseen", "no place where clients have answers of their own", knobs.unseen, remedy=remedy)
    if knobs.shards > 1 and (not kind.divisible or knobs.clients_per_scene > 1):
        given = f"{preset!r} and clients_per_scene = {knobs.clients_per_scene}"
        refuse("shards", "the presets scene, domain or function with clients_per_scene = 1", found=given)
