"""Folders of finished runs and their models."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from confed.data.encode import Tokenizer
from confed.data.examples import channels_first
from confed.data.intake.opening import PictureSource, read_picture
from confed.data.pictures import Fit, resize
from confed.federation.client_info import ClientInfo
from confed.federation.file_names import name_of_file
from confed.federation.protocols import Batch, Output
from confed.federation.specs import model_spec, task_spec
from confed.federation.state import ServerState
from confed.models.pretrained import check_fit, read_tensors
from confed.recipes.recipe import Recipe, load_recipe
from confed.registry import tasks as registered_tasks
from confed.results.folder import RunFolder, kind_of, run_folders
from confed.results.stored import read_records
from confed.results.summary import Summary

AnswerKind = Literal["answers", "labels", "captions", "conversations"]
_KINDS: Mapping[str, AnswerKind] = {"labels": "labels", "captions": "captions", "texts": "conversations"}
"""What a task judges -> what its models make of an example, where that is not answers to a question."""
_STRANGE = ("ꙮ", "𐍈")  # letters that no vocabulary has: their token is the one for unknown words


def unknown_words(tokenizer: Any, words: Iterable[str]) -> list[str]:
    """Those of some words that a tokenizer reads as unknown, each once; none of one that reads bytes."""
    distinct = list(dict.fromkeys(words))
    if not distinct:
        return []
    ids, _ = tokenizer([_STRANGE[0], " ".join(_STRANGE), _STRANGE[1], *distinct])
    once, twice, other, *rows = ids.tolist()
    if once != other:
        return []
    unknown = {token for token in once if twice.count(token) > once.count(token)}  # not those around every text
    return [word for word, row in zip(distinct, rows, strict=True) if unknown & {*row}]


@dataclass(frozen=True)
class TrainedModel:
    """A model with everything that turns a picture and a question into answers."""

    model: nn.Module  # the network, in evaluation mode
    tokenizer: Tokenizer  # what it reads questions with
    answers: tuple[str, ...]  # an answer's text by its label
    image_size: int  # pixels per side of the pictures that it was trained on
    task: Any  # what is asked of it
    # for a network that reads regions, what makes them from a picture, empty if unknown; else None
    encoder: str | None = None
    fit: Fit = "squeeze"  # how a picture becomes a square

    @property
    def head(self) -> str:
        """The head that answers."""
        return task_spec(self.task).head

    def __call__(self, batch: Batch) -> Output:
        """The network on a batch, without gradients; its docstring says what batches hold."""
        with torch.inference_mode():
            return self.model(batch)

    def ask(
        self,
        image: PictureSource,
        question: str,
        top: int = 3,
        *,
        image2: PictureSource | None = None,
        choices: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The most probable answers to a question about a picture."""
        _check_question(question, self.head, image2, choices)
        if top < 1:
            raise ValueError(f"top must be at least 1, got {top}")
        text, mask = self.tokenizer([question])
        batch = {**self.seen(image), "text": text, "text_mask": mask}
        if image2 is not None:
            batch["image2"] = self.picture(image2)
        offered = self.answers
        if choices:
            offered = tuple(choices)
            texts, masks = self.tokenizer([f"{question} {choice}" for choice in choices])
            batch |= {"choices": texts[None], "choices_mask": masks[None]}
        # a head may give more scores than this client has answers: as many as the client with the most needs.
        # Similarities are no logits: the temperature that the model was trained with makes them some.
        temperature = model_spec(self.model).temperature
        output = self(batch)
        if not output.logits.is_floating_point():  # written freely
            decoder: Any = self.tokenizer
            return {"answers": [{"answer": decoder.decode(output.logits)[0].strip()}], "unknown_words": []}
        scores = (output.logits[0, : len(offered)].float() / temperature).softmax(0)
        best = scores.topk(min(top, len(offered)))
        return {
            "answers": [
                {"answer": offered[int(label)], "probability": round(float(p), 6)}
                for p, label in zip(best.values, best.indices, strict=True)
            ],
            "unknown_words": self.unknown_words(" ".join([question, *choices])),
        }

    def unknown_words(self, question: str) -> list[str]:
        """The words of a question that the tokenizer turns into its token for unknown words."""
        if model_spec(self.model).converses:  # its tokens are of any text
            return []
        return unknown_words(self.tokenizer, re.findall(r"[^\W_]+", question))

    def seen(self, file: PictureSource) -> dict[str, Tensor]:
        """What the network reads of a picture: itself, or its regions."""
        if self.encoder is None:
            return {"image": self.picture(file)}
        from confed.models.grid_features import regions_of

        features, boxes = regions_of(read_picture(file), self.encoder)[np.zeros(1, dtype=np.int64)]
        return {"regions": torch.from_numpy(features), "boxes": torch.from_numpy(boxes)}

    def picture(self, file: PictureSource) -> Tensor:
        """A picture as the network reads it, uint8 (1, 3, S, S)."""
        table = channels_first(resize(read_picture(file), self.image_size, self.fit)[None])
        assert isinstance(table, Tensor)
        return table


def _check_question(question: str, head: str, image2: object, choices: Sequence[str]) -> None:
    if not question.strip():
        raise ValueError(f"question must contain at least a word, got {question!r}")
    if (head == "nlvr2") != (image2 is not None):
        raise ValueError(
            "this model judges statements about two pictures: give a second one (--picture2)"
            if head == "nlvr2"
            else f"this model reads one picture (its head is {head!r}): leave the second one out"
        )
    if head == "choice" and len(choices) < 2:
        raise ValueError(f"this model chooses among texts: give at least two (--choice, repeated), got {len(choices)}")
    if head != "choice" and choices:
        raise ValueError(f"this model has a fixed answer set (its head is {head!r}): leave the choices out")


Role = Literal["train", "validation", "test"]  # what examples of a client are for


def run_of(folder: Path) -> Path:
    """The run to ask when a folder may be a study: its main method's first finished seed; a run is itself."""
    if kind_of(folder) != "study":
        return folder
    finished = [path for path in run_folders(folder) if (path / "summary.json").is_file()]
    if not finished:
        raise ValueError(f"{folder} is a study, not a run, and none of its runs is finished yet")
    recipe = folder / "recipe.toml"
    main = load_recipe(recipe).sections["algorithm"]["name"] if recipe.is_file() else ""
    return next((path for path in finished if name_of_file(path.parent.name) == main), finished[0])


class FinishedRun:
    """The folder of a finished run, and its models one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary = finished_summary(folder)
        self.recipe: Recipe = load_recipe(RunFolder(folder).recipe)
        # the clients that have a model of their own, in the federation's order
        self.owners = [name for name in self.summary.clients if self._personal(name).is_file()]
        self._materials: Any = None

    @classmethod
    def of(cls, run: "Path | FinishedRun") -> "FinishedRun":
        """The run in a folder; a run that was read before, with the models it has loaded, is itself."""
        return run if isinstance(run, FinishedRun) else cls(run)

    @property
    def global_file(self) -> Path:
        """Where the values of what is shared are, if anything is."""
        return RunFolder(self.folder).models / "global" / "trained.safetensors"

    @property
    def needs_own_parts(self) -> bool:
        """Whether what is shared answers with parts of a client's own only, such as its head."""
        return self.summary.global_model == "with own parts"

    def check(self, client: str | None, *, shared: bool = False) -> None:
        label = self.summary.label
        owners = f"clients with one: {', '.join(self.owners)}" if self.owners else "no client has one"
        if (client is None or shared) and not self.global_file.is_file():
            raise ValueError(f"{label} has no global model; name a client's personal model: {owners}")
        if client is None and shared:
            raise ValueError(f"shared needs a client, whose head and private tensors go with what is shared: {owners}")
        if client is None and self.needs_own_parts:
            raise ValueError(
                f"{label} shares no model that answers without a client's own parts; name a client: {owners}"
            )
        if client is not None and client not in self.summary.clients:
            raise ValueError(f"no client is called {client!r}; there are {', '.join(self.summary.clients)}")
        if client is not None and client not in self.owners:
            raise ValueError(f"{client!r} has no personal model, {owners}; leave the client out for the global model")

    def load(self) -> None:
        """Loads the data and the model with its initial values, once; takes seconds."""
        from confed.runs.run import load_run

        if self._materials is not None:
            return
        _, self.setup, self._materials, self.workspace = load_run(self.folder)
        self.network = self.setup.algorithm.deployed_model(self.workspace.model)

    def model(self, client: str | None, *, shared: bool = False) -> TrainedModel:
        """The global or a personal model; it is valid until the next call, as all share one network."""
        from confed.runs.samples import fill

        tensors: dict[str, Tensor] = {}
        if client is not None:
            tensors |= self._read(self._personal(client))
        if client is None or shared:
            tensors |= self._shared(client)
        fill(self.workspace, tensors)
        run_data = self._materials
        data_client = client if client is not None else next(iter(run_data.dataset.clients))
        self.workspace.set_task(task := self.task(client))
        return TrainedModel(
            self.network,
            run_data.tokenizer,
            run_data.dataset.answer_set(client) if client is not None else run_data.dataset.answers,
            self._materials.dataset.clients[data_client].train.images.shape[1],
            task,
            run_data.encoder if run_data.region_width else None,
            self.recipe.sections["data"].get("fit", "squeeze"),
        )

    def batch(self, place: str, split: Role, count: int) -> Batch:
        """The first examples of a client or of an unseen place, as its model reads them."""
        if split not in get_args(Role):
            raise ValueError(f"split must be one of {', '.join(get_args(Role))}, got {split!r}")
        materials = self._materials
        place_data = materials.clients.get(place, materials.unseen.get(place))
        if place_data is None:
            places = [*self.summary.clients, *materials.unseen]
            raise ValueError(f"no client or unseen place is called {place!r}; there are {', '.join(places)}")
        table = place_data.tables[get_args(Role).index(split)]
        if count < 1 or not len(table):
            raise ValueError(f"{place!r} has {len(table)} {split} examples, so there is no batch of {count}")
        return dict(next(iter(table.batches(min(count, len(table))))))

    @property
    def dataset(self) -> Any:
        """The data that the run was made with, once they are loaded."""
        return self._materials.dataset

    def trained(self, client: str | None, *, shared: bool = False) -> dict[str, Tensor]:
        """Values of a model's trained tensors, as its file has them."""
        personal = {} if client is None else self._read(self._personal(client))
        return personal | (self._read(self.global_file) if client is None or shared else {})

    @property
    def answer_kind(self) -> AnswerKind:
        """What its models make of an example, as its task declares."""
        task = registered_tasks[self.recipe.sections["task"]["name"]]
        return _KINDS.get(task_spec(task).judges, "answers")

    def task(self, client: str | None) -> Any:
        """What is asked of a client's model; of the global one, the recipe's task with all answers."""
        return self.setup.task if client is None else self.setup.task_of(client)

    def info(self, client: str | None) -> ClientInfo:
        """Who the client is to the method; the first one for None."""
        population = self.setup.population
        infos = (population.info(number) for number in range(len(population)))
        return next((info for info in infos if info.id == client), population.info(0))

    @property
    def region_width(self) -> int:
        """Features per region that the models read; 0 if they read pictures."""
        return self._materials.region_width

    @property
    def shapes(self) -> dict[str, Any]:
        """What pictures, sounds and series of the training data are like; see :class:`confed.runs.encode.RunData`."""
        return self._materials.shapes

    @property
    def tokenizer(self) -> Any:
        return self._materials.tokenizer

    def _shared(self, client: str | None) -> dict[str, Tensor]:
        """What a client receives of the global values; all of them for None."""
        tensors = self._read(self.global_file)
        if client is None:
            return tensors
        return dict(self.setup.algorithm.broadcast(ServerState(0, tensors), self.info(client)).tensors)

    def _read(self, file: Path) -> dict[str, Tensor]:
        tensors = read_tensors(file)
        check_fit(self.workspace.tensors, tensors, (), f"{file} does not fit the recipe's model")
        return tensors

    def _personal(self, client: str) -> Path:
        return RunFolder(self.folder).personal_model(client)


def finished_summary(folder: Path) -> Summary:
    kind = kind_of(folder)
    if kind == "study":
        runs = ", ".join(str(path) for path in run_folders(folder) if (path / "summary.json").is_file())
        raise ValueError(f"{folder} is a study, not a run; its finished run folders: {runs or 'there are none yet'}")
    if kind not in ("run", "federation"):
        raise ValueError(f"{folder} is not a run folder: it has no recipe.toml")
    run = RunFolder(folder)
    if not run.summary.is_file():
        done = read_records(folder).reached
        raise ValueError(
            f"{folder} is not finished: it stands at round {done}; continue it with `confed resume {folder}`"
        )
    return Summary(json.loads(run.summary.read_text(encoding="utf-8")))
