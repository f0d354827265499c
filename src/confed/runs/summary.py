"""``summary.json``: a run's results in one machine-readable file."""

import platform
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from confed.comparison.refusals import SEVERAL
from confed.data.examples import FederatedDataset
from confed.engines.local import Participation, Setup
from confed.engines.perform import Workspace, count_parameters
from confed.federation.device_tables import DeviceCounts
from confed.federation.families.public_data import UsesPublicData
from confed.federation.frozen_features import FeatureCounts
from confed.federation.specs import model_spec
from confed.privacy.examples import ProtectsExamples
from confed.recipes.recipe import Recipe
from confed.results.folder import RunFolder, read_jsonl
from confed.results.summary import EXAMPLE_PRIVACY, WORST, average
from confed.results.views import OF_EVALUATED, TESTED, View
from confed.runs.controls import summarise_controls
from confed.runs.digests import result_digests, source_digests
from confed.runs.encode import RunData
from confed.runs.evaluate import Examination
from confed.runs.pooled_metrics import summarise_labels
from confed.runs.privacy_spent import ledger_of, summary_of
from confed.system.packages import packages
from confed.system.processor import machine
from confed.system.release import VERSION

# Epsilon of single examples where gradients are noised --------------------------------------------------------


def spent_on_examples(setup: Setup, history: Sequence[Mapping[str, Any]], clients: Sequence[str]) -> dict[str, Any]:
    """The field of ``summary.json``; nothing for methods without such noise."""
    method = setup.algorithm
    if not isinstance(method, ProtectsExamples) or not method.example_privacy.noise > 0:
        return {}
    privacy = method.example_privacy
    asked: dict[str, int] = {}
    for name in clients:
        asked[name] = sum(name in line["bytes_down"] for line in history)
    epochs = {name: count * setup.local.epochs for name, count in asked.items()}
    seed = " The noise is a function of the run's seed, which has to stay secret." if privacy.repeatable else ""
    unit = "is replaced by another one" if privacy.adjacency == "replace" else "has a gradient of zero instead"
    return {
        EXAMPLE_PRIVACY: {
            "clip": privacy.clip, "noise": privacy.noise, "delta": privacy.delta, "adjacency": privacy.adjacency,
            "steps": epochs,
            "epsilon": {name: privacy.epsilon(count) for name, count in epochs.items()},
            "claimed": dict(method.claimed_epsilon(setup.rounds)),
            "guarantee": (
                f"ε at δ = {privacy.delta:g} of one example that {unit}, towards everybody who sees what its client "
                f"sends or its models (clip {privacy.clip:g}, noise multiplier {privacy.noise:g}); every step that "
                "reads the example counts, one per epoch. Numbers of examples and evaluations are not covered. Not a "
                f"guarantee of the client with all its data.{seed}"
            ),
        }
    }  # fmt: skip


# summary.json: a run's results in one machine-readable file ---------------------------------------------------

LISTED = 1000
"""Clients that a summary lists; of more, the first so many and how many there are besides."""


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    from importlib.metadata import version

    names = ("torch", "transformers", "tokenizers", "numpy", "safetensors")
    return {"python": platform.python_version(), "confed": VERSION, **{name: version(name) for name in names}}


def summarise_run(
    recipe: Recipe,
    setup: Setup,
    run_data: RunData,
    folder: RunFolder,
    workspace: Workspace,
    examined: Examination,
    *,
    cpu: float,
    peak: int,
    resumed: bool = False,
    features: FeatureCounts | None = None,
    device_data: DeviceCounts | None = None,
    engine: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of ``summary.json``."""
    metrics = {place: setup.task_of(place).metric for place in (*run_data.clients, *run_data.unseen)}
    lines, left, asked = read_jsonl(folder.metrics), _left(recipe, run_data), run_data.dataset
    traffic = [line for line in lines if line["event"] in ("round", "finish")]
    ledger = ledger_of(setup.algorithm, recipe.run, lines)
    listed = [name for name, _ in zip(run_data.clients, range(LISTED), strict=False)]
    names = dict(asked.type_names) if isinstance(asked, FederatedDataset) else {}
    return {
        "algorithm": recipe.sections["algorithm"]["name"],
        "label": setup.algorithm.title,
        "recipe": recipe.name,
        "seed": setup.seed,
        "rounds": setup.rounds,
        "metric": SEVERAL if len(set(metrics.values())) > 1 else next(iter(metrics.values())),
        **({"metric_of": metrics} if len(set(metrics.values())) > 1 else {}),
        "clients": listed,
        **({"more_clients": len(run_data.clients) - len(listed)} if len(listed) < len(run_data.clients) else {}),
        "scenes": list(run_data.unseen),
        **_results(setup, examined, metrics, left, names),
        "examples": {
            name: dict(zip(("train", "validation", "test"), map(len, run_data.clients[name].tables), strict=True))
            for name in listed
        },
        **_costs(setup, traffic, read_jsonl(folder.timings)),
        "cpu_seconds": cpu,
        "peak_memory_bytes": peak,
        **_features(features),
        **_device_data(setup, device_data),
        **_parameters(setup, workspace),
        "global_model": setup.algorithm.global_model,
        "has_personal": setup.algorithm.traits.has_personal,
        **({"public_place": setup.algorithm.public_place()} if isinstance(setup.algorithm, UsesPublicData) else {}),
        "traits": setup.algorithm.traits.stated(),
        **_measures(recipe, setup),
        "trainable": recipe.sections["model"].get("trainable", "all"),
        "errors": [
            {"round": line["round"], "client": client, "error": error}
            for line in traffic
            for client, error in line["errors"].items()
        ],
        "facts": dict(run_data.dataset.facts),
        "versions": versions(),
        "packages": packages(),
        "digests": source_digests(run_data.dataset) | result_digests(folder),
        "machine": machine(),
        **({} if model_spec(workspace.model).exact else {"exact": False}),
        "resolved": tomllib.loads(recipe.to_toml()),
        **(engine or {}),
        "notes": examined.notes
        + ([f"left before the end, so their last models are tried but are in no mean: {left}"] if left else [])
        + _cut_note(run_data)
        + _unreadable_note(run_data)
        + (["resumed: CPU seconds and peak memory are those of the last part"] if resumed else []),
        **_texts_cut(run_data),
        **_left_out(run_data),
        **({"left": left} if left else {}),
        **_with_subsets(examined, metrics),
        **({"multilabel": labelled} if (labelled := summarise_labels(setup, run_data, examined, left)) else {}),
        **({"controls": tried} if (tried := summarise_controls(setup, run_data, examined, left)) else {}),
        **({"traffic": actions} if (actions := _actions(traffic)) else {}),
        **({} if ledger is None else summary_of(ledger, listed, setup.rounds)),
        **spent_on_examples(setup, traffic, listed),
    }


def _results(
    setup: Setup,
    examined: Examination,
    metrics: Mapping[str, str],
    left: Collection[str],
    type_names: Mapping[str, str],
) -> dict[str, Any]:
    """Values of all models on test data, with their means."""
    views: dict[str, dict[str, Mapping[str, float]]] = {view: {} for view in TESTED}
    matrix: dict[str, dict[str, float]] = {}
    traits = setup.algorithm.traits
    for (view, model_owner, place), (values, _) in examined.results.items():
        if model_owner == place:
            views[OF_EVALUATED[view]][place] = values
        if view == "personal" and not traits.centralised and traits.has_personal:
            matrix.setdefault(model_owner, {})[place] = values[metrics[place]]
    headline = {view: {p: v[metrics[p]] for p, v in places.items()} for view, places in views.items()}
    personal, seen = ([v for p, v in headline[k].items() if p not in left] for k in (View.PERSONAL, View.SEEN))
    return {
        **headline,
        View.PERSONAL.mean: average(personal),
        WORST: min(personal, default=None),
        "personal_spread": max(personal) - min(personal) if personal else None,
        View.SEEN.mean: average(seen),
        View.UNSEEN.mean: average([*headline[View.UNSEEN].values()]),
        # Every metric of the task, beside the headline's values above; those by type of question are under "types".
        "test_metrics": {
            view: {place: {k: v for k, v in values.items() if "/" not in k} for place, values in places.items()}
            for view, places in views.items()
        },
        "matrix": matrix,
        **({"type_names": type_names} if type_names else {}),
        "types": {
            view: {
                place: {k.partition("/")[2]: v for k, v in values.items() if k.startswith(f"{metrics[place]}/")}
                for place, values in places.items()
            }
            for view, places in views.items()
        },
        "ece": {view: {place: v["ece"] for place, v in places.items() if "ece" in v} for view, places in views.items()},
        **_bleu(views),
    }


def _measures(recipe: Recipe, setup: Setup) -> dict[str, Any]:
    """Declarations of further measures, each with how the recipe calls it; nothing without any."""
    stated: dict[str, dict[str, Any]] = {}
    for name, measure in zip(recipe.run.measures, setup.measures, strict=True):
        stated[measure.name] = {**measure.stated(), "of": name}
    return {"measures": stated} if stated else {}


def _costs(setup: Setup, traffic: Sequence[Mapping[str, Any]], timings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes of every round and wall-clock time."""
    rounds = [t["seconds"] for t in timings if t["round"] <= setup.rounds]
    return {
        "bytes_up": {str(line["round"]): line["bytes_up"] for line in traffic},
        "bytes_down": {str(line["round"]): line["bytes_down"] for line in traffic},
        "bytes_total": 0
        if setup.algorithm.traits.centralised
        else sum(sum(line[k].values()) for line in traffic for k in ("bytes_up", "bytes_down")),
        "seconds": sum(t["seconds"] + t["evaluation_seconds"] for t in timings),
        "seconds_per_round": sum(rounds) / max(len(rounds), 1),
    }


def _features(counts: FeatureCounts | None) -> dict[str, Any]:
    """What keeping features of frozen layers has saved, or why nothing was kept."""
    if counts is None:
        return {}
    if not counts.stage:
        return {"features": {"used": False, "reason": counts.reason}}
    counted = asdict(counts)
    return {
        "features": {
            "used": counts.reused > 0,
            **{key: counted[key] for key in counted if counted[key] not in ("", [])},
        }
    }


def _device_data(setup: Setup, counts: DeviceCounts | None) -> dict[str, Any]:
    """Bytes of clients' examples on the device, and of those that had no room, where ``run.device_data`` is set."""
    if counts is None or not setup.device_data:
        return {}
    return {"device_data": {"reason": counts.reason} if counts.reason else {"held": counts.held, "left": counts.left}}


def _texts_cut(run_data: RunData) -> dict[str, Any]:
    """Number of truncated texts and of all different texts; nothing where none is truncated."""
    cut, texts = run_data.texts_cut
    return {"texts_cut": {"cut": cut, "texts": texts}} if cut else {}


def _cut_note(run_data: RunData) -> list[str]:
    cut, texts = run_data.texts_cut
    return [f"{cut} of {texts} different texts are longer than the model reads and lose their end"] if cut else []


def _unreadable_note(run_data: RunData) -> list[str]:
    out = run_data.dataset.unreadable if isinstance(run_data.dataset, FederatedDataset) else None
    return [str(out)] if out is not None and out.pictures else []


def _left_out(run_data: RunData) -> dict[str, Any]:
    """Client or unseen place -> role -> examples whose pictures cannot be read; nothing where none is left out."""
    out = run_data.dataset.unreadable if isinstance(run_data.dataset, FederatedDataset) else None
    return {"left_out": {name: dict(roles) for name, roles in out.examples.items()}} if out and out.examples else {}


def _with_subsets(examined: Examination, metrics: Mapping[str, str]) -> dict[str, Any]:
    """View -> client or place -> set of modalities -> value, and how many examples it is of; nothing without any."""
    values: dict[str, dict[str, dict[str, float]]] = {}
    examples: dict[str, dict[str, int]] = {}
    for (view, place), sets in examined.subsets.items():
        values.setdefault(OF_EVALUATED[view], {})[place] = {
            tried: subset_values[metrics[place]] for tried, (subset_values, _) in sets.items()
        }
        examples[place] = {tried: count for tried, (_, count) in sets.items()}
    return {"modality_matrix": {**values, "examples": examples}} if values else {}


def _parameters(setup: Setup, workspace: Workspace) -> dict[str, Any]:
    """Numbers of values of one client; where clients differ, the means over them and each one's own beside these."""
    counts: dict[str, dict[str, int]] = {}
    counts_by_model: dict[int, dict[str, int]] = {}
    for number in range(min(len(setup.population), LISTED)):
        info = setup.population.info(number)
        scopes = workspace.scopes(setup.algorithm, info)
        if id(scopes) not in counts_by_model:
            counts_by_model[id(scopes)] = count_parameters(workspace, scopes, setup.algorithm.traits.aggregates)
            if not setup.algorithm.traits.sends_values:
                counts_by_model[id(scopes)]["sent"] = 0
        counts[info.id] = counts_by_model[id(scopes)]
    first = next(iter(counts.values()))
    if all(client_counts == first for client_counts in counts.values()):
        return {"parameters": first}
    means: dict[str, int] = {}
    for key in first:
        means[key] = round(sum(client_counts[key] for client_counts in counts.values()) / len(counts))
    return {"parameters": means, "parameters_of": counts}


def _bleu(views: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """BLEU-4 of each place's captions, where models write some."""
    scores: dict[str, dict[str, float]] = {}
    for view, places in views.items():
        scores[view] = {p: v["bleu4"] for p, v in places.items() if "bleu4" in v}
    return {"bleu4": scores} if any(scores.values()) else {}


def _actions(rounds: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Calls and bytes of each action, over all rounds, where a method has several servers."""
    total: dict[str, dict[str, int]] = {}
    for line in rounds:
        for action, counts in line.get("traffic", {}).items():
            before = total.setdefault(action, {"calls": 0, "up": 0, "down": 0})
            total[action] = {key: before[key] + counts[key] for key in before}
    return total


def _left(recipe: Recipe, run_data: RunData) -> list[str]:
    """The clients that were gone by the last round; a pooled run is measured on the same ones, to be comparable."""
    presence = Participation(recipe.run.joins, recipe.run.leaves)
    return [name for name in run_data.clients if not presence.holds(name, recipe.run.rounds)]
