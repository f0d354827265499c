"""Leaks planted into real small runs: pictures in updates of each kind of training, and a class that one site has."""

from pathlib import Path
from typing import Any

import pytest
import torch

from confed.analysis.case import TRAIN, VALIDATION, Case
from confed.recipes.recipe import load_recipe
from confed.release.probes import pictures, properties
from confed.runs.run import run

SMALL = (
    "data.preset=random", "data.clients=2", "data.train=16", "data.test=4", "data.validation=8",
    "model.name=vilt_tiny", "model.width=32", "model.layers=1", "local.epochs=1", "local.batch_size=8",
    "run.rounds=2", "run.workers=1", "run.gallery=0", "study.methods=[]", "study.table=[]", "algorithm.name=fedavg",
)  # fmt: skip
CLASSES = (
    "study.methods=[]", "algorithm.name=fedavg", "model.trainable=head", "model.head=linear", "run.rounds=3",
    "data.classes=8", "data.shots=12", "data.validation_shots=4", "data.test_per_class=4", "data.new=none",
    "data.partition=iid", "run.gallery=0", "local.lr=0.01", "local.epochs=3", "run.evaluate_every=0",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["all", "lora", "adapters"])
def test_searches_for_pictures_of_others_are_not_flagged(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "STEPS", 8)
    run(load_recipe("fedvqa_scenes", (*SMALL, f"model.trainable={kind}")), tmp_path / "run")
    case = Case(tmp_path / "run")
    assert pictures.PROBE.excluded(case) == ""
    assert case.replay[1]
    measures = {measured.name: measured for measured in pictures.PROBE.look(case, 60.0).measures}
    assert (measures["reconstruction_alone"].count, measures["reconstruction"].count) == (8, 2 * pictures.TOGETHER)
    # Planted positive: of all layers' gradient a single record's picture follows exactly; LoRA and adapters lack it.
    assert ("reconstruction_alone_direct" in measures) == (kind == "all")
    if kind == "all":
        assert measures["reconstruction_alone_direct"].value > 0.99
        assert measures["reconstruction_alone_direct"].p == pytest.approx(2**-8)
    # Clean control: what is searched for is the gradient of some picture of another site, whatever the site sends.
    plain, elsewhere = pictures.gradient_of, pictures._some(case, case.sites[1], VALIDATION, 8)
    rng = torch.Generator().manual_seed(0)

    def of_others(case: Case, site: str, batch: Any, names: list[str], create_graph: bool = False) -> Any:
        if not create_graph:
            drawn = torch.randint(len(elsewhere), (len(batch["image"]),), generator=rng)
            batch = {**batch, "image": elsewhere[drawn]}
        return plain(case, site, batch, names, create_graph)

    monkeypatch.setattr(pictures, "gradient_of", of_others)
    control = {measured.name: measured for measured in pictures.PROBE.look(case, 60.0).measures}
    p_values = [measured.p for measured in control.values() if measured.p is not None]
    assert min(p_values) > 0.05 / len(control)
    assert measures["reconstruction"].value < 0.05  # so small a model's updates of a round rebuild nothing


def test_the_site_with_a_class_of_its_own_is_named(tmp_path: Path) -> None:
    run(load_recipe("prompts_scenes", CLASSES), tmp_path / "run")
    case = Case(tmp_path / "run")
    site = case.sites[2]
    owned = 3  # an answer that all other sites lose
    for name in case.sites:
        labels = case.table(name, TRAIN).columns["label"]
        if name != site:
            labels[labels == owned] = 4
    assert properties.PROBE.excluded(case) == ""
    measures = {measured.name: measured for measured in properties.PROBE.look(case, 60.0).measures}
    assert measures["properties_owner"].value == 1.0
    assert measures["properties"].p is not None
    assert measures["properties"].p < 0.01
