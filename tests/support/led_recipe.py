"""A recipe led through Flower's applications in one process."""

from pathlib import Path

from confed.deployment.flower_app import apps
from confed.engines.flower.loopback import LoopbackGrid
from confed.recipes.recipe import Recipe, load_recipe

SITES_OF = ("warm", "cold", "both")


SMALL = (
    "data.name=toy_federation:squares", "data.train=8", "data.test=4", "model.name=vilt_tiny", "model.width=16",
    "model.layers=1", "local.epochs=1", "run.rounds=2", "run.workers=1", "run.gallery=0", "study.methods=[]",
    "study.table=[]",
)  # fmt: skip


def recipe_of(method: str, *more: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [f"algorithm.name={method}", *SMALL, *more])


def grid_of(recipe: Path, root: Path, **evaluations: str) -> LoopbackGrid:
    _, client = apps(recipe)
    configs = {n: {"site": name, "private": str(root / name), "data-train": 8} for n, name in enumerate(SITES_OF)}
    for config in configs.values():
        if (policy := evaluations.get(str(config["site"]))) is not None:
            config["evaluations"] = policy
    return LoopbackGrid(dict.fromkeys(configs, client), configs)
