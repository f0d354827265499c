"""``summary.json``: a run's results in one machine-readable file."""

import platform
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from typing import Any

from confed.comparison.refusals import SEVERAL
from confed.data.examples import TableData
from confed.engines.local import Participation, Setup
from confed.engines.perform import Workspace, count_parameters
from confed.federation.device_tables import DeviceCounts
from confed.federation.families.public_data import UsesPublicData
from confed.federation.frozen_features import FeatureCounts
from confed.federation.specs import model_spec
from confed.privacy.examples import ProtectsExamples
from confed.privacy.ledger import PrivacyLedger
from confed.recipes.recipe import Recipe
from confed.results.folder import RunFolder, read_jsonl
from confed.results.stored import TRAINING, Records
from confed.results.summary import EXAMPLE_PRIVACY, WORST, average
from confed.results.views import OF_EVALUATED, TESTED, View
from confed.runs.digests import result_digests, source_digests
from confed.runs.encode import RunData
from confed.runs.evaluate import Examination, summarise_controls, summarise_labels
from confed.runs.privacy_spent import spent_on_records, summary_of
from confed.system.packages import packages, version
from confed.system.processor import machine
from confed.system.release import VERSION

Sent = dict[str, dict[str, int]]  # round -> client -> bytes

# Epsilon of single examples where gradients are noised --------------------------------------------------------


def spent_on_examples(setup: Setup, asked: Sent, clients: Sequence[str]) -> dict[str, Any]:
    """The field of ``summary.json``; nothing for methods without such noise."""
    method = setup.algorithm
    if method.record_privacy is not None:
        return spent_on_records(setup, method.record_privacy, asked, clients)
    if not isinstance(method, ProtectsExamples) or not method.example_privacy.noise > 0:
        return {}
    privacy = method.example_privacy
    calls = Counter(chain.from_iterable(asked.values()))
    epochs = {name: calls[name] * setup.local.epochs for name in clients}
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

LISTED = 1000  # clients that a summary lists; of more, the first so many and how many there are besides


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    names = ("torch", "transformers", "tokenizers", "numpy", "safetensors")
    return {"python": platform.python_version(), "confed": VERSION, **{name: version(name) for name in names}}


def summarise_run(
    recipe: Recipe,
    setup: Setup,
    run_data: RunData,
    folder: RunFolder,
    workspace: Workspace,
    examined: Examination,
    records: Records,
    ledger: PrivacyLedger | None = None,
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
    left, dataset = _left(recipe, run_data), run_data.dataset
    sent = _sent(records)
    listed = list(islice(run_data.clients, LISTED))
    method, (cut, texts) = setup.algorithm, run_data.texts_cut
    examples = ({} if dataset.unreadable is None else dataset.unreadable.examples).items()
    return {
        **_what_was_run(recipe, setup, run_data, metrics),
        **_results(setup, records, metrics, left, dataset.type_names),
        "examples": {name: _sizes(run_data.clients[name]) for name in listed},
        **_costs(setup, sent, read_jsonl(folder.timings)),
        "cpu_seconds": cpu,
        "peak_memory_bytes": peak,
        **_features(features),
        **_device_data(setup, device_data),
        **_parameters(setup, workspace),
        "global_model": method.global_model,
        "has_personal": method.traits.has_personal,
        **({"public_place": method.public_place()} if isinstance(method, UsesPublicData) else {}),
        "traits": method.traits.stated(),
        **_present(measures=_measures(recipe, setup)),
        "trainable": recipe.sections["model"].get("trainable", "all"),
        "errors": list(_errors(records)),
        "facts": dict(dataset.facts),
        "versions": versions(),
        "packages": packages(),
        "digests": source_digests(dataset) | result_digests(folder),
        "machine": machine(),
        **({} if model_spec(workspace.model).exact else {"exact": False}),
        "resolved": tomllib.loads(recipe.to_toml()),
        **(engine or {}),
        "notes": [*examined.notes, *_notes(run_data, left, resumed)],
        **_present(
            texts_cut={"cut": cut, "texts": texts} if cut else {},
            left_out={name: dict(roles) for name, roles in examples},
            left=left,
            modality_matrix=_with_subsets(examined, metrics),
            multilabel=summarise_labels(setup, run_data, examined, left),
            controls=summarise_controls(setup, run_data, examined, left),
            traffic=_actions(records),
        ),
        **({} if ledger is None else summary_of(ledger, listed, setup.rounds)),
        **spent_on_examples(setup, sent["bytes_down"], listed),
    }


def _notes(run_data: RunData, left: Sequence[str], resumed: bool) -> Iterator[str]:
    """What a reader of the numbers must know of clients, texts, pictures and costs."""
    (cut, texts), unreadable = run_data.texts_cut, run_data.dataset.unreadable
    if left:
        yield f"left before the end, so their last models are tried but are in no mean: {left}"
    if cut:
        yield f"{cut} of {texts} different texts are longer than the model reads and lose their end"
    if unreadable and unreadable.pictures:
        yield str(unreadable)
    if resumed:
        yield "resumed: CPU seconds and peak memory are those of the last part"


def _what_was_run(recipe: Recipe, setup: Setup, run_data: RunData, metrics: Mapping[str, str]) -> dict[str, Any]:
    several = len(set(metrics.values())) > 1
    listed = list(islice(run_data.clients, LISTED))
    return {
        "algorithm": recipe.sections["algorithm"]["name"],
        "label": setup.algorithm.title,
        "recipe": recipe.name,
        "seed": setup.seed,
        "rounds": setup.rounds,
        "metric": SEVERAL if several else next(iter(metrics.values())),
        **_present(metric_of=metrics if several else {}),
        "clients": listed,
        **_present(more_clients=len(run_data.clients) - len(listed)),
        "scenes": list(run_data.unseen),
    }


def _present(**entries: Any) -> dict[str, Any]:
    """The entries that are not empty."""
    return {key: value for key, value in entries.items() if value}


def _results(
    setup: Setup,
    records: Records,
    metrics: Mapping[str, str],
    left: Collection[str],
    type_names: Mapping[str, str],
) -> dict[str, Any]:
    """Values of all models on test data, with their means."""
    headlines: dict[View, dict[str, float]] = {view: {} for view in TESTED}
    # Every metric of the task, beside the headline's values; those by type of question are under "types".
    further: dict[str, dict[View, dict[str, Any]]] = {}
    for key in ("test_metrics", "types", "ece", "bleu4"):
        further[key] = {view: {} for view in TESTED}
    matrix: dict[str, dict[str, float]] = {}
    traits = setup.algorithm.traits
    for evaluated, tests in records.tests.items():
        view = OF_EVALUATED[evaluated]
        for tested in tests:
            place, metric, values = tested.place, metrics[tested.place], tested.metrics
            if view is View.PERSONAL and not traits.centralised and traits.has_personal:
                matrix.setdefault(tested.owner, {})[place] = values[metric]
            if tested.owner != place:
                continue
            headlines[view][place] = values[metric]
            further["test_metrics"][view][place] = {name: value for name, value in values.items() if "/" not in name}
            typed = {name: value for name, value in values.items() if name.startswith(f"{metric}/")}
            further["types"][view][place] = {name.removeprefix(f"{metric}/"): value for name, value in typed.items()}
            for key in values.keys() & {"ece", "bleu4"}:
                further[key][view][place] = values[key]
    personal = [value for place, value in headlines[View.PERSONAL].items() if place not in left]
    seen = [value for place, value in headlines[View.SEEN].items() if place not in left]
    if not any(further["bleu4"].values()):
        del further["bleu4"]
    return {
        **headlines,
        View.PERSONAL.mean: average(personal),
        WORST: min(personal, default=None),
        "personal_spread": max(personal) - min(personal) if personal else None,
        View.SEEN.mean: average(seen),
        View.UNSEEN.mean: average([*headlines[View.UNSEEN].values()]),
        "test_metrics": further.pop("test_metrics"),
        "matrix": matrix,
        **_present(type_names=dict(type_names)),
        **further,
    }


def _sizes(data: TableData) -> dict[str, int]:
    return dict(zip(("train", "validation", "test"), map(len, data.tables), strict=True))


def _errors(records: Records) -> Iterator[dict[str, Any]]:
    for facts in records.rounds:
        for client, error in facts["errors"].items():
            yield {"round": facts["round"], "client": client, "error": error}


def _measures(recipe: Recipe, setup: Setup) -> dict[str, Any]:
    """Declarations of further measures, each with how the recipe calls it."""
    named = zip(recipe.run.measures, setup.measures, strict=True)
    return {measure.name: {**measure.stated(), "of": name} for name, measure in named}


def _sent(records: Records) -> dict[str, Sent]:
    """Direction -> round -> client -> bytes."""
    sent: dict[str, Sent] = {}
    for direction in ("bytes_up", "bytes_down"):
        rounds = records.by_round(TRAINING, direction)
        sent[direction] = {}
        for facts in records.rounds:
            of_round = rounds.get(facts["round"], {})
            sent[direction][str(facts["round"])] = {client: int(count) for client, count in of_round.items()}
    return sent


def _costs(setup: Setup, sent: Mapping[str, Sent], timings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes of every round and wall-clock time."""
    rounds = [t["seconds"] for t in timings if t["round"] <= setup.rounds]
    total = 0
    for of_rounds in sent.values():
        total += sum(chain.from_iterable(of_round.values() for of_round in of_rounds.values()))
    return {
        **sent,
        "bytes_total": 0 if setup.algorithm.traits.centralised else total,
        "seconds": sum(t["seconds"] + t["evaluation_seconds"] for t in timings),
        "seconds_per_round": sum(rounds) / max(len(rounds), 1),
    }


def _features(counts: FeatureCounts | None) -> dict[str, Any]:
    """What keeping features of frozen layers has saved, or why nothing was kept."""
    if counts is None:
        return {}
    if not counts.stage:
        return {"features": {"used": False, "reason": counts.reason}}
    counted = {key: value for key, value in asdict(counts).items() if value not in ("", [])}
    return {"features": {"used": counts.reused > 0, **counted}}


def _device_data(setup: Setup, counts: DeviceCounts | None) -> dict[str, Any]:
    """Bytes of clients' examples on the device, and of those that had no room, where ``run.device_data`` is set."""
    if counts is None or not setup.device_data:
        return {}
    return {"device_data": {"reason": counts.reason} if counts.reason else {"held": counts.held, "left": counts.left}}


def _with_subsets(examined: Examination, metrics: Mapping[str, str]) -> dict[str, Any]:
    """View -> client or place -> set of modalities -> value, and how many examples it is of; nothing without any."""
    views: dict[str, dict[str, dict[str, float]]] = {}
    examples: dict[str, dict[str, int]] = {}
    for (view, place), sets in examined.subsets.items():
        values = {tried: of_set[metrics[place]] for tried, (of_set, _) in sets.items()}
        views.setdefault(OF_EVALUATED[view], {})[place] = values
        examples[place] = {tried: count for tried, (_, count) in sets.items()}
    return {**views, "examples": examples} if views else {}


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
    totals = Counter[str]()
    for client_counts in counts.values():
        totals.update(client_counts)
    return {"parameters": {key: round(totals[key] / len(counts)) for key in first}, "parameters_of": counts}


def _actions(records: Records) -> dict[str, dict[str, int]]:
    """Calls and bytes of each action, over all rounds, where a method has several servers."""
    total: dict[str, Counter[str]] = {}
    for facts in records.rounds:
        for action, counts in facts.get("traffic", {}).items():
            total.setdefault(action, Counter(calls=0, up=0, down=0)).update(counts)
    return {action: dict(counts) for action, counts in total.items()}


def _left(recipe: Recipe, run_data: RunData) -> list[str]:
    """The clients that were gone by the last round; a pooled run is measured on the same ones, to be comparable."""
    presence = Participation(recipe.run.joins, recipe.run.leaves)
    return [name for name in run_data.clients if not presence.holds(name, recipe.run.rounds)]
