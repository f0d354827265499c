"""Export of a finished run's models; :mod:`confed.inference.load` describes the layout and loads it.

Export of models by name with their LoRA or IA3 merged into the weights: folders that plain ``transformers`` reads.

Hu et al., "LoRA: Low-rank adaptation of large language models", ICLR 2022, section 4.1: W_0 + s B A, s = alpha / r, has
the shape of W_0, so that a merged model costs nothing more at inference. Where rounds of FLoRA or FedEx-LoRA added a
matrix D beside the factors, what is merged is W_0 + s (D + B A), computed in fp32 and rounded once to the type of W_0.
"""

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from enum import Enum
from inspect import Parameter, signature
from itertools import chain
from pathlib import Path
from string import Template
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from confed.federation.algorithm import Algorithm
from confed.federation.families.lora import added_weight
from confed.federation.file_names import file_name, name_of_file
from confed.federation.params import Scope, named_tensors
from confed.federation.specs import model_spec, task_spec
from confed.federation.structure import adapter_bank, heads_of
from confed.inference.finished_run import FinishedRun, TrainedModel
from confed.inference.load import FACTS, SOURCES, backbone_of, digest, to_peft
from confed.models.finetuning import Finetuning
from confed.models.hf import TINY, base_model
from confed.models.hf.model import HuggingFaceVLM
from confed.models.pretrained import packaged, without_progress_bars, write_weights
from confed.recipes.recipe import Recipe
from confed.registry import models
from confed.results.folder import RunFolder
from confed.results.views import View

# README of an exported model: what its folder holds -----------------------------------------------------------

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
picture = Image.open("picture.png").convert("RGB")$resized
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
    value = summary.values(View.PERSONAL).get(client) if mine else summary.cost(View.SEEN.mean)
    figure = "" if value is None else f", test {summary.metric} {value:.1%}"
    tensors = chain.from_iterable(held.values() for held in parts.values())
    count = sum(tensor.numel() for tensor in tensors)
    who = f"The model of the client {client!r}" if mine else "What the clients share"
    text = (
        f"# {who}: a {summary.label} run\n\n"
        f"Recipe {summary.recipe}, seed {summary.seed}, {summary.rounds} rounds{figure}; "
        f"{len(trained.answers)} answers (`config.json`).\n\n"
        f"{', '.join(f'`{file_stem}.safetensors`' for file_stem in parts) or 'No tensors'}: "
        f"{count:,} values. `DIR` below is the folder that `confed export` wrote.\n\n"
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
    if model_spec(trained.model).converses:
        return text
    return text + (
        f"Pictures are squeezed to {trained.image_size} x {trained.image_size} pixels, not cropped, as\n"
        "`DIR/backbone/preprocessor_config.json` says; `ViltImageProcessor` of `transformers` would keep a picture's "
        "proportions.\n"
    )


def _asked(run: FinishedRun, trained: TrainedModel, client: str) -> str:
    """How to ask a model: in Python where a question is asked, else with a command."""
    if run.answer_kind in ("labels", "captions"):
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
    # Where the run did as the processor does, the processor does it here.
    resized = f".resize(({size}, {size}))" if run.recipe.sections["data"].get("fit", "squeeze") == "squeeze" else ""
    filled = Template(code).substitute(
        kind=type(processor).__name__, folder=folder, resized=resized, tokens=tokens, model=model, imports=imports
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
    if plain is None and model_spec(trained.model).converses:
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
    files = [
        f"{file_stem}.safetensors" for file_stem in ("trained", *(("head",) if placed else ())) if file_stem in parts
    ]
    if files:
        lines.append("from safetensors.torch import load_file")
    lines += [f'{inner}.load_state_dict(load_file("{where}/{file}"), strict=False)' for file in files]
    code, until = "\n".join(lines), "" if placed else ", up to the head, for which that class has no place"
    notes = ["Tokenizer and preprocessing are in `DIR/backbone`."]
    if plain.startswith("Blip"):
        notes.append("That class also looks at padding: give it questions without.")
    return f"Without confed{until}:\n\n```python\n{code}\n```\n\n{' '.join(notes)}\n\n"


# Export of a finished run's models; load describes the layout and loads it ------------------------------------

PLAIN: Mapping[str, tuple[str, str]] = {
    "Vilt": ("vilt.config", "ViltForQuestionAnswering"),
    "Vit": ("vit.config", "ViTForImageClassification"),
    "Blip": ("config", "BlipForQuestionAnswering"),
}
"""Our class -> where its configuration is, and the class of ``transformers`` whose tensors have the same names."""


@runtime_checkable
class _HasTowers(Protocol):
    """A model with encoders of ``transformers`` inside."""

    @property
    def towers(self) -> Mapping[str, Any]: ...


def export(folder: Path, target: Path, *, personal: bool = True) -> dict[str, str]:
    """Writes what the clients share and every client's own model of a finished run."""
    run = FinishedRun(folder)
    if not personal:
        if not run.global_file.is_file() or run.needs_own_parts:
            raise ValueError(
                f"{run.summary.label} has no global model that can answer, and personal models are personal data: "
                "ask for them with --personal"
            )
        run.owners = []
    if target.exists():
        raise ValueError(f"{target} exists already; name a folder that does not")
    run.load()
    tokenizer = _own_tokenizer(run)
    unfinished = target.with_name(target.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    recipe = RunFolder(folder).recipe.read_bytes() if personal else _nameless(run.recipe).to_toml().encode()
    written = _Export(run, unfinished, recipe, tokenizer).write()
    unfinished.replace(target)
    return {name: str(target / name) for name in written}


def _nameless(recipe: Recipe) -> Recipe:
    """A run's recipe without the settings that name single clients: joins, leaves, without, missing."""
    data = dict(recipe.sections["data"])
    if "missing" in data:
        data["missing"] = {key: value for key, value in data["missing"].items() if not isinstance(value, Mapping)}
    cleared = recipe.with_run(joins={}, leaves={}, without=())
    return replace(cleared, sections={**cleared.sections, "data": data})


def _own_tokenizer(run: FinishedRun) -> str:
    """Where the class of a tokenizer that is not confed's is found, as ``"module:Class"``; empty for one of ours."""
    kind = type(run.tokenizer)
    if kind.__module__.startswith("confed."):
        return ""
    model = run.recipe.sections["model"]["name"]
    if lacking := [name for name in ("save", "load") if not callable(getattr(kind, name, None))]:
        raise ValueError(
            f"{run.folder} cannot be exported: the tokenizer {kind.__name__} of the model {model!r} has no method "
            f"{' and no method '.join(lacking)}, so an export could not be loaded; give the class `save(directory)` "
            "and the classmethod `load(directory)`"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


class _Export:
    """One export of a loaded run; ``tokenizer``: ``"module:Class"`` of one that is not confed's."""

    def __init__(self, run: FinishedRun, root: Path, recipe: bytes, tokenizer: str = "") -> None:
        self.run, self.root, self.recipe, self.own_tokenizer = run, root, recipe, tokenizer
        self.workspace, self.model = run.workspace, run.workspace.model
        self.heads, self.frozen = heads_of(self.model), run.workspace.frozen
        self.generative = model_spec(self.model).writes == "answers"
        self.added, self.children = self._additions()
        names = set(named_tensors(self.model)) - self.added
        self.backbone = {name: t for name, t in backbone_of(self.model).items() if name not in self.added}
        learning = [name for name, p in self.model.named_parameters() if name in names and p.requires_grad]
        self.whole = len(learning) == sum(name in names for name, _ in self.model.named_parameters()) and not any(
            to_peft(name) or name.startswith("prompts.") for name in names
        )
        bank = adapter_bank(self.model)
        self.inside = tuple(f".{name}." for name in (bank.names if bank is not None else ()))
        self.whole = self.whole and not self.inside
        self.injected: Any = getattr(self.model, "peft_config", {}).get("default")
        self.source = self._published()
        made_here = self.source is not None and (packaged(self.source) or self.source.startswith(TINY))
        self.reachable = "DIR/base" if made_here else self.source  # by ``transformers`` alone
        self.hosted = type(self.model).__name__ in PLAIN
        self.prefix = model_spec(self.model).published_prefix
        # a network around the model looks at what the method added, which else is only there if a model has some of it.
        self.extended = bool(self.added) and run.network is not self.model

    def write(self) -> list[str]:
        """Writes everything; the names of the models' folders."""
        run, written = self.run, list[str]()
        self.root.mkdir(parents=True)
        sha256 = None if self.whole else digest(self.backbone)
        self._write_backbone()
        trained: TrainedModel | None = None
        if run.global_file.is_file():
            trained = run.model(None)
            self._write_model("global", None, trained)
            written.append("global")
        for client in run.owners:
            trained = run.model(client)
            self._write_model(f"clients/{file_name(client)}", client, trained)
            written.append(f"clients/{file_name(client)}")
        assert trained is not None
        if self.hosted:
            _json(self.root / "backbone" / "preprocessor_config.json", _preprocessing(self.model, trained.image_size))
        (self.root / "recipe.toml").write_bytes(self.recipe)
        tokenizer: Any = run.tokenizer
        several = "heads" in signature(models[run.recipe.sections["model"]["name"]]).parameters
        facts = {
            "format": 1,
            "vocab_size": tokenizer.vocab_size,
            "image_size": trained.image_size,
            "regions": {"width": run.region_width, "encoder": trained.encoder},
            "shapes": run.shapes,
            "heads": [head for head in self.heads if head != "answers"] if several else [],
            "tokenizer": {"type": self.own_tokenizer}
            if self.own_tokenizer
            else {
                "max_length": tokenizer.max_length,
                "chat": tokenizer.form == "chat",
                "answers": tokenizer.form in ("chat", "answers"),
                "captions": tokenizer.form == "captions",
                "closing": tokenizer.closing,
            },
            "backbone": {"copied": self.source is None and not self.whole, "source": self.source, "sha256": sha256},
            "extended": self.extended,
            "own_heads": run.needs_own_parts,
            "global": "global" in written,
            "clients": run.owners,
        }
        _json(self.root / FACTS, facts)
        return written

    # What a model consists of -------------------------------------------------------------------------------

    def _additions(self) -> tuple[set[str], set[str]]:
        """The tensors that the method added, and the submodules beside the backbone that hold some of them."""
        if type(self.run.setup.algorithm).add_modules is Algorithm.add_modules:
            return set(), set()
        plain = self.run.setup.build()
        before = set(named_tensors(plain))
        children = {name for name, _ in self.model.named_children()} - {name for name, _ in plain.named_children()}
        return {name for name in named_tensors(self.model) if name not in before}, children

    def _kept(self, client: str | None) -> Iterator[str]:
        """The names that a model needs beside the frozen backbone; of added modules those that a pass runs through."""
        idle = tuple(f"{child}." for child in self.children - self._used())
        info = self.run.info(client)
        scopes = self.workspace.scopes(self.run.setup.algorithm, info)
        heads = {head: f"{name}." for head, name in self.heads.items()}
        mine = self._head(client)
        given = self.run.setup.algorithm.initial_private(self.workspace.tensors)  # which the global model has as well
        for name in self.workspace.tensors:
            if name in self.frozen or name.startswith(idle or ("\0",)):
                continue
            if name.startswith(tuple(heads.values())):
                common = scopes[name] in (Scope.SHARED, Scope.SERVER)  # a server may hold the layers before the answer
                if (client is None and common) or (client is not None and name.startswith(mine)):
                    yield name
            elif client is not None or scopes[name] is not Scope.PRIVATE or name in given:
                yield name

    def _head(self, client: str | None) -> tuple[str, ...]:
        """Beginnings of the names of a client's head."""
        if client is None:
            return ()
        head = task_spec(self.run.setup.task_of(client)).head
        return (f"{self.heads[head]}.",) if head in self.heads else tuple(f"{name}." for name in self.heads.values())

    def _used(self) -> set[str]:
        """The submodules beside the backbone that a pass runs through."""
        if not self.children:
            return set()
        used: set[str] = set()
        handles: list[Any] = []
        for child in self.children:
            for module in self.model.get_submodule(child).modules():
                handles.append(module.register_forward_hook(lambda *_, name=child: used.add(name)))
        data = next(iter(self.run.setup.population.data(self.run.info(None).id).train(1, torch.Generator())))
        with torch.inference_mode():
            self.run.network({name: t for name, t in data.items() if not name.startswith("answer_")})
        for handle in handles:
            handle.remove()
        return used

    def _published(self) -> str | None:
        """The published weights that the backbone is, by name; None if it is something else."""
        section = self.run.recipe.sections["model"]
        parameters = signature(models[section["name"]]).parameters
        named = [key for key in SOURCES if key in parameters]
        # a model that cannot be built without its weights has no default.
        optional = [key for key in named if parameters[key].default is not Parameter.empty]
        if not named or any(section.get(key) is None for key in named):
            return None  # random weights
        if any(parameters[key].default is not None for key in optional):
            return None  # a mini, whose vocabulary is the data's
        peft = section.get("peft")
        if self.injected is not None and isinstance(peft, Finetuning) and peft.reset_base:
            return None  # some of its layers were replaced
        return " and ".join(str(section[key]) for key in named)

    # Files --------------------------------------------------------------------------------------------------

    def _write_backbone(self) -> None:
        directory = self.root / "backbone"
        directory.mkdir()
        if self.source is None and not self.whole:
            write_weights(directory / "model.safetensors", self.backbone, {"format": "pt"})
        if self.reachable == "DIR/base":
            section = self.run.recipe.sections["model"]
            dtype = torch.float32 if section.get("base", "fp32") == "fp32" else torch.bfloat16
            with without_progress_bars():
                base_model(str(self.source), "", self.run.recipe.run.seed, dtype).save_pretrained(self.root / "base")
        if self.hosted:
            _json(directory / "config.json", self._config(None))
        self._write_towers(self.root, learning=False)
        self.run.tokenizer.save(directory)
        if not self.own_tokenizer and not model_spec(self.model).converses:
            _tokenizer_settings(directory / "tokenizer_config.json")

    def _write_model(self, name: str, client: str | None, trained: TrainedModel) -> None:
        directory = self.root / name
        directory.mkdir(parents=True)
        tensors = {key: self.workspace.tensors[key] for key in self._kept(client)}
        if trained.head == "answers" and not self.generative and client is not None:
            tensors |= self._fitted_head(tensors, len(trained.answers))
        everything = list(tensors)
        self.extended = self.extended or not self.added.isdisjoint(everything)
        beginnings = tuple(f"{module_name}." for module_name in self.heads.values())
        head = [key for key in tensors if key.startswith(beginnings)]
        simple = self.hosted and trained.head == "answers" and not self.generative
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            plain = to_peft(key, self.prefix)
            if plain is not None:
                parts.setdefault("adapter_model", {})[plain] = tensor
            elif key in head and self.injected is not None and simple:
                parts.setdefault("adapter_model", {})[f"base_model.model.{key}"] = tensor
            elif self.whole and (key not in self.added):
                parts.setdefault("model", {})[key] = tensor
            elif key in head:
                parts.setdefault("head", {})[key] = tensor
            elif (
                key in self.added
                or key.startswith("prompts.")
                or any(module_name in key for module_name in self.inside)
            ):
                parts.setdefault("adapters", {})[key] = tensor
            else:
                parts.setdefault("trained", {})[key] = tensor
        for module_name, held in parts.items():
            write_weights(directory / f"{module_name}.safetensors", held, {"format": "pt"})
        self._write_towers(directory, learning=True)
        if self.injected is not None:
            self._peft_config(directory, [self.heads["answers"]] if simple and head else None)
        task = self.run.task(client)
        client_tensors = {
            "answers": list(trained.answers),
            "task": task.name,  # pyright: ignore[reportAttributeAccessIssue]
            "head": trained.head,
            "tensors": everything,
        }
        config = self._config(trained.answers if simple else None) if self.hosted else {}
        _json(directory / "config.json", {**config, "confed": client_tensors})
        (directory / "README.md").write_text(
            readme(name, trained, self.run, parts, (self._class() if self.hosted else None, self.reachable)),
            encoding="utf-8",
        )

    def _write_towers(self, directory: Path, *, learning: bool) -> None:
        """The encoders of ``transformers`` inside a model, as that library reads them: the frozen, or the others."""
        if not isinstance(self.model, _HasTowers):
            return
        for name, tower in self.model.towers.items():
            if any(parameter.requires_grad for parameter in tower.parameters()) == learning:
                with without_progress_bars():
                    tower.save_pretrained(directory / name)

    def _fitted_head(self, tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """The tensors of a head's last layer, as many rows as there are answers; others' larger pools need more."""
        name = self.heads.get("answers")
        layers = [] if name is None else [
            (f"{name}.{layer_name}".rstrip("."), layer)
            for layer_name, layer in self.model.get_submodule(name).named_modules()
            if isinstance(layer, nn.Linear)
        ]  # fmt: skip
        if not layers:
            return {}
        last = layers[-1][0]
        return {key: tensors[key][:count] for key in (f"{last}.weight", f"{last}.bias") if key in tensors}

    def _peft_config(self, directory: Path, save_modules: list[str] | None) -> None:
        """``adapter_config.json``, the layers by their full names."""
        settings: Any = self.injected.to_dict()
        settings |= {
            "base_model_name_or_path": self.source or "backbone",
            "inference_mode": True,
            "modules_to_save": save_modules,
            "revision": self.run.recipe.sections["model"].get("revision") or None,
            "target_modules": sorted(name.removeprefix(self.prefix) for name in settings["target_modules"]),
        }
        _json(directory / "adapter_config.json", {key: _plain(value) for key, value in settings.items()})

    def _class(self) -> str:
        return PLAIN[type(self.model).__name__][1]

    def _config(self, answers: tuple[str, ...] | None) -> dict[str, Any]:
        """The configuration for the class of ``transformers``, with the answers as its labels."""
        config: Any = self.model
        for attribute in PLAIN[type(self.model).__name__][0].split("."):
            config = getattr(config, attribute)
        options = config.to_dict()
        if answers is not None:
            labels = dict(enumerate(answers))
            options |= {"id2label": labels, "label2id": {a: i for i, a in labels.items()}}
        config = type(config).from_dict(options)
        config.architectures = [self._class()]
        return json.loads(config.to_json_string(use_diff=False))


def _json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _preprocessing(model: Any, side: int) -> dict[str, Any]:
    """Settings of ViT's image processor, which squeezes pictures to a square; that of ViLT would keep proportions."""
    return {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": side, "width": side},
        "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": list(model.mean), "image_std": list(model.std),
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """A value of a configuration as JSON has it."""
    if isinstance(value, set | frozenset | tuple):
        return sorted(map(str, value))
    return value.value if isinstance(value, Enum) else value


def _tokenizer_settings(path: Path) -> None:
    """Makes ``AutoTokenizer`` read ``tokenizer.json`` as it is."""
    from confed.models.tokenizer import SPECIAL_TOKENS

    if path.is_file():
        return
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    _json(path, {"tokenizer_class": "PreTrainedTokenizerFast", **dict(zip(names, SPECIAL_TOKENS, strict=True))})


_ROUNDINGS = 3  # how many other roundings of the merged weights say how far rounding alone moves scores
_FACTOR = 4.0  # largest difference of the scores by merging, in units of the largest one that other roundings make


def export_models(folder: Path, target: Path, *, merged: bool, client: str | None) -> dict[str, str]:
    """All models of a finished run, or one whole model for ``transformers``."""
    if merged:
        return export_merged(folder, target, client)
    if client is not None:
        raise ValueError("client goes with merged; without it all models are exported")
    return export(folder, target)


def export_merged(folder: Path, target: Path, client: str | None = None) -> dict[str, str]:
    """Writes a finished run's model by name as one folder of ``transformers``, with its processor and a model card.

    What was written is read again by ``transformers`` alone, and its scores of an example must be those of the trained
    model, but for rounding: how much that is, other roundings of the merged weights to the same type show. A base of
    ``bf16`` is written in bf16.
    """
    run = FinishedRun(folder)
    if target.exists():
        raise ValueError(f"{target} exists already; name a folder that does not")
    run.check(client)
    run.load()
    trained = run.model(client)
    model = _mergeable(trained.model, folder)
    expected = _scores(model)
    body = _merged(model)
    unfinished = target.with_name(target.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    body.config.use_cache = True  # off while training, where nothing is written
    with without_progress_bars():
        body.save_pretrained(unfinished)
    model.tokenizer.save(unfinished)
    (unfinished / "README.md").write_text(_card(run, client, trained.image_size), encoding="utf-8")
    (unfinished / "recipe.toml").write_bytes(RunFolder(folder).recipe.read_bytes())
    _check(unfinished, model, expected)
    unfinished.replace(target)
    return {"global" if client is None else f"clients/{file_name(client)}": str(target)}


def _mergeable(model: nn.Module, folder: Path) -> HuggingFaceVLM:
    if not isinstance(model, HuggingFaceVLM):
        raise ValueError(f"{folder}: only models by name (model.name = 'hf') can be merged; export without --merged")
    if model.is_loaded_in_4bit or model.is_loaded_in_8bit:
        base = "nf4" if model.is_loaded_in_4bit else "int8"
        raise ValueError(
            f"{folder}: a quantised base (model.base = {base!r}) would round what is merged into it; export without "
            "--merged, and merge the adapter into the base in bf16 with peft"
        )
    if model.adapters.names:
        raise ValueError(
            f"{folder}: adapters behind blocks (model.trainable = 'adapters') are layers of their own, which no "
            "weights of the model can hold; export without --merged"
        )
    if model.learned_tokens is not None:
        raise ValueError(
            f"{folder}: learned tokens before prompts (model.trainable = 'prompt') are no weights of the model; export "
            "without --merged"
        )
    return model


def _merged(model: HuggingFaceVLM, rng: torch.Generator | None = None) -> Any:
    """A copy of the library's model with merged weights, rounded to the nearest value or, by ``rng``, to a near one."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    body = deepcopy(model.body)
    layers = [(name, layer) for name, layer in body.named_modules() if isinstance(layer, BaseTunerLayer)]
    for name, layer in layers:
        parent, _, child = name.rpartition(".")
        merging: Any = layer
        base = merging.get_base_layer()
        dtype = base.weight.dtype
        merging.float().merge(safe_merge=True)
        if (added := added_weight(merging)) is not None:
            base.weight.data += added
        if rng is not None:
            noise = torch.rand(base.weight.shape, generator=rng, dtype=torch.float64).to(base.weight.device) - 0.5
            base.weight.data = base.weight.double() * (1 + torch.finfo(dtype).eps * noise)
        setattr(body.get_submodule(parent), child, base.to(dtype))
    return body


def _scores(model: HuggingFaceVLM) -> Tensor:
    text, mask = model.tokenizer(["What is in the picture?"])
    picture = torch.arange(3 * 64 * 64).remainder(251).to(torch.uint8).view(1, 3, 64, 64)
    batch = {
        "image": picture, "text": text, "text_mask": mask, "answer_tokens": model.tokenizer.answers(["yes"]),
    }  # fmt: skip
    device = next(model.parameters()).device
    with torch.no_grad():
        return model.eval()({key: value.to(device) for key, value in batch.items()}).logits.float().cpu()


def _check(folder: Path, model: HuggingFaceVLM, expected: Tensor) -> None:
    """Check that what was written gives the trained model's scores, as far as rounding lets it."""
    from transformers import AutoModelForImageTextToText

    with without_progress_bars():
        body = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=model.body.dtype, trust_remote_code=False, use_safetensors=True
        )
    written = _plain_scores(body, model)
    gap = (written - expected).abs().max().item()
    rounding = expected.abs().max().item() * torch.finfo(model.body.dtype).eps / 2  # of the scores themselves
    for seed in range(_ROUNDINGS):
        other = _plain_scores(_merged(model, torch.Generator().manual_seed(seed)), model)
        rounding = max(rounding, (other - written).abs().max().item())
    if not gap <= _FACTOR * rounding:
        shutil.rmtree(folder)
        raise ValueError(
            f"the merged model gives other scores than the trained one: they differ by up to {gap:.2g}, and rounding "
            f"its weights otherwise by {rounding:.2g}; the method has parts beside the model's weights: export without "
            "--merged"
        )


def _plain_scores(body: Any, model: HuggingFaceVLM) -> Tensor:
    plain = HuggingFaceVLM(body, model.tokenizer)
    plain.mixed = model.mixed
    return _scores(plain)


def _card(run: FinishedRun, client: str | None, size: int) -> str:
    summary, section = run.summary, run.recipe.sections["model"]
    source, revision = str(section.get("source", "")), str(section.get("revision", "") or "")
    who = "What the clients share" if client is None else f"The model of the client {client!r}"
    options = model_options({"base": section.get("base", "fp32")})
    load = f'model = AutoModelForImageTextToText.from_pretrained("DIR"{options})'
    code = chat_code(run, load, "DIR", size)
    head = f"---\nlibrary_name: transformers\npipeline_tag: image-text-to-text\nbase_model: {source}\n---\n\n"
    return (
        f"{head}# {who}: a {summary.label} run\n\n"
        f"Recipe {summary.recipe}, seed {summary.seed}, {summary.rounds} rounds of federated learning on "
        f"`{source}`{f', revision `{revision}`' if revision else ''}, whose licence holds for these weights too. "
        f"What was trained (model.trainable = {section.get('trainable', 'lora')!r}) is merged into the weights.\n\n"
        f"{code}"
    )
