"""An exported run, to be asked like the folder of a finished one."""

from pathlib import Path
from typing import Any

from confed.engines.perform import Workspace
from confed.federation.specs import model_spec, task_spec
from confed.inference.finished_run import FinishedRun
from confed.inference.load import FACTS, load_exported, read_facts, task_of
from confed.inference.trained_model import TrainedModel
from confed.recipes.recipe import load_recipe

__all__ = ["ExportedRun", "is_exported"]


def is_exported(folder: Path) -> bool:
    """Whether a folder is one that ``confed export`` wrote."""
    return (folder / FACTS).is_file()


class ExportedRun(FinishedRun):
    """A folder that :func:`confed.inference.export.export` wrote, as a run without data and results.

    Args:
        folder: the export.
    """

    def __init__(self, folder: Path) -> None:  # not the base's, which reads a run folder
        self.folder = folder
        self.facts = read_facts(folder)
        self.recipe = load_recipe(folder / "recipe.toml")
        algorithm: Any = self.recipe.construct("algorithm")
        self.summary = {"label": algorithm.title, "clients": self.facts["clients"]}
        self.owners = list(self.facts["clients"])
        self._loaded: tuple[str | None, bool, TrainedModel] | None = None

    @property
    def global_file(self) -> Path:
        """Configuration of what is shared, if anything is."""
        return self.folder / "global" / "config.json"

    @property
    def needs_own_parts(self) -> bool:
        """Whether what is shared answers with parts of a client's own only, such as its head."""
        return bool(self.facts["own_heads"])

    @property
    def shapes(self) -> dict[str, Any]:
        """What pictures, sounds and series of the training data are like."""
        return dict(self.facts.get("shapes", {}))

    @property
    def threshold(self) -> float:
        """The probability from which on a model of labels predicts one."""
        return task_spec(self.task(self._trained[0])).threshold

    @property
    def reads_states(self) -> bool:
        """Whether a model of labels can be told labels that are known."""
        return model_spec(self._trained[2].model).reads_states

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model that was asked for last."""
        return self._trained[2].tokenizer

    def load(self) -> None:
        """Nothing: a model is loaded when it is asked for."""

    def model(self, client: str | None, *, shared: bool = False) -> TrainedModel:
        """The global or a personal model, loaded once in a row."""
        if self._loaded is None or self._loaded[:2] != (client, shared):
            trained = load_exported(self.folder, client, shared=shared)
            self._loaded, self.workspace = (client, shared, trained), Workspace(trained.model)
        return self._loaded[2]

    def task(self, client: str | None) -> Any:
        """What is asked of a model."""
        trained = self.model(client)
        return task_of(self.recipe, self.recipe.sections["task"]["name"], trained.answers, trained.tokenizer)

    @property
    def _trained(self) -> tuple[str | None, bool, TrainedModel]:
        if self._loaded is None:
            raise ValueError(f"no model of {self.folder} is loaded yet")
        return self._loaded
