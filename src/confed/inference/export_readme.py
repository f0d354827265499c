"""README of an exported model: what its folder holds, and how to load it with confed, ``transformers`` and ``peft``."""

import json
import shlex
from collections.abc import Mapping

from torch import Tensor

from confed.inference.ask import kind_of_answers
from confed.inference.finished_run import FinishedRun
from confed.inference.trained_model import TrainedModel
from confed.models.pretrained import packaged

__all__ = ["readme"]

_QUESTION = "what is in the picture?"


def readme(
    name: str,
    trained: TrainedModel,
    run: FinishedRun,
    parts: Mapping[str, Mapping[str, Tensor]],
    plain: tuple[str | None, str | None],
) -> str:
    """What the folder holds and how to load it.

    Args:
        name: the folder's.
        trained: the model.
        run: the run.
        parts: its files of tensors.
        plain: the class of ``transformers``, and the published weights of the backbone; None where there is none.
    """
    summary, client = run.summary, name.removeprefix("clients/")
    mine = name != "global"
    value = summary.get("personal", {}).get(client) if mine else summary.get("global_seen_mean")
    figure = f", test {summary['metric']} {value:.1%}" if isinstance(value, float) else ""
    who = f"The model of the client {client!r}" if mine else "What the clients share"
    text = (
        f"# {who}: a {summary['label']} run\n\n"
        f"Recipe {summary['recipe']}, seed {summary['seed']}, {summary['rounds']} rounds{figure}; "
        f"{len(trained.answers)} answers (`config.json`).\n\n"
        f"{', '.join(f'`{part}.safetensors`' for part in parts) or 'No tensors'}: "
        f"{sum(t.numel() for held in parts.values() for t in held.values()):,} values. `DIR` below is the folder that "
        "`confed export` wrote.\n\n"
    )
    if mine or not run.needs_own_parts:
        text += _asked(run, trained, client if mine else "")
        if mine and run.global_file.is_file():
            text += "With `shared=True` it has the global values of what is shared, instead of this client's own.\n\n"
    else:
        text += 'Every client has a head or another part of its own: ask a client\'s model, `confed.load_exported("DIR", "NAME")`.\n\n'
    text += _elsewhere(name, parts, *plain, placed=trained.head == "answers")
    if trained.encoder is not None:
        return text + f"It reads features of picture regions (made by: {trained.encoder or 'not known'}).\n"
    return text + (
        f"Pictures are squeezed to {trained.image_size} x {trained.image_size} pixels, not cropped. The preprocessing "
        "of `transformers` keeps a\npicture's proportions instead: make pictures square before it.\n"
    )


def _asked(run: FinishedRun, trained: TrainedModel, client: str) -> str:
    """How to ask a model: in Python where a question is asked, else with a command.

    Args:
        run: the run.
        trained: the model.
        client: whose model it is; empty for the global one.
    """
    if kind_of_answers(run) in ("labels", "captions"):
        who = f" --client {shlex.quote(client)}" if client else ""
        given = "--image picture.png" if trained.image_size else "--text 'a text'"
        return f"```sh\nconfed predict DIR {given}{who}\n```\n\n"
    extra = {"nlvr2": ', image2="second.png"', "choice": ', choices=["a tree", "a house"]'}.get(trained.head, "")
    # The question that the data ask of every picture; a client's own ones are not told.
    question = json.dumps(run.recipe.sections["data"].get("question") or _QUESTION)
    who = f", {json.dumps(client)}" if client else ""
    return (
        "```python\n"
        "import confed\n"
        f'model = confed.load_exported("DIR"{who})\n'
        f'print(model.ask("picture.png", {question}{extra}))\n'
        "```\n\n"
    )


def _elsewhere(name: str, parts: Mapping[str, object], plain: str | None, source: str | None, *, placed: bool) -> str:
    """How to load a model without confed, or why one cannot.

    Args:
        name: its folder.
        parts: its files of tensors.
        plain: the class of ``transformers``.
        source: the published weights of the backbone.
        placed: whether that class has a place for the head.
    """
    if "adapters" in parts:
        return "Neither `transformers` nor `peft` has a place for what is in `adapters.safetensors`.\n\n"
    if plain is None and set(parts) == {"adapter_model"} and source is not None:
        lines, base = list[str](), f'"{source}"'
        if packaged(source):
            lines, base = ["from confed.models.pretrained import weights_file"], f"weights_file({base})"
        lines = [
            "from transformers import AutoModelForImageTextToText, AutoProcessor",
            "from peft import PeftModel",
            *lines,
        ]
        return (
            f"With `transformers`, on the base model:\n\n```python\n{chr(10).join(lines)}\n\n"
            f"model = AutoModelForImageTextToText.from_pretrained({base})"
            f'\nmodel = PeftModel.from_pretrained(model, "DIR/{name}")\nprocessor = AutoProcessor.from_pretrained('
            '"DIR/backbone")\n```\n\n'
        )
    if plain is None or ("trained" in parts and "adapter_model" in parts):
        return "No class of `transformers` is built like this network, so it needs confed.\n\n"
    lines, where = [f"from transformers import AutoConfig, {plain}"], f"DIR/{name}"
    if "model" in parts:
        lines = [f"from transformers import {plain}", f'model = {plain}.from_pretrained("{where}")']
    else:
        lines += [
            f'config = AutoConfig.from_pretrained("{where}")',
            f'model = {plain}.from_pretrained("{source or "DIR/backbone"}", config=config)',
        ]
    inner = "model"
    if "adapter_model" in parts:
        lines += ["from peft import PeftModel", f'model = PeftModel.from_pretrained(model, "{where}")']
        inner = "model.get_base_model()"
    files = [f"{part}.safetensors" for part in ("trained", *(("head",) if placed else ())) if part in parts]
    if files:
        lines.append("from safetensors.torch import load_file")
    lines += [f'{inner}.load_state_dict(load_file("{where}/{file}"), strict=False)' for file in files]
    code, until = "\n".join(lines), "" if placed else ", up to the head, for which that class has no place"
    notes = ["The tokenizer is in `DIR/backbone`."]
    if plain.startswith("Blip"):
        notes.append("That class also looks at padding: give it questions without.")
    return f"Without confed{until}:\n\n```python\n{code}\n```\n\n{' '.join(notes)}\n\n"
