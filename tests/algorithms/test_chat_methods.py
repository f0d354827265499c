"""Methods on a vision-language model that writes: the table in docs/vision_language_models.md is made here.

``python tests/algorithms/test_chat_methods.py`` prints the table.
"""

import re
import sys
from pathlib import Path

import pytest
import torch

from confed.engines.perform import Workspace
from confed.recipes.recipe import Recipe, load_recipe
from confed.runs.run import prepare
from confed.testing.steadiness import flare_in, flower_in, run_through
from confed.testing.trial import run, same
from refusals import refuses

DOCS = Path(__file__).parents[2] / "docs" / "vision_language_models.md"
SMALL = (
    "model.name=hf", "model.source=tiny:llava", "task.name=chat", "task.max_new_tokens=2", "study.methods=[]",
    "data.train=4", "data.validation=1", "data.test=1", "data.unseen=[]", "run.rounds=2", "run.workers=1",
    "run.without=['home', 'commercial', 'natural', 'educational']", "local.epochs=1", "local.batch_size=2",
    "local.lr=0.01",
)  # fmt: skip
LORA, ADAPTERS = ("model.trainable=lora", "model.peft={rank=2}"), ("model.trainable=adapters",)
PRESETS = ("ffa_lora", "fedsa_lora", "share_b", "flora", "fedex_lora", "flexlora", "rolora", "lora_fair", "flora_na",
           "hetlora")  # fmt: skip
METHODS: dict[str, tuple[str, ...]] = {
    **{name: (*LORA, f"algorithm.name={name}")
       for name in ("local", "central", "fedavg", "fedadam", "fedyogi", "fedavgm", "fedprox", "ditto", "scaffold",
                    "fedkd", "fedmosaic", "fedavg_ft")},
    **{f"fedlora, {preset}": (*LORA, "algorithm.name=fedlora", f"algorithm.preset={preset}") for preset in PRESETS},
    "fedlora, fisher": (*LORA, "algorithm.name=fedlora", "algorithm.aggregation=fisher", "algorithm.fisher_examples=2"),
    **{f"fedpeft, {kind}": (f"model.trainable={kind}", "algorithm.name=fedpeft")
       for kind in ("adapters", "ia3", "prompt", "top")},
    "feddat": (*ADAPTERS, "algorithm.name=feddat"),
    "feddat, fisher": (
        *ADAPTERS, "algorithm.name=feddat", "algorithm.aggregation=fisher", "algorithm.fisher_examples=2",
    ),
    "feddpa": (*ADAPTERS, "algorithm.name=feddpa"),
    "pfedmma": (*ADAPTERS, "algorithm.name=pfedmma"),
    "fedavg, update privacy": (
        *LORA, "algorithm.name=fedavg", "algorithm.update_privacy={clip=0.1, noise=0.1}",
    ),
    "fedavg, secure aggregation": (
        *LORA, "algorithm.name=fedavg", "algorithm.secure_sum={bits=64}",
        "run.without=['home', 'commercial', 'natural']",  # of two, each would know the other's update
    ),
    **{f"{name}, candidates": (*LORA, f"algorithm.name={name}", "task.metric=choice")
       for name in ("fedp3", "sp", "st")},
    "moon, candidates": (*LORA, "algorithm.name=moon", "algorithm.projection=false", "task.metric=choice"),
}  # fmt: skip
REFUSED = {
    "fedper": "keeps the answer head private, and this model does not say what its head is",
    "fedrep": "keeps the answer head private, and this model does not say what its head is",
    "fedp3": "compares scores of answers, and the model writes them freely",
    "dkd": "treats the right answer apart from the others",
}
"""Method -> why it does not run on written answers."""
ALWAYS = ("feddat", "fedlora, flexlora", "fedavg, secure aggregation")


def recipe(*settings: str) -> Recipe:
    return load_recipe("fedvqa_scenes", [*SMALL, *settings])


def works(name: str) -> bool:
    """Whether all clients learn, alike in the simulator and through Flower's and FLARE's messages."""
    setup = prepare(recipe(*METHODS[name]))[0]
    here = run(setup)
    assert not any(here.errors), here.errors
    initial, final = Workspace(setup.model()).initial, here.tensors()
    assert any(not torch.equal(value, initial[own]) for name, value in final.items()
               if (own := name.partition(": ")[2]) in initial)  # fmt: skip
    if setup.algorithm.traits.centralised:
        return True
    for transport in (flower_in, flare_in):
        there = run_through(setup, transport)
        if setup.algorithm.update_privacy is None:
            same(f"{name} through {transport.__name__}", here, there)
        else:  # across machines the operating system draws the noise
            assert not any(there.errors), there.errors
    return True


def written() -> dict[str, str]:
    """The table in the documentation: method -> what is said of it."""
    lines = DOCS.read_text().partition("| method | runs |")[2].splitlines()[2:]
    rows = [line.strip("|").split("|") for line in lines[: next(i for i, line in enumerate(lines) if not line)]]
    return {cells[0].strip().strip("`"): cells[1].strip() for cells in rows}


@pytest.mark.parametrize("method", ALWAYS)
def test_method_learns_to_write_alike_in_all_engines(method: str) -> None:
    assert works(method)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(set(METHODS) - set(ALWAYS)))
def test_other_method_learns_to_write_alike_in_all_engines(method: str) -> None:
    assert works(method)


@pytest.mark.parametrize("method", REFUSED)
def test_what_does_not_apply_says_why(method: str) -> None:
    refuses(re.escape(REFUSED[method]), prepare, recipe(*LORA, f"algorithm.name={method}"))


def test_table_has_all_methods_and_reasons() -> None:
    assert written() == dict.fromkeys(METHODS, "yes") | REFUSED


if __name__ == "__main__":
    for name in sys.argv[1:] or METHODS:
        sys.stdout.write(f"| `{name}` | {'yes' if works(name) else 'no'} |\n")
        sys.stdout.flush()
    for name, reason in REFUSED.items():
        sys.stdout.write(f"| `{name}` | {reason} |\n")
