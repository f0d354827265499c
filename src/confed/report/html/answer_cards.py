"""Cards of questions with the models' answers and attention maps, and of pictures with their captions."""

from collections.abc import Mapping, Sequence
from typing import Any

from confed.report.html.attention_maps import attention_overlay
from confed.report.html.image_store import ImageStore
from confed.report.html.media import modalities_line, player, read, series_plot
from confed.report.html.page import component
from confed.results.runs import StudyResults
from confed.results.summary import number

Sample = Mapping[str, Any]


class AnswerCards:
    """Test questions with answers, or captions."""

    style = ""
    note = (
        "P: the personal model of the place's client; G: the global model. An unseen place has no client, so only the "
        "global model is asked."
    )

    def __init__(self, store: ImageStore) -> None:
        self._store = store

    def takes(self, sample: Sample) -> bool:
        """Whether a sample is a test question; what a filter picks for training questions has a section of its own."""
        return "forgotten" not in sample

    def key(self, sample: Sample) -> tuple[str, ...]:
        """Place, question, right answer and inputs."""
        return tuple(
            str(sample.get(field, "")) for field in ("place", "question", "answer", "image", "sound", "series")
        )

    def introduction(self, samples: Sequence[Sample]) -> str:
        """Nothing."""
        del samples
        return ""

    def card(self, sample: Sample, again: str) -> str:
        """One question to one method's two models; ``again`` says where a sound is that was shown before."""
        picture, second = self._store.add(sample.get("image")), self._store.add(sample.get("image2"))
        has, captions, choices = sample.get("has"), sample.get("captions"), sample.get("choices")
        answers = [
            _answer(view, given, str(sample.get("answer", "")), picture)
            for view in ("global", "personal")
            if isinstance(given := sample.get(view), Mapping)
        ]
        values = {
            "place": place_of(sample),
            "type": str(sample.get("type", "")),
            "question": str(sample.get("question", "")),
            "pictured": not (isinstance(has, list) and "image" not in has),
            "pictures": [name for name in (picture, second) if name] if picture else [],
            "others_html": self._others(sample, again),
            "choices": [str(choice) for choice in choices] if isinstance(choices, list) else None,
            "captioned": isinstance(captions, list),
            "truth": _right(sample),
            "answers": answers,
        }
        return component("question", values, template="gallery")

    def heading(self, samples: Sequence[Sample]) -> str:
        """What the second column holds."""
        captioned = any("captions" in sample for sample in samples)
        return "what people say" if captioned else "question and correct answer"

    def row(self, sample: Sample) -> tuple[str, str]:
        """Picture, or pair, and question with its right answer."""
        picture = self._store.add(sample.get("image"))
        second = self._store.add(sample.get("image2"))
        bare = not picture and isinstance(sample.get("has"), list)
        text = component(
            "asked", str(sample.get("question", "")), _right(sample), place_of(sample),
            self._others(sample, "to be heard further up"), template="gallery",
        )  # fmt: skip
        return component("small_pictures", None if bare else picture, second, template="gallery"), text

    def cell(self, given: Sample) -> str:
        """The answers of a method's personal and its global model."""
        truth = _right(given)
        answers = [
            (letter, _verdict(view_answer, truth))
            for letter, view in (("P", "personal"), ("G", "global"))
            if isinstance(view_answer := given.get(view), Mapping)
        ]
        return component("answer_pairs", answers, template="gallery")

    def shown(self, study: StudyResults, samples: Mapping[str, Sequence[Sample]]) -> int:
        """The last method whose clients have models of their own: its cards show where a model looked."""
        del study
        asked: list[bool] = []
        for method_samples in samples.values():
            asked.append(any(s.get("global") and s.get("personal") for s in method_samples))
        return max((number for number, both in enumerate(asked, 1) if both), default=0)

    def _others(self, sample: Sample, again: str) -> str:
        """The sound and the values of sensors, and which modalities there are."""
        html = modalities_line(sample.get("has"), sample.get("lacks"))
        recording = read(sample.get("sound"))
        if recording is not None:
            seconds = number(sample["sound"].get("seconds"))
            html = player(recording, seconds, "" if self._store.first(recording) else again) + html
        return series_plot(sample.get("series")) + html


def place_of(sample: Sample) -> str:
    """Place of a sample, with a remark where it is unseen."""
    return f"{sample.get('place', '')}{'' if sample.get('seen', True) else ' (unseen)'}"


def _right(sample: Sample) -> str:
    """The right answer, or all captions."""
    captions = sample.get("captions")
    return " · ".join(map(str, captions)) if isinstance(captions, list) else str(sample.get("answer", ""))


def _verdict(given: Sample, truth: str) -> dict[str, Any]:
    """The answer and whether it is right; of a caption its CIDEr, which says how near it is."""
    answer, cider = str(given.get("answer", "")), number(given.get("cider"))
    return {"answer": answer, "cider": None if cider is None else f"{100 * cider:.0f}", "right": answer == truth}


def _answer(view: str, given: Sample, truth: str, picture: str) -> dict[str, Any]:
    """One model's answer, its probability, and the picture under its attention."""
    probability = number(given.get("probability"))
    return {
        "view": view,
        "verdict": _verdict(given, truth),
        "percent": None if probability is None else f"{100 * probability:.0f}",
        "picture": picture,
        "layer_html": attention_overlay(given.get("attention"), given.get("boxes")),
    }
