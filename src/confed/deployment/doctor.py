"""Checks of a site before it joins a federation: server, certificates, clock, versions, disk, and its data.

Every finding says what to do where something is wrong. Nothing is sent but a signed question for the server's version.
"""

import math
import shutil
import socket
import ssl
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from confed.data.examples import Examples, FederatedDataset
from confed.deployment.site import site_recipe
from confed.engines.perform import Workspace
from confed.engines.remote.client import client_named
from confed.federation.params import Scope
from confed.runs.build import prepare
from confed.system.events import Note, Progress, ignore
from confed.system.release import PROTOCOL, VERSION

Mark = Literal["good", "mind", "bad"]
LOOKED_AT = 2000  # pictures that are opened, spread over all of a client's, at most
SOON = 14  # days before its end from which a certificate is spoken of


@dataclass(frozen=True)
class Finding:
    what: str  # the thing that was checked
    mark: Mark  # whether a run can go on with it: yes; yes, but mind it; no
    text: str
    advice: str = ""  # what to do; empty where there is nothing to do


# The server ---------------------------------------------------------------------------------------------------


def check_server(server: str, key: Path, ca: Path | None) -> list[Finding]:
    """Check that this site can reach a server and is on its list."""
    from confed.engines.flower.probe import reach

    host, _, number = server.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not number.isdigit():
        raise ValueError(f"--server must be HOST:PORT, got {server!r}")
    port, problems = int(number), list(_key(key))
    try:
        reach(host, port)
    except OSError as error:
        problems.append(Finding("reachable", "bad", f"{server}: {error}", _no_answer(error, host, port)))
        rest = "whether this site is listed, clock, versions"
        return [*problems, Finding("not looked at", "mind", rest if ca is None else f"certificate, {rest}")]
    problems.append(Finding("reachable", "good", f"{server} answers"))
    if ca is None:
        problems.append(Finding("certificate", "mind", "none: anyone on the network path can read and change messages"))
    else:
        problems.append(_certificate(host, port, ca))
    if any(finding.mark == "bad" for finding in problems):
        return [*problems, Finding("not looked at", "mind", "whether this site is listed, clock, versions")]
    return [*problems, *_about(host, port, key, ca)]


def _no_answer(error: OSError, host: str, port: int) -> str:
    if isinstance(error, socket.gaierror):
        return f"no machine is known as {host!r}: check the name with the coordinator, and this machine's DNS"
    if isinstance(error, ConnectionRefusedError):
        return f"the machine is there and nothing listens on port {port}: is the server started, on this port?"
    if isinstance(error, TimeoutError):
        return f"no answer: does a firewall here let TCP go out to port {port}, and one there let it in?"
    return "check this machine's network"


def _key(path: Path) -> Iterator[Finding]:
    from confed.engines.flower.supernode import read_key

    try:
        read_key(path)
    except ValueError as error:
        advice = "use the one from the coordinator's folder, or make one with `confed federation key FILE`"
        yield Finding("key", "bad", str(error), advice)
        return
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield Finding("key", "mind", f"others on this machine can read {path}", f"chmod 600 {path}")
    else:
        yield Finding("key", "good", f"{path}, which only its owner can read")


def _certificate(host: str, port: int, ca: Path) -> Finding:
    from confed.engines.flower.probe import certificate_ends

    try:
        days = (certificate_ends(host, port, ca) - time.time()) / 86400
    except ssl.SSLCertVerificationError as error:
        return Finding("certificate", "bad", error.verify_message, _unvouched(error.verify_message, host))
    except (OSError, ValueError) as error:
        advice = "is --ca the file ca.crt of this federation, and does the server speak TLS?"
        return Finding("certificate", "bad", f"{type(error).__name__}: {error}", advice)
    if days < SOON:
        advice = "the coordinator should make new certificates, and hand out ca.crt again"
        return Finding("certificate", "mind", f"vouched for, and ends in {days:.0f} days", advice)
    return Finding("certificate", "good", f"vouched for by {ca}, for another {days:.0f} days")


def _unvouched(reason: str, host: str) -> str:
    if "expired" in reason:
        return "the coordinator has to make new certificates; if they are new, this machine's clock is wrong"
    if "not yet valid" in reason:
        return "this machine's clock is behind: set it, best by NTP"
    if "mismatch" in reason or "doesn't match" in reason:
        return f"the certificate is not for {host!r}: dial the name that the federation was founded with"
    return "ca.crt is of another federation, or another server answers: ask the coordinator before you continue"


def _about(host: str, port: int, key: Path, ca: Path | None) -> Iterator[Finding]:
    from confed.engines.flower.probe import TOLERANCE, about
    from confed.engines.flower.supernode import read_key

    try:
        told = about(host, port, read_key(key), ca)
    except PermissionError as error:
        advice = "send the coordinator the public half of your key; it goes into the server's sites.json"
        yield Finding("listed", "bad", str(error), advice)
        return
    except (OSError, ValueError) as error:
        advice = "is this the port of `confed server`?"
        yield Finding("listed", "bad", str(error), advice)
        return
    yield Finding("listed", "good", "the server knows this site's key")
    text = f"the server's is {abs(told.ahead):.1f} s {'ahead' if told.ahead > 0 else 'behind'}"
    if abs(told.ahead) > TOLERANCE / 2:
        mark: Mark = "bad" if abs(told.ahead) > TOLERANCE else "mind"
        advice = f"set this machine's clock, best by NTP; at most {TOLERANCE:.0f} s are allowed"
        yield Finding("clock", mark, text, advice)
    else:
        yield Finding("clock", "good", text)
    if (
        type(told.protocol) is not int or abs(told.protocol - PROTOCOL) > 1
    ):  # confed is on no package index; the coordinator hands it out
        advice = "install the file that the coordinator's README names, and check its SHA-256"
        text = f"here {PROTOCOL} (confed {VERSION}), at the server {told.protocol} (confed {told.confed})"
        yield Finding("protocol", "bad", text, advice)
    else:
        yield Finding("protocol", "good", f"{PROTOCOL} here, {told.protocol} at the server, of confed {told.confed}")
    if (installed := version("flwr")) == told.flwr:
        yield Finding("version of flwr", "good", installed)
    else:
        advice = f"pip install flwr=={told.flwr}"
        yield Finding("version of flwr", "mind", f"here {installed}, at the server {told.flwr}", advice)


def check_signature(
    ca: Path, key: Path, site: str, recipe: str, card: Path | None, private: Path | None = None
) -> list[Finding]:
    """Check of the coordinator's signature of the recipe, the card, and this site's key under its name."""
    from confed.deployment.manifest import check_serial, check_signed
    from confed.engines.flower.supernode import public_of, read_key

    try:
        certificate, manifest = check_signed(ca.parent, ca, recipe, card, site, public_of(read_key(key)))
        if private is not None:
            check_serial(private, certificate, manifest)
    except ValueError as error:
        advice = "do not join before the coordinator has put this right; --unsigned goes without"
        return [Finding("signature", "bad", str(error), advice)]
    what = "recipe, card, key" if card is not None else "recipe, key"
    return [Finding("signature", "good", f"the coordinator signed {what} and the list of {len(manifest.sites)} sites")]


# The data -----------------------------------------------------------------------------------------------------


def check_data(
    source: str | Path, site: str, private: Path, data: Sequence[str] = (), progress: Progress = ignore
) -> list[Finding]:
    """Check of the data that a recipe needs: the site's examples, their pictures and answers, and disk space."""
    progress(Note("reading the data"))
    try:
        setup, run_data = prepare(site_recipe(source, data))
        info = client_named(setup, site)
    except (ValueError, OSError) as error:
        advice = "check the recipe, --site, and --data root=/where/the/examples/are"
        return [Finding("data", "bad", str(error), advice)]
    dataset = run_data.dataset
    has = f", which has {' and '.join(info.modalities)}" if info.modalities else ""
    problems = [Finding("data", "good", f"{dataset.name}, client {site!r}{has}")]
    split: Any = dataset.clients[site]
    for role, examples in split.roles.items():
        problems += _examples(dataset, site, role, examples)
    workspace = Workspace(setup.model())
    scopes = workspace.scopes(setup.algorithm, info)
    stored = sum(t.nbytes for n, t in workspace.tensors.items() if scopes[n] in (Scope.SHARED, Scope.PRIVATE))
    return [*problems, _room(private, stored)]


def _examples(dataset: FederatedDataset, site: str, role: str, examples: Examples) -> Iterator[Finding]:
    """Check of one role's examples: their number, whether pictures can be read, and whether answers are known."""
    count = len(examples)
    if not count:
        advice = "without training examples a site cannot take part" if role == "train" else ""
        yield Finding(f"{role} examples", "bad" if role == "train" else "mind", "none", advice)
        return
    yield Finding(f"{role} examples", "good", f"{count}")
    pictures: Any = examples.images
    if len(pictures) and math.prod(pictures.shape[1:]):
        yield _pictures(role, pictures, np.unique(examples.image_index))
    if examples.choices is None and dataset.kind != "labels":
        yield _answers(role, examples.answers, frozenset(dataset.answer_set(site)), allowed=role != "train")


def _pictures(role: str, pictures: Any, numbers: np.ndarray) -> Finding:
    """Opens pictures, all of them or some that are spread over them."""
    picked = numbers[:: max(1, math.ceil(len(numbers) / LOOKED_AT))]
    unread: list[tuple[int, str]] = []
    for number in picked.tolist():
        try:
            pictures[number]
        except Exception as error:  # a library may say in many ways that a file is not one of its formats
            unread.append((number, f"{type(error).__name__}: {error}"))
    what = f"{role} pictures"
    if unread:
        advice = "copy these files again, or take their questions out"
        text = f"{len(unread)} of {len(picked)} cannot be read, such as number {unread[0][0]}: {unread[0][1]}"
        return Finding(what, "bad", text, advice)
    return Finding(what, "good", f"{len(picked)} of {len(numbers)} opened, all readable")


def _answers(role: str, answers: Sequence[str], vocabulary: frozenset[str], *, allowed: bool) -> Finding:
    strange = sorted({answer for answer in answers if answer not in vocabulary})
    what = f"{role} answers"
    if not strange:
        return Finding(what, "good", f"all of them among the {len(vocabulary)} of the vocabulary")
    share = sum(answer not in vocabulary for answer in answers) / len(answers)
    text = f"{share:.1%} are outside the vocabulary of {len(vocabulary)}, such as {', '.join(map(repr, strange[:3]))}"
    advice = "no model can give them: map them to answers of the vocabulary, or leave these questions out"
    return Finding(what, "mind" if allowed else "bad", text, advice)


def _room(private: Path, stored: int) -> Finding:
    """Whether the disk has space for states, of which a few versions are kept, and for the last reply."""
    existing = private
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    need, free = 6 * stored + 64 * 2**20, shutil.disk_usage(existing).free
    text = f"{free / 2**30:.1f} GiB free at {private}, about {need / 2**30:.2f} GiB wanted"
    if free < need:
        return Finding("disk", "bad", text, "make room, or give another folder with --private")
    return Finding("disk", "good", text)
