"""Job scripts: what schedulers read in them, and what becomes of faulty options."""

import subprocess
from pathlib import Path

import pytest

from command_line import Patch
from confed.studies.cells import BatchOptions, array_index, parse_options, parse_time, ranges, script_of, write_script
from refusals import refuses


def test_options_of_slurm_are_passed_on() -> None:
    found = parse_options(
        ['partition=gpu,gres=gpu:1,exclusive,nodelist="a,b"', "time=1-02,array=%5,signal=B:USR1@60", "p=x"]
    )
    assert found.lines == (
        "--partition=gpu", "--gres=gpu:1", "--exclusive", "--nodelist=a,b", "--time=1-02", "-p x",
    )  # fmt: skip
    assert (found.throttle, found.lead, found.seconds, found.grace) == ("%5", 60, 26 * 3600, 45)
    assert parse_options([]) == BatchOptions()
    assert parse_options(['comment="a b",partition=gpu']).lines == ('--comment="a b"', "--partition=gpu")  # quoted


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("4:00:00", 14400), ("1-2", 93600), ("1-2:3", 93780), ("2-0:0:1", 172801),
        ("0", None),
    ],
)  # fmt: skip
def test_time_limits_are_read_as_slurm_does(text: str, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("time=soon", "--slurm time must be MINUTES"), ("time=1", "longer than the 120 s"),
        ("partition=", "takes options of sbatch"), ("a b=1", "takes options of sbatch"),
        ("comment=x\n#SBATCH --uid=0", "takes options of sbatch"), ("array=3", "array must be %N"),
        ("signal=TERM", "signal must be B:USR1@SECONDS"), ("wrap=ls", "wrap does not go"), ('name="x', "quote without"),
        ("comment='a\"b'", "takes options of sbatch"),
    ],
)  # fmt: skip
def test_faulty_options_are_named(text: str, expected: str) -> None:
    refuses(expected, parse_options, [text])


def test_each_schedulers_variable_gives_the_cells_number() -> None:
    for name in ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", "LSB_JOBINDEX", "SGE_TASK_ID"):
        assert array_index({name: "7"}) == 7
    assert array_index({"JOB_COMPLETION_INDEX": "0"}) == 1
    assert array_index({"LSB_JOBINDEX": "0", "SGE_TASK_ID": "undefined"}) is None
    refuses("PBS_ARRAY_INDEX must be the number of an array task, got 'x'", array_index, {"PBS_ARRAY_INDEX": "x"})


def test_numbers_are_written_as_ranges() -> None:
    assert ranges([10, 1, 2, 3, 7, 9]) == "1-3,7,9-10"
    assert ranges([4]) == "4"


def test_the_script_runs_the_command_on_folders_with_any_name(tmp_path: Path, monkeypatch: Patch) -> None:
    place, here = tmp_path / "a study's $HOME", tmp_path / "here it's"
    place.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    show = tmp_path / "show"
    show.write_text('#!/bin/sh\nprintf "%s|" "$PWD" "$X" "$@"\n')
    show.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(show))
    text = script_of(place, [1, 2], parse_options(["job-name=mine"]), ["export X=1"], ["my.code"])
    assert "#SBATCH --array=1-2\n" in text
    assert [line for line in text.splitlines() if "job-name" in line] == ["#SBATCH --job-name=mine"]
    script = write_script(place, text)
    said = subprocess.run(["bash", str(script), "2"], capture_output=True, text=True, check=True).stdout
    given = ["resume", str(place), "--cell", "2", "--grace", "90", "--allow-code", "my.code", ""]
    assert said.split("|") == [str(here), "1", "-m", "confed.cli", *given]
    other = {"CONFED": f"{show} x", "CONFED_STUDY": "/runs/it", "PATH": "/usr/bin:/bin"}
    said = subprocess.run([str(script)], capture_output=True, text=True, check=True, env=other).stdout
    assert said.split("|") == [str(here), "1", "x", "resume", "/runs/it", "--cell", "array", *given[4:]]
