"""Recipes: a TOML file whose sections name constructors and give exactly their keyword arguments.

``[algorithm]``, ``[model]``, ``[task]`` and ``[data]`` have a ``name`` and the keywords of that constructor;
any ``[data]`` may have ``missing`` besides (:mod:`confed.data.imputation`), and ``card``, a file in whose terms
they are put (:mod:`confed.datasets.card`);
``[local]`` are the fields of :class:`confed.federation.local.Local` and ``[run]`` those of
:class:`confed.recipes.run_section.RunSection`. A recipe with ``[study] methods = [...]`` runs several methods on the
same data; ``[methods.NAME]`` are the keywords of one.
There, ``name`` gives the method where the row has another name (several rows of one method), ``label`` how tables
write it, ``[methods.NAME.local]`` the row's own ``[local]``, ``[methods.NAME.model]`` its own ``[model]``, such as
another way of finetuning, and ``[methods.NAME.task]`` its own ``[task]``. ``[study] table`` names the rows that
``confed compare --methods all`` runs, ``[study] lr`` the learning rates that ``confed tune`` tries, and ``[study]
score`` what it chooses multi-label configurations by. ``[study]
headline``, and ``headline`` of a row, say which model stands in the column "deployed" of tables: "personal", or
"global_seen" (what is global, with each client's own head). ``[study] models`` names the models with which ``confed
compare --models all`` runs all methods; ``[models.NAME]`` are the keywords of one, with ``name``, ``label`` and
``[models.NAME.local]`` as for methods.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w

from confed.data.imputation import missing_of
from confed.data.pictures import Fit
from confed.federation.algorithm import Algorithm
from confed.federation.file_names import Name, Title
from confed.federation.local import Local
from confed.federation.old_keys import with_new_keys
from confed.federation.ranges import POSITIVE, check_fields
from confed.federation.reading import read_bounded
from confed.federation.specs import model_spec
from confed.recipes.objects import content_of
from confed.recipes.overrides import NAMED, Overrides, apply_overrides, kept_keys
from confed.recipes.run_section import RunSection
from confed.recipes.schema import DERIVED, arguments, plain, validate
from confed.registry import SESSION, models


def named_section(section: str, values: Mapping[str, Any], where: str | None = None) -> dict[str, Any]:
    """A section that names a constructor, checked, with defaults filled in."""
    values = dict(values)
    where = where or section
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(
            f"{where}.name must be given, the name of one {NAMED[section].kind}; there are "
            f"{', '.join(NAMED[section].names())}"
        )
    # What examples lose at random, in whose terms they are put and how pictures become squares is no dataset's affair.
    fit = values.pop("fit", None) if section == "data" else None
    missing = values.pop("missing", None) if section == "data" else None
    card = values.pop("card", None) if section == "data" else None
    checked = validate(NAMED[section][name], values, where, DERIVED.get(section, set()))
    if card is not None and not (isinstance(card, str) and card):
        raise ValueError(f"{where}.card must name a card's file, got {card!r}")
    if missing is not None:
        missing_of(missing, f"{where}.missing")
        checked = {**checked, "missing": plain(missing)}
    if fit is not None:
        if fit not in get_args(Fit) or "image_size" not in checked:
            ways = " or ".join(get_args(Fit))
            raise ValueError(f"{where}.fit must be {ways}, of a dataset with image_size, got {fit!r} of {name!r}")
        checked = {**checked, "fit": fit}
    return {"name": name, **checked, **({} if card is None else {"card": card})}


def pop_section(given: dict[str, Any], section: str, where: str) -> dict[str, Any]:
    """Takes a row's own section out of its keywords."""
    values = given.pop(section, {})
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}.{section} must be a section of [{section}]'s keys, got {values!r}")
    return dict(values)


def with_own(section: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A section with a row's own keys, those of tables one by one."""
    merged = dict(section)
    for key, value in own.items():
        before = plain(merged.get(key))
        merged[key] = {**before, **value} if isinstance(value, Mapping) and isinstance(before, dict) else value
    return merged


SECTIONS = ("algorithm", "model", "task", "data", "local", "run", "study", "methods", "models")
MOST_BYTES = 4 * 2**20  # largest file of a recipe
Headline = Literal["personal", "global_seen"]  # what a method may deploy at a client; see with_deployed


@dataclass(frozen=True, init=False)
class Recipe:
    """A validated recipe.

    From a file it comes by :func:`load_recipe`; in Python it can be made of objects, some of which no file can hold
    (``session_only``).

    Args:
        algorithm: a name, an :class:`~confed.federation.algorithm.Algorithm`, or a mapping with ``name`` and keywords.
        model: a name, a mapping, a function or class that makes the model, or a module.
        data: a name, a mapping, a function that makes the data, or a federated dataset.
        task: a name, a mapping, a class or an object; by default the task that fits the data.
        local: keys of ``[local]``, or a :class:`~confed.federation.local.Local`.
        run: keys of ``[run]``.
        name: in tables, and of the folder.
        sections: all sections as :func:`load_recipe` checks them, in place of the objects; the other arguments go with
            them.

    Raises:
        ValueError: an object of another kind, an unknown key or a wrong type.

    Example:
        >>> from confed.algorithms.fedp3 import FedP3
        >>> recipe = confed.Recipe(algorithm=FedP3(lam=0.1), model="vilt_tiny", data="scenes", run={"rounds": 2})
        >>> recipe.sections["algorithm"]["lam"], recipe.run.rounds, recipe.session_only
        (0.1, 2, ())

    Attributes:
        name: of the file, without its ending.
        sections: section -> keyword -> value, defaults filled in.
        methods: the study's methods in order; empty for a single run.
        overrides: method -> its own keywords.
        table: the rows of the recipe's full table; empty where it has none.
        lr: learning rates that tuning tries; empty for its default.
        score: what tuning chooses by, where the task counts; empty for the task's own, see :mod:`confed.studies.tune`.
        headline: what the study's methods are taken to deploy at a client, where a row does not say; see
            :func:`confed.results.summary.with_deployed`.
        models: the models that all methods can be run with, in order; empty where the recipe names none.
        variants: model -> its own keywords.
    """

    name: str
    sections: Mapping[str, Mapping[str, Any]]
    methods: tuple[str, ...] = ()
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    table: tuple[str, ...] = ()
    lr: tuple[float, ...] = ()
    headline: str = ""
    models: tuple[str, ...] = ()
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    score: str = ""

    def __init__(
        self,
        algorithm: Any = "fedavg",
        model: Any = None,
        data: Any = None,
        task: Any = None,
        local: Local | Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | None = None,
        *,
        name: str = "recipe",
        sections: Mapping[str, Mapping[str, Any]] | None = None,
        methods: tuple[str, ...] = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        table: tuple[str, ...] = (),
        lr: tuple[float, ...] = (),
        headline: str = "",
        models: tuple[str, ...] = (),
        variants: Mapping[str, Mapping[str, Any]] | None = None,
        score: str = "",
    ) -> None:
        if sections is None:
            given = {"algorithm": algorithm, "model": model, "data": data, "task": task, "local": local, "run": run}
            sections = _resolve(name, with_new_keys(content_of(given))).sections
        values = {
            "name": Name(name, "a recipe's name"), "sections": sections, "methods": methods, "table": table, "lr": lr,
            "overrides": overrides or {}, "headline": headline, "models": models, "variants": variants or {},
            "score": score,
        }  # fmt: skip
        for key, value in values.items():
            object.__setattr__(self, key, value)

    @property
    def session_only(self) -> tuple[str, ...]:
        """Names of objects that only this Python session has: ``recipe.toml`` alone cannot make the run again."""
        named = [*self.sections.values(), *self.overrides.values(), *self.variants.values()]
        names = [str(section["name"]) for section in named if "name" in section] + list(self.methods)
        return tuple(dict.fromkeys(name for name in names if name.startswith((SESSION, "__main__:"))))

    @property
    def run(self) -> RunSection:
        """The section ``[run]``."""
        return RunSection(**arguments(RunSection, self.sections["run"]))

    @property
    def local(self) -> Local:
        """The section ``[local]``."""
        values = dict(self.sections["local"])
        values["betas"] = tuple(values["betas"])
        return Local(**values)

    @property
    def algorithm(self) -> Algorithm:
        """The method of the section ``[algorithm]``."""
        return self.construct("algorithm")

    def construct(self, section: str, **derived: Any) -> Any:
        """The object that a named section describes."""
        values = dict(self.sections[section])
        return NAMED[section][values.pop("name")](**values, **derived)

    def changed(self, overrides: Overrides) -> "Recipe":
        """The same recipe with overrides, as :func:`load_recipe` takes them."""
        return parse_recipe(self.to_toml(), self.name, overrides)

    def with_run(self, **changes: Any) -> "Recipe":
        """The same recipe with other values in ``[run]``."""
        return replace(self, sections={**self.sections, "run": {**self.sections["run"], **changes}})

    @property
    def single(self) -> "Recipe":
        """The single-run recipe of its ``[algorithm]``, without its study."""
        return Recipe(name=self.name, sections=self.sections)

    def method(self, name: str) -> "Recipe":
        """The single-run recipe of one of the study's methods.

        Raises:
            ValueError: unknown keywords for that method.
        """
        where = f"methods.{name}"
        given = dict(self.overrides.get(name, {}))
        given.pop("label", None)
        given.pop("headline", None)
        parts = {section: pop_section(given, section, where) for section in ("local", "model", "task", "run")}
        row_values = {**given, "name": given.get("name", name)}
        sections = {**self.sections, "algorithm": self._own("algorithm", row_values, where)}
        for section in ("model", "task"):
            if parts[section]:
                sections[section] = self._own(section, parts[section], f"{where}.{section}")
        if parts["local"]:
            sections["local"] = validate(
                Local, with_own(self.sections["local"], parts["local"]), f"{where}.local", set()
            )
        if parts["run"]:
            # How many rounds and clients is the same for all rows, or they could not be compared.
            if other := sorted(set(parts["run"]) - {"sampling"}):
                raise ValueError(f"{where}.run may have the key sampling only, got {', '.join(other)}")
            sections["run"] = validate(RunSection, {**self.sections["run"], **parts["run"]}, f"{where}.run", set())
        return replace(self.single, sections=sections)

    def with_model(self, row: str) -> "Recipe":
        """The same study with one of its models; what the model says of ``[local]`` holds for every row.

        Args:
            row: one of ``models``, or the name of any registered model.

        Raises:
            ValueError: no such model, or faulty keywords of it.
        """
        where = f"models.{row}"
        if not re.fullmatch(r"[\w.+-]+", row):
            raise ValueError(f"study.models: a model's row has letters, digits and _ . + - only, got {row!r}")
        given = dict(self.variants.get(row, {}))
        Name(row, "study.models: a model's row")
        Title(given.pop("label", row), f"{where}.label")
        local = pop_section(given, "local", where)
        sections = {**self.sections, "model": self._own("model", {**given, "name": given.get("name", row)}, where)}
        if local:
            sections["local"] = validate(Local, with_own(self.sections["local"], local), f"{where}.local", set())
        overrides = {name: dict(given) for name, given in self.overrides.items()}
        for given in overrides.values():
            if "local" in given:
                given["local"] = {key: value for key, value in given["local"].items() if key not in local}
        return replace(self, sections=sections, overrides=overrides, models=(), variants={})

    def _own(self, section: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A row's own section on top of the recipe's; another constructor has other keywords."""
        same = given.get("name", self.sections[section]["name"]) == self.sections[section]["name"]
        before = dict(self.sections[section])
        if "source" in given:
            before.pop("revision", None)  # another model has other commits
        values = before if same else kept_keys(section, str(given["name"]), before)
        return named_section(section, {**values, **given}, where)

    def with_rows(self, rows: Sequence[str], overrides: Mapping[str, Mapping[str, Any]] | None = None) -> "Recipe":
        """The same recipe as a study of these rows.

        Args:
            rows: methods, or names of ``overrides``.
            overrides: row -> its own keywords; the recipe's by default.

        An unknown method, or faulty keywords of a row, are a ValueError.
        """
        given = self.overrides if overrides is None else overrides
        study = replace(self, methods=tuple(rows), overrides={row: given[row] for row in rows if row in given})
        for row in rows:
            study.check_row(row)
        return study

    def check_row(self, row: str) -> None:
        """Check of a row's name, which also names its folder in the study's, and of its keywords.

        Raises:
            ValueError: the name or the keywords are faulty.
        """
        if not re.fullmatch(r"[\w.:+-]+", row) or row.startswith(":"):
            raise ValueError(
                "study.methods: a row's name has letters, digits and _ . : + - only, and begins with none of . :, "
                f"got {row!r}"
            )
        if re.fullmatch(r".*\.(json|toml|html|md|csv|tex|txt|part)|figures|filter_size", row, re.IGNORECASE):
            raise ValueError(f"study.methods: a row must not be called like a file of a study's folder, got {row!r}")
        Name(row.replace(":", "."), "study.methods: a row's name")  # "module:attribute"
        Title(self.overrides.get(row, {}).get("label", row), f"methods.{row}.label")
        if self.deploys(row) not in ("", *get_args(Headline)):
            raise ValueError(
                f"methods.{row}.headline must be one of {', '.join(get_args(Headline))}, got {self.deploys(row)!r}"
            )
        single = self.method(row)
        _ = single.local, single.algorithm

    def label(self, name: str) -> str:
        """Label of one of the study's rows in tables: its own label, or its method's."""
        row_label = self.overrides.get(name, {}).get("label")
        if row_label is not None:
            return str(row_label)
        return self.method(name).algorithm.title

    def deploys(self, name: str) -> str:
        """The model that one of the study's rows deploys at a client; empty for the default of its method's kind."""
        return str(self.overrides.get(name, {}).get("headline", self.headline))

    def to_toml(self) -> str:
        """The recipe as a TOML file that gives the same recipe again."""
        content: dict[str, Any] = {"name": self.name} | {
            name: plain(section) for name, section in self.sections.items()
        }
        study: dict[str, Any] = {"methods": list(self.methods), "table": list(self.table), "lr": list(self.lr)}
        study |= {"headline": self.headline, "models": list(self.models), "score": self.score}
        if any(study.values()):
            content["study"] = {key: values for key, values in study.items() if values}
            content["methods"] = {name: plain(values) for name, values in self.overrides.items() if values}
        if self.variants:
            content["models"] = {name: plain(values) for name, values in self.variants.items() if values}
        return tomli_w.dumps(content)


def packaged_recipes() -> list[str]:
    """Names of the recipes that come with confed."""
    return sorted(p.name.removesuffix(".toml") for p in files("confed.recipes").iterdir() if p.name.endswith(".toml"))


def load_recipe(source: str | Path = "fedvqa_scenes", overrides: Overrides = ()) -> Recipe:
    """A recipe from a file, or a packaged one by name.

    Args:
        source: a path, ``recipes/NAME.toml`` or ``NAME``; where there is no such file, the packaged recipe NAME.
        overrides: ``section.key=value`` with a TOML value, such as ``algorithm.lam=0.5``; a value that is no
            TOML is taken as a string. ``~section.key`` takes a key of the recipe away, so that its default counts.
            Or a mapping: ``{"algorithm.lam": 0.5}``, in which None takes a key away.

    Raises:
        ValueError: no such recipe; an unknown key or a wrong type, with the valid ones; or a key to take away that
            the recipe does not have.
    """
    path = Path(source)
    name = path.name.removesuffix(".toml")
    if path.is_file():
        text = read_text(path)
    elif name in packaged_recipes() and str(source) in (name, f"{name}.toml", f"recipes/{name}.toml"):
        text = (files("confed.recipes") / f"{name}.toml").read_text(encoding="utf-8")
    else:
        near = get_close_matches(name, packaged_recipes(), 3)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(f"no recipe at {str(source)!r}: {hint}`confed list recipes` names those that come with confed")
    try:
        return parse_recipe(text, name, overrides)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: not TOML: {error}") from error


def parse_recipe(text: str, name: str = "recipe", overrides: Overrides = ()) -> Recipe:
    try:
        content = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("a recipe must be TOML; this one is nested too deeply") from error
    name = Name(content.pop("name", name), "a recipe's name")
    content = with_new_keys(content)
    apply_overrides(content, overrides)
    return _resolve(name, content)


def read_text(path: Path) -> str:
    """A file's text, which must be UTF-8; the mark that some editors put in front is left out."""
    try:
        return read_bounded(path, MOST_BYTES).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8 (byte {error.start + 1}); save it in that encoding") from error


def _resolve(name: str, content: Mapping[str, Any]) -> Recipe:
    for section, values in content.items():
        if section not in SECTIONS:
            near = get_close_matches(section, SECTIONS, 1)
            hint = f" did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown section [{section}];{hint} valid sections: {', '.join(SECTIONS)}")
        if not isinstance(values, Mapping):
            raise ValueError(f"{section} must be a section of keys, got {values!r}")
    sections = {section: named_section(section, content.get(section, {})) for section in NAMED}
    # A recipe with a size and no fit is one from before there were fits, or means what it says.
    if "image_size" in sections["data"] and "image_size" not in content.get("data", {}):
        of_model = pictures_of(sections["model"])
        sections["data"] |= {key: value for key, value in of_model.items() if key not in content.get("data", {})}
    sections["local"] = validate(Local, content.get("local", {}), "local", set())
    sections["run"] = validate(RunSection, content.get("run", {}), "run", set())
    study = validate(_Study, content.get("study", {}), "study", set())
    check_fields(_Study(**study), "study")
    methods = tuple(study["methods"])
    twice = next((method for method in methods if methods.count(method) > 1), None)
    if twice is not None:
        raise ValueError(
            f"study.methods must name each row once, got {twice!r} {methods.count(twice)} times; for more seeds use "
            "`confed compare --seeds`, for another setting a separate row, [methods.ROW] with its name"
        )
    overrides = {str(k): dict(v) for k, v in content.get("methods", {}).items()}
    for method in overrides:
        if method not in (*methods, *study["table"]):
            raise ValueError(
                f"[methods.{method}] is not one of the study's methods: {', '.join(methods) or 'none'}; study.methods "
                "must name it"
            )
    rows_of_models, variants = tuple(study["models"]), {str(k): dict(v) for k, v in content.get("models", {}).items()}
    for model in variants:
        if model not in rows_of_models:
            raise ValueError(f"[models.{model}] is not one of study.models: {', '.join(rows_of_models) or 'none'}")
    recipe = Recipe(
        name=name, sections=sections, methods=methods, overrides=overrides, table=tuple(study["table"]),
        lr=tuple(study["lr"]), headline=study["headline"] or "", models=rows_of_models, variants=variants,
        score=study["score"],
    )  # fmt: skip
    # Their constructors check values that types cannot.
    _ = recipe.run, recipe.local, recipe.algorithm
    # The table may be long; its other rows are checked when they are asked for.
    for method in dict.fromkeys([*methods, *overrides]):
        recipe.check_row(method)
    for model in rows_of_models:
        recipe.with_model(model)
    return recipe


def pictures_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of ``[data]`` by which pictures are as a model's own processor makes them."""
    spec, keys = model_spec(models[model["name"]]), dict[str, Any]()
    if spec.picture_side is not None and (side := spec.picture_side(model)) is not None:
        keys["image_size"] = side
    if spec.picture_fit is not None and (fit := spec.picture_fit(model)) != "squeeze":
        keys["fit"] = fit
    return keys


@dataclass(frozen=True)
class _Study:
    methods: tuple[str, ...] = ()
    table: tuple[str, ...] = ()
    lr: Annotated[tuple[float, ...], POSITIVE] = ()
    headline: Headline | None = None
    models: tuple[str, ...] = ()
    score: str = ""
