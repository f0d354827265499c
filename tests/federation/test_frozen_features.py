"""Outputs of frozen stages are kept under what they were made of, and numbers do not change."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from confed.engines.executor import attach
from confed.federation.frozen_features import FrozenFeatures
from confed.federation.protocols import Batch, Output
from confed.federation.specs import frozen_names
from confed.federation.stages import Stage, expected_passes, frozen_stages, run_stages
from confed.federation.teacher import teacher


@pytest.fixture(autouse=True)
def kept_although_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of these tests take less time than a look-up."""
    monkeypatch.setattr(FrozenFeatures, "_weigh", lambda self: None)


FIRST = 8 * 9
"""Rows computed of a first batch of eight: as it is, backwards, and moved on by one to seven places."""


class Chain(nn.Module):
    """Two frozen layers and a head; counts the examples that each stage sees."""

    frozen_features: FrozenFeatures | None = None

    def __init__(self, inputs: tuple[str, ...] = ("x",), drop: float = 0.0) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.first, self.second, self.head = (nn.utils.skip_init(nn.Linear, 4, 4) for _ in range(3))
        for parameter in self.parameters():
            parameter.data.normal_(generator=rng)
        for layer in (self.first, self.second):
            layer.requires_grad_(False)
        self.inputs, self.drop, self.seen = inputs, drop, [0, 0, 0]
        self.wobble, self.shifted = 0.0, "shift" in inputs

    @property
    def frozen(self) -> set[str]:
        return {name for name, parameter in self.named_parameters() if not parameter.requires_grad}

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage("first", self.inputs, ("first.",)), Stage("second", (), ("second.",)), Stage("head", (), ("",))

    @property
    def stage_variant(self) -> str:
        return ""

    def forward_stages(self, state: Any, first: int, last: int, batch: Batch) -> Any:
        for number in range(first, last):
            if number == 0:
                state = batch["x"] + batch["shift"] if self.shifted else batch["x"]
            self.seen[number] += len(state)
            state = (self.first, self.second, self.head)[number](state)
            if number == 0:
                state = functional.dropout(state, self.drop, self.training) + self.wobble * self.seen[0]
        return state if last < 3 else Output(state, state)

    def forward(self, batch: Batch) -> Output:
        return run_stages(self, batch, 3)


def batch(rows: int = 8, start: float = 0.0) -> dict[str, Tensor]:
    return {"x": torch.arange(rows * 4.0).view(rows, 4).sin() + start}


def kept(model: Chain, memory: int = 10**6, **options: Any) -> FrozenFeatures:
    found = attach(model, frozen_names(model), memory, **options)
    assert isinstance(found, FrozenFeatures), found
    return found


def served(model: Chain, examples: Batch) -> int:
    """How many examples a pass sends through the frozen stages; what comes out is what it would be without."""
    before = model.seen[0]
    found = model(examples).logits
    used = model.seen[0] - before
    expected = model.head(model.second(model.first(examples["x"])))
    assert torch.equal(found, expected)
    return used


def test_features_are_kept_once_their_bits_are_known():
    model = Chain()
    features = kept(model)
    assert features.counts.stage == "second"
    # twice at first, once more in another order for comparison, then never
    mixed = {"x": batch()["x"][[3, 1, 4, 7, 5, 2, 6, 0]]}
    assert [served(model, b) for b in (batch(), mixed, batch(), mixed, batch())] == [FIRST, 8, 0, 0, 0]
    assert features.counts.reused == 24
    assert features.counts.exact


def test_other_examples_and_altered_ones_are_computed():
    model = Chain()
    kept(model)
    for _ in range(3):
        served(model, batch())
    assert served(model, batch(start=0.5)) == 8
    turned = {"x": batch()["x"].flip(-1)}
    assert served(model, turned) == 8
    half = {"x": torch.cat([batch()["x"][:4], turned["x"][4:]])}
    # Each row is an example of its own.
    assert served(model, half) == 0
    assert served(model, turned) == 0


def test_evaluation_mode_and_other_sizes_are_compared_first():
    model = Chain()
    features = kept(model)
    for _ in range(3):
        served(model, batch())
    model.eval()
    with torch.no_grad():
        assert [served(model, batch()) for _ in range(3)] == [8, 0, 0]
        assert [served(model, {"x": batch()["x"][:3]}) for _ in range(3)] == [3, 0, 0]
    assert features.counts.exact


def test_gradients_of_what_is_trained_are_those_of_a_whole_pass():
    gradients = []
    for model in (Chain(), Chain()):
        if gradients:
            kept(model)
        for _ in range(4):
            model.zero_grad()
            model(batch()).logits.square().sum().backward()
        assert model.head.weight.grad is not None
        gradients.append(model.head.weight.grad)
    assert torch.equal(*gradients)


def test_dropout_in_training_keeps_nothing():
    plain, model = Chain(drop=0.5), Chain(drop=0.5)
    features = kept(model)
    outputs = []
    for each in (plain, model):
        torch.manual_seed(3)
        outputs.append([each(batch()).logits for _ in range(4)])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert features.counts.reused == 0
    assert "random numbers" in features.counts.notes[0]
    model.eval(), plain.eval()
    with torch.no_grad():
        assert all(torch.equal(model(batch()).logits, plain(batch()).logits) for _ in range(4))
    assert features.counts.reused == 16  # evaluation draws nothing


def test_model_that_gives_other_values_each_time_keeps_nothing():
    model = Chain()
    features = kept(model)
    model.wobble = 1e-6
    for _ in range(4):
        model(batch())
    assert features.counts.reused == 0
    assert "computed twice" in features.counts.notes[0]


@pytest.mark.parametrize("tolerance", [0.0, 1e-5])
def test_layers_that_round_by_place_keep_nothing(tolerance: float):
    model = Chain()
    features = kept(model, tolerance=tolerance)
    exact = type(model).forward_stages

    def uneven(state: Any, first: int, last: int, given: Batch) -> Any:
        found = exact(model, state, first, last, given)
        if last < 3:
            found = found * torch.cat([torch.ones(len(found) - 1, 1), torch.full((1, 1), 1 + 1e-6)])
        return found

    model.forward_stages = uneven  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(4):
        model(batch(5))
    assert (features.counts.reused > 0) == (not features.counts.exact) == (tolerance > 0)
    assert (features.counts.notes == []) == (tolerance > 0)
    if not tolerance:
        assert features.counts.notes == ["layers round differently by the place in batches of 5; not kept"]


def test_undeclared_input_ends_it_and_is_named():
    model = Chain()
    features = kept(model)
    model.shifted, shifted = True, {**batch(), "shift": torch.ones(8, 4)}
    for _ in range(3):
        model(shifted)
    assert features.counts.reason == "the frozen layers read shift, which the model does not declare"
    assert features.counts.reused == 0


def test_declared_second_input_is_part_of_the_example():
    model = Chain(inputs=("x", "shift"))
    features = kept(model)
    for shift in (0.0, 1.0, 0.0, 1.0, 0.0, 1.0):
        found = model({**batch(), "shift": torch.full((8, 4), shift)}).logits
        assert torch.equal(found, model.head(model.second(model.first(batch()["x"] + shift))))
    assert features.counts.reused == 24


def test_changed_frozen_tensor_ends_it():
    model = Chain()
    features = kept(model)
    for _ in range(3):
        served(model, batch())
    with torch.no_grad():
        model.first.weight.mul_(2)
    assert served(model, batch()) == 8
    assert features.counts.reason == "a tensor of the frozen layers was changed"
    assert features.counts.held == 0


def test_teacher_with_other_frozen_values_is_computed():
    model = Chain()
    kept(model)
    for _ in range(3):
        served(model, batch())
    own = teacher(model, {"first.weight": model.first.weight * 2})
    before = model.seen[0]
    expected = model.head(model.second(functional.linear(batch()["x"], model.first.weight * 2, model.first.bias)))
    assert torch.equal(own(batch()).logits, expected)
    assert model.seen[0] == before + 8
    other = teacher(model, {"head.weight": model.head.weight * 2})
    [other(batch()) for _ in range(3)]
    before = model.seen[0]
    other(batch())
    assert model.seen[0] == before


def test_copy_keeps_nothing_and_inputs_have_gradients():
    import copy

    model = Chain()
    kept(model)
    for _ in range(3):
        served(model, batch())
    assert copy.deepcopy(model).frozen_features is None
    wanted = {"x": batch()["x"].requires_grad_()}
    (gradient,) = torch.autograd.grad(model(wanted).logits.sum(), wanted["x"])
    assert gradient.abs().sum() > 0


def test_batches_that_round_differently_are_computed():
    for tolerance in (0.0, 1e-5):
        model = Chain()
        features = kept(model, tolerance=tolerance)
        exact = type(model).forward_stages

        def rounding(state: Any, first: int, last: int, given: Batch, model: Chain = model, exact: Any = exact) -> Any:
            found = exact(model, state, first, last, given)
            return found * (1 + 1e-6) if last < 3 and len(given["x"]) == 3 else found

        model.forward_stages = rounding  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(3):
            model(batch())
        assert features.counts.reused == 8
        few = {"x": batch()["x"][:3]}
        expected = model.head(model.second(model.first(few["x"]))) * 1.0
        for _ in range(4):
            found = model(few).logits
        assert (features.counts.reused > 8) == (tolerance > 0)
        assert features.counts.exact == (tolerance == 0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert features.counts.difference == pytest.approx(1e-6 if tolerance else 0, rel=0.2)


def test_a_small_budget_keeps_the_first_examples():
    model = Chain()
    features = kept(model, memory=15)
    assert [served(model, batch()) for _ in range(2)] == [FIRST, 8]
    assert features.counts.reason == "the budget of 15 bytes holds no example, each takes 16"
    model = Chain()
    features = kept(model, memory=16 * 8)
    for _ in range(3):
        served(model, batch())
        served(model, batch(start=1.0))
    assert features.counts.reused == 8
    assert features.counts.notes == ["the budget is used up with 8 examples; the others are computed each time"]


def test_reading_that_takes_longer_than_computing_ends_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    model = Chain()
    features = kept(model)
    clock = iter(range(10**6))
    monkeypatch.setattr("confed.federation.frozen_features.time.perf_counter", lambda: next(clock) ** 2)
    for passes in (12, 28):  # one comparison of costs, such as a busy machine may spoil, and three
        assert not features.counts.reason
        for _ in range(passes):
            assert torch.equal(model(batch()).logits, model.head(model.second(model.first(batch()["x"]))))
    assert features.counts.reason == "reading what is kept takes longer than computing it"


def test_what_is_trained_decides_how_many_stages_are_frozen():
    model = Chain()
    assert frozen_stages(model, ["head.weight"]) == 2
    assert frozen_stages(model, ["head.weight", "second.bias"]) == 1
    assert frozen_stages(model, ["first.bias", "head.bias"]) == 0
    assert frozen_stages(model, ["extra.of.a.method"]) == 2
    assert attach(model, frozenset(), 10**6) == "the first stage (first) is trained"
    assert attach(nn.Linear(2, 2), frozenset(), 10**6) == "Linear does not say which stages its pass has"


def test_stages_without_tensors_are_computed_each_time(monkeypatch: pytest.MonkeyPatch):
    stages = (Stage("reading", ("x",), ("none",)), Stage("rest", (), ("",)))
    monkeypatch.setattr(Chain, "stages", stages)
    assert attach(Chain(), frozenset(), 10**6) == "no layer is frozen before what is trained"


def test_a_stage_may_be_a_block_without_its_adapter():
    adapted = Stage("block without adapter", (), ("block.",), without=("adapter",))
    assert adapted.reads("block.weight")
    assert not adapted.reads("block.adapter.weight")


def test_rows_with_kept_features_are_not_gathered():
    from confed.data.table import RowBatch

    x, gathered, source = batch()["x"], [0], object.__new__(type("Source", (), {}))

    def rows(numbers: Tensor) -> RowBatch:
        def gather() -> Tensor:
            gathered[0] += 1
            return x[numbers]

        return RowBatch(source, numbers, {"x": gather})

    model = Chain()
    kept(model)
    for _ in range(4):
        found = model(rows(torch.arange(8)))
    assert torch.equal(found.logits, model.head(model.second(model.first(x))))
    assert gathered == [2]
    changed = rows(torch.arange(8))
    changed["x"].add_(1)
    assert torch.equal(model(changed).logits, model.head(model.second(model.first(x + 1))))


def test_pictures_with_labels_are_read_when_asked_for():
    from confed.data.examples import TableData
    from confed.data.ragged import Ragged, end_to_end
    from confed.data.table import Table
    from confed.data.targets import SparseLabels
    from confed.federation.protocols import FromRows

    pictures = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    labels = SparseLabels(Ragged(*end_to_end([np.array(row, dtype=np.int32) for row in ([0], [1, 2], [], [2])])), 3)
    table = Table(pictures, torch.arange(4), {}, labels=labels)
    data = TableData(table, table, table, known=0.75)
    (drawn,) = data.train(4, torch.Generator().manual_seed(0))
    assert isinstance(drawn, FromRows)
    assert drawn["labels"][drawn.rows.argsort()].tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0], [0, 0, 1]]
    assert drawn["known"].shape == (4, 3)
    assert drawn.same_rows(["image", "labels"])
    assert not drawn.same_rows(["image", "known"])
    drawn["labels"].add_(1)
    assert not drawn.same_rows(["image"])


@pytest.mark.parametrize(("passes", "computed"), [(1, [8, 8]), (3, [8, 8, 8]), (4, [FIRST, 8, 0, 0])])
def test_examples_of_few_passes_are_not_kept(passes: int, computed: list[int]):
    model = Chain()
    features = kept(model)
    with expected_passes(model, passes):
        assert [served(model, batch()) for _ in computed] == computed
    assert len(features.store) == (8 if passes > 3 else 0)
    assert features.passes is None


def test_examples_read_twice_are_kept_where_no_check_is_due():
    model = Chain()
    features = kept(model)
    for _ in range(2):
        served(model, batch())
    with expected_passes(model, 2):
        assert [served(model, batch(start=1.0)) for _ in range(2)] == [8, 0]
    with expected_passes(model, 1):
        assert [served(model, batch(start=start)) for start in (2.0, 2.0, 1.0)] == [8, 8, 0]
    assert len(features.store) == 16
