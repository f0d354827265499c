"""Contract of models: every registered one keeps it, and each kind of broken one is named in a line."""

import threading
from dataclasses import replace
from inspect import signature

import pytest
import torch
from torch import Tensor, nn

from confed.algorithms.fedavg import FedAvg
from confed.algorithms.fedper import FedPer
from confed.federation.local import Local
from confed.federation.model_contract import model_faults, reading_fault
from confed.federation.params import named_tensors, tied_names
from confed.federation.protocols import Output
from confed.models import create_model
from confed.registry import models
from confed.testing import ContractViolation, check_model
from confed.testing.toy import ToyModel, toy_setup
from confed.testing.trial import run
from refusals import refuses

FULL_SIZE = ("albef", "ban_4", "ban_8", "blip", "caption_transformer", "mcan_large", "mcan_small", "mfb", "mmnas_large",
             "mmnas_small", "modal_transformer", "vault_b32", "vilt_b32", "vit_b16")  # fmt: skip
PACKAGED = {"hf": "smolvlm_mini", "clip": "clip_mini"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in FULL_SIZE else ()) for n in models.names()]
)
def test_every_registered_model_keeps_the_contract(name: str):
    known = {"answers": ["yes", "no"], "vocab_size": 92, "region_width": 8, "words": ("a", "b"), "seed": 0,
             "picture_size": (32, 32), "source": PACKAGED.get(name, ""), "vision": "tiny:resnet"}  # fmt: skip
    given = {key: value for key, value in known.items() if key in signature(models[name]).parameters}
    assert all(result == "passed" for _, result in check_model(create_model(name, **given)))


class Small(nn.Module):
    """Three features of the picture's mean colour, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, batch: dict[str, Tensor]) -> Output:
        features = torch.relu(self.body(batch["image"].float().mean((2, 3))))
        return Output(self.head(features), features)


def with_(change: object, model: type[nn.Module] = Small) -> nn.Module:
    made = model()
    change(made)  # pyright: ignore[reportCallIssue]
    return made


def buffer(value: Tensor):
    return lambda m: m.register_buffer("extra", value)


def parameter(value: Tensor):
    return lambda m: m.register_parameter("extra", nn.Parameter(value))


def extra_state(m: nn.Module) -> None:
    class Remembers(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 1}

    m.memory = Remembers()


def tie(m: Small) -> None:
    m.out = nn.Linear(3, 4)
    m.out.weight = m.body.weight


def one_frozen(names: tuple[str, ...]):
    def change(m: Small) -> None:
        tie(m)
        m.frozen = names

    return change


def view_of_a_weight(m: Small) -> None:
    m.register_buffer("extra", m.body.weight.detach()[1:, 1:])


def half_of_each(m: Small) -> None:
    whole = torch.zeros(4, 8)
    m.register_buffer("left", whole[:, :4])
    m.register_buffer("right", whole[:, 4:])


def closure(m: Small) -> None:
    scale = nn.Parameter(torch.ones(1))
    m.scale, m.scaled = scale, lambda value: value * scale


BROKEN = {
    "complex": (buffer(torch.zeros(2, dtype=torch.complex64)), "'extra' is complex64, which cannot be sent"),
    "float8": (buffer(torch.zeros(2, dtype=torch.float8_e4m3fn)), "'extra' is float8_e4m3fn"),
    "uint16": (buffer(torch.zeros(2, dtype=torch.uint16)), "'extra' is uint16"),
    "sparse": (buffer(torch.eye(3).to_sparse()), "sparse_coo, which cannot be sent or stored: make it dense"),
    "meta": (parameter(torch.zeros(2, device="meta")), "on the device 'meta' and has no values"),
    "lazy": (lambda m: setattr(m, "body", nn.LazyLinear(4)), "'body.weight' has no shape yet"),
    "extra state": (extra_state, "'memory._extra_state' is no tensor"),
    "expanded": (buffer(torch.zeros(1, 4).expand(5, 4)), "values of 'extra' share memory"),
    "expanded parameter": (parameter(torch.zeros(1).expand(3)), "values of 'extra' share memory"),
    "sliding": (buffer(torch.zeros(6).unfold(0, 3, 1)), "values of 'extra' share memory"),
    "view": (view_of_a_weight, "'extra' and 'body.weight' share memory"),
    "alias": (lambda m: m.register_buffer("extra", m.body.weight.detach()), "'extra' and 'body.weight' share memory"),
    "lock": (lambda m: setattr(m, "lock", threading.Lock()), "it cannot be copied"),
    "history": (lambda m: setattr(m, "doubled", m.body.weight * 2), "it cannot be copied"),
    "closure": (closure, "the function 'scaled' of Small holds a module or tensor"),
    "pattern": (lambda m: setattr(m, "parts", nn.ModuleDict({"a[1]": nn.Linear(2, 2)})), "read .* as patterns"),
    "first frozen": (one_frozen(("body.weight",)), "'body.weight' is frozen and 'out.weight' is not"),
    "later frozen": (one_frozen(("out.weight",)), "'out.weight' is frozen and 'body.weight' is not"),
    "frozen typo": (lambda m: setattr(m, "frozen", ("bdoy.weight",)), "frozen names 'bdoy.weight', which is none"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_models_are_named_in_one_line(kind: str):
    change, message = BROKEN[kind]
    with pytest.raises(ContractViolation, match=message) as caught:
        check_model(with_(change))
    assert "\n" not in str(caught.value)


def quantised(m: Small) -> None:
    m.register_buffer("extra", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors_are_named():
    with pytest.raises(ContractViolation, match="'extra' is qint8"):
        check_model(with_(quantised))


@pytest.mark.parametrize(
    "change",
    [
        tie, half_of_each, one_frozen(("body.weight", "out.weight")),
        parameter(torch.zeros(6, 4).t()), parameter(torch.zeros(())), parameter(torch.zeros(0, 3)),
        buffer(torch.ones(3, dtype=torch.bool)), parameter(torch.zeros(3, dtype=torch.bfloat16)),
        lambda m: setattr(m, "act", lambda value: value + 1),
        lambda m: setattr(m, "parts", nn.ModuleDict({"müsli": nn.Linear(2, 2), "a b": nn.Linear(2, 2)})),
        lambda m: setattr(m, "rnn", nn.LSTM(3, 4)), lambda m: m.to(memory_format=torch.channels_last),
    ],
)  # fmt: skip
def test_unusual_models_that_can_be_trained_pass(change):
    assert [*model_faults(with_(change))] == []


def test_a_tied_tensor_has_one_name_and_one_tensor():
    model = with_(tie)
    assert tied_names(model) == {"out.weight": "body.weight"}
    assert list(named_tensors(model)) == ["body.weight", "body.bias", "head.weight", "head.bias", "out.bias"]


def test_the_trial_changes_nothing_and_names_the_error():
    class Counts(Small):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, batch: dict[str, Tensor]) -> Output:
            self.calls += 1
            made = super().forward(batch)
            return Output(made.logits, self.drop(self.norm(made.features)) + torch.rand(4))

    model, batch = Counts(), {"image": torch.zeros(2, 3, 8, 8, dtype=torch.uint8)}
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    assert check_model(model, batch)[-1] == ("answers a batch", "passed")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert (model.training, model.norm.training, torch.equal(state, torch.get_rng_state())) == (True, True, True)
    assert reading_fault(model, {"image": torch.zeros(2, 1, 8, 8, dtype=torch.uint8)}).startswith("raises RuntimeError")
    with pytest.raises(ContractViolation, match="must give an Output"):
        check_model(
            with_(lambda m: setattr(m, "forward", lambda batch: Output(torch.zeros(1, 2), torch.zeros(1)))), batch
        )


class TwiceUsed(ToyModel):
    """The toy model with a second layer that has the first one's weight, under a name of its own or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__(False, torch.Generator().manual_seed(7))
        self.tied = tied
        if tied:
            self.again = nn.Linear(8, 8)
            self.again.weight = self.body.weight
            nn.init.zeros_(self.again.bias)
        else:
            self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, batch: dict[str, Tensor]) -> Output:
        first = torch.relu(self.body(self.stem(batch["x"])))
        second = self.again(first) if self.tied else nn.functional.linear(first, self.body.weight, self.bias)
        return Output(self.head(first + second), first + second)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_tied_weights_take_one_step_a_batch(optimizer: str):
    made = toy_setup(FedAvg(), local=Local(epochs=1, batch_size=4, lr=0.05, optimizer=optimizer), rounds=1)
    tied, plain = (run(replace(made, build=lambda tied=tied: TwiceUsed(tied))) for tied in (True, False))
    tied_values, plain_values = tied.servers["main"].params, plain.servers["main"].params
    assert "again.weight" not in tied_values
    for name in ("body.weight", "head.weight"):
        assert torch.equal(tied_values[name], plain_values[name])
    assert torch.equal(tied_values["again.bias"], plain_values["bias"])


def test_a_method_that_takes_tied_weights_apart_is_refused():
    made = toy_setup(FedAvg(), rounds=1)
    method = FedPer(head=("again",)).configure(TwiceUsed(tied=True), made.task)
    message = "'body.weight' and 'again.weight' are one tensor .tied weights., and FedPer takes them apart"
    refuses(message, run, replace(made, algorithm=method, build=lambda: TwiceUsed(tied=True)))
