"""Client workspace for the duration of an action."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from confed.federation.client_info import ClientInfo
from confed.federation.keyed_noise import KeyedNoise, Noise
from confed.federation.local import Local
from confed.federation.measure import Measure
from confed.federation.messages import Message
from confed.federation.params import Params, Scalar, Scope, copy_into
from confed.federation.protocols import ClientData, Task
from confed.federation.randomness import generator
from confed.federation.record_privacy import RecordPrivacy
from confed.federation.state import ClientState
from confed.federation.step_checkpoints import StepCheckpoints
from confed.federation.traits import GlobalModel


class Session(dict[str, Any]):
    """Live objects that a client keeps in this process between the calls of a session.

    A site that was restarted does the session's actions again, with the same messages: what they leave here must follow
    from the client's state, the messages and :meth:`Client.rng`.

    Attributes:
        writing: whether the engine wants a snapshot in the client's state of all that another process would need to go
            on with the session. A method may leave it to a later call.
        written: whether the action left one; set by the method.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writing = self.written = False


class Journal(Protocol):
    """Append-only record of a client: unlike its state, no server can reset it to an earlier version."""

    def use(self, secret: bytes, what: bytes = b"") -> None:
        """Writes down that a secret is used for the request in hand.

        Args:
            secret: the secret.
            what: what leaves under it, where doing the same request again may give something else.

        Raises:
            ValueError: it was used for another request before, or for something else.
        """
        ...


class NoiseSource(Protocol):
    """Noise from a secret of a client's own, the same one for the same values."""

    def noise(self, round: int, client: str, purpose: str) -> KeyedNoise:
        """The noise for one purpose in the call in hand."""
        ...


class SignatureCheck(Protocol):
    """Check of signatures by which clients identify themselves."""

    def check(self, client: str, statement: bytes, signature: bytes) -> None:
        """Checks a client's signature.

        Raises:
            ValueError: it is none of that client's.
        """
        ...


class Signer(SignatureCheck, Protocol):
    """Signatures by which clients identify themselves to each other, independent of the server between them."""

    def sign(self, statement: bytes) -> bytes:
        """The client's signature under a statement."""
        ...


@dataclass
class Client:
    """One client for the duration of one action: its data and state, and a model to work in.

    The model is a workspace that other clients use before and after; whatever it holds when an action starts
    is meaningless until :meth:`load` has filled it.

    Attributes:
        info: who this is.
        data: its examples.
        model: the workspace.
        tensors: the workspace's live tensors by name.
        task: loss and tally.
        local: how to train.
        state: what the client keeps; saved when the action returns, discarded when it raises.
        scopes: where each of the model's tensors lives for this client.
        initial: the values every party started from (of all tensors that are not frozen).
        round: number of the round, from 0.
        rounds: number of rounds in the run.
        seed: the run's seed.
        keep_personal: whether :meth:`remember` also keeps the client's version of the shared tensors.
        session: what the client keeps in this process between calls of one session: live objects such as an optimiser
            and the graph of the last forward pass; empty when the session begins, and when it goes on in this process
            from a snapshot in ``state``. None where the engine may start a new process for every call, so that
            everything must be in ``state``.
        initial_private: the method's values for private tensors that no client has trained.
        lr_factor: name of a tensor -> the method's factor on ``local.lr`` for it.
        public: examples that every client holds besides its own, where the method needs some.
        journal: what a site of a federation across machines remembers for good; None in the simulator.
        signer: by what a site is known to other sites; None without signatures.
        secret: where noise on values that a server may ask for again comes from at a site; None in the simulator.
        measures: numbers by which final models are judged beside the task's own.
        record_privacy: clipping and noise on the gradients of examples, which training follows.
        checkpoints: where training writes how far it has come, at a site; None in the simulator.
        at_once: whether it is trained at once with other clients, which no model is that compares examples.
        incoming: the shared tensors that :meth:`load` was last given, in the order of the model.
    """

    info: ClientInfo
    data: ClientData
    model: nn.Module
    tensors: Mapping[str, Tensor]
    task: Task
    local: Local
    state: ClientState
    scopes: Mapping[str, Scope]
    initial: Params
    round: int
    rounds: int
    seed: int
    keep_personal: bool = True
    session: Session | None = None
    initial_private: Callable[[Params], Params] = lambda shared: {}
    lr_factor: Callable[[str], float] = lambda name: 1.0
    public: ClientData | None = None
    journal: Journal | None = None
    signer: Signer | None = None
    secret: NoiseSource | None = None
    measures: Sequence[Measure] = ()
    record_privacy: RecordPrivacy | None = None
    checkpoints: StepCheckpoints | None = None
    at_once: bool = False
    incoming: Params = None  # type: ignore[assignment]

    def rng(self, purpose: str) -> torch.Generator:
        """A generator derived from (seed, round, client, purpose)."""
        return generator(self.seed, self.round, self.info.id, purpose)

    def noise(self, purpose: str) -> torch.Generator | None:
        """Generator of noise for privacy (see :func:`confed.federation.randomness.normal`).

        As :meth:`rng` in the simulator, whose runs are repeatable; None, the operating system, at a site of a
        federation across machines: the other parties know the seed.
        """
        return self.rng(purpose) if self.journal is None else None

    def fixed_noise(self, purpose: str, *, repeatable: bool = True) -> Noise:
        """Noise that a request which comes again does not draw anew (see :mod:`confed.federation.keyed_noise`).

        Releases that no journal counts need it: those at the cut of split learning, and those of every step.

        Args:
            purpose: what it is for.
            repeatable: whether a run in the simulator can be repeated.
        """
        if self.secret is not None:
            return self.secret.noise(self.round, self.info.id, purpose)
        return self.noise(purpose) if repeatable else None

    def names(self, *wanted: Scope) -> list[str]:
        """The model's tensor names of the wanted scopes."""
        return [name for name, scope in self.scopes.items() if scope in wanted]

    def load(self, shared: Params, *, common: GlobalModel = "none") -> None:
        """Fills the workspace: the shared values given, and this client's private ones; clears gradients.

        A simulator that evaluates a model whose parts lie on several servers gives the servers' own values too.

        Args:
            shared: values of the shared tensors.
            common: for the global model, what the method says of it: values for private tensors that follow from the
                shared ones go before the client's own, and where it answers alone, so do initial values.

        Raises:
            ValueError: a shared name is missing, unknown or of another shape.
        """
        names, remote = self.names(Scope.SHARED), [n for n in self.names(Scope.SERVER) if n in shared]
        if set(shared) != {*names, *remote}:
            missing, extra = sorted(set(names) - set(shared)), sorted(set(shared) - {*names, *remote})
            raise ValueError(f"client {self.info.id!r}: shared tensors missing: {missing}, unexpected: {extra}")
        self.incoming = {n: shared[n] for n in names}
        private, given = self.state.tensors.get("private", {}), self.initial_private(shared)
        if common == "alone":
            private = {}
        private = {**given, **private} if common == "none" else {**private, **given}
        private_values = {n: private.get(n, self.initial[n]) for n in self.names(Scope.PRIVATE)}
        # What a rule freezes for this client another client may train: it starts from the common values.
        rest = [n for n in self.initial if self.scopes[n] not in (Scope.SHARED, Scope.PRIVATE)]
        values = {**self.incoming, **private_values, **{n: shared.get(n, self.initial[n]) for n in rest}}
        copy_into([self.tensors[n] for n in values], list(values.values()))
        for tensor in self.tensors.values():  # walking through the modules takes longer
            tensor.grad = None

    def load_personal(self) -> bool:
        """Fills the workspace with the client's personal model; False if it has none yet."""
        personal = self.state.tensors.get("personal")
        if personal is None:
            return False
        self.load(personal)
        return True

    def values(self, *wanted: Scope) -> dict[str, Tensor]:
        """Copies, in main memory, of the workspace's tensors of the wanted scopes."""
        live = {name: self.tensors[name].detach() for name in self.names(*wanted)}
        return {name: t.clone() if t.device.type == "cpu" else t.cpu() for name, t in live.items()}

    def remember(self) -> None:
        """Keeps the private values and, where the run keeps personal models, the shared ones as trained here."""
        private = self.values(Scope.PRIVATE)
        if private:
            self.state.tensors["private"] = private
        if self.keep_personal:
            self.state.tensors["personal"] = self.values(Scope.SHARED)

    def upload(self, **metrics: Scalar) -> Message:
        """The shared values, and nothing else, as a reply."""
        return Message(self.values(Scope.SHARED), metrics)
