"""BiCSL: bidirectional contrastive split learning.

Sun and Ochiai, "Bidirectional contrastive split learning for visual question answering", AAAI 2024. A network in four
parts (figure 4). At client k: f_MHA, a question-answering model without its output layer, and f_APN, a network over the
answer's words. At a server: the adapters f_NHA and f_LTA. For a batch of B examples (Algorithm 1):

    client:  v_MHA = f_MHA(picture, question) (B, D),   v_APN = f_APN(answer) (B, H)         activations go up
    server:  v = f_NHA(v_MHA),  u = f_LTA(v_APN), both (B, S),   L = InfoNCE(v, u)           (Eq. 2)
             steps f_NHA and f_LTA; sends dL/dv_MHA and dL/dv_APN                            gradients come down
    client:  steps f_MHA and f_APN with the vector-Jacobian products

Algorithm 1 sends "dL/d theta_NHA" and "dL/d theta_LTA" down and differentiates them by theta_MHA, which has no meaning;
the gradients at the cut, which give what training the whole network would, are what is meant. Labels never leave a
client.

Two servers (section "Local update aggregation"): *main* holds f_NHA and f_LTA, a copy per client within a round, and
averages the copies; *aux* averages the clients' parts f_MHA and f_APN (Eq. 3: every client counts 1/K). Main never sees
a client's part, aux never an activation or an adapter: each sees the replies to its own calls only. A round is three
phases: aux hands out the clients' part, main leads all batches of all clients, aux collects.

Paper and released code: in the code (preset ``code``) f_APN and f_LTA are one module that is never averaged, and the
averaged network is evaluated with the first client's. Its split protocol and second server do not exist (one process,
end-to-end). Loss, masking and similarity of either are the task's presets; schedules are the recipe's ``[local]``.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from confed.federation.algorithm import action
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.split import MISFITS, Cut, Half, ServerPart, TwoServers, left_out, steps_of, stored
from confed.federation.messages import Call, Flow, Message
from confed.federation.params import Mean, Params, Rules, Scope
from confed.federation.protocols import Batch, Task
from confed.federation.ranges import NOT_NEGATIVE
from confed.federation.specs import Contrasting, model_spec, task_spec
from confed.federation.state import ServerState
from confed.federation.traits import Traits
from confed.losses.distance_correlation import distance_correlation
from confed.losses.info_nce import Contrast, same_answers
from confed.privacy.cut import CutPrivacy, refuse_mixing

PARTS: Mapping[str, tuple[str, ...]] = {"client": ("mha", "apn"), "server": ("nha", "lta")}


@dataclass(frozen=True)
class BiCSL(TwoServers):
    """Contrastive split learning with a server for the heads and another for the clients' parts.

    Attributes:
        preset: "paper" or "code"; see above.
        averaged: "all" four parts, or "backbone": MHA and NHA, while each client goes on with its own APN and LTA, and
            those of the first by name answer in evaluations; default: the preset's.
        weighting: every client counts the same, or as its training "examples".
        staleness: 0: a client waits for the gradients of a batch before it runs the next, which is exact. 1: it runs
            the next one meanwhile (the paper's concurrent processing), and a batch's gradients are those of weights
            one step older.
        keep_moments: optimisers go on from round to round with each party's own moments, rather than begin anew.
        privacy: clipping and noise on the activations; there are no gradients that go up.
        decorrelate: weight of a distance correlation between a batch's inputs and its v_MHA that the client adds to its
            loss (Vepakomma et al., "NoPeek", 2020).
    """

    preset: Literal["paper", "code"] = "paper"
    averaged: Literal["all", "backbone"] | None = None
    weighting: Literal["uniform", "examples"] = "uniform"
    staleness: Literal[0, 1] = 0
    keep_moments: bool = False
    privacy: CutPrivacy = field(default_factory=CutPrivacy)
    decorrelate: Annotated[float, NOT_NEGATIVE] = 0.0
    modules: nn.Module | None = field(default=None, init=False, repr=False, compare=False)
    contrast: Contrast | None = field(default=None, init=False, repr=False, compare=False)

    traits = Traits(
        group="split",
        has_personal=False,
        in_sessions=True,
        made_for="contrastive",
        splits=True,
        rows_up=2,
        neutral="no client ever holds the whole network",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.privacy.gradient_clip is not None:
            raise ValueError(
                "algorithm.privacy.gradient_clip must be left out: BiCSL's clients send no gradients, "
                "and those they get are made of the activations"
            )

    # Before anything runs ----------------------------------------------------------------------------------

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Setup of the servers' modules and the loss."""
        if model_spec(model).split_parts != PARTS or not isinstance(task, Contrasting):
            name = task_spec(task).name or type(task).__name__
            raise ValueError(f"BiCSL needs task.name = 'contrastive', got {name!r}")
        contrast = task.contrast
        if contrast.mask_same_answer and self.privacy.noise > 0:
            raise ValueError(
                "task.mask_same_answer finds equal answers by equal rows, which algorithm.privacy.noise takes away"
            )
        if not self.server.plain:
            raise ValueError("BiCSL's servers take the mean of their parts, so algorithm.server must be left as it is")
        for client_part in PARTS["client"]:
            refuse_mixing(self.privacy, model.get_submodule(client_part))
        modules = nn.ModuleDict({name: copy.deepcopy(model.get_submodule(name)) for name in PARTS["server"]})
        return self.told(modules=modules.cpu(), contrast=contrast)

    def rules(self, client: ClientInfo) -> Rules:
        """The adapters are the main server's; the rest is the clients', averaged by the other server."""
        return {"nha.*": Scope.SERVER, "lta.*": Scope.SERVER, "*": Scope.SHARED}

    @property
    def own_answers(self) -> bool:
        """Whether APN and LTA stay each client's own."""
        return (self.averaged or ("backbone" if self.preset == "code" else "all")) == "backbone"

    # Servers -----------------------------------------------------------------------------------------------

    def split(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """Phase in which clients train batch by batch with ``main``, which then averages the adapters."""
        heads = {c.id: self._head(server, c) for c in cohort}
        calls = [Call(c, "step", Message(), session=True) for c in cohort]
        finished: list[ClientInfo] = []
        arrived: dict[str, Message] = {}
        last = ""
        while calls:
            replies = yield calls
            # With staleness the clients are at their next batch while main works on what came before.
            answers = {c: self._learnt(heads[c], message, c) for c, message in arrived.items()}
            arrived, calls = {}, list[Call]()
            for reply in replies:
                name = reply.client.id
                if reply.error is not None:
                    last = f"; {name}: {reply.error}"
                    continue
                if bool(reply.message.scalars.get("done")):
                    if heads[name].finite():
                        finished.append(reply.client)
                    else:
                        last = f"; {name}: its adapters diverged, they hold a NaN or an infinity"
                    continue
                if self.staleness and reply.message.tensors:
                    arrived[name] = reply.message
                stale = bool(self.staleness)
                message = answers.get(name, Message()) if stale else self._learnt(heads[name], reply.message, name)
                if isinstance(message, Message):
                    calls.append(Call(reply.client, "step", message, session=True))
                else:
                    last = f"; {name}: {message}"
        if not finished:
            raise RuntimeError(f"no client is left in round {server.round + 1}{last}")
        order = [c.id for c in cohort if c in finished]
        return self._averaged(server, {c: heads[c] for c in order}, {c.id: self.share(c) for c in finished})

    @property
    def not_averaged(self) -> str:
        """APN, where it stays each client's own."""
        return "apn." if self.own_answers else ""

    def share(self, client: ClientInfo) -> float:
        """Weight of a client in means, as ``weighting`` says."""
        return 1.0 if self.weighting == "uniform" else float(client.num_examples)

    def _head(self, server: ServerState, client: ClientInfo) -> ServerPart:
        """A client's copy of the adapters."""
        if self.modules is None or server.local is None:
            raise ValueError("BiCSL does not know the servers' modules; call configure(model, task) before the run")
        answer_layer: Params = server.slots.get(f"lta of {client.id}", {}) if self.own_answers else {}
        moments = server.slots.get(f"moments of {client.id}") if self.keep_moments else None
        return ServerPart(
            self.modules, {**server.params, **answer_layer}, server.local, server.round, max(server.rounds, 1),
            steps_of(client.num_examples, server.local), moments,
        )  # fmt: skip

    def _learnt(self, head: ServerPart, activations: Message, client: str) -> Message | Exception:
        """:meth:`_learn`, or why nothing can be learnt from what a client sent."""
        try:
            return self._learn(head, activations)
        except MISFITS as error:
            return left_out(client, error)

    def _learn(self, head: ServerPart, activations: Message) -> Message:
        """One step of a client's copy of the adapters; the gradients at the cut, and the loss."""
        if self.contrast is None:
            raise ValueError("BiCSL does not know the loss; call configure(model, task) before the run")
        cut = {name: tensor.float().requires_grad_() for name, tensor in activations.tensors.items()}
        if not cut:
            return Message()
        v, u = head.modules["nha"](cut["v_mha"]), head.modules["lta"](cut["v_apn"])
        loss = self.contrast(v, u, _same(cut["v_apn"]) if self.contrast.mask_same_answer else None)
        head.learn(loss)
        gradients = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in cut.items()}
        return Message(gradients, {"loss": float(loss.detach())})

    def _averaged(
        self, server: ServerState, heads: Mapping[str, ServerPart], shares: Mapping[str, float]
    ) -> ServerState:
        mean, slots = Mean(self.accumulator_dtype), dict(server.slots)
        for name, head in heads.items():
            values = head.values()
            mean.add(values, shares[name])
            if self.own_answers:
                slots[f"lta of {name}"] = {n: t for n, t in values.items() if n.startswith("lta.")}
            if self.keep_moments:
                slots[f"moments of {name}"] = head.moments()
        params = mean.result(server.params)
        if self.own_answers:
            params |= slots[f"lta of {min(heads)}"]
        return replace(server, round=server.round + 1, params=params, slots=slots)

    # Client ------------------------------------------------------------------------------------------------

    @action
    def receive(self, client: Client, message: Message) -> Message:
        """Client action: reception of the averaged part before the first batch."""
        answer_layer = client.state.tensors.get("answers", {}) if self.own_answers else {}
        client.load({**message.tensors, **answer_layer})
        moments = client.state.tensors.get("moments") if self.keep_moments else None
        Half(client, self._bottom, self.staleness, moments=moments).keep(client)
        return Message()

    @action
    def step(self, client: Client, message: Message) -> Message:
        """Client action: update with an earlier batch's gradients; the reply has the next batch's activations.

        The scalar ``done`` of the reply says that there are no more batches, and that all gradients have come.
        """
        half = Half.of(client, self._bottom, self.staleness)
        if message.tensors:
            half.learn(message.tensors, client)
            half.note(float(message.scalars["loss"]))
        sent = half.advance(client)
        half.keep(client)
        return Message(sent, {"done": half.done})

    @action
    def send(self, client: Client, message: Message) -> Message:
        """The trained part, for the auxiliary server."""
        half = Half.of(client, self._bottom, self.staleness)
        if self.keep_moments:
            client.state.tensors["moments"] = stored(half.optimizer, half.parameters)
        loss = half.close(client)
        sent = client.upload(loss=loss)
        if self.own_answers:
            client.state.tensors["answers"] = {n: t for n, t in sent.tensors.items() if n.startswith("apn.")}
        return sent

    def _bottom(self, client: Client, model: nn.Module, batch: Batch, step: int) -> Cut:
        """v_MHA and v_APN of a batch as they are sent."""
        rows = self.privacy.rows(batch["label"])
        if rows is not None:
            batch = {name: tensor[rows] for name, tensor in batch.items()}
            if len(rows) < 2:
                return Cut({})
        cut: Any = model.cut  # a model in four parts, as configure() has checked
        v_mha, v_apn = (tensor.float() for tensor in cut(batch))
        penalty = None
        if self.decorrelate:
            penalty = self.decorrelate * distance_correlation(_inputs(batch), v_mha)
        release = {
            name: self.privacy.activations(tensor, client.fixed_noise(f"cut/{name}/{step}"))
            for name, tensor in (("v_mha", v_mha), ("v_apn", v_apn))
        }
        return Cut(release, penalty)


def _same(v_apn: Tensor) -> Tensor:
    """Pairs of equal rows, (B, B): equal answers, as the server can tell them without any label."""
    groups = cast("tuple[Tensor, Tensor]", torch.unique(v_apn.detach(), dim=0, return_inverse=True))  # pyright: ignore
    return same_answers(groups[1])


def _inputs(batch: Batch) -> Tensor:
    """A batch's pictures or their regions as rows of numbers, (B, ...)."""
    key = next((name for name in ("regions", "image", "x") if name in batch), None)
    if key is None:
        raise ValueError(f"algorithm.decorrelate needs regions or pictures in a batch, got {', '.join(sorted(batch))}")
    return batch[key].flatten(1).float()
