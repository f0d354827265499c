"""FedLoRA: federated LoRA and its variants as policies on the two factors.

LoRA (Hu et al., ICLR 2022) replaces a frozen weight W_0 (m x n) by W_0 + s B A with A (r x n) and B (m x r), s =
alpha / r; B starts at 0. The mean of the clients' factors is not the mean of their updates: sum_k w_k B_k A_k differs
from (sum_k w_k B_k)(sum_k w_k A_k). The variants differ in three choices:

| preset | trains | shares | the server | source |
|---|---|---|---|---|
| lora | A, B | A, B | takes the mean of each factor | FedIT: Zhang et al., ICASSP 2024, arXiv 2305.05644 |
| ffa_lora | B | B | mean; exact, as all have the same A | FFA-LoRA: Sun et al., ICLR 2024, arXiv 2403.12313 |
| fedsa_lora | A, B | A | mean; B stays at home | FedSA-LoRA: Guo et al., ICLR 2025, arXiv 2410.01463 |
| share_b | A, B | B | mean; A stays at home | the mirror image of FedSA-LoRA |
| flora | A, B | A, B | stacks the factors; all add s B A to W_0 and start anew | FLoRA: arXiv 2409.05976 |
| fedex_lora | A, B | A, B | mean; all add what it lacks to W_0 | FedEx-LoRA: arXiv 2410.09432 |
| flexlora | A, B | A, B | decomposes the mean update into ranks that clients have | FlexLoRA: arXiv 2402.11505 |
| rolora | B, A in turn | as trained | mean; exact, as all have the same other factor | RoLoRA: arXiv 2409.02346 |
| lora_fair | A, B | A, B | mean; corrects B towards the mean update | LoRA-FAIR: ICCV 2025, arXiv 2411.14961 |
| flora_na | A, B | A, B | sums with weights that it fits | FLoRA-NA: arXiv 2509.26399 |
| hetlora | A, B | A, B | mean weighted by ||B_k A_k||; ranks shrink | HetLoRA: EMNLP 2024, arXiv 2401.06432 |

Formulas are in ``losses/low_rank.py`` and, of the last three, in ``losses/low_rank.py`` with what was read of each.
What FLoRA and FedEx-LoRA add to W_0 is a matrix of its own (``federation/families/lora.py``).

Ranks may differ (``ranks``). All have the same s, that of the model's rank. A client of a smaller rank sends and
receives only its rows of A and columns of B. The mean counts what it does not have as 0 (zero-padding, as in HetLoRA),
unless ``aggregation = "dimension"``: then each row of A and column of B is the mean over the clients that have it, as
in FediLoRA (Yang et al., arXiv 2509.06984; without its repair of a client's layer by the global one). Stacking and
decomposing need no padding. With ``aggregation = "fisher"`` what a client does not have has no information.

RoLoRA (NeurIPS 2025, arXiv 2502.01755), read from its abstracts and from descriptions in public repositories: rounds 1,
3, ... train B, which starts at 0 and without which A has no gradient; rounds 2, 4, ... train A. A client sends the
factor that it trained, half of the values; it is sent both, as it may have been away.

HetLoRA's clients prune their own ranks (``federation/families/lora.py``). What was pruned travels in the old
shape once more, as zeros, beside the new rank; ``prune_decay = 1`` is no pruning.

Deviations: in all of these every client has an answer head of its own, as in FedDAT's tables (unless the model writes
its answers and has none); FLoRA's clients draw the new A of a round themselves, from the distribution LoRA starts from;
and clients count the same by default, as FedDAT's do, where FedIT, FLoRA, FlexLoRA and FediLoRA weigh them by their
numbers of examples (``weighting = "examples"``).
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from confed.federation.algorithm import Protection, keeps_protections, weight_by_setting
from confed.federation.client import Client
from confed.federation.client_info import ClientInfo
from confed.federation.families.branches import still
from confed.federation.families.fisher import FisherWeighted
from confed.federation.families.lora import (
    ADDED,
    STACKED,
    add_matrices,
    change_for,
    cut_to_rank,
    factor_names,
    fresh_factors,
    hold,
    limit_rank,
    lora_layers,
    noted,
    padded,
    received,
    train_and_prune,
    zero_beyond,
)
from confed.federation.messages import Call, Flow, Message, Reply
from confed.federation.params import Params, Rules, Scope, named_tensors
from confed.federation.protocols import Task
from confed.federation.ranges import AT_LEAST_ONE, NOT_NEGATIVE, SHARE
from confed.federation.reports import Number, Report
from confed.federation.specs import frozen_names
from confed.federation.state import ServerState
from confed.federation.structure import head_rules, private_head
from confed.federation.train import LocalTraining, Train
from confed.federation.traits import Traits
from confed.losses.low_rank import Factors, corrected, decomposed, dimension_wise, fitted, mean_by_norm, residual, stack

Preset = Literal[
    "", "lora", "ffa_lora", "fedsa_lora", "share_b", "flora", "fedex_lora", "flexlora",
    "rolora", "lora_fair", "flora_na", "hetlora",
]  # fmt: skip
"""The variants with names; see the module."""

Aggregation = Literal["mean", "stack", "residual", "svd", "dimension", "fisher", "corrected", "fitted", "norm"]
"""What the server does with the factors: FedAvg's mean, FLoRA's stack, FedEx-LoRA's mean and rest, FlexLoRA's SVD,
FediLoRA's mean of every dimension over the clients that have it, FedNano's mean by Fisher information, LoRA-FAIR's
corrected mean, FLoRA-NA's fitted one, or HetLoRA's mean by norms."""

PRESETS: Mapping[Preset, Mapping[str, str]] = {
    "lora": {},
    "ffa_lora": {"train": "B"},
    "fedsa_lora": {"share": "A"},
    "share_b": {"share": "B"},
    "flora": {"aggregation": "stack"},
    "fedex_lora": {"aggregation": "residual"},
    "flexlora": {"aggregation": "svd"},
    "rolora": {"train": "alternate"},
    "lora_fair": {"aggregation": "corrected"},
    "flora_na": {"aggregation": "fitted"},
    "hetlora": {"aggregation": "norm"},
}
"""Preset -> the choices in which it is not the default."""

_CHOICES = {"train": ("both", "B", "alternate"), "share": ("both", "A", "B"), "aggregation": get_args(Aggregation)}
_ONE_RANK = ("residual", "corrected", "fitted")
"""Aggregations whose result is the same for all clients only if all have the same rank."""
_RANKS = "ranks"  # slot of a server with the ranks that clients have pruned to


@dataclass(frozen=True)
class FedLoRA(FisherWeighted):
    """Federated LoRA with a choice of aggregation; answer heads are private.

    Attributes:
        preset: a variant by its name, which sets the next three; "" to choose them one by one.
        train: which factors clients train; with "B", A keeps its initial values, the same for all; "alternate" trains
            B in the first round, A in the second, and so on.
        share: which of the trained factors travel; the other one is private.
        aggregation: what the server does with them; other than "mean" and "fisher" where both are trained and shared.
        ranks: client -> its rank, at most the model's (``model.peft.rank``), which all others have.
        correction: lambda, what a correction of B costs (LoRA-FAIR).
        prune_decay: gamma, share of its rank that a client keeps when it prunes; 1 for no pruning (HetLoRA).
        prune_penalty: lambda, weight of the tail of the factors in the loss (HetLoRA).
        least_rank: the smallest rank that a client prunes to (HetLoRA).
        weighting: every client counts the same, or as its training examples.
        head: names of the submodules that are private; the model's heads if none are given.
    """

    preset: Preset = ""
    train: Literal["both", "B", "alternate"] = "both"
    share: Literal["both", "A", "B"] = "both"
    aggregation: Aggregation = field(default="mean", kw_only=True)  # pyright: ignore[reportIncompatibleVariableOverride]
    ranks: Mapping[str, int] = field(default_factory=dict[str, int])
    correction: Annotated[float, NOT_NEGATIVE] = 0.01
    prune_decay: Annotated[float, SHARE] = 0.99
    prune_penalty: Annotated[float, NOT_NEGATIVE] = 0.01
    least_rank: Annotated[int, AT_LEAST_ONE] = 1
    weighting: Literal["uniform", "examples"] = "uniform"
    head: tuple[str, ...] = ()

    traits = Traits(
        steps_alone=True,
        unbatchable_reason="",
        label="FedLoRA",
        group="finetuning",
        synchronous="what its server adds to the weights belongs to the factors of one round; take fedpeft",
        aggregates=(f"*.{ADDED}",),
        made_for="lora",
        neutral="the head is never shared",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset:
            for name, values in _CHOICES.items():
                default, wanted = values[0], PRESETS[self.preset].get(name, values[0])
                if getattr(self, name) not in (default, wanted):
                    raise ValueError(
                        f"algorithm.{name} is {wanted!r} in the preset {self.preset!r}, got {getattr(self, name)!r}; "
                        'write preset = "" to choose freely'
                    )
                object.__setattr__(self, name, wanted)  # recipes are written out with the choice itself
        averaged = self.aggregation in ("mean", "fisher")
        unfit = {"both": (), "B": ("A",), "alternate": ("A", "B")}[self.train]
        if self.share in unfit or (unfit and not averaged):
            raise ValueError(
                f"algorithm.train = {self.train!r} keeps one factor as it is, so algorithm.share must not be 'A' (and "
                "with 'alternate' not 'B') and algorithm.aggregation must be 'mean' (which is exact then) or 'fisher', "
                f"got {self.share!r} and {self.aggregation!r}"
            )
        if self.share != "both" and not averaged:
            raise ValueError(
                f"algorithm.aggregation = {self.aggregation!r} needs both factors, so algorithm.share must be 'both', "
                f"got {self.share!r}"
            )
        for client, rank in self.ranks.items():
            if rank < 1:
                raise ValueError(f"algorithm.ranks.{client} must be at least 1, got {rank}")
        if self.ranks and self.aggregation in _ONE_RANK:
            fits = ", ".join(repr(kind) for kind in get_args(Aggregation) if kind not in _ONE_RANK)
            raise ValueError(
                f"algorithm.ranks needs one of the aggregations {fits}, got {self.aggregation!r}: what the mean lacks "
                "is the same for all clients only if all have the same rank"
            )

    # Before anything runs ----------------------------------------------------------------------------------

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """Constants of the aggregation, where it has some."""
        constants: Mapping[str, Mapping[str, Sequence[Any]]] = {
            "corrected": {"correction": (0.001, 0.01, 0.1)},
            "norm": {"prune_decay": (0.85, 0.95, 0.99), "prune_penalty": (0.001, 0.01, 0.1)},
        }
        return constants.get(self.aggregation, {})

    @keeps_protections("update_privacy", "record_privacy")
    def reports(self, action: str) -> Report:
        """The loss, and the rank that a client has left after pruning."""
        rank = {"rank": Number(1, 2**31)} if self.aggregation == "norm" else {}
        return {**super().reports(action), **rank}

    def configure(self, model: nn.Module, task: Task) -> Self:
        """Setup of the heads, with a check that the model has LoRA of sufficient rank."""
        targets = lora_layers(set(named_tensors(model)) - frozen_names(model))
        if not targets:
            raise ValueError(
                f"FedLoRA works on the factors of LoRA, and {type(model).__name__} trains none: set model.trainable "
                "to 'lora'"
            )
        for target, (a, b) in targets.items():
            rank, wide, tall = *model.get_parameter(a).shape, len(model.get_parameter(b))
            for client, wanted in self.ranks.items():
                if wanted > rank:
                    raise ValueError(
                        f"algorithm.ranks.{client} must be at most {rank}, which is the rank of {target}, got {wanted}"
                    )
            if self.aggregation == "svd" and rank > min(wide, tall):
                raise ValueError(
                    f"model.peft.rank must be at most {min(wide, tall)} for the aggregation 'svd', which is all that "
                    f"{target} ({tall} x {wide}) can have, got {rank}"
                )
        return replace(self, head=private_head(model, self.head, "FedLoRA", optional=True))

    def add_modules(self, model: nn.Module, rng: torch.Generator) -> None:
        """Addition of the matrix D to layers with LoRA, where the aggregation adds to weights."""
        if self._adds:
            add_matrices(model)

    def rules(self, client: ClientInfo) -> Rules:
        """Heads are private, A and B as the policy says, the rest of what is trained is shared."""
        a = Scope.PRIVATE if self.share == "B" else Scope.SHARED
        if self.train == "B":
            a = Scope.FROZEN
        b = Scope.PRIVATE if self.share == "A" else Scope.SHARED
        return {**head_rules(self.head, "FedLoRA"), "*.lora_A.*": a, "*.lora_B.*": b, "*": Scope.SHARED}

    def unsupported_reason(self, protection: Protection) -> str:
        """Every protection where factors are not averaged; of sums also where clients have ranks of their own."""
        if self.aggregation not in ("mean", "fisher"):
            return f"algorithm.aggregation = {self.aggregation!r} puts the clients' factors together in its own way"
        at_server = self.update_privacy is not None and self.update_privacy.at == "server"
        if self.ranks and (protection == "secure_sum" or (protection == "update_privacy" and at_server)):
            return "algorithm.ranks gives clients factors of different shapes, which cannot be summed"
        return super().unsupported_reason(protection)

    @property
    def updates_compressible(self) -> bool:
        """Not where rounds add to the weights and factors are sent whole, of other shapes than what was received."""
        return self.aggregation != "stack" and super().updates_compressible

    @property
    def _adds(self) -> bool:
        """Whether rounds add to the weights beside the factors."""
        return self.aggregation in ("stack", "residual")

    # Server ------------------------------------------------------------------------------------------------

    weight = weight_by_setting

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def round(self, server: ServerState, cohort: Sequence[ClientInfo]) -> Flow:
        """Round of the action ``fit``, with messages in each client's own rank."""
        absent = sorted(set(self.ranks) - {client.id for client in cohort})
        if absent and not server.round and len(cohort) == server.clients:  # who may join later is not known here
            names = ", ".join(client.id for client in cohort)
            warnings.warn(f"algorithm.ranks names {absent[0]!r}, but the clients of round 1 are {names}", stacklevel=2)
        messages = [self._download(server, client) for client in cohort]
        expected = [self._expected(server, client) for client in cohort]
        replies = yield [Call(c, "fit", m, e) for c, m, e in zip(cohort, messages, expected, strict=True)]
        return self.aggregate(server, replies)

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def broadcast(self, server: ServerState, client: ClientInfo) -> Message:
        """Parameters sent to a client, in the model's shapes: 0 beyond the client's rank, and D in full."""
        tensors = super().broadcast(server, client).tensors
        return Message({**tensors, **zero_beyond(tensors, self._rank(server, client))})

    @keeps_protections("robust", "secure_sum", "update_privacy")
    def aggregate(self, server: ServerState, replies: Iterable[Reply]) -> ServerState:
        """The mean of what is shared, and of the factors what the policy says."""
        heard: list[tuple[str, float, Params]] = []
        ranks = dict(server.slots.get(_RANKS, {}))

        def rest() -> Iterator[Reply]:
            for reply in replies:
                if reply.error is not None:
                    continue
                tensors = dict(reply.message.tensors)
                factors = {name: tensors.pop(name) for name, _ in factor_names(tensors)}
                if self.aggregation not in ("mean", "fisher"):
                    heard.append((reply.client.id, self.weight(reply), factors))
                if self.aggregation in ("mean", "fisher", "residual"):
                    tensors |= padded(factors, server.params)
                if self.aggregation == "norm":
                    held = min(factors[name].shape[dim] for name, dim in factor_names(factors))
                    ranks[reply.client.id] = torch.tensor(min(held, int(reply.message.scalars["rank"])))
                yield replace(reply, message=Message(tensors, reply.message.scalars))

        params = self.average(server, rest())
        slots = {**server.slots, **({_RANKS: ranks} if ranks else {})}
        after = replace(server, round=server.round + 1, params=params, slots=slots)
        if self.aggregation in ("mean", "fisher") or not heard:
            return after
        heard.sort(key=lambda entry: entry[0])  # the order in which clients registered does not matter
        weights = [weight for _, weight, _ in heard]
        last: dict[str, Tensor] = {}
        for target, (a, b) in lora_layers(server.params).items():
            pairs = [(factors[a], factors[b]) for _, _, factors in heard]
            if not self._adds:
                params[a], params[b] = self._combined(pairs, weights, (server.params[a], server.params[b]))
                continue
            stacked, name = stack(pairs, weights), f"{target}.{ADDED}"
            params[name] = server.params[name] + self._addition(stacked, (params[a], params[b]))
            if sum(factor.numel() for factor in stacked) < params[name].numel():
                last |= {
                    f"{target}.{factor_name}": factor for factor_name, factor in zip(STACKED, stacked, strict=True)
                }
        if not self._adds:
            return after
        return replace(after, slots=noted(after, [client for client, _, _ in heard], last))

    def _combined(self, pairs: Sequence[Factors], weights: Sequence[float], current: Factors) -> Factors:
        """One layer's factors after a round, of aggregations that leave nothing beside them."""
        if self.aggregation == "svd":
            return decomposed(pairs, weights, current)
        if self.aggregation == "corrected":
            return corrected(pairs, weights, self.correction)
        if self.aggregation == "fitted":
            return fitted(pairs, weights)
        if self.aggregation == "norm":
            return mean_by_norm(pairs, weights, len(current[0]))
        a = dimension_wise([pair[0] for pair in pairs], weights, current[0], 0)
        b = dimension_wise([pair[1] for pair in pairs], weights, current[1], 1)
        return a, b

    def _addition(self, stacked: Factors, mean: Factors) -> Tensor:
        """Increment of D in a round: the mean update, or its residual after the product of the mean factors."""
        return stacked[1] @ stacked[0] if self.aggregation == "stack" else residual(stacked, mean)

    def _rank(self, server: ServerState, client: ClientInfo) -> int | None:
        """A client's rank, where it is not the model's."""
        shrunk = server.slots.get(_RANKS, {}).get(client.id)
        return self.ranks.get(client.id) if shrunk is None else int(shrunk)

    def _own(self, server: ServerState, client: ClientInfo) -> dict[str, Tensor]:
        """A client's rows of A and columns of B, and all else that is shared but D."""
        shared = super().broadcast(server, client).tensors
        factors = {name: tensor for name, tensor in shared.items() if not name.endswith(f".{ADDED}")}
        return cut_to_rank(factors, self._rank(server, client))

    def _expected(self, server: ServerState, client: ClientInfo) -> dict[str, Tensor]:
        """Tensors that a client sends."""
        tensors = self._own(server, client)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in self._resting(tensors, server.round)}
        return {**tensors, **self.information_of(tensors)} if self.aggregation == "fisher" else tensors

    def _resting(self, tensors: Iterable[str], round: int) -> list[str]:
        """The factors that are not trained in a round, counted from 0: A in even ones, B in odd ones."""
        return [name for name, dim in factor_names(tensors) if self.train == "alternate" and dim == round % 2]

    def _download(self, server: ServerState, client: ClientInfo) -> Message:
        """Message to a client in a round: its part of the shared parameters, and the change of D."""
        tensors = self._own(server, client)
        if not self._adds:
            return Message(tensors)
        if self.aggregation == "stack":  # factors start anew, at the client
            tensors = {name: t for name, t in tensors.items() if not factor_names([name])}
        return Message({**tensors, **change_for(server, client.id)}, {"round": server.round})

    # Client ------------------------------------------------------------------------------------------------

    @keeps_protections("record_privacy")
    def local_training(self, client: Client, message: Message) -> LocalTraining:
        """Local training; private parameters and D stay, the client's part of shared ones is sent."""
        starting = self._starting(client, message)
        added = received(client, message, starting, self._addition) if self._adds else {}
        client.load({**starting, **added})
        rank = self.ranks.get(client.info.id)
        if self.aggregation == "norm":  # what is sent has the rank that the server knows of
            rank = min(message.tensors[name].shape[dim] for name, dim in factor_names(message.tensors))
        limit_rank(client, rank)  # factors that are not shared have their initial values beyond the rank
        resting, left = self._resting(client.tensors, client.round), None
        if self.aggregation == "norm" and rank is not None:
            prune = {"decay": self.prune_decay, "penalty": self.prune_penalty}
            objective = self.objective(client)
            loss, left = yield from train_and_prune(client, objective, rank, least=self.least_rank, **prune)
        else:
            with still(client.tensors[name] for name in resting):
                loss = yield Train(self.objective(client))
        client.remember()
        if added:
            hold(client, message, added)
        names = [name for name in client.names(Scope.SHARED) if name not in {*added, *resting}]
        client_factors = cut_to_rank({name: client.tensors[name].detach() for name in names}, rank)
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in client_factors.items()}
        return Message(tensors, {"loss": loss} if left is None else {"loss": loss, "rank": left})

    def _starting(self, client: Client, message: Message) -> dict[str, Tensor]:
        """Every shared tensor but D, in the model's shapes."""
        full = {name: client.tensors[name] for name in client.names(Scope.SHARED)}
        stored = {n: t for n, t in message.tensors.items() if n in full and n.split(".")[-1] != ADDED}
        if self.aggregation != "stack":
            return {**stored, **padded(stored, full)}
        anew = fresh_factors(full, client.rng("restart"))
        return {**stored, **anew, **zero_beyond(anew, self.ranks.get(client.info.id))}
