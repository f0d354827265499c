"""Validation only in the rounds that ``run.evaluate_every`` names, and no model on the same examples twice."""

import json
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from confed.federation.protocols import Batch, Output
from confed.models.vilt import Vilt
from confed.recipes.recipe import load_recipe
from confed.results.folder import RunFolder
from confed.runs.run import run
from tiny_runs import TINY

ROUNDS, CLIENTS, UNSEEN = 5, 3, 1


@pytest.mark.parametrize(("every", "rounds"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (0, [])])
def test_validation_waits_for_its_rounds_and_nothing_is_evaluated_twice(
    every: int, rounds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, forward, folder = defaultdict[int, list[str]](list), Vilt.forward, RunFolder(tmp_path / "run")

    def events(kind: str) -> list[dict[str, Any]]:
        lines = folder.metrics.read_text().splitlines() if folder.metrics.is_file() else []
        return [line for line in map(json.loads, lines) if line["event"] == kind]

    def counted(model: Vilt, batch: Batch) -> Output:
        if not model.training:
            values = [*model.state_dict().values(), *(batch[key] for key in sorted(batch) if key != "index")]
            digest = sha256(b"".join(value.contiguous().numpy().tobytes() for value in values)).hexdigest()
            last = bool(rounds) and [e["round"] for e in events("evaluation")] == rounds  # the end of the run
            passes[ROUNDS + 1 if last or not rounds else len(events("round"))].append(digest)
        return forward(model, batch)

    monkeypatch.setattr(Vilt, "forward", counted)
    options = {**TINY, "algorithm.name": "fedavg", "run.rounds": ROUNDS, "run.evaluate_every": every}
    recipe = load_recipe("fedvqa_scenes", [f"{name}={value}" for name, value in options.items()])
    run(recipe.method("fedavg"), folder.root)
    end = passes.pop(ROUNDS + 1)
    assert [event["round"] for event in events("evaluation")] == sorted(passes) == rounds
    for round, seen in passes.items():
        # The global model at every client and unseen place, and each client's personal one where it has trained.
        assert len(seen) == CLIENTS * (1 + (round > 0)) + UNSEEN
    validated = [digest for seen in passes.values() for digest in seen]
    assert len(set(validated)) == len(validated)
    assert len(set(end)) == len(end)
    # Unseen places have test examples only, whose answers the end of the run keeps one by one.
    assert len(set(end) & set(validated)) == (UNSEEN if rounds else 0)
