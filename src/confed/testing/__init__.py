"""Contracts of methods and models, as executable checks.

``check_algorithm(MyMethod())`` runs all of them on the toy federation in a second or two and raises
:class:`ContractViolation` at the first that fails; ``check_model(my_model)`` does so for a model and
``check_task(my_task, output, batch)`` and ``check_dataset(my_function, **options)`` for a task and a dataset. The test
suite runs them for everything that is registered; ``confed check FILE`` for what a file of one's own declares.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import nn

from confed.data.dataset_contract import DATASET_CHECKS, dataset_faults
from confed.engines.buffered import unsupported_reason
from confed.federation.algorithm import Algorithm
from confed.federation.compression import uncompressible_reason
from confed.federation.equivalence import unbatchable_training
from confed.federation.model_contract import MODEL_CHECKS, TASK_CHECKS, model_faults, reading_fault, task_faults
from confed.federation.protocols import Batch, Output
from confed.testing.protections import (
    PROTECTED,
    keeps_frozen_tensors,
    lacks_protection,
    noise_at_the_client_covers_what_is_sent,
    noise_at_the_server_covers_one_client,
    noise_on_records_covers_what_is_sent,
    nothing_leaks,
    sends_only_what_is_shared,
    servers_see_their_own_part,
    the_robust_mean_is_used,
    the_secure_sum_equals_the_plain_one,
)
from confed.testing.steadiness import (
    a_failure_changes_nothing,
    compressed_updates_arrive,
    finite_and_deterministic,
    has_asynchronous_rounds,
    ignores_the_workspace,
    neutral_is_fedavg,
    one_global_model,
    one_step_is_gradient_descent,
    order_is_irrelevant,
    resumes_exactly,
    simulator_equals_flare,
    simulator_equals_flower,
    stacked_equals_one_by_one,
    survives_the_wire,
)
from confed.testing.trial import ContractViolation

Check = Callable[[Algorithm], None]


def check_algorithm(algorithm: Algorithm) -> list[tuple[str, str]]:
    """Results of all checks of the contract that apply to a method.

    A failed check is a :class:`ContractViolation`.

    Args:
        algorithm: the method with the hyper-parameters to check.

    Returns:
        Check -> "passed", or why it does not apply.
    """
    verdicts: list[tuple[str, str]] = []
    for name, check in CHECKS.items():
        reason = exemption(algorithm, name)
        if reason is None:
            check(algorithm)
        verdicts.append((name, reason or "passed"))
    return verdicts


def check_model(model: nn.Module, batch: Batch | None = None) -> list[tuple[str, str]]:
    """Results of all checks that a model must pass before a federation trains it.

    A run makes the same checks before round 1 of every model that does not come with confed.

    Args:
        model: with its initial values; it is left as it was.
        batch: a few examples as tensors, such as ``{"image": uint8 (B, 3, H, W), "text": int64 (B, T), "text_mask":
            int64 (B, T)}``, which the model is to answer; without it what the model answers is not checked.

    Returns:
        Check -> "passed".

    Raises:
        ContractViolation: a check failed; the message is one line.
    """
    for check, fault in model_faults(model):
        raise ContractViolation(f"{check}: {fault}")
    if batch is not None and (fault := reading_fault(model, batch)):
        raise ContractViolation(f"answers a batch: the model {fault}")
    return [(check, "passed") for check in (*MODEL_CHECKS, *(("answers a batch",) if batch is not None else ()))]


def check_task(task: object, output: Output, batch: Batch) -> list[tuple[str, str]]:
    """Results of all checks that a task must pass before a federation trains with it.

    A run makes the same checks before round 1 of every task that does not come with confed.

    Args:
        task: the task.
        output: what a model says of the batch, such as ``Output(logits, logits)`` with logits (B, C).
        batch: at least two examples as tensors, each with a row per example.

    Returns:
        Check -> "passed".

    Raises:
        ContractViolation: a check failed; the message is one line.

    Example:
        >>> import torch
        >>> from confed import Output, check_task
        >>> from confed.tasks.vqa import VQA
        >>> logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 1.0]])
        >>> results = check_task(VQA(2), Output(logits, logits), {"label": torch.tensor([0, 1, 1])})
        >>> results[4]
        ('the headline is the mean of the predictions', 'passed')
    """
    for check, fault in task_faults(task, output, batch):
        raise ContractViolation(f"{check}: the task {fault}")
    return [(check, "passed") for check in TASK_CHECKS]


def check_dataset(build: Callable[..., Any], **options: Any) -> list[tuple[str, str]]:
    """Results of all checks of a function that makes a federated dataset.

    Args:
        build: the function, which returns a :class:`confed.FederatedDataset`.
        options: its keywords, as a recipe has them under ``[data]``, such as ``root``.

    Returns:
        Check -> "passed".

    Raises:
        ContractViolation: a check failed; the message is one line.

    Example:
        >>> from confed import check_dataset
        >>> from confed.datasets.scenes import scenes
        >>> results = check_dataset(scenes, train=8, validation=4, test=4)
        >>> results[7]
        ('a seed leaves the tests as they are', 'passed')
    """
    for check, fault in dataset_faults(build, options):
        raise ContractViolation(f"{check}: the dataset {fault}")
    return [(check, "passed") for check in DATASET_CHECKS]


def checks(algorithm: Algorithm) -> Iterator[tuple[str, Check]]:
    """The checks of the contract that apply to a method, by name, for a test runner that reports each by itself."""
    return ((name, check) for name, check in CHECKS.items() if exemption(algorithm, name) is None)


def contract(name: str) -> list[tuple[str, str]]:
    """Applicable checks of one registered method: each check and either "applies" or why it does not."""
    from confed.registry import algorithms

    algorithm = algorithms[name]()
    return [(check, exemption(algorithm, check) or "applies") for check in CHECKS]


def exemption(algorithm: Algorithm, check: str) -> str | None:
    """Reason why a check does not apply to a method, in the method's own words; None if it applies."""
    if check in ("neutral coefficients give FedAvg", "one full step equals gradient descent"):
        return algorithm.traits.neutral if isinstance(algorithm.traits.neutral, str) else None
    reasons = {
        "asynchronous rounds": unsupported_reason,
        "compressed updates arrive": uncompressible_reason,
        "clients trained at once equal one by one": unbatchable_training,
        "one global model": lambda method: "" if method.traits.has_global else "there is no global model",
    }
    reasons |= {name: partial(lacks_protection, check=name) for name in PROTECTED}
    if check in reasons:
        return reasons[check](algorithm) or None
    if algorithm.traits.centralised and check in ("a failure changes nothing", "nothing leaks from client to client"):
        return "there is one member, so there are no others to go on or to leak to"
    if check == "simulator equals Flower" and find_spec("flwr") is None:
        return "Flower is not installed (the extra 'flower')"
    if check == "simulator equals FLARE" and find_spec("nvflare") is None:
        return "NVIDIA FLARE is not installed (the extra 'flare')"
    return None


CHECKS: dict[str, Check] = {
    "finite and deterministic": finite_and_deterministic,
    "resumes exactly": resumes_exactly,
    "asynchronous rounds": has_asynchronous_rounds,
    "ignores the workspace": ignores_the_workspace,
    "sends only what is shared": sends_only_what_is_shared,
    "a failure changes nothing": a_failure_changes_nothing,
    "the order of clients is irrelevant": order_is_irrelevant,
    "nothing leaks from client to client": nothing_leaks,
    "servers see their own part only": servers_see_their_own_part,
    "keeps frozen tensors": keeps_frozen_tensors,
    "compressed updates arrive": compressed_updates_arrive,
    "survives the wire": survives_the_wire,
    "simulator equals Flower": simulator_equals_flower,
    "simulator equals FLARE": simulator_equals_flare,
    "neutral coefficients give FedAvg": neutral_is_fedavg,
    "one full step equals gradient descent": one_step_is_gradient_descent,
    "one global model": one_global_model,
    "clients trained at once equal one by one": stacked_equals_one_by_one,
    "noise at the client covers what is sent": noise_at_the_client_covers_what_is_sent,
    "noise at the server covers one client": noise_at_the_server_covers_one_client,
    "noise on records covers what is sent": noise_on_records_covers_what_is_sent,
    "the robust mean is used": the_robust_mean_is_used,
    "the secure sum equals the plain one": the_secure_sum_equals_the_plain_one,
}
