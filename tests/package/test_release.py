"""What a release consists of: one version, small files, and container files whose commands exist."""

import re
import tomllib
import warnings
from pathlib import Path

import pytest
import yaml

from confed.cli.catalogue import papers
from confed.system import release
from repository import ROOT

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about a newer click
    from confed.cli.app import command_line


def test_version_stands_in_one_place_and_is_the_cited_one() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert built["project"]["dynamic"] == ["version"]
    assert ROOT / built["tool"]["hatch"]["version"]["path"] == Path(release.__file__)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None
    assert cited[1] == release.VERSION


def test_wheel_holds_the_package_and_the_page_on_papers() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert built["wheel"]["packages"] == ["src/confed"]
    assert built["wheel"]["force-include"] == {
        "docs/papers.md": "confed/papers.md",
        "constraints.txt": "confed/constraints.txt",
    }
    files = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 25_000_000
    assert papers()["fedavg"].source.startswith("McMahan")


@pytest.mark.parametrize("file", ["compose.yaml", "Dockerfile"])
def test_commands_of_containers_exist(file: str) -> None:
    verbs = command_line().commands
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = re.findall(r"confed ((?:federation new|client|server|run)[^\"\n]*)", text)
    lines += [" ".join(re.findall(r'"([^"]+)"', given)) for given in re.findall(r"command: \[(\"server\".*)\]", text)]
    assert lines
    for line in lines:
        words = line.split()
        verb = verbs[words[0]]
        if words[0] == "federation":
            verb = verb.commands[words[1]]
        known = {option for parameter in verb.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_compose_file_names_what_it_declares() -> None:
    content = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    services, volumes, networks = content["services"], content["volumes"], content["networks"]
    assert {"found", "server"} < set(services)
    for name, service in services.items():
        assert (ROOT / service["build"]["context"] / "Dockerfile").is_file()
        assert set(service["networks"]) <= set(networks), name
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= set(volumes), name
        assert set(service.get("depends_on", ())) <= set(services), name
    sites = set(services) - {"found", "server"}
    (made,) = services["found"]["command"]
    assert set(re.findall(r"--sites (\S+)", made)[0].split(",")) == sites == set(volumes) - {"server"}
    for site in sites:
        assert f"--site {site} " in services[site]["command"][0]
    assert set(content["x-party"]["build"]["args"]) <= set(
        re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    )


def test_docker_copies_what_the_build_needs() -> None:
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert "!docs/papers.md" in kept
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    for place in " ".join(copied).split():
        assert (ROOT / place).exists(), place
