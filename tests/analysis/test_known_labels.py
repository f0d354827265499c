"""Telling a finished run's model some labels: which ones, and metrics of the others by hand."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from coloured_labels import SHIFT, colours_dataset
from command_line import confed as command
from confed.analysis.known_labels import tell
from confed.federation.randomness import derive
from confed.losses.label_states import UNKNOWN, share_of_states
from confed.metrics.multilabel import multilabel_metrics
from refusals import refuses


@pytest.fixture(scope="module")
def finished(finished_label_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finished_label_run, tmp_path_factory.mktemp("told") / "run"))


def test_a_share_of_each_examples_labels_is_known() -> None:
    labels, index = (torch.arange(60).reshape(12, 5) % 3 == 0).float(), torch.arange(12)
    some, more = (share_of_states(labels, index, 3, share) for share in (0.4, 0.8))
    assert (some != UNKNOWN).sum(1).tolist() == [2] * 12
    assert (more != UNKNOWN).sum(1).tolist() == [4] * 12
    assert ((some == UNKNOWN) | (some == more)).all()
    assert torch.equal(some[some != UNKNOWN].float(), labels[some != UNKNOWN])
    assert (share_of_states(labels, index, 3, 0.19) == UNKNOWN).all()
    assert len({tuple(row) for row in (some != UNKNOWN).tolist()}) > 3
    refuses(r"share of known labels must lie in \[0, 1\]", share_of_states, labels, index, 3, 1.1)


def test_metrics_are_of_labels_that_are_not_told(finished: Path) -> None:
    values = tell([finished], (0.5, 0.0), seed=4).values
    nothing, half = values["rows"]
    assert (nothing["share"], half["share"]) == (0.0, 0.5)
    assert nothing["told"] == nothing["alone"]
    kept, dataset = load_file(finished / "predictions.safetensors"), colours_dataset()
    places = [name for name, split in dataset.clients.items() if len(split.test)]
    scores, truth, unknown, shifted = list[np.ndarray](), list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for place in places:
        labels = torch.from_numpy(kept[f"labels/{place}"])
        states = share_of_states(labels, torch.arange(len(labels)), derive(4, 0, place, "labels told"), 0.5)
        logits = np.log(kept[f"global/{place}/probabilities"]) - np.log1p(-kept[f"global/{place}/probabilities"])
        more = SHIFT * ((states == 1).sum(1) - (states == 0).sum(1)).numpy()[:, None]
        shifted.append(1 / (1 + np.exp(-(logits + more))))
        scores.append(kept[f"global/{place}/probabilities"])
        truth.append(labels.numpy())
        unknown.append((states == UNKNOWN).numpy())
    real, mask = np.concatenate(truth), np.concatenate(unknown)
    assert half["entries"] == mask.sum() == len(real) * 2
    for key, p in (("told", shifted), ("alone", scores)):
        expected = multilabel_metrics(np.concatenate(p), real, mask, undefined="omit")
        assert half[key] == pytest.approx({name: expected[name] for name in half[key]}, abs=1e-6)
    assert half["told"] != half["alone"]


def test_the_command_writes_page_table_and_curve(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("evaluate", str(finished), "--known", "0,0.5", "--out", str(tmp_path)) == 0
    assert "told" in capsys.readouterr().out
    assert json.loads((tmp_path / "told.json").read_text())["kind"] == "told"
    assert {"told.html", "told.csv", "told.md", "told.svg"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--known", "0,1"], "shares must lie in [0, 1), at least one, got 0.0, 1.0"),
        (["--known", "half"], "--known must be numbers separated by commas, got 'half'"),
        (["--known", "0", "--model", "personal:nobody"], "nobody"),
        (["--known", "0", "--model", "all"], "--model must be global or personal:CLIENT, got all"),
        (["--known", "0", "--data", "root=x"], "--data goes without --known"),
    ],
)
def test_faulty_commands_say_why(
    finished: Path, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("evaluate", str(finished), *arguments) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())
