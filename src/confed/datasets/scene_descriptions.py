"""Built-in captioning benchmark as a question: "Describe the picture.", for models that converse.

Pictures, captions and places are those of :mod:`confed.datasets.scene_captions`. What is asked is the same everywhere,
and a right answer is what people said of the picture: all of it is learned, each caption by its share, and a written
one is compared with up to five.
"""

from typing import Annotated

import numpy as np

from confed.data.examples import Examples, FederatedDataset, Split
from confed.data.federate import words
from confed.data.options import DrawnOptions
from confed.data.refusals import refuse
from confed.datasets.reader import reader
from confed.datasets.scene_captions import WAYS, Told, check_places
from confed.datasets.scenes.graph import SCENES
from confed.federation.ranges import AT_LEAST_ONE


@reader(
    "* question train validation test captions references unseen conflict test_seed seed",
    things="pictures", unseen=("home", "commercial"),
)  # fmt: skip
def scene_descriptions(
    options: DrawnOptions,
    question: str = "Describe the picture.",
    captions: Annotated[int, AT_LEAST_ONE] = 2,
    references: Annotated[int, AT_LEAST_ONE] = 5,
) -> FederatedDataset:
    """Pictures of 64 x 64 pixels with one question, which captions answer; a client per place.

    Raises ``ValueError``: an argument is out of its range, or a place is unknown or none is left for a client.

    Options:
        question: what is asked of every picture.
        captions: captions of a training picture.
        references: captions of a validation or test picture, of which those that are the same count once.
        test_seed: decides test pictures, their captions and the places' frequencies of colours.
        seed: decides all else.
    """
    if not question.strip():
        refuse("data.question", "a word at least", question)
    check_places(options.unseen)

    def place(scene: str, way: str | None, role: str, each: int) -> Examples:
        told = Told.draw(scene, way, role, options.size(role), options)
        return _described(scene, role, told, question, each)

    splits: dict[str, Split] = {}
    for number, scene in enumerate(scene for scene in SCENES if scene not in options.unseen):
        way = WAYS[number % len(WAYS)]
        splits[scene] = Split(
            place(scene, way, "train", captions),
            place(scene, way, "validation", references),
            place(scene, way, "test", references),
        )
    places = {scene: place(scene, None, "test", references) for scene in options.unseen}
    texts: set[str] = set()
    for split in splits.values():
        texts.update(split.train.answers, split.validation.answers)
    facts = {
        "origin": "drawn; captions follow from what stands where, put in five ways of which each client prefers one",
        "captions": f"{captions} of each training picture, up to {references} of each test picture to compare with",
        "unseen": "places that nobody trains in, described in all ways alike" if places else "none",
    }
    return FederatedDataset(
        "scene_descriptions", tuple(sorted(texts)), splits, places, words([question]), facts, outside=True
    )


def _described(scene: str, role: str, told: Told, question: str, each: int) -> Examples:
    """Pictures of one role with what people say of them, the first of it as the answer."""
    count = len(told.tags)
    everything: list[tuple[str, ...]] = []
    for picture in range(count):
        everything.append(tuple(told.caption(picture) for _ in range(each)))
    people = everything if role == "train" else [tuple(dict.fromkeys(descriptions)) for descriptions in everything]
    return Examples(
        told.pictures, np.arange(count), [question] * count, [descriptions[0] for descriptions in people],
        [told.kind(picture) for picture in range(count)], [f"{scene}/{role}/{row:06d}" for row in range(count)],
        annotations=people,
    )  # fmt: skip
