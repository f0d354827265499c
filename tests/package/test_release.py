"""What a release consists of: one version, small files, and container files whose commands exist."""

import re
import shutil
import subprocess
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


PACKAGING = ROOT / "packaging"
COMPOSE = ["compose.yaml", "packaging/server/compose.yaml", "packaging/site/compose.yaml"]
UNITS = ["packaging/confed-server.service", "packaging/confed-site@.service"]


def command_lines(text: str) -> list[list[str]]:
    """The words behind `confed` of every command line in a file."""
    written_out = re.findall(r"confed ((?:federation new|client|server|run)[^\"\n`]*)", text)
    listed = re.findall(r'command: \[("(?:server|client)".*)\]', text)
    return [line.split() for line in written_out] + [re.findall(r'"([^"]+)"', line) for line in listed]


@pytest.mark.parametrize("file", [*COMPOSE, *UNITS, "Dockerfile"])
def test_commands_of_containers_and_units_exist(file: str) -> None:
    verbs = command_line().commands
    lines = command_lines((ROOT / file).read_text(encoding="utf-8"))
    assert lines
    for words in lines:
        verb = verbs[words[0]]
        if words[0] == "federation":
            verb = verb.commands[words[1]]
        known = {option for parameter in verb.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, words


@pytest.mark.parametrize("party", ["server", "site"])
def test_a_partys_container_is_confined_and_watched(party: str) -> None:
    content = yaml.safe_load((PACKAGING / party / "compose.yaml").read_text(encoding="utf-8"))
    service = content["services"][party]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["user"].partition(":")[0] not in ("", "0", "root")
    assert service["restart"] == "on-failure"
    assert set(service.get("secrets", ())) <= set(content.get("secrets", ()))
    command = service["command"]
    page = command[command.index("--page") + 1]
    assert f"http://127.0.0.1:{page}/healthz" in service["healthcheck"]["test"][-1]
    written = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
    assert written == ["work:/work"], "all else is mounted read-only"
    assert command[command.index("--state" if party == "server" else "--private") + 1].startswith("/work/")


@pytest.mark.parametrize("file", UNITS)
def test_units_are_confined_by_systemds_own_measure(file: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd here")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(r"^User=confed$", text, re.MULTILINE)
    unit = tmp_path / Path(file).name.replace("@", "@sports")
    unit.write_text(text.replace("/opt/confed/bin/confed", "/bin/true"), encoding="utf-8")
    for arguments in (["verify"], ["security", "--offline=true", "--threshold=20"]):  # tenths: 2.0 of 10 is "OK"
        checked = subprocess.run([analyze, *arguments, unit], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout[-300:] + checked.stderr
        assert "confed" not in checked.stderr, checked.stderr


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
