"""Combinations of model, task and data that cannot work: the table :data:`RULES`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from confed.data.examples import FederatedDataset
from confed.data.labelled import LabelDataset
from confed.federation.specs import ModelSpec, TaskSpec, model_spec, task_spec
from confed.recipes.recipe import Recipe
from confed.registry import models

__all__ = ["RULES", "Combination", "Rule", "check_combination", "combination"]

Targets = Literal["answers", "captions", "labels"]
_TASK_FOR = {"answers": "vqa", "captions": "captioning", "labels": "multilabel"}


@dataclass(frozen=True)
class Combination:
    """Facts of a recipe's combination that rules ask for; "task" is empty before the task is known.

    Attributes:
        targets: what the examples of the data have.
        own: "tasks" or "answer sets" where clients have such of their own; empty where these are the same for all.
        reads_answers: whether the model's tokenizer makes tokens of answers, which the model writes then.
        wraps: whether the task replaces the model's answer head.
        conversed: whether answers end conversations of several turns, or with any number of pictures.
        heads_missing: tasks of clients that the model has no head for, with the clients.
    """

    model: str
    data: str
    task: str = ""
    model_spec: ModelSpec = field(default_factory=ModelSpec)
    task_spec: TaskSpec = field(default_factory=TaskSpec)
    targets: Targets = "answers"
    own: Literal["", "tasks", "answer sets"] = ""
    reads_answers: bool = False
    wraps: bool = False
    conversed: bool = False
    heads_missing: str = ""

    @property
    def writes(self) -> str:
        """Output of a generative model: "answers", "captions" or nothing."""
        return "answers" if self.reads_answers else self.model_spec.writes

    @property
    def task_that_writes(self) -> str:
        """Tasks of a model that writes answers, in quotes."""
        return '"chat" or "generation"' if self.model_spec.converses else '"generation"'

    @property
    def task_for_data(self) -> str:
        """A task for these targets."""
        return "generation" if self.reads_answers and self.targets == "answers" else _TASK_FOR[self.targets]


class Rule(NamedTuple):
    """One line of the table: the combinations that cannot work, and what to set instead."""

    refused: Callable[[Combination], bool]
    message: str


RULES = (
    # Model x data.
    Rule(
        lambda c: c.targets == "labels" and (c.reads_answers or c.model_spec.reads == "regions"),
        "the model {c.model!r} answers questions, and dataset {c.data!r} has labels: set model.name to a model that "
        'scores labels, such as "vit_mini" or "ctran_mini"',
    ),
    # Task x data.
    Rule(
        lambda c: c.targets != "captions" and c.task_spec.judges == "captions",
        'task.name = "{c.task}" needs pictures with captions, and dataset {c.data!r} has {c.targets}: set task.name = '
        '"{c.task_for_data}", or data.name to a dataset with captions, such as "scene_captions"',
    ),
    Rule(
        lambda c: c.targets == "captions" and bool(c.task) and c.task_spec.judges != "captions",
        'dataset {c.data!r} has captions, not questions: set task.name = "captioning", got {c.task!r}',
    ),
    Rule(
        lambda c: c.targets == "labels" and bool(c.task) and c.task_spec.judges != "labels",
        'dataset {c.data!r} has labels, not questions: set task.name = "multilabel", got {c.task!r}',
    ),
    Rule(
        lambda c: c.targets != "labels" and c.task_spec.judges == "labels",
        'dataset {c.data!r} has {c.targets}, not labels: set task.name = "{c.task_for_data}", got {c.task!r}',
    ),
    Rule(
        lambda c: c.wraps and bool(c.own),
        'task.name = "{c.task}" needs the same answers and the same task for all clients, and those of dataset '
        '{c.data!r} have {c.own} of their own: set task.name to a task without shared answers, such as "vqa"',
    ),
    # Model x task.
    Rule(
        lambda c: c.task_spec.judges == "captions" and c.writes != "captions",
        'the model {c.model!r} writes no captions: set model.name to one that does, such as "caption_transformer_mini"',
    ),
    Rule(
        lambda c: bool(c.task) and c.writes == "captions" and c.task_spec.judges != "captions",
        'the model {c.model!r} writes captions and answers no questions: set task.name = "captioning"',
    ),
    Rule(
        lambda c: bool(c.task) and c.reads_answers and c.task_spec.judges not in ("answers", "texts"),
        "the model {c.model!r} writes its answers: set task.name = {c.task_that_writes}, got {c.task!r}",
    ),
    Rule(
        lambda c: not c.reads_answers and c.task_spec.judges == "answers",
        'the model {c.model!r} does not write answers: set task.name = "{c.task_for_data}", got {c.task!r}',
    ),
    Rule(
        lambda c: c.task_spec.judges == "texts" and not c.model_spec.converses,
        'the model {c.model!r} writes no free answers: set model.name = "hf", or task.name = "{c.task_for_data}"',
    ),
    Rule(
        lambda c: c.conversed and bool(c.task) and c.task_spec.judges != "texts",
        'dataset {c.data!r} has conversations of several turns or pictures: set task.name = "chat", got {c.task!r}',
    ),
    Rule(
        lambda c: bool(c.heads_missing),
        "the model {c.model!r} has no head for the tasks of {c.heads_missing}: leave these clients out (run.without), "
        "or set model.name to a model with such heads",
    ),
)
"""Model x task x data -> why they do not fit and what to set; the first rule that refuses is raised."""


def combination(
    recipe: Recipe | str, dataset: FederatedDataset | LabelDataset, task: object = None, *, reads_answers: bool = False
) -> Combination:  # fmt: skip
    """The combination of a recipe, or of a model's name and data before the task is known."""
    name = recipe if isinstance(recipe, str) else recipe.sections["model"]["name"]
    labelled = isinstance(dataset, LabelDataset)
    return Combination(
        name,
        dataset.name,
        "" if isinstance(recipe, str) else recipe.sections["task"]["name"],
        model_spec(models[name]),
        TaskSpec() if task is None else task_spec(task),
        "labels" if labelled else "captions" if dataset.captioned else "answers",
        "" if labelled else "tasks" if dataset.tasks else "answer sets" if dataset.answer_sets else "",
        reads_answers,
        conversed=not labelled and dataset.conversed,
    )


def check_combination(combined: Combination) -> None:
    """Check of a recipe's combination of model, task, data and method against :data:`RULES`.

    Raises:
        ValueError: a rule refuses; the message is the rule's.
    """
    for rule in RULES:
        if rule.refused(combined):
            raise ValueError(rule.message.format(c=combined))
