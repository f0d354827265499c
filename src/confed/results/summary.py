"""Results of a run, read from its ``summary.json``: the only place that knows its keys.

Folders of every version are read, unfinished and damaged ones too: what is missing has an empty value, and numbers that
are not finite are missing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, get_args

from confed.federation.traits import GlobalModel, Traits
from confed.results.views import View
from confed.system import format as formats

if TYPE_CHECKING:
    from confed.federation.algorithm import Algorithm

VALIDATION = "validation"
"""An unseen place of this name is looked at while training; it counts in no test result over several places."""

PRIVACY, EXAMPLE_PRIVACY = "update_privacy", "example_privacy"
"""Keys of the guarantees of clients and of single examples; the first is also that of a line of ``metrics.jsonl``."""

PRIVACY_SHOWN = 8  # rounds of a ledger that a summary states, spread evenly; of clients four times as many are shown
WORST = "personal_worst"  # key of the lowest value among personal models

LABELS: Mapping[str, tuple[str, str]] = {
    f"{view} {metric}".strip(): (view, metric) for view, metric in product(("", "unseen", "personal"), ("C-AP", "O-F1"))
}
"""Means of multi-label runs -> view and metric; the empty view is the one that heads a run's results."""

LABEL_METRICS = ("C-AP", "C-P", "C-R", "C-F1", "O-AP", "O-P", "O-R", "O-F1")

_OLDER_TRAITS: Mapping[str, str] = {
    "has_personal": "has_personal",
    "has_global": "has_global",
    "pooled": "centralised",
}
"""Key of a summary before summaries stated all traits -> trait."""


def number(value: object) -> float | None:
    """A finite number as a float, anything else as None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(value: object) -> dict[str, float]:
    """The finite numbers of a mapping; anything else is an empty one."""
    read = {str(key): number(item) for key, item in mapping(value).items()}
    return {key: item for key, item in read.items() if item is not None}


def table(value: object) -> dict[str, dict[str, float]]:
    """A mapping of mappings of numbers."""
    return {str(key): numbers(row) for key, row in mapping(value).items()}


def mapping(value: object) -> Mapping[str, Any]:
    """A mapping as it is, anything else as an empty one."""
    return value if isinstance(value, Mapping) else {}


def text(value: object) -> str:
    """A value as a text; empty where there is none."""
    return str(value or "")


def texts(value: object) -> tuple[str, ...]:
    """The entries of a list as texts; anything else is empty."""
    return tuple(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else ()


def entries(value: object) -> Sequence[Mapping[str, Any]]:
    """The mappings of a list; anything else is empty."""
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list | tuple) else ()


def words(value: object) -> dict[str, str]:
    """A mapping of texts."""
    return {str(key): str(item) for key, item in mapping(value).items()}


def whole(value: Any) -> int:
    """A whole number; 0 where there is none."""
    return int(0 if value is None else value)


def average(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are there, None if none is."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


Read = TypeVar("Read")
Read_co = TypeVar("Read_co", covariant=True)


def _entry(key: str, read: Callable[[Any], Read]) -> Read:
    """A property: what a function reads of the entry under a key, None where it is missing."""

    def value(summary: "Summary") -> Read:
        return read(summary.content.get(key))

    return cast("Read", property(value))


class _OfView(Protocol[Read_co]):
    def __call__(self, view: View) -> Read_co: ...


def _of_view(key: str, read: Callable[[Any], Read], *, counted: bool = False) -> _OfView[Read]:
    """A method: what a function reads of a view's part of an entry; ``counted``: only places that means are over."""

    def value(summary: "Summary") -> _OfView[Read]:
        def of(view: View) -> Read:
            places = mapping(mapping(summary.content.get(key)).get(summary.view(view)))
            return read({place: value for place, value in places.items() if not counted or place not in summary.left})

        return of

    return cast("_OfView[Read]", property(value))


@dataclass(frozen=True)
class Summary:
    """Results of a run."""

    content: Mapping[str, Any]  # of `summary.json`; of an interrupted run what its other files tell
    # The view of what the method deploys at a client, where tables have a column of it; else None.
    deploys: View | None = None

    # What was run ---------------------------------------------------------------------------------------------

    algorithm = _entry("algorithm", text)  # the method's registered name

    @property
    def label(self) -> str:
        """The method's name as people write it."""
        return str(self.content.get("label", self.algorithm))

    recipe = _entry("recipe", text)  # name of the recipe
    seed = _entry("seed", whole)  # the run's seed
    rounds = _entry("rounds", whole)  # rounds that were done
    planned_rounds = _entry("planned_rounds", whole)  # rounds of the recipe of an interrupted run; 0 of a finished one

    metric = _entry(
        "metric", lambda name: text(name) or "accuracy"
    )  # of the headline; `SEVERAL` where places have such
    metrics_of_places = _entry("metric_of", words)  # place -> its headline metric, where places have several
    trainable = _entry("trainable", text)  # which part of the model is trained; empty where unknown
    clients = _entry("clients", texts)  # clients in the federation's order; of very many the first ones
    more_clients = _entry("more_clients", whole)
    """Clients besides :attr:`clients`."""
    scenes = _entry("scenes", texts)  # unseen places: they took no part in training
    left = _entry("left", texts)  # clients that left before the end; they are in no mean
    sites = _entry("federation", mapping)  # client -> its site, of a federation across machines

    @cached_property
    def traits(self) -> Traits:
        """What the run states of its method; of older runs, what the registered method says."""
        stated, method = self.content.get("traits"), _registered(self.algorithm)
        traits = Traits() if isinstance(stated, Mapping) or method is None else method.traits
        older = {trait: self.content.get(key) for key, trait in _OLDER_TRAITS.items()}
        values: dict[str, Any] = {trait: value for trait, value in older.items() if isinstance(value, bool)}
        for name, default in traits.stated().items():
            value = mapping(stated).get(name)
            if type(value) is type(default):
                values[name] = value
        return replace(traits, **values)

    @cached_property
    def global_model(self) -> GlobalModel:
        """What is global of the method and the model; older runs say whether the method has private heads."""
        stated: Any = self.content.get("global_model")
        if stated in get_args(GlobalModel):
            return stated
        if not self.traits.has_global:
            return "none"
        private_heads = mapping(self.content.get("traits")).get("private_heads", self.content.get("own_heads"))
        if private_heads is None:
            private_heads = _needs_own_parts(self.algorithm)
        return "with own parts" if private_heads else "alone"

    @property
    def is_bound(self) -> bool:
        """Whether it is a bound on what a federation could reach; bounds are not ranked."""
        return self.traits.centralised

    @property
    def without_personal(self) -> bool:
        """Whether the method makes no models of the clients' own; the global one stands where these would."""
        return not self.traits.has_personal

    @property
    def without_global(self) -> bool:
        """Whether the method makes no global model: clients train alone, or keep private parts."""
        return self.global_model == "none"

    def public_place(self, recipe: Mapping[str, Any]) -> str:
        """The unseen place whose examples every client holds; empty where the method has none."""
        stated = self.content.get("public_place", mapping(recipe.get("algorithm")).get("public"))
        return stated if isinstance(stated, str) else ""

    # Results --------------------------------------------------------------------------------------------------

    def view(self, view: View) -> View:
        """The view itself; of what is deployed, the one that it is."""
        return (self.deploys or View.PERSONAL) if view is View.DEPLOYED else view

    def values(self, view: View) -> dict[str, float]:
        """Place -> headline value; of what is deployed only where tables have a column of it."""
        if view is View.DEPLOYED and self.deploys is None:
            return {}
        return numbers(self.content.get(self.view(view)))

    def counted(self, view: View) -> dict[str, float]:
        """Place -> headline value, of those that means are over: clients that left before the end are not."""
        return {place: value for place, value in self.values(view).items() if place not in self.left}

    def headline(self, name: str) -> float | None:
        """A mean that heads the results, worked out from its places where it is not stated.

        Args:
            name: ``View.mean``, :data:`WORST`, or one of :data:`LABELS`.
        """
        if name in LABELS:
            view, metric = LABELS[name]
            return self.label_value(metric, view)
        stated = number(self.content.get(name))
        if stated is not None:
            return stated
        if name == WORST:
            return min(self.counted(View.PERSONAL).values(), default=None)
        return average([*self.counted(View(name.removesuffix("_mean"))).values()])

    metrics = _of_view("test_metrics", table)  # view -> place -> every metric of the task
    measures = _entry("measures", mapping)
    """Name of a further measure (``run.measures``) -> its declaration: "title", "better", "mean" ..."""

    def measured(self, name: str, view: View) -> dict[str, float]:
        """Place -> value of a metric or further measure, of places that means are over."""
        places = self.metrics(view)
        return {place: of[name] for place, of in places.items() if name in of and place not in self.left}

    types = _of_view("types", table)  # view -> place -> type of question -> headline value
    type_names = _entry("type_names", words)  # type of question -> how people write it
    calibration = _of_view("ece", numbers, counted=True)  # view -> place -> expected calibration error
    captioned = _entry("bleu4", lambda stated: stated is not None)  # whether models write captions
    bleu4 = _of_view("bleu4", numbers, counted=True)  # view -> place -> BLEU-4 of its captions
    matrix = _entry("matrix", table)  # owner of a personal model -> place -> value
    has_modality_matrix = _entry("modality_matrix", bool)  # whether models were tried with sets of modalities
    modality_matrix = _of_view("modality_matrix", table)  # view -> place -> set of modalities -> value
    controls = _of_view("controls", mapping)  # view -> results under control conditions; empty where none were tried
    controls_left_out = _entry("controls", lambda stated: words(mapping(stated).get("left_out")))
    """View, or "all" -> why control conditions were not tried."""

    # Labels ---------------------------------------------------------------------------------------------------

    labelled = _entry("multilabel", mapping)
    """Results of multi-label data (:mod:`confed.runs.evaluate`); empty for other data."""
    is_labelled = _entry("multilabel", lambda stated: isinstance(stated, Mapping))
    label_view = _entry("multilabel", lambda stated: text(mapping(stated).get("headline")))
    """The view that heads multi-label results: "global", "unseen/<place>" or "personal"."""

    def label_section(self, view: str = "", level: str = "") -> Mapping[str, Any]:
        """Metrics of one view of multi-label results (by default the one that heads them), at one level of labels."""
        section = mapping(self.labelled.get(view or self.label_view))
        return mapping(section.get(level)) if level else section

    def label_value(self, metric: str, view: str = "", level: str = "") -> float | None:
        """One value of multi-label results, a fraction; None where there is none."""
        return number(self.label_section(view, level).get(metric))

    # Data, costs and circumstances -----------------------------------------------------------------------------

    examples = _entry("examples", table)  # client -> role ("train", "validation", "test") -> number of examples
    left_out = _entry("left_out", mapping)  # client or unseen place -> role -> examples whose pictures cannot be read

    def cost(self, key: str) -> float | None:
        """A number that is stated once: "bytes_total", "seconds", "seconds_per_round", "cpu_seconds" ..."""
        return number(self.content.get(key))

    parameters = _entry("parameters", numbers)  # values of one client's model: "total", "trained", "sent" and "stored"
    parameters_of = _entry("parameters_of", table)  # client -> the same, where clients differ
    is_site = _entry("site", lambda name: name is not None)  # whether it is what a site keeps, without results

    def sent(self, direction: str) -> list[dict[str, float]] | None:
        """Client -> bytes, of each round; ``direction`` is "bytes_up" or "bytes_down"; None where not counted."""
        rounds = self.content.get(direction)
        return [numbers(line) for line in rounds.values()] if isinstance(rounds, Mapping) else None

    actions = _entry("traffic", table)  # action of a split method -> "calls", "up" and "down"
    features = _entry("features", mapping)  # what keeping features of frozen layers saved

    errors = _entry("errors", entries)  # calls that failed: "round", "client" and "error"
    notes = _entry("notes", texts)  # what a reader of the numbers must know
    facts = _entry("facts", mapping)  # sizes and floors of the data
    versions = _entry("versions", mapping)  # package -> version
    packages = _entry("packages", mapping)  # every installed package -> version
    machine = _entry("machine", mapping)  # processor and system
    digests = _entry("digests", mapping)  # what -> SHA-256 of it

    def privacy(self, key: str) -> Mapping[str, Any]:
        """A guarantee, :data:`PRIVACY` or :data:`EXAMPLE_PRIVACY`; empty where none is given."""
        return mapping(self.content.get(key))

    missing_sites = _entry("membership", lambda stated: words(mapping(stated).get("missing")))
    """Site of a federation that was not evaluated -> why."""

    @property
    def membership(self) -> str:
        """Share of a federation's sites that the means are over, such as "1 of 2 sites"; empty where all are."""
        if not self.missing_sites:
            return ""
        evaluated = len(self.content["membership"]["evaluated"])
        return f"{evaluated} of {evaluated + len(self.missing_sites)} sites"

    def over_clients(self, words: str) -> str:
        """Words for a mean over clients, which say over which where some sites have no result."""
        if not self.membership:
            return words
        if "over clients" in words:
            return words.replace("over clients", f"over {self.membership}")
        return f"{words}, {self.membership}"


# Which model a method deploys at a client ---------------------------------------------------------------------

DEPLOYABLE = (View.PERSONAL, View.SEEN)
"""What may be deployed: each client's own model; what is global, with each client's own head where it has one."""


def check_headline(value: str, where: str) -> str:
    """The value, if it is one of :data:`DEPLOYABLE` or empty (as a method's kind asks); else a ``ValueError``."""
    if value not in ("", *DEPLOYABLE):
        raise ValueError(f"{where} must be one of {', '.join(DEPLOYABLE)}, got {value!r}")
    return value


def deployed_by(global_model: GlobalModel) -> View:
    """What a method deploys unless a recipe says otherwise."""
    return View.SEEN if global_model == "with own parts" else View.PERSONAL


def deploys(summary: Summary, wanted: str = "") -> View:
    """What a run's method deploys: the wanted view or its own, if it has values."""
    view = View(wanted) if wanted else deployed_by(summary.global_model)
    return view if summary.content.get(view) else View.PERSONAL


def with_deployed(summaries: Sequence[Summary], wanted: Sequence[str] = ()) -> list[Summary]:
    """The same summaries with what each deploys, so that methods of different kinds stand in one column."""
    views = [deploys(*pair) for pair in zip(summaries, wanted or [""] * len(summaries), strict=True)]
    if View.SEEN not in views:
        return [replace(summary, deploys=None) for summary in summaries]
    return [replace(summary, deploys=view) for summary, view in zip(summaries, views, strict=True)]


def deployed_note(firsts: Mapping[str, Summary]) -> str:
    """What is deployed by whom, in a sentence."""
    labels_of: dict[View, list[str]] = {view: [] for view in DEPLOYABLE}
    for label, summary in firsts.items():
        if summary.deploys is not None:
            labels_of[summary.deploys].append(label)
    heads = any(firsts[label].global_model == "with own parts" for label in labels_of[View.SEEN])
    shared = "what is global, with each client's own head where it has one" if heads else "the global model"
    parts = [f"{shared} ({formats.names(labels_of[View.SEEN])})"]
    if labels_of[View.PERSONAL]:
        parts.append(f"each client's own model ({formats.names(labels_of[View.PERSONAL])})")
    return f"Deployed, on each client's test data: {', or '.join(parts)}."


def personal_note(firsts: Mapping[str, Summary]) -> str:
    """Which methods' personal values are the global model's, in a sentence; the empty text if none are."""
    labels = [label for label, summary in firsts.items() if summary.without_personal]
    if not labels:
        return ""
    return f"{formats.names(labels)}: no models of the clients' own, so under personal stands the global model."


def global_note(firsts: Mapping[str, Summary]) -> str:
    """Which methods have nothing under global, in a sentence; the empty text if all have."""
    labels = [label for label, summary in firsts.items() if summary.without_global]
    verb = "trains" if len(labels) == 1 else "train"
    whose = "its" if len(labels) == 1 else "their"
    return f"{formats.names(labels)} {verb} no shared model, so {whose} global columns are empty." if labels else ""


@lru_cache(maxsize=256)
def _registered(name: str) -> "type[Algorithm] | None":
    """The method of that name; None where none is registered here."""
    from confed.federation.algorithm import Algorithm
    from confed.registry import algorithms

    try:
        method = algorithms[name]
    except ValueError:
        return None
    return method if isinstance(method, type) and issubclass(method, Algorithm) else None


@lru_cache(maxsize=256)
def _needs_own_parts(name: str) -> bool:
    """Whether the registered method needs parts of clients' own on a model with a head, as all early ones had."""
    method = _registered(name)
    try:
        return method is not None and method().global_model == "with own parts"
    except ValueError:  # it keeps the model's head private, and was not told which one that is
        return True
