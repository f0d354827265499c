r"""Labels from updates: which answers a batch of records has, from the gradient of the last layer's bias.

With cross-entropy the gradient of the bias of answer c is the mean over the batch of p_c - y_c. So n_c, the number of
the batch's B records with answer c, is B (mean p_c - g_c), and the attacker puts for mean p_c that of public records
(for B = 1 Zhao, Mopuri and Bilen 2020, "iDLG: improved deep leakage from gradients"; for counts Wainakh et al. 2022,
"User-level label leakage from gradients in federated learning"). Without a bias g_c is the gradient of the answer's
weights in the direction of the mean feature of public records, over that feature's squared length.
"""

import torch
from torch import Tensor

from confed.federation.params import Params
from confed.federation.randomness import generator
from confed.release.case import EVERYBODY, TRAIN, VALIDATION, Case
from confed.release.probe import Finding, Measured, Probe, mean_measure
from confed.runs.samples import fill

BATCHES = 24


def label_counts(gradient: Tensor, probabilities: Tensor, size: int) -> Tensor:
    """Numbers of records with each answer, int64 (C,), of which there are ``size`` in all.

    Args:
        gradient: of the bias, (C,).
        probabilities: the attacker's guess of the batch's mean probabilities, (C,).
        size: records of the batch.
    """
    expected = (size * (probabilities - gradient)).clamp_min(0)
    return largest_remainders(expected * size / expected.sum().clamp_min(1e-12), size)


def largest_remainders(expected: Tensor, size: int) -> Tensor:
    """Whole numbers that add up to ``size``, nearest to what is expected."""
    counts = expected.floor().long()
    rest = (expected - counts).argsort(descending=True)[: size - int(counts.sum())]
    counts[rest] += 1
    return counts


def overlap(counts: Tensor, truth: Tensor) -> float:
    """Share of a batch's labels that are named, each as often as it is there."""
    return float(torch.minimum(counts, truth).sum()) / float(truth.sum())


def _last_layer(case: Case) -> tuple[str, bool]:
    """Name of the tensor whose gradient tells labels, and whether it is a bias; "" where none is sent."""
    tensors = {name: case.workspace.tensors[name] for name in case.trained_names(case.members[0])}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) == (case.classes,):
            return name, True
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and len(tensor) == case.classes:
            return name, False
    return "", False


def _excluded(case: Case) -> str:
    if case.unseen_updates:
        return case.unseen_updates
    if case.classes < 2 or case.algorithm.global_model != "alone":
        return "sites do not train a whole model on answers that they share"
    if not getattr(case.setup.task, "single_label", False):
        return "the task's loss is no cross-entropy of one right answer"
    return "" if _last_layer(case)[0] else "no layer whose rows are the answers is sent"


def _look(case: Case, seconds: float) -> Finding:
    del seconds
    model: Params = next(iter(case.replay.watched.first.values()))[0].message.tensors
    public = case.records(VALIDATION, 400)
    outputs = [output for _, _, output in case.outputs({EVERYBODY: model}, public, VALIDATION)]
    guess = torch.cat([output.logits.float().softmax(-1) for output in outputs]).mean(0).cpu()
    feature = torch.cat([output.features.float() for output in outputs]).mean(0).cpu()
    public_labels = [case.table(site, VALIDATION).columns["label"][chosen] for site, chosen in public.items()]
    frequencies = torch.bincount(torch.cat(public_labels), minlength=case.classes).double()
    measures: list[Measured] = []
    for size in dict.fromkeys((1, case.setup.local.batch_size)):
        differences: list[float] = []
        for number in range(BATCHES):
            truth, gradient = _gradient(case, model, size, number, feature)
            found = overlap(label_counts(gradient, guess, int(truth.sum())), truth)
            count = int(truth.sum())
            blind = overlap(largest_remainders(frequencies / frequencies.sum() * count, count), truth)
            differences.append(found - blind)
        title = f"labels of {size} record{'s' if size > 1 else ''} in one step, above guessing"
        measures.append(mean_measure(f"labels_{size}", title, differences, "labels" if size > 1 else ""))
    epochs = case.setup.local.epochs
    notes = [f"One step each, with the weights of the first round, when updates tell most; the run's updates are of {epochs} epochs, so that "
             "what they tell is that of Properties of a site."]  # fmt: skip
    return Finding(measures, notes)


def _gradient(case: Case, model: Params, size: int, number: int, feature: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the labels of a batch drawn at some site, and the gradient of the last layer's bias, both (C,)."""
    site = case.sites[number % len(case.sites)]
    table, name_and_kind = case.table(site, TRAIN), _last_layer(case)
    order = torch.randperm(len(table), generator=generator(case.setup.seed, number, site, f"labels of {size}"))
    batch = table.batch(order[:size])
    fill(case.workspace, model)
    case.network.eval()
    case.workspace.set_task(case.setup.task_of(site))
    name, is_bias = name_and_kind
    loss = case.setup.task_of(site).loss(case.network(batch), batch)
    (gradient,) = torch.autograd.grad(loss, [case.workspace.tensors[name]])
    gradient = gradient.float() if is_bias else gradient.float() @ feature / feature.square().sum().clamp_min(1e-12)
    return torch.bincount(batch["label"], minlength=case.classes), gradient


PROBE = Probe(
    "labels",
    "Labels from updates",
    "Sees the update of one step of a site, and has public records.",
    _excluded, lambda case: 10.0, _look,
)  # fmt: skip
