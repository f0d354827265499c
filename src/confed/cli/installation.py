"""Diagnosis of the installation: versions, processors, memory, GPUs and packaged weights."""

import os
import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from confed.system.installing import for_this_installation
from confed.system.release import DISTRIBUTION, VERSION

__all__ = ["diagnose"]


def diagnose() -> dict[str, dict[str, str]]:
    """Versions, processors, memory, GPUs and packaged weights; what is missing says how to get it."""
    return {
        "system": _system(),
        "libraries": _libraries(),
        "extras": _extras(),
        "GPUs": _gpus(),
        "packaged weights": _weights(),
    }


def _system() -> dict[str, str]:
    import torch

    from confed.engines.workers import free_cores

    disk = shutil.disk_usage(Path.cwd())
    found = {
        "python": platform.python_version(),
        "operating system": platform.platform(),
        "cores": f"{free_cores()} of {os.cpu_count()} may be used",
        "threads of torch": str(torch.get_num_threads()),
        "memory": _memory(),
        "disk": f"{disk.free / 2**30:.1f} GiB free of {disk.total / 2**30:.1f} GiB here",
    }
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE"):
        found[name] = os.environ.get(name, "not set")
    if found["OMP_WAIT_POLICY"].upper() != "PASSIVE":
        found["OMP_WAIT_POLICY"] += " (PASSIVE keeps waiting threads from taking cores from other processes)"
    if found["HF_HUB_OFFLINE"] in ("not set", "0"):
        found["HF_HUB_OFFLINE"] += " (names on the hub may be downloaded; 1 forbids it and fails at once)"
    return found


def _memory() -> str:
    names = os.sysconf_names if hasattr(os, "sysconf") else {}
    if "SC_PHYS_PAGES" not in names:
        return "unknown on this system"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = re.search(r"MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")))
    free = f"{int(available[1]) / 2**20:.1f} GiB available of " if available else ""
    return f"{free}{total / 2**30:.1f} GiB"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _libraries() -> dict[str, str]:
    found = {"confed": VERSION}
    for requirement in requires(DISTRIBUTION) or ():
        if "extra ==" not in requirement:
            name = _package(requirement)
            hint = for_this_installation(f"pip install {name} -c constraints.txt")
            found[name] = _version(name) or f"missing ({requirement}): {hint}"
    return found


def _extras() -> dict[str, str]:
    groups: dict[str, list[str]] = {}
    for requirement in requires(DISTRIBUTION) or ():
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if extra:
            groups.setdefault(extra[1], []).append(_package(requirement))
    found: dict[str, str] = {}
    for extra, packages in sorted(groups.items()):
        have = {name: _version(name) for name in packages}
        missing = [name for name, installed in have.items() if installed is None]
        there = ", ".join(f"{name} {installed}" for name, installed in have.items() if installed)
        command = for_this_installation(f"pip install '.[{extra}]' -c constraints.txt")
        hint = f"missing {', '.join(missing)}: {command}" if missing else ""
        found[extra] = "; ".join(filter(None, (there, hint)))
    return found


def _package(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return found[0] if found else requirement


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"none": f"torch {torch.__version__} sees no GPU; runs use the processor"}
    found: dict[str, str] = {}
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        found[f"cuda:{number}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return found


def _weights() -> dict[str, str]:
    from confed.models.pretrained import describe as metadata
    from confed.models.pretrained import packaged, weights_file
    from confed.prepare.pretraining import MINIS

    found: dict[str, str] = {}
    for name in MINIS:
        if not packaged(name):
            found[name] = (
                f"missing: give model.pretrained=FILE, made with `confed pretrain {name} --out FILE`, or false"
            )
            continue
        facts = metadata(weights_file(name))
        accuracy = facts.get("accuracy", {}).get("overall")
        planned, done = facts.get("settings", {}).get("epochs"), facts.get("epochs_done")
        place = weights_file(name)
        size = sum(file.stat().st_size for file in (place.iterdir() if place.is_dir() else (place,)))
        parts = [f"{size / 2**20:.1f} MiB", *([f"{len(facts['words'])} words"] if facts["words"] else ())]
        if accuracy is not None:
            parts.append(
                f"C-AP {accuracy:.3f} on held-out public pictures"
                if facts.get("metric") == "C-AP"
                else f"{accuracy:.1%} of held-out public questions right"
            )
        if facts.get("start"):
            parts.append("started from vilt_mini's")
        if planned is not None and done != planned:
            parts.append(f"unfinished: {done} of {planned} epochs")
        found[name] = ", ".join(parts)
    return found
