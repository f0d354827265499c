"""The examples of CONTRIBUTING.md are complete: they are written to disk as they stand, and run together."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from confed import registry
from confed.cli import main
from confed.engines.local import InProcess, Simulation, simulate
from confed.federation.state import MemoryStore
from confed.inference.export import export
from confed.inference.finished_run import FinishedRun
from confed.inference.load import load_exported
from confed.recipes.recipe import load_recipe
from confed.runs.run import prepare, run
from repository import ROOT

PAGE = ROOT / "CONTRIBUTING.md"
KINDS = {
    "feature_anchor": "algorithms",
    "bag_of_words": "models",
    "colours": "datasets",
    "focal": "tasks",
    "never_given": "measures",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's files, importable; registries and modules are as before when the tests are over."""
    root = tmp_path_factory.mktemp("contributing")
    for text in re.findall(r"^```(?:python|toml)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        name = Path(text.splitlines()[0].removeprefix("# ")).name
        (root / name).write_text(text)
    registries = (registry.algorithms, registry.models, registry.datasets, registry.tasks, registry.measures)
    for kind in registries:
        kind.names()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        patch.setenv(registry.ALLOWED, ",".join(KINDS))  # what the page says with --allow-code
        for kind in registries:
            patch.setattr(kind, "_entries", dict(kind._entries))
        yield root
    for path in root.glob("*.py"):
        sys.modules.pop(path.stem, None)


def module(folder: Path, name: str) -> ModuleType:
    assert (folder / f"{name}.py").is_file()
    return importlib.import_module(name)


def test_every_example_says_which_file_it_is(folder: Path) -> None:
    files = {path.stem for path in folder.iterdir()}
    assert files >= {*KINDS, "mine"}
    for name, package in KINDS.items():
        assert f"# src/confed/{package}/{name}.py\n" in PAGE.read_text()
        assert not (PAGE.parent / "src" / "confed" / package / f"{name}.py").exists()


@pytest.mark.parametrize("name", KINDS)
def test_the_command_says_that_an_example_is_done(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("confed.api.check.run", lambda recipe, folder: None)  # a test below runs them together
    with pytest.raises(SystemExit) as stop:
        main(["check", str(folder / f"{name}.py"), "--json"])
    assert stop.value.code == 0
    (checked,) = json.loads(capsys.readouterr().out)
    assert checked["kind"] == KINDS[name].removesuffix("s").replace("algorithm", "method")
    verdicts = dict(checked["verdicts"])
    exempt = {"clients trained at once equal one by one", "a run of one round", "noise on records covers what is sent"}
    assert {verdict for check, verdict in verdicts.items() if check not in exempt} <= {"passed"}
    assert ("neutral coefficients give FedAvg" in verdicts) == (name == "feature_anchor")


@pytest.mark.parametrize(
    ("name", "text", "code", "message"),
    [
        (
            "failing_method",
            "from confed import Algorithm, Traits\n"
            "class Failing(Algorithm):\n"
            "    traits = Traits(label='Failing')\n"
            "    def objective(self, client):\n"
            "        raise RuntimeError('not yet')\n",
            1,
            "✗ every client failed in round 1; client-0: RuntimeError: not yet",
        ),
        (
            "failing_model",
            "from confed import register_model\n"
            "@register_model\ndef late(answers, vocab_size, seed=0):\n    return 1 / 0\n\n"
            "from confed.models.tokenizer import WordTokenizer\nlate.tokenizer = WordTokenizer\n",
            1,
            "✗ failing_model.py, line 4: division by zero",
        ),
        ("empty_module", "", 2, "declares nothing: expected a subclass of Algorithm"),
        ("faulty_module", "1 / 0", 2, "cannot be imported: ZeroDivisionError: division by zero"),
        ("json", "", 2, "has the name of another module"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_the_command_names_what_fails(
    name: str, text: str, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["check", str(tmp_path / f"{name}.py")])
    assert stop.value.code == code
    assert message in " ".join("".join(capsys.readouterr()).split())
    sys.path.remove(str(tmp_path))


def test_the_four_run_together(folder: Path) -> None:
    setup, run_data = prepare(load_recipe(folder / "mine.toml"))
    assert run_data.dataset.answers == ("red", "orange", "blue", "cyan")
    simulation = Simulation(setup, MemoryStore())
    assert isinstance(simulation.executor, InProcess)
    servers = simulation.start(simulation.executor.workspace)
    initial = servers["main"].params
    records = list(simulate(simulation, servers))
    assert len(records) == 2
    assert not any(record.errors for record in records)
    assert records[1].losses.keys() == {"warm", "cold"}
    assert all(records[1].losses[name] < records[0].losses[name] for name in ("warm", "cold"))
    assert any(not torch.equal(t, records[-1].servers["main"].params[n]) for n, t in initial.items())
    views = simulation.evaluate(records[-1].servers, 2, split="test")
    correct, count = views["unseen"]["everything"]["accuracy"]
    assert count == 20
    assert correct / count > 0.25  # chance


def test_a_run_of_them_goes_through_export_and_load(folder: Path, tmp_path: Path) -> None:
    recipe = load_recipe(folder / "mine.toml", ["data.train=8", "data.test=8", "run.rounds=1", "run.workers=1"])
    run(recipe, tmp_path / "run")
    written = export(tmp_path / "run", tmp_path / "exported")
    assert set(written) == {"global", "clients/warm", "clients/cold"}
    finished = FinishedRun(tmp_path / "run")
    finished.load()
    batch = next(iter(finished.setup.population.data("warm").test(8)))
    for client in (None, "warm", "cold"):
        expected = finished.model(client)(batch).logits.clone()
        assert torch.equal(load_exported(tmp_path / "exported", client)(batch).logits, expected)


def test_who_loads_such_an_export_allows_its_modules(folder: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(registry.ALLOWED, ",".join(KINDS))
        recipe = load_recipe(folder / "mine.toml", ["data.train=4", "data.test=4", "run.rounds=1", "run.workers=1"])
        run(recipe, tmp_path / "run")
        export(tmp_path / "run", tmp_path / "exported")
        patch.setenv(registry.ALLOWED, "")
        with pytest.raises(
            ValueError, match=r"which you have not allowed: .*--allow-code (bag|feature|colours|focal|never)"
        ):
            load_exported(tmp_path / "exported")
        load_exported(tmp_path / "exported", allow_code=tuple(KINDS))
        assert registry.allowed_code() == ()


def test_the_registries_find_the_files_by_name(folder: Path) -> None:
    for name in KINDS:
        importlib.reload(module(folder, name))  # an earlier test may have imported it
    assert "bag_of_words" in registry.models.names()
    assert "colours" in registry.datasets.names()
    assert "focal" in registry.tasks.names()
    assert "never given" in registry.measures.names()


def test_the_focal_loss_is_what_its_formula_says(folder: Path) -> None:
    from confed.federation.protocols import Output

    focal = module(folder, "focal").Focal(answers=2)
    logits = torch.tensor([[3.0, 1.0]]).log()  # probabilities 3/4 and 1/4
    loss = focal.loss(Output(logits, logits), {"label": torch.tensor([0])})
    torch.testing.assert_close(loss, -(torch.tensor(0.25) ** 2) * torch.tensor(0.75).log())


def test_a_declared_column_is_in_every_table_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from confed.report.tables import columns
    from confed.report.tables.methods import paper_table, results_table
    from confed.results.runs import RunResults, StudyResults
    from confed.results.summary import Summary

    found = re.search(r"^# src/confed/report/tables/columns.py, in COLUMNS\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert found is not None
    column = eval(found.group(1), vars(columns))
    monkeypatch.setattr(columns, "COLUMNS", (*columns.COLUMNS, column))
    summary = Summary({"algorithm": "fedavg", "clients": ["a", "b"], "personal": {"a": 0.5, "b": 0.75}})
    study = StudyResults(Path(), "", (RunResults(Path(), "fedavg", "FedAvg", 0, summary, {}),))
    for table in (results_table([("FedAvg", [summary])]), paper_table(study)):
        place = [heading.full_title for heading in table.columns].index("personal best")
        assert table.rows[0][place].text == "75.0"
