"""What each site sent, what it gained by the federation (with an interval), and which sites stand out."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from confed.analysis.case import VALIDATION, Case, flattened, sent_model
from confed.federation.file_names import name_of_file
from confed.federation.params import Params
from confed.metrics.statistics import LEVEL, holm
from confed.metrics.stratified import flip_interval, sign_flip
from confed.recipes.recipe import Recipe, load_recipe, named_section
from confed.results.folder import RunFolder, kind_of
from confed.results.stored import TRAINING, Records
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


# Sites that stand out ------------------------------------------------------------------------------------------


LEAST_SITES, FAR = 5, 3.5
"""A value stands out where it is more than 3.5 robust standard deviations from the median of the sites (Iglewicz and
Hoaglin 1993, "How to detect and handle outliers"); with fewer than five sites that is not said of any."""

LOOKED_AT = 300  # validation records that updates are tried on


@dataclass(frozen=True)
class Standing:
    """One site among the others."""

    site: str
    rounds: int  # in which it sent an update
    norm: float  # of its updates, the mean over rounds
    cosine: float | None  # between its update and the sum of the others', the mean over rounds
    losses: tuple[float, ...]  # of its updates on all sites' validation records, in the first, a middle, the last round
    influence: float | None  # how far the model moves without the site, as a share of how far training moved it
    far: tuple[str, ...]  # the figures with which it stands out


def robust_z(values: Sequence[float]) -> np.ndarray:
    """Distances from the median in robust standard deviations, 0.6745 (x - median) / MAD."""
    centred = np.asarray(values, dtype=np.float64) - np.median(values)
    spread = np.median(np.abs(centred))
    return np.zeros_like(centred) if spread == 0 else 0.6745 * centred / spread


def standing(case: Case) -> list[Standing]:
    """All sites that sent updates; influence is given of those without which the run was trained."""
    watched = case.replay[0]
    sites = [site for site in case.sites if site in watched.norms]
    columns: dict[str, list[float | None]] = {
        "norm": [float(np.mean(watched.norms[site])) for site in sites],
        "cosine": [float(np.mean(watched.cosines[site])) if site in watched.cosines else None for site in sites],
        "influence": [influence_of(case, site) if site in case.left_out else None for site in sites],
    }
    far: dict[str, list[str]] = {site: [] for site in sites}
    for name, values in columns.items():
        known = [value for value in values if value is not None]
        if len(known) == len(sites) >= LEAST_SITES:
            for site in np.array(sites)[np.abs(robust_z(known)) > FAR].tolist():
                far[site].append(name)
    rows: list[Standing] = []
    for site, norm, cosine, influence in zip(sites, *columns.values(), strict=True):
        losses = _losses(case, site)
        rows.append(Standing(site, len(watched.norms[site]), norm or 0.0, cosine, losses, influence, tuple(far[site])))
    return rows


def _losses(case: Case, site: str) -> tuple[float, ...]:
    """Mean loss of a site's model, as it sent it, on all sites' validation records."""
    rows, watched = case.records(VALIDATION, LOOKED_AT), case.replay[0]
    if case.unasked or case.algorithm.global_model != "alone" or case.algorithm.traits.changes or not rows:
        return ()
    seen = [of_round[site] for of_round in (watched.first, watched.middle, watched.last) if site in of_round]
    return tuple(float(case.losses(sent_model(*pair), rows, VALIDATION).mean()) for pair in seen)


def influence_of(case: Case, site: str) -> float | None:
    """Distance between the released model and the one without a site, over the distance from the start of training."""
    without, apart, moved = case.without(site), 0.0, 0.0
    for owner in case.released.keys() & without.keys():
        apart += _distance(case.released[owner], without[owner])
        moved += _distance(case.released[owner], case.workspace.initial)
    return None if moved == 0 else apart / moved


def _distance(a: Params, b: Params) -> float:
    names = sorted(name for name in a.keys() & b.keys() if a[name].is_floating_point())
    return float(torch.dist(flattened(a, names), flattened(b, names)))


# What left each site -------------------------------------------------------------------------------------------


KINDS = {"lora": "LoRA", "adapter": "adapters", "prompt": "prompts"}


@dataclass(frozen=True)
class Sent:
    """What one site sent in all rounds."""

    site: str
    records: int | None  # it trained on
    rounds: str  # in which it took part, such as "1–10"
    times: int
    bytes: int


def sent_by_site(records: Records, examples: Mapping[str, Mapping[str, float]], sites: Sequence[str]) -> list[Sent]:
    """Sites with the rounds in which they took part, and the bytes that they sent in these."""
    bytes_up = records.by_round(TRAINING, "bytes_up")
    rows: list[Sent] = []
    for site in sites:
        sent: dict[int, float] = {}
        for facts in records.rounds:
            in_round = bytes_up.get(facts["round"], {})
            if site in in_round and site not in facts["errors"]:
                sent[facts["round"]] = in_round[site]
        count = examples.get(site, {}).get("train")
        rounds = spans(list(sent))
        rows.append(Sent(site, None if count is None else int(count), rounds, len(sent), int(sum(sent.values()))))
    return rows


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: "1–4, 6"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in ranges) or "none"


def tensor_kinds(tensors: Params, heads: Sequence[str]) -> dict[str, int]:
    """Kind of tensor -> number of values: LoRA, adapters and prompts by their names, heads, and everything else."""
    kinds: dict[str, int] = {}
    for name, tensor in tensors.items():
        kind = "head" if name.startswith(tuple(heads)) else "other layers"
        kind = next((label for word, label in KINDS.items() if word in name), kind)
        kinds[kind] = kinds.get(kind, 0) + tensor.numel()
    return kinds
