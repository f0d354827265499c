"""Methods on learned prompts and on class names: formulas by hand, what is private, and what is sent."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor, nn

from confed.algorithms.afl import AFL, GRAM
from confed.algorithms.dpfpl import DPFPL, context_gradients, factors, projected
from confed.algorithms.fedotp import FedOTP
from confed.algorithms.fedpgp import FedPGP
from confed.algorithms.fedtpg import FedTPG, PromptGenerator
from confed.algorithms.pfedmoap import POOL, THERE, VECTORS, Gate, PFedMoAP
from confed.algorithms.promptfl import PromptFL
from confed.algorithms.tip_adapter import KEYS, SUMS, TipAdapter, cached, votes
from confed.federation.algorithm import Algorithm
from confed.federation.families.prompts import CONTEXT
from confed.federation.local import Local
from confed.federation.update_privacy import UpdatePrivacy
from confed.privacy.accountant import epsilon
from confed.privacy.examples import ExamplePrivacy
from confed.recipes.recipe import load_recipe
from confed.report.report import write_report
from confed.runs.build import check_local
from confed.runs.run import prepare
from confed.runs.run import run as run_recipe
from confed.testing.toy import ToyTask, toy_clients, toy_setup
from confed.testing.trial import run
from refusals import refuses

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


@pytest.mark.parametrize("options", [{"knowledge": 2.0}, {"consistency": 0.5}], ids=str)
def test_one_step_is_down_the_gradient_of_the_written_out_loss(options: dict[str, float]) -> None:
    local = Local(epochs=1, batch_size=64, lr=0.1, optimizer="sgd", weight_decay=0.0)
    setup = toy_setup(PromptFL(**options), rounds=1, local=local)
    model: Any = setup.model()
    for name, state in run(setup).states.items():
        batch = next(iter(setup.population.data(name).test(64)))
        context = model.context.vectors.detach().clone().requires_grad_()
        texts, plain = model.class_features(context, torch.arange(3)), model.handwritten_features(torch.arange(3))
        seen = model.image_features(batch)
        logged, wanted = (5 * seen @ texts.T).log_softmax(1), (5 * seen @ plain.T).softmax(1)
        loss = -logged[torch.arange(len(seen)), batch["label"]].mean()
        loss = loss + options.get("knowledge", 0.0) * (texts - plain).square().sum(1).mean()
        divergence = (wanted * (wanted.log() - logged)).sum(1).mean()
        loss = loss + options.get("consistency", 0.0) * (25 * (texts - plain).abs().mean() + divergence)
        loss.backward()
        stepped = model.context.vectors.detach() - 0.1 * context.grad
        torch.testing.assert_close(state.tensors["personal"][CONTEXT], stepped)


MOAP_RNG = torch.Generator().manual_seed(4)
MOAP_X = torch.randn(4, 6, generator=MOAP_RNG)


def test_the_gate_is_attention_of_the_library() -> None:
    """With its usual scaling; keys and values are the experts of one class, the query is the picture."""
    gate: Any = Gate(12, 8, 4, 2**-0.5, MOAP_RNG)  # every feature is read: 12 // 8 is 1
    library = nn.MultiheadAttention(12, 4, batch_first=True)
    library.load_state_dict(
        {
            "in_proj_weight": torch.cat([gate.query.weight, gate.key.weight, gate.value.weight]),
            "in_proj_bias": torch.cat([gate.query.bias, gate.key.bias, gate.value.bias]),
            "out_proj.weight": gate.output.weight,
            "out_proj.bias": gate.output.bias,
        }
    )
    gate._scaling = 3**-0.5
    pictures, experts = torch.randn(5, 12, generator=MOAP_RNG), torch.randn(7, 3, 12, generator=MOAP_RNG)
    found = gate(pictures, experts)
    for c in range(7):
        each = experts[c].expand(5, -1, -1)
        mixed = library(pictures.unsqueeze(1), each, each)[0].squeeze(1)
        torch.testing.assert_close(found[:, c], (pictures * mixed).sum(1), rtol=1e-4, atol=1e-5)


def test_wide_features_are_read_by_a_stride() -> None:
    gate: Any = Gate(12, 4, 8, 10.0, MOAP_RNG)
    assert gate.query.weight.shape == (4, 4)
    pictures, experts = torch.randn(2, 12, generator=MOAP_RNG), torch.randn(3, 2, 12, generator=MOAP_RNG)
    before = gate(pictures, experts)
    pictures[:, 1::3], experts[..., 2::3] = 9.0, -9.0
    assert torch.equal(gate(pictures, experts), before)


def mixture(lam: float = 0.5) -> tuple[Any, Any]:
    setup = toy_setup(PFedMoAP(experts=3, lam=lam))
    model: Any = setup.model().eval()
    return model, setup.algorithm.deployed_model(model)


def test_scores_are_those_of_both_parts() -> None:
    model, deployed = mixture(lam=0.3)
    classes = torch.arange(3)
    with torch.no_grad():
        model.experts.vectors[:2] = torch.randn(2, 2, 5, generator=MOAP_RNG)
        model.experts.there.fill_(2.0)
        image = model.image_features({"x": MOAP_X})
        texts = [model.class_features(p, classes) for p in (model.context.vectors, *model.experts.vectors[:2])]
        wanted = 0.3 * image @ texts[0].T + model.gate(image, torch.stack(texts, 1))
        torch.testing.assert_close(deployed({"x": MOAP_X}).logits, model.similarity_scores(wanted))
        offered = torch.tensor([[True, False, True]] * 4)
        some = deployed({"x": MOAP_X, "offered": offered}).logits
    torch.testing.assert_close(some[:, [0, 2]], model.similarity_scores(wanted)[:, [0, 2]])


def test_without_experts_the_scores_are_those_of_the_own_prompt() -> None:
    model, deployed = mixture()
    with torch.no_grad():
        torch.testing.assert_close(deployed({"x": MOAP_X}).logits, model({"x": MOAP_X}).logits)


def test_texts_of_experts_are_read_once() -> None:
    model, deployed = mixture()
    model.experts.there.data.fill_(3)
    passes: list[Tensor] = []
    plain = model.class_features
    model.class_features = lambda context, classes: passes.append(context) or plain(context, classes)
    for _ in range(4):
        deployed({"x": MOAP_X})
    assert len(passes) == 3 + 4


def test_clients_are_sent_the_nearest_prompts_of_others() -> None:
    outcome = run(toy_setup(PFedMoAP(experts=9), rounds=2))
    fits = [(call, reply) for _, call, reply in outcome.replies if call.action == "fit"]
    assert not any(call.message.tensors[THERE].any() for call, _ in fits[:3])
    first = {reply.client.id: reply.message.tensors[CONTEXT] for _, reply in fits[:3]}
    for call, _ in fits[3:]:
        told = call.message.tensors
        others = [prompt for name, prompt in first.items() if name != call.client.id]
        assert int(told[THERE]) == len(others) == 2
        gaps = [float((prompt - first[call.client.id]).norm()) for prompt in told[VECTORS][:2]]
        assert gaps == sorted(gaps)
        assert {p.sum().item() for p in told[VECTORS][:2]} == {p.sum().item() for p in others}
        assert not told[VECTORS][2:].any()
    assert set(outcome.servers["main"].slots[POOL]) == {"client-0", "client-1", "client-2"}


def test_the_first_round_is_promptfl_and_the_second_is_not() -> None:
    def context(method: Any, rounds: int) -> Tensor:
        return run(toy_setup(method, rounds=rounds)).servers["main"].params[CONTEXT]

    torch.testing.assert_close(context(PFedMoAP(), 1), context(PromptFL(), 1))
    assert (context(PFedMoAP(), 2) - context(PromptFL(), 2)).abs().max() > 1e-3


def test_a_dual_encoder_of_the_library_mixes_prompts(tmp_path: Path) -> None:
    told = (
        "algorithm.name=pfedmoap", "study.methods=[]", "~study.lr", "model.source=tiny:clip", "model.context=2",
        "data.shots=1", "data.classes=4", "data.test_per_class=1", "data.validation_shots=1", "run.rounds=2",
        "local.epochs=1", "run.gallery=0",
    )  # fmt: skip
    summary = run_recipe(load_recipe("prompts_scenes", told), tmp_path / "run")
    assert not summary["errors"]
    first, second = (sum(summary["bytes_down"][number].values()) for number in ("1", "2"))
    assert first == second  # zeros have the place of prompts that are not there
    assert summary["parameters"]["sent"] == 2 * 32


def test_prompts_that_others_are_sent_are_noised() -> None:
    pytest.importorskip("dp_accounting")
    noisy = PFedMoAP(update_privacy=UpdatePrivacy(clip=1e-6, noise=1.0))
    outcome = run(toy_setup(noisy, rounds=1))
    start = toy_setup(PFedMoAP()).model().get_parameter(CONTEXT).detach()
    for prompt in outcome.servers["main"].slots[POOL].values():
        assert 0 < float((prompt - start).abs().max()) < 1e-5


WIDE = ExamplePrivacy(clip=1e9)
DPFPL_RNG = torch.Generator().manual_seed(1)
BATCH = {"x": torch.randn(5, 6, generator=DPFPL_RNG), "label": torch.tensor([0, 2, 1, 1, 0])}


def gradients(context: Tensor) -> tuple[Tensor, Any]:
    model: Any = toy_setup(DPFPL()).model()
    return context_gradients(model, ToyTask(), BATCH, context), model


def test_gradients_of_examples_are_those_of_batches_of_one() -> None:
    found, model = gradients(torch.ones(2, 5))
    for i, one in enumerate(found):
        context = torch.ones(2, 5, requires_grad=True)
        texts = model.class_features(context, torch.arange(3))
        scores = model.similarity_scores(model.image_features({"x": BATCH["x"][i : i + 1]}) @ texts.T)
        torch.nn.functional.cross_entropy(scores, BATCH["label"][i : i + 1]).backward()
        torch.testing.assert_close(one, context.grad)


def test_one_example_moves_the_mean_by_two_clips_at_most() -> None:
    privacy = ExamplePrivacy(clip=0.5)
    rows = [torch.randn(4, 3, 2, generator=DPFPL_RNG), torch.randn(4, 6, generator=DPFPL_RNG)]
    rows[0][0], rows[1][0] = 1000 * rows[0][0], 1000 * rows[1][0]
    other = [torch.cat([-row[:1], row[1:]]) for row in rows]
    one, two = (torch.cat([t.flatten() for t in privacy.release(r, 4, None)]) for r in (rows, other))
    moved = float((one - two).norm())
    assert 0.99 * 2 * 0.5 / 4 < moved <= 2 * 0.5 / 4 + 1e-6
    # The clipped mean of a batch, as in the released code, moves by 2 C whatever the size of the batch.
    means = [torch.cat([r.flatten(1) for r in x], 1).mean(0) for x in (rows, other)]
    apart = [m * min(1, 0.5 / float(m.norm())) for m in means]
    assert float((apart[0] - apart[1]).norm()) > 0.99 * 2 * 0.5


def test_short_gradients_pass_and_long_ones_are_cut() -> None:
    found = ExamplePrivacy(clip=1.0).release([torch.tensor([[0.3, 0.4], [3.0, 4.0]])], 2, None)[0]
    torch.testing.assert_close(found, torch.tensor([0.9, 1.2]) / 2)


def test_noise_has_the_spread_that_the_accountant_reads() -> None:
    privacy = ExamplePrivacy(clip=0.5, noise=3.0)
    found = privacy.release([torch.zeros(8, 100, 200)], 8, torch.Generator().manual_seed(0))[0]
    assert float(found.std()) == pytest.approx(3.0 * 0.5 / 8, rel=0.02)
    assert not torch.equal(found, privacy.release([torch.zeros(8, 100, 200)], 8, None)[0])


def test_projection_keeps_rows_and_columns_of_the_factors() -> None:
    prompt, gradient = torch.randn(5, 7, generator=DPFPL_RNG), torch.randn(5, 7, generator=DPFPL_RNG)
    u, v = factors(prompt, 2, DPFPL_RNG)
    torch.testing.assert_close(u.T @ u, torch.eye(2))
    torch.testing.assert_close(v @ v.T, torch.eye(2))
    kept = projected(gradient @ v.T, u.T @ gradient, u, v)
    away = gradient - kept
    assert (u.T @ away).abs().max() < 1e-5
    assert (away @ v.T).abs().max() < 1e-5
    whole_u, whole_v = factors(prompt, 9, DPFPL_RNG)
    torch.testing.assert_close(projected(gradient @ whole_v.T, whole_u.T @ gradient, whole_u, whole_v), gradient)


def test_without_clip_and_noise_the_step_is_plain() -> None:
    """One SGD step on all examples, p_G as PromptFL's from the sum of both prompts, p_L by the same gradient."""
    local = Local(epochs=1, batch_size=64, lr=0.1, optimizer="sgd", weight_decay=0.0)
    setup = toy_setup(DPFPL(rank=9, example_privacy=WIDE), rounds=1, local=local)
    outcome = run(setup)
    start: Any = setup.model()
    both = start.context.vectors.detach() + start.private_context.vectors.detach()
    for name, state in outcome.states.items():
        batch = next(iter(setup.population.data(name).test(64)))
        step = 0.1 * context_gradients(start, ToyTask(), batch, both).mean(0)
        private = state.tensors["private"]["private_context.vectors"]
        torch.testing.assert_close(private, start.private_context.vectors.detach() - step)
        torch.testing.assert_close(state.tensors["personal"][CONTEXT], start.context.vectors.detach() - step)


def test_noise_repeats_by_seed_where_it_may() -> None:
    def context(repeatable: bool, noise: float = 1.0) -> Tensor:
        privacy = ExamplePrivacy(noise=noise, repeatable=repeatable)
        return run(toy_setup(DPFPL(example_privacy=privacy), rounds=1)).servers["main"].params[CONTEXT]

    assert torch.equal(context(True), context(True))
    assert not torch.equal(context(False), context(False))
    assert not torch.equal(context(True), context(True, 0.0))


def test_every_step_draws_noise_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[list[Tensor]] = []
    given: list[tuple[list[tuple[int, ...]], int]] = []
    real = ExamplePrivacy.release

    def noise_alone(self: ExamplePrivacy, rows: Any, size: int, rng: Any) -> list[Tensor]:
        given.append(([tuple(r.shape[1:]) for r in rows], size))
        released.append(real(self, [torch.zeros_like(r) for r in rows], size, rng))
        return released[-1]

    monkeypatch.setattr(ExamplePrivacy, "release", noise_alone)
    local = Local(epochs=2, batch_size=5, lr=0.05)
    run(toy_setup(DPFPL(rank=1, example_privacy=ExamplePrivacy(noise=1.0)), rounds=2, local=local))
    assert len(released) >= 2 * 2 * 3
    for part in zip(*released, strict=True):
        assert len({tuple(noise.flatten().tolist()) for noise in part}) == len(released)
    assert {str(shapes) for shapes, _ in given} == {str([(2, 5), (2, 1), (1, 5)])}
    assert {size for _, size in given} == {5}


def test_iterations_and_class_lists_from_labels_are_refused() -> None:
    refuses(r"local\.iterations must be 0 for DP-FPL", check_local, DPFPL(), Local(iterations=3))
    told = ["algorithm.name=dpfpl", "algorithm.example_privacy.noise=1.0", "data.offer=own", "~study.lr"]
    recipe = load_recipe("prompts_scenes", [*told, "study.methods=[]", "data.partition=classes", "data.classes=8"])
    refuses(r"which no noise hides: set data\.offer = 'base'", prepare, recipe)


def test_claimed_epsilon_turns_the_released_codes_formula_round() -> None:
    """std = sqrt(T ln(1 / delta)) / named * C / B there, z C / B here."""
    named, rounds = 0.4, 100
    z = math.sqrt(rounds * math.log(1e5)) / named
    method = DPFPL(example_privacy=ExamplePrivacy(noise=z))
    assert method.claimed_epsilon(rounds) == pytest.approx({"released code of DP-FPL": named})


def test_both_epsilons_are_in_summary_and_report(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    told = (
        "algorithm.name=dpfpl", "algorithm.example_privacy.noise=4.0", "study.methods=[]", "model.source=tiny:clip",
        "data.shots=1", "data.classes=4", "data.test_per_class=1", "data.validation_shots=1",
        "run.rounds=3", "local.epochs=2", "local.batch_size=4",
        "run.gallery=0", "~study.lr", "model.context=2",
    )  # fmt: skip
    found = run_recipe(load_recipe("prompts_scenes", told), tmp_path / "run")["example_privacy"]
    assert set(found["steps"].values()) == {6}
    assert set(found["epsilon"].values()) == {epsilon(4.0, 6, 1e-5)}
    assert found["claimed"] == {"released code of DP-FPL": pytest.approx(math.sqrt(3 * math.log(1e5)) / 4)}
    html = write_report(tmp_path / "run").read_text()
    assert "ε named by the released code of DP-FPL" in html
    assert f"{epsilon(4.0, 6, 1e-5):.3g}" in html


def test_a_clip_of_nothing_is_refused() -> None:
    refuses(r"example_privacy\.clip must be positive", replace, WIDE, clip=0.0)


TIP_RNG = torch.Generator().manual_seed(5)


def pooled(setup: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and labels of all clients' training examples."""
    model: Any = setup.model().eval()
    parts = [b for d in toy_clients().values() for b in d.train(8, torch.Generator().manual_seed(0))]
    with torch.no_grad():
        return torch.cat([model.image_features(b) for b in parts]), torch.cat([b["label"] for b in parts])


def test_votes_are_sums_over_keys_and_zeros_have_none() -> None:
    features = torch.nn.functional.normalize(torch.randn(4, 5, generator=TIP_RNG), dim=1)
    keys = torch.nn.functional.normalize(torch.randn(3, 2, 5, generator=TIP_RNG), dim=2)
    keys[1, 1] = 0.0
    found = votes(features, keys, 2.0)
    for b in range(4):
        for k in range(3):
            near = [float(features[b] @ key) for key in keys[k] if key.any()]
            assert float(found[b, k]) == pytest.approx(sum(math.exp(-2.0 * (1 - n)) for n in near), rel=1e-5)


def test_a_cache_keeps_the_first_shots_of_each_class() -> None:
    features = torch.arange(1.0, 7.0).unsqueeze(1)
    keys = cached(features, torch.tensor([2, 0, 2, 2, 0, 2]), 3, 3)
    assert keys[..., 0].tolist() == [[2, 5, 0], [0, 0, 0], [1, 3, 4]]


def test_global_cache_is_that_of_pooled_examples() -> None:
    setup = toy_setup(TipAdapter(alpha=3.0, beta=2.0), rounds=1)
    outcome = run(setup)
    features, labels = pooled(setup)
    sums = torch.stack([features[labels == c].sum(0) for c in range(3)]) / len(features)
    torch.testing.assert_close(outcome.servers["main"].params[SUMS], sums)

    model: Any = setup.model().eval()
    model.load_state_dict({SUMS: sums}, strict=False)
    x = torch.randn(4, 6, generator=TIP_RNG)
    with torch.no_grad():
        seen = model.image_features({"x": x})
        means = sums / sums.norm(dim=1, keepdim=True)
        wanted = 5 * seen @ model.handwritten_features(torch.arange(3)).T
        wanted = wanted + 3.0 * (-2.0 * (1 - seen @ means.T)).exp()
        found = setup.algorithm.deployed_model(model)({"x": x}).logits
    torch.testing.assert_close(found, wanted)

    own = torch.nn.functional.normalize(torch.randn(3, 16, 4, generator=TIP_RNG), dim=2)
    model.load_state_dict({KEYS: own}, strict=False)
    with torch.no_grad():
        found = setup.algorithm.deployed_model(model)({"x": x}).logits
    near = torch.stack([(-2.0 * (1 - seen @ keys.T)).exp().sum(1) for keys in own], 1)
    torch.testing.assert_close(found, wanted + 3.0 * near)


def test_single_features_stay_at_the_client() -> None:
    setup = toy_setup(TipAdapter(shots=2), rounds=2)
    outcome = run(setup)
    sent = [reply.message.tensors for _, call, reply in outcome.replies if call.action == "fit"]
    assert all(set(tensors) == {SUMS} for tensors in sent)
    features, _ = pooled(setup)
    for state in outcome.states.values():
        keys = state.tensors["private"][KEYS]
        assert keys.shape == (3, 2, 4)
        own = keys[keys.square().sum(-1) > 0]
        assert len(own)
        assert (own @ features.T).amax(1).min() > 1 - 1e-6


def test_new_places_have_no_keys_of_their_own() -> None:
    setup = toy_setup(TipAdapter(shots=2), rounds=1)
    given = setup.algorithm.initial_private(run(setup).servers["main"].params)
    assert given[KEYS].shape == (3, 2, 4)
    assert not given[KEYS].any()
