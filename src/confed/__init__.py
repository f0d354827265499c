"""confed: federated vision-language learning.

A confederation: every client keeps its own model and its own data, and all of them learn together. The names below
are the public interface; they are loaded when first used, so that ``import confed`` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import confed.system.processor  # before torch, which reads once which instructions it may use  # noqa: F401
from confed.system.release import VERSION

if TYPE_CHECKING:
    from confed.api.run import Run, load_run, run
    from confed.api.study import Study, load_study, study
    from confed.data.examples import Examples, FederatedDataset, Split
    from confed.engines.local import Members, Setup, Simulation, Workspace, simulate
    from confed.federation.algorithm import Algorithm, action, keeps_protections
    from confed.federation.client import Client
    from confed.federation.client_info import ClientInfo
    from confed.federation.local import Local
    from confed.federation.measure import Measure
    from confed.federation.messages import Call, Flow, Message, Reply
    from confed.federation.params import Mean, Rules, Scope
    from confed.federation.protocols import Batch, Output
    from confed.federation.state import ClientState, ServerState
    from confed.federation.teacher import teacher
    from confed.federation.train import LocalTraining, Objective, TaskLoss, Train, train
    from confed.federation.traits import Traits
    from confed.inference.load import load_exported
    from confed.models import create_model, list_models
    from confed.recipes.recipe import Recipe, load_recipe
    from confed.registry import allow_code, register_dataset, register_measure, register_model, register_task
    from confed.release.dossier import Dossier, dossier
    from confed.release.limits import Release
    from confed.testing import check_algorithm, check_dataset, check_model, check_task

__version__ = VERSION

_HOMES = {
    "confed.api.run": ("Run", "load_run", "run"),
    "confed.api.study": ("Study", "load_study", "study"),
    "confed.data.examples": ("Examples", "FederatedDataset", "Split"),
    "confed.engines.local": ("Members", "Setup", "Simulation", "Workspace", "simulate"),
    "confed.inference.load": ("load_exported",),
    "confed.federation.algorithm": ("Algorithm", "action", "keeps_protections"),
    "confed.federation.client": ("Client",),
    "confed.federation.client_info": ("ClientInfo",),
    "confed.federation.local": ("Local",),
    "confed.federation.measure": ("Measure",),
    "confed.federation.messages": ("Call", "Flow", "Message", "Reply"),
    "confed.federation.params": ("Mean", "Rules", "Scope"),
    "confed.federation.protocols": ("Batch", "Output"),
    "confed.federation.state": ("ClientState", "ServerState"),
    "confed.federation.teacher": ("teacher",),
    "confed.federation.train": ("LocalTraining", "Objective", "TaskLoss", "Train", "train"),
    "confed.federation.traits": ("Traits",),
    "confed.models": ("create_model", "list_models"),
    "confed.recipes.recipe": ("Recipe", "load_recipe"),
    "confed.registry": ("allow_code", "register_dataset", "register_measure", "register_model", "register_task"),
    "confed.release.dossier": ("Dossier", "dossier"),
    "confed.release.limits": ("Release",),
    "confed.testing": ("check_algorithm", "check_dataset", "check_model", "check_task"),
}
_HOME_OF: dict[str, str] = {}
for _home, _names in _HOMES.items():
    _HOME_OF |= dict.fromkeys(_names, _home)

__all__ = [
    "Algorithm", "Batch", "Call", "Client", "ClientInfo", "ClientState", "Dossier", "Examples", "FederatedDataset",
    "Flow", "Local", "LocalTraining", "Mean", "Measure", "Members", "Message", "Objective", "Output", "Recipe",
    "Release", "Reply", "Rules", "Run", "Scope", "ServerState", "Setup", "Simulation", "Split", "Study", "TaskLoss",
    "Train", "Traits", "Workspace", "action", "allow_code", "check_algorithm", "check_dataset", "check_model",
    "check_task", "create_model", "dossier", "keeps_protections", "list_models", "load_exported", "load_recipe",
    "load_run", "load_study", "register_dataset", "register_measure", "register_model", "register_task", "run",
    "simulate", "study", "teacher", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'confed' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
