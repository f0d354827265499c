"""Policy of a site, from ``policy.toml``: what a federation may ask of it, whatever its recipe or server says.

What asks for more is refused with the line of the policy: before the site joins where the recipe says so, else in the
reply, so that the coordinator reads it too. ``[release]`` of the same file holds the limits of a model that leaves
(``confed dossier --limits policy.toml``).
"""

import json
import re
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from confed.datasets.card import Card, read_card
from confed.deployment.manifest import digest_of, signature_by, signed_by
from confed.engines.perform import Setup
from confed.engines.remote.protocol import Refused
from confed.federation.checkpoint import write_atomically
from confed.federation.client_info import ClientInfo
from confed.federation.ranges import AT_LEAST_ONE, POSITIVE, check_fields
from confed.federation.reading import FAULTS, read_bounded
from confed.privacy.evaluation_policy import EvaluationPolicy
from confed.recipes.recipe import Recipe
from confed.recipes.schema import validate
from confed.runs.privacy_spent import record_cost
from confed.system.private_keys import load_private

FILE = "policy.toml"
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True)
class SitePolicy:
    """What a federation may ask of a site; a limit that is left out is not set.

    Attributes:
        methods: registered names of the methods that may run here.
        actions: actions of a method that may be asked for, such as "fit" and "evaluate".
        rounds: most rounds of a run.
        client_epsilon: most that all updates from here may cost, of the site with all its records.
        record_epsilon: most that a run may cost a record, by the recipe's ``algorithm.record_privacy``.
        evaluations: as ``confed client --evaluations``, such as "noise=8,in_all=40".
        least_examples: fewest examples that a reported figure is over.
        hours: "20:00-06:00", in which this site computes, by the clock of its machine.
        bytes_per_day: most bytes received and sent in a day of that clock.
    """

    methods: tuple[str, ...] | None = None
    actions: tuple[str, ...] | None = None
    rounds: Annotated[int | None, AT_LEAST_ONE] = None
    client_epsilon: Annotated[float | None, POSITIVE] = None
    record_epsilon: Annotated[float | None, POSITIVE] = None
    evaluations: str | None = None
    least_examples: Annotated[int | None, AT_LEAST_ONE] = None
    hours: str | None = None
    bytes_per_day: Annotated[int | None, AT_LEAST_ONE] = None
    file: str = ""  # where it was read from; empty where it was not
    lines: Mapping[str, str] = field(default_factory=dict[str, str])  # key -> "line 4, rounds = 20", for refusals

    def __post_init__(self) -> None:
        check_fields(self, FILE)
        if self.hours is not None and not _HOURS.fullmatch(self.hours):
            raise ValueError(f"{FILE}: hours must be like 20:00-06:00, got {self.hours!r}")
        if self.evaluations is not None:
            EvaluationPolicy.parse(self.evaluations)

    def refuse(self, key: str, why: str) -> Refused:
        """The error of what asks for more than the policy's entry allows."""
        return Refused(f"this site's policy, {self.lines.get(key, key)}: {why}")

    def check_recipe(self, recipe: Recipe) -> None:
        """Check of a recipe's method and rounds, before anything of the data is read."""
        method = str(recipe.sections["algorithm"]["name"])
        if self.methods is not None and method not in self.methods:
            raise self.refuse("methods", f"the recipe's method is {method}")
        if self.rounds is not None and recipe.run.rounds > self.rounds:
            raise self.refuse("rounds", f"the recipe has {recipe.run.rounds} rounds")
        privacy = recipe.construct("algorithm").update_privacy
        if self.client_epsilon is not None and (privacy is None or privacy.at != "client" or not privacy.noise):
            raise self.refuse("client_epsilon", "the recipe has no noise of clients (algorithm.update_privacy)")

    def check_records(self, setup: Setup, client: ClientInfo) -> None:
        """Check that a whole run costs no record of this site more than the policy allows."""
        if self.record_epsilon is None:
            return
        privacy = setup.algorithm.record_privacy
        if privacy is None:
            raise self.refuse("record_epsilon", "the recipe has no noise for records (algorithm.record_privacy)")
        _, cost = record_cost(privacy, setup.local, client.num_examples, setup.rounds)
        if cost > self.record_epsilon:
            raise self.refuse("record_epsilon", f"{setup.rounds} rounds cost a record here {cost:.4g}")

    def narrowed(self, client_epsilon: float | None, evaluations: str | None) -> "SitePolicy":
        """The policy with limits of a command line, which cannot widen it."""
        if client_epsilon is not None and client_epsilon > (self.client_epsilon or client_epsilon):
            raise self.refuse("client_epsilon", f"--epsilon says {client_epsilon:g}")
        if evaluations is not None and evaluations != (self.evaluations or evaluations):
            raise self.refuse("evaluations", f"--evaluations says {evaluations}")
        limit = self.client_epsilon if client_epsilon is None else client_epsilon
        return replace(self, client_epsilon=limit, evaluations=evaluations or self.evaluations)

    @property
    def on_evaluations(self) -> EvaluationPolicy | None:
        """Rules for evaluations; None where the policy has none."""
        if self.evaluations is None and self.least_examples is None:
            return None
        policy = EvaluationPolicy.parse(self.evaluations or "default")
        return replace(policy, least=max(policy.least, self.least_examples or 1))


def read_policy(path: Path) -> SitePolicy:
    """The policy in a TOML file; a fault is a ValueError."""
    try:
        text = read_bounded(path, 2**20).decode()
        content: dict[str, Any] = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} must be a site's policy in TOML: {error}") from error
    content.pop("release", None)
    try:
        values = validate(SitePolicy, content, "policy", {"file", "lines"})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return SitePolicy(**values, file=str(path.resolve()), lines=_lines(text, content))


def policy_of(file: Path | None, client_epsilon: float | None, evaluations: str | None) -> SitePolicy:
    """The policy in a file, by default that of the folder where there is one, narrowed by options."""
    chosen = Path(FILE) if file is None else file
    policy = read_policy(chosen) if file is not None or chosen.is_file() else SitePolicy()
    return policy.narrowed(client_epsilon, evaluations)


def _lines(text: str, content: Mapping[str, Any]) -> dict[str, str]:
    """Key -> its line in the file, as a refusal quotes it."""
    quoted: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key = line.partition("=")[0].strip()
        if key in content:
            quoted.setdefault(key, f"line {number}, {line.partition('#')[0].strip()}")
    return quoted


class PolicyGuard:
    """Check of single requests of a server: their action, the hour, and the bytes of the day."""

    def __init__(self, policy: SitePolicy, audit: Path, clock: Callable[[], float] = time.time) -> None:
        self._policy, self._clock = policy, clock
        self._day, self._bytes = self._date(clock()), 0
        if policy.bytes_per_day is not None and audit.is_file():
            self._bytes = _bytes_of(audit, self._day, self._date)

    def check(self, action: str, size: int) -> None:
        """Check of a request before anything is computed; a refusal is a :class:`Refused`."""
        policy = self._policy
        if policy.actions is not None and action not in policy.actions:
            raise policy.refuse("actions", f"the server asks for {action}")
        if policy.hours is not None and not _within(policy.hours, time.localtime(self._clock())):
            raise policy.refuse("hours", f"it is {time.strftime('%H:%M', time.localtime(self._clock()))} here")
        self.count(size)

    def count(self, size: int) -> None:
        """Count of bytes that came or are to leave; a refusal where the day's are spent."""
        today = self._date(self._clock())
        if today != self._day:
            self._day, self._bytes = today, 0
        most = self._policy.bytes_per_day
        if most is not None and self._bytes + size > most:
            raise self._policy.refuse("bytes_per_day", f"{self._bytes} were used today, and {size} are asked for")
        self._bytes += size

    @staticmethod
    def _date(seconds: float) -> str:
        return time.strftime("%Y-%m-%d", time.localtime(seconds))


def _bytes_of(audit: Path, day: str, date: Callable[[float], str]) -> int:
    """Bytes that a site's log has of a day."""
    total = 0
    for line in audit.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
            total += int(entry["bytes"]) if date(entry["time"]) == day else 0
        except FAULTS:
            continue  # a line that was not written to its end
    return total


def _within(hours: str, now: time.struct_time) -> bool:
    """Whether a time lies in hours such as "20:00-06:00", which may span midnight."""
    begin, end = hours.split("-")
    clock = f"{now.tm_hour:02}:{now.tm_min:02}"
    if begin <= end:
        return begin <= clock < end
    return clock >= begin or clock < end


# Consent of a site, in its data card ---------------------------------------------------------------------------


_WORDS = ("by", "on", "policy", "card")


def give_consent(file: Path, site: str, by: str, key: Path, policy: Path) -> None:
    """Consent to a site's card and policy, written into the card; an earlier one of the site is replaced."""
    card = read_card(file)
    if site not in card.clients:
        raise ValueError(f"{file} has no client {site!r}; there are {', '.join(card.clients)}")
    if not by.strip():
        raise ValueError("--by must name who consents, got nothing")
    read_policy(policy)
    described = replace(card, clients={name: replace(told, consent={}) for name, told in card.clients.items()})
    consent = {"by": by, "on": time.strftime("%Y-%m-%d"), "policy": digest_of(policy)}
    consent["card"] = sha256(described.to_json().encode()).hexdigest()
    consent["signature"] = signature_by(load_private(key.read_bytes(), str(key)), _text(site, consent)).hex()
    clients = {**card.clients, site: replace(card.clients[site], consent=consent)}
    write_atomically(file, replace(card, clients=clients).to_json().encode())


def check_consents(card: Card, keys: Mapping[str, str]) -> None:
    """Check of the signatures under all consents of a card, by the list of the sites' public keys."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    for site, client in card.clients.items():
        if not client.consent or site not in keys:
            continue
        try:
            signature, text = bytes.fromhex(client.consent["signature"]), _text(site, client.consent)
            sound = signed_by(load_ssh_public_key(keys[site].encode()), signature, text)
        except (ValueError, KeyError):
            sound = False
        if not sound:
            raise ValueError(
                f"the consent of {site!r} in the card is not signed with the key of that site: it has to be given "
                "again (`confed federation consent`)"
            )


def check_policy(card: Card, site: str, policy: str) -> None:
    """Check that a site's policy is the one that was agreed to, where its card has a consent."""
    client = card.clients.get(site)
    if client is None or not client.consent:
        return
    agreed = client.consent
    if not policy or digest_of(Path(policy)) != agreed["policy"]:
        raise ValueError(
            f"{policy or 'no policy'} is not what {agreed['by']} consented to on {agreed['on']}: put that policy back, "
            "or have the consent given again (`confed federation consent`)"
        )


def _text(site: str, consent: Mapping[str, str]) -> bytes:
    return json.dumps(["confed consent", site, *(consent[word] for word in _WORDS)]).encode()
