"""Job scripts for clusters: one array task per cell of a study, for Slurm, PBS, LSF, Grid Engine and Kubernetes.

The script is a shell script with ``#SBATCH`` lines that starts ``confed resume STUDY --cell array``; which cell that
is, the task learns from the variable of its scheduler (:func:`array_index`). Slurm sends SIGUSR1 to the script's
process, which by then is that command, some time before the time limit (``--signal=B:USR1@SECONDS``), and a task that
has stopped for it asks to be queued again (``scontrol requeue``).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import Name

SCRIPT = "cells.sh"
"""The job script, in the folder of the study or sweep."""

LEAD = 120
"""Seconds before the time limit at which Slurm sends SIGUSR1, if the options do not say it."""

GRACE = 90.0
"""Seconds after SIGUSR1 within which the round under way may end, if the lead is :data:`LEAD`."""

_VARIABLES = {
    "SLURM_ARRAY_TASK_ID": 0, "PBS_ARRAY_INDEX": 0, "PBS_ARRAYID": 0, "LSB_JOBINDEX": 0, "SGE_TASK_ID": 0,
    "JOB_COMPLETION_INDEX": 1,
}  # fmt: skip
"""Variable of a scheduler -> what is added to its value, so that cells count from 1; Kubernetes counts from 0."""


_PATTERNS = {
    "array": (r"%[1-9]\d*", "%N (N tasks at a time), as cells are counted here"),
    "signal": (r"B:(?:SIG)?USR1@(\d+)", "B:USR1@SECONDS, which cells understand"),
}
"""Option of sbatch that is read here -> pattern of its value, and what it must be."""


@dataclass(frozen=True)
class Options:
    """Options of ``sbatch``."""

    lines: tuple[str, ...] = ()  # long options with their values, such as "--partition=gpu"
    throttle: str = ""  # tasks at a time, as Slurm writes it after the indexes ("%20"); empty for no limit
    lead: int = LEAD  # seconds between SIGUSR1 and the time limit
    seconds: float | None = None  # the time limit; None if none was given

    @property
    def grace(self) -> float:
        """Seconds after SIGUSR1 within which the round under way may end; the rest is for a checkpoint."""
        return self.lead * GRACE / LEAD


def parse_options(texts: Sequence[str]) -> Options:
    """``partition=gpu,gres=gpu:1,exclusive`` as options of ``sbatch``; a value with commas stands in quotes."""
    lines, throttle, lead, seconds = dict[str, str](), "", LEAD, None
    for text in texts:
        for option_text in _parts(text):
            key, equals, value = option_text.partition("=")
            printable = value.isprintable() and '"' not in value
            if not re.fullmatch(r"[A-Za-z][A-Za-z-]*", key) or (equals and not value) or not printable:
                raise ValueError(
                    f"--slurm takes options of sbatch, as in partition=gpu,time=4:00:00, got {option_text!r}"
                )
            if key in _PATTERNS:
                pattern, wanted = _PATTERNS[key]
                match = re.fullmatch(pattern, value)
                if match is None:
                    raise ValueError(f"--slurm {key} must be {wanted}, got {value!r}")
                throttle, lead = (match[0], lead) if key == "array" else (throttle, int(match[1]))
            elif key in ("wrap", "parsable", "test-only"):
                raise ValueError(f"--slurm {key} does not go with a job script")
            else:
                seconds = parse_time(value) if key in ("time", "t") else seconds
                dashes, between = ("-", " ") if len(key) == 1 else ("--", "=")
                lines[key] = f"{dashes}{key}" + (f"{between}{_quoted(value)}" if equals else "")
    if seconds is not None and seconds <= lead:
        raise ValueError(
            f"--slurm time must be longer than the {lead} s before its end at which cells stop, got {seconds:.0f} s"
        )
    return Options(tuple(lines.values()), throttle, lead, seconds)


def _parts(text: str) -> list[str]:
    splitter = shlex.shlex(text, posix=True, punctuation_chars=False)
    splitter.whitespace, splitter.whitespace_split, splitter.commenters = ",", True, ""
    try:
        return [option_text.strip() for option_text in splitter if option_text.strip()]
    except ValueError as error:
        raise ValueError(f"--slurm has a quote without its end: {text!r}") from error


def parse_time(text: str) -> float | None:
    """A time limit of Slurm in seconds; None if it has none.

    ``MINUTES``, ``MINUTES:SECONDS``, ``HOURS:MINUTES:SECONDS``, ``DAYS-HOURS``, ``DAYS-HOURS:MINUTES`` or
    ``DAYS-HOURS:MINUTES:SECONDS``.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "0", "-1"):
        return None
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(field.isdecimal() for field in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        raise ValueError(f"--slurm time must be MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS, got {text!r}")
    numbers = [int(field) for field in parts]
    if dash or len(parts) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return int(days or 0) * 86400.0 + hours * 3600 + minutes * 60 + seconds


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as schedulers write them: ``1-4,7,9-10``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def script_of(
    root: Path, numbers: Sequence[int], options: Options, before: Sequence[str] = (), allowed: Sequence[str] = ()
) -> str:
    """The job script; a fault is a ValueError."""
    place, log = root.resolve(), root.resolve() / "cells-%A_%a.log"
    for path in (place, Path.cwd()):
        if not str(path).isprintable() or '"' in str(path):
            raise ValueError(f"a job script needs folders without control characters and quotes, got {str(path)!a}")
    command = " ".join(map(shlex.quote, (sys.executable, "-m", "confed.cli")))
    more = "".join(f" --allow-code {shlex.quote(module)}" for module in allowed)
    given = {re.split(r"[ =]", line.lstrip("-"))[0] for line in options.lines}
    lines = {
        "job-name": Name(re.sub(r"[^\w .+-]", "_", f"confed-{place.name}")[:80].strip()),
        "output": str(log),
        "open-mode": "append",
    }
    directives = [f"--{key}={_quoted(value)}" for key, value in lines.items() if key not in given]
    directives += [f"--array={ranges(numbers)}{options.throttle}", "--requeue", f"--signal=B:USR1@{options.lead}"]
    head = "\n".join(f"#SBATCH {line}" for line in [*directives, *options.lines])
    return f"""#!/bin/bash
# One cell of {place} per array task; written by confed.
# CONFED and CONFED_STUDY in the environment replace the command and the folder.
{head}
cd {shlex.quote(str(Path.cwd()))} || exit 1
{"".join(line + chr(10) for line in before)}study={shlex.quote(str(place))}
study=${{CONFED_STUDY:-$study}}
set -- resume "$study" --cell "${{1:-array}}" --grace {options.grace:g}{more}
[ -z "$CONFED" ] || exec $CONFED "$@"
exec {command} "$@"
"""


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search(r"\s", value) else value


def write_script(root: Path, text: str) -> Path:
    """Writes the job script into the folder of the study or sweep; returns its path."""
    path = root / SCRIPT
    write_atomically(path, text.encode())
    path.chmod(0o755)
    return path


def submit(script: Path) -> str:
    """Submits a job script to Slurm and returns the job's number; faults are a ValueError or RuntimeError."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ValueError(
            f"--submit needs sbatch, which is not on this machine's PATH; on a login node give: sbatch {script}"
        )
    done = subprocess.run([sbatch, "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"sbatch {script} ended with exit code {done.returncode}: {(done.stderr or done.stdout).strip()}"
        )
    return done.stdout.strip().splitlines()[-1].partition(";")[0] if done.stdout.strip() else ""


def array_index(environment: Mapping[str, str]) -> int | None:
    """Number of the cell that an array task's environment asks for; None outside arrays; a fault is a ValueError."""
    for name, offset in _VARIABLES.items():
        text = environment.get(name, "")
        # LSF and Grid Engine set theirs for ordinary jobs too.
        if text in ("", "undefined") or (name == "LSB_JOBINDEX" and text == "0"):
            continue
        if not text.isdecimal():
            raise ValueError(f"{name} must be the number of an array task, got {text!r}")
        return int(text) + offset
    return None


def requeue(environment: Mapping[str, str] = os.environ) -> bool:
    """Asks Slurm to queue this array task again; returns whether it will."""
    job, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    name = f"{job}_{task}" if job and task else environment.get("SLURM_JOB_ID")
    scontrol = shutil.which("scontrol", path=environment.get("PATH"))
    if not name or scontrol is None:
        return False
    return subprocess.run([scontrol, "requeue", name], check=False).returncode == 0
