"""README of an exported model: what its folder holds, and how to load it with confed, ``transformers`` and ``peft``."""

import json
import shlex
from collections.abc import Mapping
from string import Template
from typing import Any

from torch import Tensor

from confed.federation.file_names import name_of_file
from confed.inference.ask import kind_of_answers
from confed.inference.finished_run import FinishedRun
from confed.inference.trained_model import TrainedModel
from confed.models.hf.prompts import ChatTokenizer

__all__ = ["chat_code", "model_options", "readme"]

_QUESTION = "what is in the picture?"

_PROCESSOR = """${imports}from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

processor = AutoProcessor.from_pretrained("$folder", backend="pil")"""

_WITHOUT_VIDEOS = """${imports}from types import SimpleNamespace
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, $kind


class Pictures($kind):  # AutoProcessor reads the part for videos too, and needs torchvision for it
    get_attributes = classmethod(lambda _: ["image_processor", "tokenizer"])
    video_processor = SimpleNamespace(num_frames=None, fps=None)


parts = AutoImageProcessor.from_pretrained("$folder", backend="pil"), AutoTokenizer.from_pretrained("$folder"), None
processor = Pictures.from_args_and_dict(parts, Pictures.get_processor_dict("$folder")[0])"""

_PICTURE = f"""
$model
picture = Image.open("picture.png").convert("RGB").resize(($size, $size))
question = "{_QUESTION}"
"""

_TEMPLATE = """content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
how = dict(add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
inputs = processor.apply_chat_template([{"role": "user", "content": content}], **how)
"""

_BARE = """inputs = processor(text=processor.image_token + question, images=picture, return_tensors="pt")
"""

_WRITE = """written = model.eval().generate(**inputs, max_new_tokens=$tokens, do_sample=False)
answer = processor.batch_decode(written[:, inputs["input_ids"].shape[1]:], skip_special_tokens=True)[0]
print(answer.strip())
"""


def readme(
    name: str,
    trained: TrainedModel,
    run: FinishedRun,
    parts: Mapping[str, Mapping[str, Tensor]],
    plain: tuple[str | None, str | None],
) -> str:
    """What the folder holds and how to load it."""
    summary, client = run.summary, name_of_file(name.removeprefix("clients/"))
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
        text += (
            "Every client has a head or another part of its own: ask a client's model, "
            '`confed.load_exported("DIR", "NAME")`.\n\n'
        )
    text += _elsewhere(name, parts, *plain, run=run, trained=trained)
    if trained.encoder is not None:
        return text + f"It reads features of picture regions (made by: {trained.encoder or 'not known'}).\n"
    if isinstance(run.tokenizer, ChatTokenizer):
        return text
    return text + (
        f"Pictures are squeezed to {trained.image_size} x {trained.image_size} pixels, not cropped, as\n"
        "`DIR/backbone/preprocessor_config.json` says; `ViltImageProcessor` of `transformers` would keep a picture's "
        "proportions.\n"
    )


def _asked(run: FinishedRun, trained: TrainedModel, client: str) -> str:
    """How to ask a model: in Python where a question is asked, else with a command."""
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


def chat_code(run: FinishedRun, model: str, folder: str, size: int, imports: str = "") -> str:
    """Python that asks a vision-language model, made by the lines ``model``, with ``transformers``, as the run did."""
    processor: Any = run.tokenizer.processor
    code = _WITHOUT_VIDEOS if hasattr(type(processor), "video_settings") else _PROCESSOR
    code += _PICTURE + (_TEMPLATE if processor.chat_template else _BARE) + _WRITE
    tokens = run.recipe.sections.get("task", {}).get("max_new_tokens", 32)
    filled = Template(code).substitute(
        kind=type(processor).__name__, folder=folder, size=size, tokens=tokens, model=model, imports=imports
    )
    return f"```python\nimport torch\n{filled}```\n\n"


def model_options(section: Mapping[str, Any]) -> str:
    """Arguments behind the base model's name, so that it is read as the run read it."""
    revision = f', revision="{section["revision"]}"' if section.get("revision") else ""
    return f"{revision}, dtype=torch.{'float32' if section.get('base', 'fp32') == 'fp32' else 'bfloat16'}"


def _elsewhere(
    name: str,
    parts: Mapping[str, object],
    plain: str | None,
    source: str | None,
    *,
    run: FinishedRun,
    trained: TrainedModel,
) -> str:
    """How to load a model without confed, or why one cannot; ``plain``: the class of ``transformers``."""
    if "adapters" in parts:
        return "Neither `transformers` nor `peft` has a place for what is in `adapters.safetensors`.\n\n"
    where = f"DIR/{name}"
    if plain is None and set(parts) == {"adapter_model"} and source is not None:
        options = model_options(run.recipe.sections["model"])
        model = f'model = AutoModelForImageTextToText.from_pretrained("{source}"{options})\n'
        model += f'model = PeftModel.from_pretrained(model, "{where}")'
        imports = "from peft import PeftModel\n"
        code = chat_code(run, model, "DIR/backbone", trained.image_size, imports)
        return f"With `transformers`, on the base model:\n\n{code}"
    if plain is None and isinstance(run.tokenizer, ChatTokenizer):
        return "For `transformers` alone, `confed export RUN FOLDER --merged` writes the model as a whole.\n\n"
    if plain is None or ("trained" in parts and "adapter_model" in parts):
        return "No class of `transformers` is built like this network, so it needs confed.\n\n"
    lines = [f"from transformers import AutoConfig, {plain}"]
    if "model" in parts:
        lines = [f"from transformers import {plain}", f'model = {plain}.from_pretrained("{where}")']
    else:
        lines += [
            f'config = AutoConfig.from_pretrained("{where}")',
            f'model = {plain}.from_pretrained("{source or "DIR/backbone"}", config=config)',
        ]
    inner, placed = "model", trained.head == "answers"
    if "adapter_model" in parts:
        lines += ["from peft import PeftModel", f'model = PeftModel.from_pretrained(model, "{where}")']
        inner = "model.get_base_model()"
    files = [f"{part}.safetensors" for part in ("trained", *(("head",) if placed else ())) if part in parts]
    if files:
        lines.append("from safetensors.torch import load_file")
    lines += [f'{inner}.load_state_dict(load_file("{where}/{file}"), strict=False)' for file in files]
    code, until = "\n".join(lines), "" if placed else ", up to the head, for which that class has no place"
    notes = ["Tokenizer and preprocessing are in `DIR/backbone`."]
    if plain.startswith("Blip"):
        notes.append("That class also looks at padding: give it questions without.")
    return f"Without confed{until}:\n\n```python\n{code}\n```\n\n{' '.join(notes)}\n\n"
