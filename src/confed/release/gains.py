"""What each site gained: alone, federated, personal, pooled, with an interval of the difference."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from confed.analysis.case import Case
from confed.federation.file_names import name_of_file
from confed.metrics.statistics import LEVEL, holm
from confed.metrics.stratified import flip_interval, sign_flip
from confed.recipes.recipe import Recipe, load_recipe, named_section
from confed.results.folder import RunFolder, kind_of
from confed.runs.run import run
from confed.system import format as formats
from confed.system.events import Progress


@dataclass(frozen=True)
class Gain:
    """One site's test scores, as shares, and what it gained over training alone."""

    site: str
    alone: float
    together: float | None  # the global model
    personal: float | None  # the site's own model of the federation
    pooled: float | None  # one model trained on all sites' records: a bound, which no site could have
    deployed: str  # which of the two the difference is of
    difference: float  # deployed minus alone
    low: float | None
    high: float | None
    p: float  # after Holm's correction over the sites
    examples: int
    noised: bool = False  # whether the federation's model has noise of its privacy, which the one alone has not

    @property
    def sentence(self) -> str:
        """Whether the site should stay, as it follows from the interval and the corrected p-value."""
        figure = f"{formats.points(self.difference)} points"
        if self.low is not None and self.high is not None:
            figure += f" [{formats.points(self.low)}, {formats.points(self.high)}]"
        if self.noised:
            figure += " after the noise of its privacy, against a model alone without noise,"
        if self.p <= LEVEL and self.difference > 0:
            return f"{self.site} should stay: the federation is worth {figure} to it."
        if self.p <= LEVEL:
            return f"{self.site} should not stay for accuracy's sake: alone it is better, {figure}."
        return f"{self.site}: not shown either way after correction, {figure} on {self.examples} test records."


def references(case: Case) -> dict[str, Path]:
    """Folders of the rows ``local`` and ``central`` of the study that the run is part of, as far as there are any."""
    study = case.folder.resolve().parent.parent
    if kind_of(study) != "study":
        return {}
    folders: dict[str, Path] = {}
    for row in study.iterdir():
        folder = row / case.folder.name
        name = name_of_file(row.name)
        if name in ("local", "central") and (folder / "summary.json").is_file():
            recipe = load_recipe(RunFolder(folder).recipe)
            if recipe.sections["data"] == case.recipe.sections["data"] and recipe.run.seed == case.recipe.run.seed:
                folders[name] = folder
    return folders


def gains(case: Case, found: Mapping[str, Path], progress: Progress) -> list[Gain]:
    """Every site's gain; a reference that no study has is trained in a folder that does not stay."""
    with tempfile.TemporaryDirectory() as scratch:
        scores = {"": _scores(case.folder)}
        for name in ("local", "central"):
            folder = found.get(name) or _train(case.recipe, name, Path(scratch) / name, progress)
            scores[name] = _scores(folder)
    rows = compared(scores[""], scores["local"], scores["central"], case.sites)
    return [replace(row, noised=case.noised) for row in rows]


def _train(recipe: Recipe, method: str, folder: Path, progress: Progress) -> Path:
    """A run of the same recipe with another method and without protections."""
    sections = {**recipe.sections, "algorithm": named_section("algorithm", {"name": method})}
    reference = replace(recipe.single, sections=sections).with_run(
        gallery=0, checkpoint_every=0, controls="none", buffer=0
    )
    run(reference, folder, progress=progress)
    return folder


def _scores(folder: Path) -> Mapping[str, Tensor]:
    return load_file(RunFolder(folder).predictions)


def compared(
    federated: Mapping[str, Tensor], local: Mapping[str, Tensor], central: Mapping[str, Tensor], sites: list[str]
) -> list[Gain]:
    """Gains from the scores of test records: tensors called ``VIEW/SITE/correct``."""
    rows: list[Gain] = []
    for site in sites:
        alone, personal, together = (
            scores.get(f"{view}/{site}/correct")
            for scores, view in ((local, "personal"), (federated, "personal"), (federated, "global"))
        )
        pooled = central.get(f"global/{site}/correct", central.get(f"personal/{site}/correct"))
        deployed, view = (together, "global") if personal is None else (personal, "personal")
        if alone is None or deployed is None or len(alone) != len(deployed) or not len(alone):
            continue
        differences = [(deployed.double() - alone.double()).numpy()[None]]
        interval, test = flip_interval(differences), sign_flip(differences)
        low, high = (None, None) if interval is None else (interval.low, interval.high)
        rows.append(
            Gain(
                site, float(alone.double().mean()), _mean(together), _mean(personal), _mean(pooled), view,
                test.difference, low, high, test.p, len(alone),
            )
        )  # fmt: skip
    corrected = holm({row.site: row.p for row in rows}).adjusted
    return [replace(row, p=corrected[row.site]) for row in rows]


def _mean(scores: Tensor | None) -> float | None:
    return None if scores is None else float(scores.double().mean())
