"""A site of a federation across machines: it answers requests, and private state stays in the site's folder.

Nothing here knows a transport: requests and replies are bytes. A site runs the named actions of the method that is
installed on it, and nothing else. What it keeps is in its folder and survives the process; in a round of split learning
that is what the server sent (:mod:`confed.engines.remote.site_session`). The server says with every request which of it
counts (:attr:`confed.engines.remote.protocol.Request.base`), so that a site which did more than the server knows of,
because its reply was late or the server was stopped, goes on from where the server is.

A server may have a site go back to an earlier state; it must, when it was killed itself and does a round again. What
has left the site cannot go back. Of that journals are kept (secrets used, what updates have cost in privacy,
evaluations answered): they only grow, a line is on disk before the reply leaves, and nothing that a server asks for
removes one. The secret that noise is a function of is made once for a recipe: with another one what has left would
leave again with other noise.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, cast

from confed.engines.participation import listed
from confed.engines.perform import Setup, Workspace, answer
from confed.engines.remote.journal_chains import JournalChains
from confed.engines.remote.pieces import SitePieces, is_piece
from confed.engines.remote.protocol import (
    GOODBYE,
    HELLO,
    LEFT_OUT,
    Answer,
    Fingerprint,
    Limits,
    Refused,
    Request,
    Schema,
    Settings,
    digest,
    fingerprint,
    open_body,
    redact,
    schema_of,
    seal,
)
from confed.engines.remote.site_session import Record, SiteSession
from confed.federation.atomic import write_atomically
from confed.federation.checkpoint import DirectoryStore
from confed.federation.client import Signer
from confed.federation.client_info import ClientInfo
from confed.federation.directory_store import newest_until
from confed.federation.equivalence import follows_steps
from confed.federation.keyed_noise import KeyedNoise
from confed.federation.messages import Call, Message, Reply
from confed.federation.params import Params, Scalar, Scope
from confed.federation.state import ClientState
from confed.federation.step_checkpoints import EVERY, StepCheckpoints, read_interval
from confed.federation.update_privacy import UpdatePrivacy
from confed.privacy import accountant
from confed.privacy.accountant import epsilon
from confed.privacy.evaluation_policy import EvaluationPolicy
from confed.privacy.protections import ANALYSIS, UPDATE, ValueBound, actions, noise_is_fixed
from confed.privacy.secure_sum.member import FRESH, GROUP
from confed.system.events import Note, Progress, ignore
from confed.system.plain_text import visible

EVALUATION = "evaluate"
USED, COSTS = "used.jsonl", "privacy.jsonl"

_SECRET = {"secret": str, "asked": str}
_COST = {"run": str, "round": int, "action": str, "noise": float}
_SENSIBLE = (1e-100, 1e100)  # noise multipliers whose squares are numbers


class Journal:
    """Journal of a site on disk; see :class:`confed.federation.client.Journal`."""

    def __init__(self, root: Path, run: str, limit: float | None = None) -> None:
        if limit is not None and not 0 < limit < math.inf:
            raise ValueError(f"the limit of epsilon must be positive and finite, got {limit}")
        root.mkdir(parents=True, exist_ok=True)
        self.request_digest = ""  # the digest of the request in hand
        self._run, self._limit = run, limit
        self._secrets, self._costs = root / USED, root / COSTS
        self._used: dict[str, str] = {line["secret"]: line["asked"] for line in read_lines(self._secrets, _SECRET)}
        costs = read_lines(self._costs, _COST)
        # whether anything of the recipe left this site before this object was made
        self.released = any(line["run"] == run for line in costs)
        self._multipliers: list[float] = [line["noise"] for line in costs if line.get("action") != EVALUATION]
        self._evaluations: list[float] = [line["noise"] for line in costs if line.get("action") == EVALUATION]
        self._bare: set[tuple[int, str]] = {
            (line["round"], line["action"]) for line in costs if line["run"] == run and not line["noise"]
        }
        if limit is not None and not all(self._multipliers):
            first = next(line for line in costs if not line["noise"])
            raise ValueError(
                f"a limit of epsilon cannot hold: round {first['round']} of the recipe {first['run']} told a server of "
                f"this site's examples without noise of its own ({self._costs}); for other examples use another folder"
            )

    def use(self, secret: bytes, what: bytes = b"") -> None:
        """See :class:`confed.federation.client.Journal`; the same request may come again, as its reply may be lost."""
        name = blake2b(secret, digest_size=16).hexdigest()
        told = self.request_digest + (blake2b(what, digest_size=16).hexdigest() if what else "")
        if self._used.setdefault(name, told) != told:
            raise ValueError("this was done before, for another request; the same secret is not used twice")
        append(self._secrets, {"secret": name, "asked": told})

    def epsilon(self, privacy: UpdatePrivacy, more: int = 0, evaluation: float | None = None) -> float:
        """Epsilon of all updates and noised evaluations, of any recipe and run: they tell of the same examples.

        Gaussian mechanisms of multipliers z_i are together one of (sum of z_i^-2)^(-1/2) (Dong, Roth and Su, "Gaussian
        differential privacy", 2022). Updates alone: for a client with all its data; with evaluations: for each of its
        examples. An evaluation's sums move by 1 where an example is another one, an update by twice its clip.
        """
        twice = 2.0 if privacy.adjacency == "replace" else 1.0
        told = [*self._evaluations, *([] if evaluation is None else [evaluation])]
        multipliers = [*self._multipliers, *[privacy.noise] * more, *(twice * z for z in told)]
        total = sum(1 / z**2 if z else math.inf for z in multipliers)
        return epsilon(1 / math.sqrt(total), 1, privacy.delta, privacy.adjacency) if total else 0.0

    def check(self, privacy: UpdatePrivacy, evaluation: float | None = None) -> None:
        """Check that one more update, or one evaluation with that noise, is within the limit; else a ValueError."""
        if self._limit is None:
            return
        more, what = (1, "update") if evaluation is None else (0, "evaluation")
        if (cost := self.epsilon(privacy, more, evaluation)) > self._limit:
            raise ValueError(
                f"this site's limit of privacy is reached: epsilon {self._limit:g} at delta {privacy.delta:g}, and "
                f"with one more {what} {cost:.4g}"
            )

    def check_exact(self, privacy: UpdatePrivacy) -> None:
        """Check that the limit allows an update, without which nothing exact is told either."""
        if self._limit is not None and self.epsilon(privacy, 1) > self._limit:
            raise ValueError(
                f"this site's limit of privacy is spent: epsilon {self._limit:g}; nothing exact is told of its examples"
            )

    def evaluated(self, privacy: UpdatePrivacy, noise: float, round: int) -> None:
        """Record of an evaluation with noise that leaves the site."""
        self._evaluations.append(noise)
        self._record(round, EVALUATION, noise, {"unit": "example"}, privacy)

    def release(self, privacy: UpdatePrivacy, round: int) -> None:
        """Record of an update that leaves the site."""
        self._multipliers.append(privacy.noise)
        self._record(round + 1, UPDATE, privacy.noise, {"clip": privacy.clip}, privacy)

    def bare(self, round: int, action: str) -> None:
        """Record, once a round, of a reply about the examples to which this site added no noise."""
        if (round + 1, action) in self._bare:
            return
        self._bare.add((round + 1, action))
        self._multipliers.append(0.0)
        self._record(round + 1, action, 0.0, {})

    def _record(
        self, round: int, action: str, noise: float, what: Mapping[str, Any], privacy: UpdatePrivacy | None = None
    ) -> None:
        """A line of what was told, with epsilon so far where this site added noise."""
        line = {"time": time.time(), "run": self._run, "round": round, "action": action, **what, "noise": noise}
        cost = math.inf
        if privacy is not None:
            line |= {"delta": privacy.delta, "adjacency": privacy.adjacency}
            cost = self.epsilon(privacy)
        append(self._costs, {**line, "epsilon": cost if math.isfinite(cost) else None})


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line to a journal; on disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path, kinds: Mapping[str, type]) -> list[dict[str, Any]]:
    """The lines of a journal; one that was not written to its end is dropped, as nothing was sent then."""
    data = path.read_bytes() if path.is_file() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    try:
        return [_checked(json.loads(line), kinds) for line in whole.splitlines()]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; a site does not go on without its journal") from error


def _checked(line: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """A line whose entries have the right types: one that has not could make the cost look lower."""
    if not isinstance(line, dict):
        raise ValueError(f"a line must be an object, got {repr(line)[:80]}")
    entries = cast(dict[str, Any], line)
    for name, kind in kinds.items():
        value: Any = entries.get(name)
        if kind is float:
            sound = type(value) in (int, float) and (value == 0 or _SENSIBLE[0] <= value <= _SENSIBLE[1])
        else:
            sound = type(value) is kind
        if not sound:
            wanted = "a noise multiplier" if kind is float else f"of type {kind.__name__}"
            raise ValueError(f"{name} must be {wanted}, got {repr(value)[:80]}")
    return entries


# Secret of a site that its noise is a function of (keyed_noise) -----------------------------------------------

BYTES = 32


class NoiseSecret:
    """Source of a site's noise; see :class:`confed.federation.client.NoiseSource`."""

    def __init__(self, path: Path, released: bool) -> None:
        self.heard = ""  # digest of the messages of the round up to the one in hand
        stored = path.read_bytes() if path.is_file() else None
        if stored is not None and len(stored) == BYTES:
            self._secret = stored
            return
        if released:
            got = "no file" if stored is None else f"{len(stored)} bytes"
            raise ValueError(
                f"{path} must hold the {BYTES} bytes that this site's noise in this run is made from, got {got}: put "
                "it back, as with new ones what was sent before could leave again with other noise; or begin in "
                "another private folder"
            )
        self._secret = os.urandom(BYTES)
        write_atomically(path, self._secret, sync=True, mode=0o600)

    def noise(self, round: int, client: str, purpose: str) -> KeyedNoise:
        return KeyedNoise(self._secret, self.heard, round, client, purpose)


# Record of the evaluations that a site answered ---------------------------------------------------------------

POLICY, ANSWERED = "evaluations.txt", "evaluations.jsonl"


def kept_policy(root: Path, policy: EvaluationPolicy | None) -> EvaluationPolicy:
    """The policy of a site: the given one, which is kept with the site, else the one that was kept before."""
    path = root / POLICY
    if policy is not None:
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{policy}\n".encode(), sync=True)
        return policy
    if not path.is_file():
        return EvaluationPolicy()
    try:
        return EvaluationPolicy.parse(path.read_text(encoding="utf-8").strip())
    except ValueError as error:  # also of bytes that are no text
        raise ValueError(f"{path} must hold this site's policy for evaluations: {error}") from error


class EvaluationRecord:
    """A site's evaluations so far; ``evaluations.jsonl`` in its folder."""

    def __init__(
        self, root: Path, run: str, policy: EvaluationPolicy, journal: Journal, privacy: UpdatePrivacy | None
    ) -> None:
        if policy.mode == "noise" and not accountant.available():
            raise ValueError("noise on evaluations needs the library dp-accounting (the extra 'privacy')")
        self.policy, self._run, self._journal = policy, run, journal
        # For delta and the neighbours, in which both kinds of entries are added up.
        self._privacy = UpdatePrivacy(clip=1.0) if privacy is None else privacy
        self._noised = privacy is not None
        self._path = root / ANSWERED
        lines = read_lines(self._path, {"run": str, "round": int})
        self._answered = len(lines)
        self._models: dict[tuple[str, int], list[str]] = {}
        for line in lines:
            self._models.setdefault((line["run"], line["round"]), []).append(str(line.get("model", "")))

    def check(self, round: int, model: str) -> None:
        """Check that the policy allows one more evaluation, before anything is computed."""
        policy = self.policy
        models = self._models.get((self._run, round), [])
        again = model in models and policy.mode != "noise"  # the same sums once more
        if policy.mode == "off":
            raise ValueError("this site answers no evaluations")
        for name, most, so_far in (
            ("in a round", None if again else policy.per_round, len(models if policy.mode == "noise" else {*models})),
            ("in all", policy.in_all, self._answered),
        ):
            if most is not None and so_far >= most:
                raise ValueError(f"this site answers {most} evaluations {name}, and has answered {so_far}")
        if policy.mode == "noise":
            self._journal.check(self._privacy, policy.noise)
        elif policy.mode == "default" and self._noised:
            self._journal.check_exact(self._privacy)

    def release(self, message: Message, round: int, model: str) -> Message:
        """The part of an evaluation's reply that may leave the site; it is recorded first."""
        released = self.policy.release(message)
        line = {"time": time.time(), "run": self._run, "round": round, "model": model, "noise": self.policy.noise}
        if self.policy.mode == "noise":
            self._journal.evaluated(self._privacy, self.policy.noise, round)
        append(self._path, {**line, "sums": sum(name.endswith(":sum") for name in released.scalars)})
        self._answered += 1
        self._models.setdefault((self._run, round), []).append(model)
        return released


# A site of a federation across machines: it answers requests --------------------------------------------------

KEPT_AT_HOME = frozenset({"examine"})  # actions that no machine offers to another: they hand private values around


def client_named(setup: Setup, client_id: str) -> ClientInfo:
    """Information about the client of a name."""
    infos = [setup.population.info(number) for number in range(len(setup.population))]
    for info in infos:
        if info.id == client_id:
            return info
    raise ValueError(f"no client is called {client_id!r}; there are {listed([info.id for info in infos])}")


EVALUATE = "evaluate"  # the action that tells sums over examples and nothing else; the site's policy says which
SERIALS = "manifests.json"  # file in a site's folder with serial numbers of manifests; see manifest
AFTER = 2  # behind a run's last round come the method's finish and the evaluation of the final models


class Guard(Protocol):
    """A site's check of what a server asks for, by rules that no server and no recipe sets."""

    def check(self, action: str, size: int) -> None:
        """Check of a request of so many bytes before anything is computed; a refusal is a :class:`Refused`."""
        ...

    def count(self, size: int) -> None:
        """Count of bytes that come or are to leave; a refusal is a :class:`Refused`."""
        ...


class RefusingSite:
    """A site that takes no part, as its policy says: it tells the server why, and nothing else."""

    def __init__(self, why: str, told: Callable[[], None]) -> None:
        self._why, self._told = why, told

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """The reason, whatever is asked."""
        request = Request.from_bytes(head, Limits())
        if request.action == HELLO:
            self._told()
        return Answer(request.id, redact(f"Refused: {self._why}"), False, 0.0).to_bytes(), seal(Message())


class Site:
    """Client end of a federation across machines."""

    def __init__(
        self,
        setup: Setup,
        client: ClientInfo,
        root: Path,
        *,
        common: Settings | None = None,
        limits: Limits | None = None,
        audit: Path | None = None,
        progress: Progress = ignore,
        limit: float | None = None,
        evaluations: EvaluationPolicy | None = None,
        guard: Guard | None = None,
        signer: Signer | None = None,
        over: Callable[[], None] = lambda: None,
        left_out: Mapping[str, int] | None = None,
        final: Callable[[Params, ClientState], str] = lambda shared, state: "",
        checkpoint: str = EVERY,
    ) -> None:
        privacy = setup.algorithm.update_privacy
        self._privacy = privacy if privacy is not None and privacy.at == "client" and privacy.noise > 0 else None
        if limit is not None and self._privacy is None:
            raise ValueError(
                "a limit of epsilon needs a recipe whose clients add noise (algorithm.update_privacy with at = "
                "'client'); without noise every update costs more than any limit"
            )
        self._telling = frozenset(setup.algorithm.actions()).difference(ANALYSIS)
        self.client = client
        # why this site cannot take part, as found out by the last hello; None where it can
        self.problem: str | None = None
        self._audit, self._progress, self._over = audit, progress, over
        self._final, self._final_folder = final, ""
        self._left_out = {} if left_out is None else dict(left_out)
        self._guard = guard
        self._last = root / "reply"
        self._workspace = Workspace(setup.model(), setup.device)
        self.fingerprint: Fingerprint = fingerprint(setup, self._workspace, common)
        self._run = run = self.fingerprint.run[:16]
        secret, lines = f"noise-{run}.key", [USED, COSTS, ANSWERED]
        if audit is not None and audit.parent == root:
            lines.append(audit.name)
        root.mkdir(parents=True, exist_ok=True)
        self._journals = JournalChains(client.id, root, lines, [secret], SERIALS)
        self.journal = Journal(root, run, limit)  # what this site remembers for good
        policy = kept_policy(root, evaluations)
        # which evaluations it has answered, and what it still answers
        self.evaluations = EvaluationRecord(root, run, policy, self.journal, self._privacy)
        fixed = noise_is_fixed(setup.algorithm)
        self._secret = NoiseSecret(root / secret, self.journal.released) if fixed else None
        self._checkpoints = None
        every = read_interval(checkpoint)
        if any(every) and follows_steps(setup.algorithm, setup.local):
            self._checkpoints = StepCheckpoints(root / "steps", every)
        self._setup = replace(
            setup, journal=self.journal, signer=signer, secret=self._secret, checkpoints=self._checkpoints
        )
        # Every recipe has a folder: another run must not take this one's state for its own, and drop it.
        self.store = DirectoryStore(root / "state" / run)
        self._scopes = self._workspace.scopes(setup.algorithm, client)
        self._schema: Schema = schema_of(self._workspace.tensors)
        self._values = ValueBound.of(self._workspace.tensors.values(), setup.algorithm.traits.sums)
        self._limits = Limits.of(self._schema) if limits is None else limits
        self._pieces = SitePieces(root / "request", self._limits, self._handle)
        # a server may show its own layers when it asks for an evaluation of the whole.
        self._allowed = frozenset(n for n, s in self._scopes.items() if s in (Scope.SHARED, Scope.SERVER))
        self.store.root.mkdir(parents=True, exist_ok=True)
        self._session = SiteSession(
            self._setup, self._workspace, client, self.store, root / "session", self._digest_of, self._asking
        )

    @property
    def actions(self) -> frozenset[str]:
        """The actions that a server may ask for."""
        return frozenset(actions(self._setup.algorithm)) - KEPT_AT_HOME

    @property
    def largest(self) -> int:
        """Largest message to this site in bytes, by the same formula as at the server."""
        return self._limits.head + self._limits.body

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Head and body of the reply to a request, or to a piece of one; every error becomes the reply's error."""
        if not is_piece(head):
            return self._handle(head, body)
        try:
            return self._pieces.take(head, body)
        except (Refused, OSError) as error:
            answer, data = self._refusal("", error)
            return answer.to_bytes(), data

    def _refusal(self, name: str, error: Exception, when: str = "") -> tuple[Answer, bytes]:
        self._progress(Note(f"refused{when}: {error}"))
        return Answer(name, redact(f"{type(error).__name__}: {error}"), False, 0.0), seal(Message())

    def _handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        began, name, at_once = time.perf_counter(), "", 0
        try:
            request = self._read(head, body)
            name, at_once = request.id, request.at_once
            self._journals.confirm(request.journals)
            if self._guard is not None and request.action in (HELLO, GOODBYE):
                self._guard.count(len(head) + len(body))
            elif self._guard is not None:
                self._guard.check(request.action, len(head) + len(body))
            if request.action == GOODBYE:
                answer, data = self._take_leave(request)
            else:
                answer, data = self._greet(request, body) if request.action == HELLO else self._answer(request, body)
            if answer.error is None and not request.session:  # in a session calls are many, and cost no entries
                answer = replace(answer, journals=self._journals.statement())
            if self._guard is not None:
                self._guard.count(len(data))
        except Exception as error:
            answer, data = self._refusal(name, error)
        answer = replace(answer, seconds=time.perf_counter() - began)
        head = answer.to_bytes()
        try:
            self._log("out", head, data, id=answer.id, error=answer.error, seconds=answer.seconds)
        except OSError as error:  # nothing leaves that the site's own log does not hold
            answer, data = self._refusal(name, error, ", as the log cannot be written")
            return answer.to_bytes(), data
        return self._pieces.cut(head, data, at_once)

    def _read(self, head: bytes, body: bytes) -> Request:
        """A request's head; what is no request is in the log, too."""
        try:
            request = Request.from_bytes(head, self._limits)
        except Exception as error:
            self._log("in", head, body, error=f"{type(error).__name__}: {error}"[:500])
            raise
        self._log("in", head, body, id=request.id, action=request.action)
        return request

    def _greet(self, request: Request, body: bytes) -> tuple[Answer, bytes]:
        """Says who this is, and finds out whether both sides mean the same run."""
        told = open_body(body, self._limits, {}, frozenset(), {}).scalars
        self.problem = self.fingerprint.differences(told, "this site", "the server")
        self._progress(Note("connected" if self.problem is None else f"cannot take part: {self.problem}"))
        info = self.client
        greeting: dict[str, Scalar] = {"client": info.id, "examples": info.num_examples, "head": info.head}
        greeting |= {f"{LEFT_OUT}{role}": count for role, count in self._left_out.items()}
        greeting["countersigned"] = self._journals.kept
        scalars = {**self.fingerprint.scalars(), **greeting, "modalities": ",".join(info.modalities)}
        return Answer(request.id, None, False, 0.0), seal(Message({}, scalars))

    def _take_leave(self, request: Request) -> tuple[Answer, bytes]:
        where = f": {self._final_folder}" if self._final_folder else ""
        self._progress(Note(f"the run is over; the personal model stays here{where}"))
        try:
            self.store.scrub(self.client.id, GROUP, before=self._newest() + 1)
            self._session.end()
        finally:
            self._over()
        return Answer(request.id, None, False, 0.0), seal(Message())

    def _when(self, request: Request) -> str:
        """What is asked, as the person at the site reads it: an evaluation counts the rounds that are over."""
        if request.action != EVALUATE:
            return f"round {request.round + 1}: {request.action}"
        return f"{'the end' if request.round > self._setup.rounds else f'after round {request.round}'}: evaluate"

    def _answer(self, request: Request, body: bytes) -> tuple[Answer, bytes]:
        if request.client != self.client.id:
            raise Refused(f"this site is {self.client.id!r}, the request is for {request.client!r}")
        if request.action not in self.actions:
            raise Refused(f"this site has no action {request.action!r}; it has {sorted(self.actions)}")
        self._pieces.keep(body)
        # A server that was killed in the round counts on its checkpoint, which is the same state of this client's.
        base = request.base if request.session else max(self._newest(request.base), 0)
        request = replace(request, base=base)
        request_digest = self._digest_of(request, body)
        if (repeated := self._repeated(request, request_digest)) is not None:
            self._progress(Note(f"{self._when(request)} was done already, the reply goes out again"))
            return repeated
        if request.round > (end := self._setup.rounds + AFTER):  # a server could count evaluations as it likes
            raise Refused(f"the round must be at most {end} in a run of {self._setup.rounds}, got {request.round}")
        message = open_body(body, self._limits, self._schema, self._allowed)
        self._values.check(message.tensors)
        privacy = self._privacy if request.action == UPDATE else None
        if privacy is not None:
            self.journal.check(privacy)
        self._progress(Note(self._when(request)))
        if request.action == EVALUATE:  # before the store is touched: what is refused must leave no trace there
            try:
                self.evaluations.check(request.round, digest(b"", body))
            finally:  # also where the site's policy refuses the evaluation itself
                self._keep_final(request, message)
        reply = self._do(request, message, request_digest, body)
        saved = self._newest() == request.version
        if request.action == EVALUATE and reply.error is None:
            reply = replace(reply, message=self.evaluations.release(reply.message, request.round, digest(b"", body)))
        data = seal(reply.message)
        if reply.error is not None:
            self._progress(Note(f"{self._when(request)} failed: {reply.error}"))
            return Answer(request.id, redact(reply.error), saved, 0.0), data
        if privacy is not None:
            self.journal.release(privacy, request.round)
        elif self._privacy is None and reply.message.tensors and request.action in self._telling:
            self.journal.bare(request.round, request.action)
        self._remember(request_digest, saved, data, request.session)
        if request.action in FRESH:  # after the reply is on disk: one that got lost is asked for again
            self.store.scrub(self.client.id, GROUP, before=request.version)
        return Answer(request.id, None, saved, 0.0), data

    def _do(self, request: Request, message: Message, request_digest: str, body: bytes) -> Reply:
        """Reply of the client, from the state that the server counts on."""
        self.store.rewind(request.base)
        self._session.rewind(request.base)
        self.store.begin(request.version)
        self.store.kept = *request.kept, *self._session.needed
        if again := self._session.enter(request, request_digest, body):
            self._progress(Note(f"{self._when(request)} goes on after {again} calls of the round were done again"))
        if self._checkpoints is not None and request.action in self._telling and not request.session:
            self._checkpoints.enter(request_digest)
        call = Call(self.client, request.action, message, session=request.session)
        store = self._session.states if request.session else self.store
        reply = answer(self._setup, self._workspace, call, store, request.round)
        if reply.error is None:
            self._session.leave(request, request_digest, body)
        elif request.session:
            self._session.fail()
        return reply

    def _digest_of(self, request: Request | Record, body: bytes) -> str:
        """Digest of a request, by which it is known when it comes again."""
        what = [self._run, request.action, request.round, request.version, request.base]
        return digest(json.dumps(what).encode(), body)

    def _asking(self, request_digest: str, heard: str) -> None:
        self.journal.request_digest = request_digest
        if self._secret is not None:
            self._secret.heard = heard

    def _keep_final(self, request: Request, message: Message) -> None:
        """Keeps the final models for use at this site; a run never fails because this does."""
        if request.round != self._setup.rounds + AFTER or message.scalars.get("split") != "test":
            return
        names = {name for name, scope in self._scopes.items() if scope is Scope.SHARED}
        servers = {name for name, scope in self._scopes.items() if scope is Scope.SERVER}
        if message.tensors.keys() - servers != names:
            why = "the message must hold all tensors that this site receives"
            self._progress(Note(f"the final models were not kept: {why}"))
            return
        try:
            store = DirectoryStore(self.store.root)  # a separate one, which removes nothing
            store.begin(request.base)
            self._final_folder = self._final(message.tensors, store.load(self.client.id))
        except Exception as error:
            self._progress(Note(f"the final models could not be kept: {error}"))

    # The last reply ------------------------------------------------------------------------------------------

    def _repeated(self, request: Request, request_digest: str) -> tuple[Answer, bytes] | None:
        """The last reply, where the server asks for the same again because it did not get it."""
        try:
            data = self._last.read_bytes()
            length = int.from_bytes(data[:8], "little")
            last: Mapping[str, Any] = json.loads(data[8 : 8 + length])
        except (OSError, ValueError):
            return None
        body, newest = data[8 + length :], self._newest()
        if last.get("asked") != request_digest or last.get("digest") != digest(b"", body):
            return None
        if newest != request.version if last.get("saved") else newest > request.base:
            return None  # what it left in the state is gone
        return Answer(request.id, None, bool(last["saved"]), 0.0), body

    def _remember(self, request_digest: str, saved: bool, body: bytes, session: bool) -> None:
        """Storage of the reply until the next request: after a lost connection its arrival is unknown.

        In a session it is written over the one before, as a rename has some file systems flush the file: one that is
        cut is told by its digest, and the call is done again, as its request is taken back.
        """
        head = json.dumps({"asked": request_digest, "saved": saved, "digest": digest(b"", body)}).encode()
        data = len(head).to_bytes(8, "little") + head + body
        if not session or not self._last.is_file():
            write_atomically(self._last, data)
            if self._checkpoints is not None:
                self._checkpoints.leave()
            return
        with open(self._last, "r+b") as file:
            file.write(data)
            file.truncate()

    def _newest(self, most: int = sys.maxsize) -> int:
        """The newest version that this client's state has left behind and that is not newer than another."""
        return max(newest_until(self.store.versions(self.client.id), most), self._session.newest(most))

    def _log(self, way: str, head: bytes, body: bytes, **more: object) -> None:
        if self._audit is not None:
            line: dict[str, object] = {"time": time.time(), "way": way, "bytes": len(head) + len(body)}
            line |= {"digest": digest(head, body), **more}
            with self._audit.open("a", encoding="utf-8") as file:
                file.write(visible(json.dumps(line)) + "\n")
