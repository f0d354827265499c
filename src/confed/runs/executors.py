"""Choice of who computes the clients of a run: this process, worker processes, or actors on a Ray cluster."""

from typing import TYPE_CHECKING

import torch

from confed.engines.executor import InProcess
from confed.engines.perform import Setup, Workspace
from confed.engines.workers import Workers, free_cores
from confed.recipes.recipe import Recipe
from confed.runs.setup_source import source_of
from confed.system.events import Progress

if TYPE_CHECKING:
    from confed.engines.ray.executor import RayActors

__all__ = ["local_executor", "ray_actors"]


def local_executor(recipe: Recipe, setup: Setup, workspace: Workspace) -> InProcess | Workers:
    """Executor on this machine.

    Args:
        recipe: a single-run recipe.
        setup: the federation that it describes.
        workspace: with its model, which one process uses.
    """
    settings, places = recipe.run, len(setup.population) + len(setup.observers)
    count = 1 if settings.batch_clients > 1 else settings.workers or min(free_cores(), places)
    if count == 1:
        torch.set_num_threads(settings.threads)
        return InProcess(setup, workspace if setup.device == "cpu" else None)
    return Workers(setup, count, settings.threads, settings.start_method, source_of(recipe))


def ray_actors(recipe: Recipe, workspace: Workspace, progress: Progress) -> "RayActors":
    """Actors on the Ray cluster of a recipe.

    Args:
        recipe: a single-run recipe.
        workspace: with its model, in the process that has read the data: an actor will need as much memory as this
            process has, and gradients and moments besides.
        progress: told of nodes that come and go.

    Raises:
        ValueError: Ray is not installed, the cluster cannot be joined, or its nodes cannot work on the run.
        ModuleNotFoundError: another module is missing.
    """
    try:
        from confed.engines.ray.executor import RayActors
        from confed.engines.ray.placement import Wanted
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise ValueError(
            "run.engine = 'ray' needs Ray, which is not installed: pip install '.[ray]' -c constraints.txt"
        ) from None
    import psutil

    settings = recipe.run
    trained = sum(t.nbytes for t in workspace.tensors.values() if t.requires_grad)
    wanted = Wanted(
        settings.workers,
        settings.threads,
        {"cpu": False, "cuda": True, "auto": None}[settings.device],
        psutil.Process().memory_info().rss + 3 * trained,
    )
    cores = settings.workers * settings.threads or free_cores()
    return RayActors(source_of(recipe), wanted, settings.address, cores, progress)
