"""Methods that learn prompts: scores of FedPGP, FedOTP and FedTPG by small computations, and what travels of each."""

from typing import Any

import numpy as np
import pytest
import scipy.special
import torch

from confed.algorithms.afl import AFL, GRAM
from confed.algorithms.dpfpl import DPFPL
from confed.algorithms.fedotp import FedOTP
from confed.algorithms.fedpgp import FedPGP
from confed.algorithms.fedtpg import FedTPG, PromptGenerator
from confed.algorithms.pfedmoap import PFedMoAP
from confed.algorithms.promptfl import PromptFL
from confed.algorithms.tip_adapter import KEYS, SUMS, TipAdapter
from confed.federation.algorithm import Algorithm
from confed.federation.families.prompts import CONTEXT
from confed.federation.local import Local
from confed.privacy.examples import ExamplePrivacy
from confed.testing.toy import toy_setup
from confed.testing.trial import run

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


def network(method: Any, **values: torch.Tensor) -> tuple[Any, Any]:
    setup = toy_setup(method)
    model: Any = setup.model().eval()
    model.load_state_dict({name.replace("__", "."): value for name, value in values.items()}, strict=False)
    return model, setup.algorithm.deployed_model(model)


def test_fedotp_with_all_mass_scores_the_mean_patch() -> None:
    """Two equal sinks take every patch in equal parts, whatever the plan: <C, T> is the mean cost of a patch."""
    model, _ = network(FedOTP(mass=1.0))
    model.local_context.vectors.data.copy_(model.context.vectors)
    with torch.no_grad():
        output = FedOTP(mass=1.0, steps=500).deployed_model(model)({"x": X})
        texts = model.class_features(model.context.vectors, torch.arange(3))
        wanted = model.similarity_scores(model.patch_features({"x": X}).mean(1) @ texts.T)
    torch.testing.assert_close(output.logits, wanted, rtol=1e-3, atol=1e-3)


def test_fedotp_with_less_mass_leaves_out_the_worst_patches() -> None:
    model, _ = network(FedOTP())
    model.local_context.vectors.data.copy_(model.context.vectors)
    with torch.no_grad():
        some = FedOTP(mass=1 / 3, strength=1e-3, steps=3000).deployed_model(model)({"x": X}).logits
        texts = model.class_features(model.context.vectors, torch.arange(3))
        best = (model.patch_features({"x": X}) @ texts.T).amax(1)
    torch.testing.assert_close(some, model.similarity_scores(1 - (1 - best) / 3), rtol=1e-2, atol=1e-2)


def test_fedpgp_answers_with_the_sum_of_both_parts() -> None:
    u, v = torch.randn(2, 8), torch.randn(8, 5)
    model, deployed = network(FedPGP(), personal_context__u=u, personal_context__v=v)
    with torch.no_grad():
        texts = model.class_features(model.context.vectors + u @ v, torch.arange(3))
        wanted = model.similarity_scores(model.image_features({"x": X}) @ texts.T)
        torch.testing.assert_close(deployed({"x": X}).logits, wanted)


def test_fedpgp_steps_are_down_the_written_out_gradient() -> None:
    local = Local(epochs=2, batch_size=64, lr=0.5, optimizer="sgd", weight_decay=0.0)
    setup = toy_setup(FedPGP(mu=0.7, temperature=0.5, rank=3), rounds=1, local=local)
    model: Any = setup.model()
    plain = model.handwritten_features(torch.arange(3))
    for name, state in run(setup).states.items():
        batch = next(iter(setup.population.data(name).test(64)))
        values = [model.context.vectors, model.personal_context.u, torch.zeros(3, 5)]
        for _ in range(2):
            shared, u, v = (value.detach().clone().requires_grad_() for value in values)
            common, own = (model.class_features(c, torch.arange(3)) for c in (shared, shared + u @ v))
            loss = torch.nn.functional.cross_entropy(5 * model.image_features(batch) @ own.T, batch["label"])
            near, far = (torch.exp((common * other).sum(1) / 0.5) for other in (plain, own))
            (loss - 0.7 * (near / (near + far)).log().mean()).backward()
            values = [value.detach() - 0.5 * value.grad for value in (shared, u, v)]
        kept = state.tensors["private"]
        found = [state.tensors["personal"][CONTEXT], kept["personal_context.u"], kept["personal_context.v"]]
        torch.testing.assert_close(found, values)


GENERATOR = ("queries", "keys", "values", "hidden", "output", "offset")
TRAVELS: list[tuple[Algorithm, set[str], set[str]]] = [
    (AFL(), {GRAM, "moments.cross"}, set()),
    (DPFPL(example_privacy=ExamplePrivacy(noise=1.0)), {CONTEXT}, {"private_context.vectors"}),
    (FedPGP(), {CONTEXT}, {"personal_context.u", "personal_context.v"}),
    (FedOTP(), {CONTEXT}, {"local_context.vectors"}),
    (FedTPG(), {f"prompt_generator.{name}" for name in GENERATOR}, set()),
    (PFedMoAP(), {CONTEXT}, {"gate.key.bias", "gate.key.weight", "gate.output.bias", "gate.output.weight",
                             "gate.query.bias", "gate.query.weight", "gate.value.bias", "gate.value.weight"}),
    (PromptFL(), {CONTEXT}, set()),
    (TipAdapter(), {SUMS}, {KEYS}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "shared", "private"), TRAVELS, ids=lambda value: type(value).__name__)
def test_what_travels_and_what_stays(method: Algorithm, shared: set[str], private: set[str]) -> None:
    outcome = run(toy_setup(method))
    sent = [reply.message for _, call, reply in outcome.replies if call.action == "fit"]
    assert all(set(message.tensors) == shared for message in sent)
    # Noise on gradients of examples does not cover the loss of DP-FPL's clients, which is not sent.
    assert all(set(message.scalars) == (set() if isinstance(method, DPFPL) else {"loss"}) for message in sent)
    kept = [set(state.tensors.get("private", {})) for state in outcome.states.values()]
    assert kept == [private] * 3


def test_fedtpg_makes_another_context_of_other_names() -> None:
    model, deployed = network(FedTPG())
    model.prompt_generator.output.data.normal_(generator=torch.Generator().manual_seed(0))
    offered = torch.tensor([[True, True, False]] * 4)
    with torch.no_grad():
        every, some = deployed({"x": X}).logits, deployed({"x": X, "offered": offered}).logits
        names = model.handwritten_features(torch.arange(2))
        texts = model.class_features(model.prompt_generator(names), torch.arange(2))
        wanted = model.similarity_scores(model.image_features({"x": X}) @ texts.T)
    torch.testing.assert_close(some[:, :2], wanted)
    assert (some[:, :2] - every[:, :2]).abs().max() > 1e-3


def test_fedtpgs_generator_by_hand() -> None:
    """Attention of queries over class names of length sqrt(D), a layer norm, a network, and the offset, in numpy."""
    rng = torch.Generator().manual_seed(4)
    generator = PromptGenerator(torch.randn(2, 5, generator=rng), 7, 6, rng)
    assert 0.005 < float(generator.output.detach().std()) * 12**0.5 < 0.04  # N(0, 0.02^2 / fan-in)
    generator.output.data.normal_(generator=rng)
    names = torch.nn.functional.normalize(torch.randn(3, 7, generator=rng), dim=1)
    queries, keys, values, hidden, output, offset = (
        tensor.detach().double().numpy()
        for tensor in (
            generator.queries, generator.keys, generator.values, generator.hidden, generator.output, generator.offset
        )
    )  # fmt: skip

    def normed(rows: np.ndarray) -> np.ndarray:
        centred = rows - rows.mean(1, keepdims=True)
        return centred / np.sqrt(centred.var(1, keepdims=True) + 1e-5)

    scaled = names.double().numpy() * np.sqrt(7)
    scores = normed(queries) @ (scaled @ keys.T).T / np.sqrt(6)
    attention = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    inner = normed(queries + attention @ (scaled @ values.T)) @ hidden.T
    gelu = inner * 0.5 * (1 + scipy.special.erf(inner / np.sqrt(2)))
    wanted = torch.from_numpy(offset + gelu @ output.T).float()
    torch.testing.assert_close(generator(names), wanted, rtol=1e-5, atol=1e-5)
