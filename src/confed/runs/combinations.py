"""Combinations of model, task and data that cannot work: the table :data:`RULES`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from confed.data.examples import FederatedDataset
from confed.data.targets import FITTING_TASK, Kind
from confed.federation.specs import ModelSpec, TaskSpec, model_spec, task_spec
from confed.registry import models

_MODEL_FOR: dict[Kind, str] = {
    "answers": 'a model that answers questions, such as "vilt_mini"',
    "captions": 'one that writes captions, such as "caption_transformer_mini"',
    "labels": 'a model that scores labels, such as "vit_mini" or "ctran_mini"',
    "conversations": 'a model that converses, such as "hf"',
}
"""What the data have -> models for it."""


@dataclass(frozen=True)
class Combination:
    """Facts of a recipe's combination that rules ask for; "task" is empty before the task is known."""

    model: str
    data: str
    task: str = ""
    model_spec: ModelSpec = field(default_factory=ModelSpec)
    task_spec: TaskSpec = field(default_factory=TaskSpec)
    kind: Kind = "answers"  # what the examples of the data have
    # "tasks" or "answer sets" where clients have such of their own; empty where these are the same for all.
    of_clients: Literal["", "tasks", "answer sets"] = ""
    reads_answers: bool = False  # whether the model's tokenizer makes tokens of answers, which the model writes then
    wraps: bool = False  # whether the task replaces the model's answer head
    heads_missing: str = ""  # tasks of clients that the model has no head for, with the clients

    @property
    def writes(self) -> str:
        """Output of a generative model: "answers", "captions" or nothing."""
        return "answers" if self.reads_answers else self.model_spec.writes

    @property
    def model_does(self) -> str:
        """What a model that scores no labels does."""
        return "writes captions" if self.writes == "captions" else "answers questions"

    @property
    def fitting_task(self) -> str:
        """A task of this model with these data; empty if there is none, so that another model is needed."""
        if self.kind == "captions":
            return "captioning" if self.writes == "captions" else ""
        if self.writes == "captions":
            return ""
        if self.kind == "labels":
            return "" if self.reads_answers or self.model_spec.reads == "regions" else "multilabel"
        if self.kind == "conversations":
            return "chat" if self.model_spec.converses else ""
        return "generation" if self.reads_answers else "vqa"

    @property
    def instead(self) -> str:
        """What to set for these data: another task, or another model and its task where this model has none."""
        return f'set task.name = "{self.fitting_task}"' if self.fitting_task else self.other_model

    @property
    def other_model(self) -> str:
        """Another model for these data, and its task if that is another one."""
        task = FITTING_TASK[self.kind]
        return f"set model.name to {_MODEL_FOR[self.kind]}" + (
            f', and task.name = "{task}"' if self.task not in ("", task) else ""
        )

    @property
    def or_captions(self) -> str:
        """Data for a model that writes captions, as another way out."""
        if self.writes != "captions":
            return ""
        task = "" if self.task_spec.judges == "captions" else ', and task.name = "captioning"'
        return f', or data.name to a dataset with captions, such as "scene_captions"{task}'

    @property
    def or_chat(self) -> str:
        """The other task of a model that converses."""
        return ', or task.name = "chat"' if self.model_spec.converses else ""

    @property
    def or_task(self) -> str:
        """A task that this model has with these data, as another way out."""
        return f', or task.name = "{self.fitting_task}"' if self.fitting_task else ""


class Rule(NamedTuple):
    """One line of the table: the combinations that cannot work, and what to set instead."""

    refused: Callable[[Combination], bool]
    message: str


RULES = (
    # Model x data.
    Rule(
        lambda c: c.kind == "labels" and not c.fitting_task,
        "the model {c.model!r} {c.model_does}, and dataset {c.data!r} has labels: {c.instead}",
    ),
    # Task x data.
    Rule(
        lambda c: c.kind != "captions" and c.task_spec.judges == "captions",
        'task.name = "{c.task}" needs pictures with captions, and dataset {c.data!r} has {c.kind}: '
        "{c.instead}{c.or_captions}",
    ),
    Rule(
        lambda c: c.kind == "captions" and bool(c.task) and c.task_spec.judges != "captions",
        "dataset {c.data!r} has captions, not questions: {c.instead}, got {c.task!r}",
    ),
    Rule(
        lambda c: c.kind == "labels" and bool(c.task) and c.task_spec.judges != "labels",
        "dataset {c.data!r} has labels, not questions: {c.instead}, got {c.task!r}",
    ),
    Rule(
        lambda c: c.kind != "labels" and c.task_spec.judges == "labels",
        "dataset {c.data!r} has {c.kind}, not labels: {c.instead}, got {c.task!r}",
    ),
    Rule(
        lambda c: c.wraps and bool(c.of_clients),
        'task.name = "{c.task}" needs the same answers and the same task for all clients, and those of dataset '
        "{c.data!r} have {c.of_clients} of their own: {c.instead}",
    ),
    # Model x task.
    Rule(
        lambda c: c.task_spec.judges == "captions" and c.writes != "captions",
        "the model {c.model!r} writes no captions: {c.instead}",
    ),
    Rule(
        lambda c: bool(c.task) and c.writes == "captions" and c.task_spec.judges != "captions",
        "the model {c.model!r} writes captions and answers no questions: {c.instead}{c.or_captions}",
    ),
    Rule(
        lambda c: c.kind == "conversations" and bool(c.task) and c.task_spec.judges != "texts",
        "dataset {c.data!r} has conversations of several turns or pictures: {c.instead}, got {c.task!r}",
    ),
    Rule(
        lambda c: bool(c.task) and c.reads_answers and c.task_spec.judges not in ("answers", "texts"),
        "the model {c.model!r} writes its answers: {c.instead}{c.or_chat}, got {c.task!r}",
    ),
    Rule(
        lambda c: not c.reads_answers and c.task_spec.judges == "answers",
        "the model {c.model!r} does not write answers: {c.instead}, got {c.task!r}",
    ),
    Rule(
        lambda c: c.task_spec.judges == "texts" and not c.model_spec.converses,
        'the model {c.model!r} writes no free answers: set model.name = "hf"{c.or_task}',
    ),
    Rule(
        lambda c: bool(c.heads_missing),
        "the model {c.model!r} has no head for the tasks of {c.heads_missing}: leave these clients out (run.without), "
        "or {c.other_model}",
    ),
)
"""Model x task x data -> why they do not fit and what to set; the first rule that refuses is raised."""


def combination(
    model: str, dataset: FederatedDataset, task_name: str = "", task: object = None, *, reads_answers: bool = False
) -> Combination:
    """The combination of a model and data, and of a task once it is known."""
    heads = "answer sets" if dataset.answer_sets else ""
    return Combination(
        model,
        dataset.name,
        task_name,
        model_spec(models[model]),
        TaskSpec() if task is None else task_spec(task),
        dataset.kind,
        "tasks" if dataset.tasks else heads,
        reads_answers,
    )


def check_combination(combined: Combination) -> None:
    """Check of a recipe's combination of model, task, data and method against :data:`RULES`."""
    for rule in RULES:
        if rule.refused(combined):
            raise ValueError(rule.message.format(c=combined))
