"""Advice of refused combinations of model, task and data: whoever follows it comes to one that works."""

import re
from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from itertools import product

import pytest

from confed.federation.specs import TaskSpec, WrapsModel, model_spec, task_spec
from confed.registry import models, tasks
from confed.runs.combinations import Combination, check_combination

SETTING = re.compile(r'(model|task|data)\.name (?:= |to [^"]*?)"(\w+)"')
ANSWERS = {"entailment": 3, "nlvr2": 2}
DATA = [
    *({"data": "questions", "kind": "answers", "of_clients": own} for own in ("", "tasks", "answer sets")),
    {"data": "conversations", "kind": "conversations"},
    {"data": "captions", "kind": "captions"},
    {"data": "labels", "kind": "labels"},
]


def of_task(name: str) -> tuple[TaskSpec, bool]:
    task = tasks[name]
    made = task(answers=ANSWERS.get(name, 4)) if "answers" in signature(task).parameters else task()
    return task_spec(made), isinstance(made, WrapsModel)


TASKS = {name: of_task(name) for name in tasks.names()}


def combined(model: str, task: str, data: dict[str, object]) -> Combination:
    spec = model_spec(models[model])
    found, wraps = TASKS[task]
    lacking = data.get("of_clients") == "tasks" and "heads" not in signature(models[model]).parameters
    return Combination(
        model, task=task, model_spec=spec, task_spec=found, wraps=wraps, reads_answers=spec.writes == "answers",
        heads_missing="pairs (nlvr2)" if lacking else "", **data,
    )  # type: ignore[arg-type]  # fmt: skip


def refusal(combination: Combination) -> str:
    try:
        check_combination(combination)
    except ValueError as error:
        return str(error)
    return ""


def ways_out(message: str) -> list[dict[str, str]]:
    """Settings of every alternative that a message names, those of one alternative together."""
    alternatives = re.split(r",? or (?=(?:set )?(?:model|task|data)\.name)", message.partition(": ")[2])
    return [found for found in (dict(SETTING.findall(part)) for part in alternatives) if found]


def followed(model: str, task: str, data: dict[str, object], steps: int) -> Iterator[list[str]]:
    """Messages of every way on which advice does not lead to a combination that works, within so many steps."""
    message = refusal(combined(model, task, data))
    if not message:
        return
    ways = ways_out(message)
    if not ways or not steps:
        yield [message]
    for way in ways if steps else ():
        other = {"data": "scene_captions", "kind": "captions"} if "data" in way else data
        for rest in followed(way.get("model", model), way.get("task", task), other, steps - 1):
            yield [message, *rest]


@pytest.mark.parametrize("data", DATA, ids=lambda data: f"{data['data']} {data.get('own', '')}".strip())
def test_advice_leads_to_a_combination_that_works(data: dict[str, object]) -> None:
    refused = 0
    for model, task in product(models.names(), TASKS):
        refused += bool(refusal(combined(model, task, data)))
        assert [*followed(model, task, data, steps=2)] == []
    assert 0 < refused < len(models.names()) * len(TASKS)  # every kind of data has a model and a task


def test_a_model_of_captions_is_told_its_task_and_data_at_once() -> None:
    questions = combined("caption_transformer_mini", "vqa", DATA[0])
    assert refusal(questions) == (
        "the model 'caption_transformer_mini' writes captions and answers no questions: set model.name to a model that "
        'answers questions, such as "vilt_mini", or data.name to a dataset with captions, such as "scene_captions", '
        'and task.name = "captioning"'
    )
    assert 'model.name to a model that answers questions, such as "vilt_mini", and task.name = "vqa"' in refusal(
        combined("caption_transformer_mini", "captioning", DATA[0])
    )
    conversations = combined("vilt_mini", "vqa", DATA[3])
    assert refusal(conversations).endswith(
        'set model.name to a model that converses, such as "hf", and task.name = "chat", got \'vqa\''
    )
    assert refusal(replace(conversations, model_spec=model_spec(models["hf"]), reads_answers=True)).endswith(
        "set task.name = \"chat\", got 'vqa'"
    )
