r"""Labels from updates: which answers a batch of records has, from the gradient of the last layer's bias.

With cross-entropy the gradient of the bias of answer c is the mean over the batch of p_c - y_c. So n_c, the number of
the batch's B records with answer c, is B (mean p_c - g_c), and the attacker puts for mean p_c that of public records
(for B = 1 Zhao, Mopuri and Bilen 2020, "iDLG: improved deep leakage from gradients"; for counts Wainakh et al. 2022,
"User-level label leakage from gradients in federated learning"). Without a bias g_c is the gradient of the answer's
weights in the direction of the mean feature of public records, over that feature's squared length.
"""

import torch
from torch import Tensor

from confed.analysis.case import EVERYBODY, TRAIN, VALIDATION, Case
from confed.federation.protocols import SingleLabel
from confed.federation.randomness import generator
from confed.release.probe import Finding, Probe, mean_estimate
from confed.system import format as formats

BATCHES = 24


def label_counts(gradient: Tensor, probabilities: Tensor, size: int) -> Tensor:
    """Numbers of ``size`` records with each answer, from the bias's gradient and guessed probabilities, (C,)."""
    expected = (size * (probabilities - gradient)).clamp_min(0)
    return largest_remainders(expected * size / expected.sum().clamp_min(1e-12), size)


def largest_remainders(expected: Tensor, size: int) -> Tensor:
    """Whole numbers that add up to ``size``, nearest to what is expected."""
    counts = expected.floor().long()
    counts[(expected - counts).argsort(descending=True)[: size - int(counts.sum())]] += 1
    return counts


def overlap(counts: Tensor, truth: Tensor) -> float:
    """Share of a batch's labels that are named, each as often as it is there."""
    return float(torch.minimum(counts, truth).sum()) / float(truth.sum())


def _last_layer(case: Case) -> str:
    """Name of the bias over the answers that sites send, else of the weights; "" where they send neither."""
    shapes = {name: tuple(case.workspace.tensors[name].shape) for name in case.sent_names()}
    rows = sorted((len(shape), name) for name, shape in shapes.items() if shape[:1] == (case.classes,))
    return rows[0][1] if rows and rows[0][0] <= 2 else ""


def _excluded(case: Case) -> str:
    if case.unlabelled_updates:
        return case.unlabelled_updates
    if case.noised:
        return "the run's updates have noise, and the single step that is looked at has none"
    if not (isinstance(case.setup.task, SingleLabel) and case.setup.task.single_label):
        return "the task's loss is no cross-entropy of one right answer"
    return "" if _last_layer(case) else "no layer whose rows are the answers is sent"


def _look(case: Case, seconds: float) -> Finding:
    del seconds
    model = {EVERYBODY: next(iter(case.replay[0].first.values()))[0].message.tensors}
    public = case.records(VALIDATION, 400)
    outputs = list(case.outputs(model, public, VALIDATION))
    guess = torch.cat([output.logits for _, _, output in outputs]).double().softmax(-1).mean(0)
    feature = torch.cat([output.features for _, _, output in outputs]).double().mean(0)
    labels = torch.cat([batch["label"] for _, batch, _ in outputs])
    frequencies = torch.bincount(labels, minlength=case.classes).double() / len(labels)
    measures = []
    for size in dict.fromkeys((1, case.setup.local.batch_size)):
        differences: list[float] = []
        for number in range(BATCHES):
            site = case.sites[number % len(case.sites)]
            case.load(model, site)
            table = case.table(site, TRAIN)
            order = torch.randperm(len(table), generator=generator(case.setup.seed, number, site, f"labels of {size}"))
            batch = table.batch(order[:size])
            loss = case.setup.task_of(site).loss(case.network(batch), batch)
            (gradient,) = torch.autograd.grad(loss, [case.workspace.tensors[_last_layer(case)]])
            gradient = gradient.double()
            if gradient.ndim == 2:
                gradient = gradient @ feature / feature.square().sum().clamp_min(1e-12)
            truth = torch.bincount(batch["label"], minlength=case.classes)
            count = len(batch["label"])
            named = overlap(label_counts(gradient, guess, count), truth)
            differences.append(named - overlap(largest_remainders(frequencies * count, count), truth))
        title = f"labels of {formats.counted(size, 'record')} in one step, above guessing"
        measures.append(mean_estimate(f"labels_{size}", title, differences, "labels" if size > 1 else ""))
    words = (
        "One step each, with the weights of the first round, when updates tell most. The run's updates are of "
        f"{case.setup.local.epochs} epochs: what they tell stands under Properties of a site."
    )
    return Finding(measures, [words])


PROBE = Probe(
    "labels", "Labels from updates", "Sees the update of one step of a site, and has public records.",
    _excluded, lambda case: 10.0, _look,
)  # fmt: skip
