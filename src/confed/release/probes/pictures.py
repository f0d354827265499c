r"""Pictures rebuilt from updates: search for pictures whose gradient points where an update does.

Geiping, Bauermeister, Dröge and Moeller 2020, "Inverting gradients: how easy is it to break privacy in federated
learning?":  1 - cos(gradient of the loss at x, update) + lambda TV(x), by steps of Adam with the sign of the gradient
in x, from the mean picture of the attacker's. Of the tensors that sites send only: a head, LoRA, adapters or all.
Questions and answers are taken as known, so that this bounds such a search from above.

*As sent*: an update of a whole round with its epochs, from which :data:`TOGETHER` pictures are sought at once, each
compared with the site's picture nearest to it, as is the mean picture. *One record, one step*: what an update would
give away at worst. A search alone moves from the mean picture towards pictures as such, so that every figure is minus
that of the same search for the gradient of other sites' pictures.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from confed.federation.params import Params
from confed.federation.randomness import generator
from confed.federation.specs import PreparesPictures
from confed.federation.stages import staged_part
from confed.release.case import TRAIN, VALIDATION, Case, update_of
from confed.release.probe import Finding, Probe, mean_estimate

STEPS, RATE, SMOOTHNESS = 120, 0.05, 0.01
RECORDS, TOGETHER = 8, 4


def total_variation(pictures: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, of (B, 3, H, W)."""
    down = (pictures[..., 1:, :] - pictures[..., :-1, :]).abs().mean()
    right = (pictures[..., 1:] - pictures[..., :-1]).abs().mean()
    return down + right


def nearest_errors(rebuilt: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error of each rebuilt picture to the true one nearest to it, (B,)."""
    return torch.cdist(rebuilt.flatten(1).double(), truth.flatten(1).double()).square().min(1).values / truth[0].numel()


def _prepared(case: Case, pictures: Tensor) -> Tensor:
    """Pictures as the network reads them."""
    model = case.workspace.model
    return model.prepared_pictures(pictures) if isinstance(model, PreparesPictures) else pictures.float() / 127.5 - 1


def inverted(case: Case, site: str, batch: Mapping[str, Tensor], wanted: Params, start: Tensor, steps: int) -> Tensor:
    """Pictures whose gradient points where ``wanted`` does, from ``start`` (B, 3, H, W)."""
    low, high = start.min(), start.max()
    target = torch.cat([wanted[name].flatten() for name in wanted])
    pictures = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([pictures], lr=RATE)
    for step in range(steps):
        gradient = gradient_of(case, site, {**batch, "image": pictures}, list(wanted), create_graph=True)
        flat = torch.cat([gradient[name].flatten() for name in wanted])
        value = 1 - torch.cosine_similarity(flat, target, dim=0) + SMOOTHNESS * total_variation(pictures)
        (slope,) = torch.autograd.grad(value, [pictures])
        pictures.grad = slope.sign()
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        optimizer.step()
        pictures.data.clamp_(low, high)
    return pictures.detach()


def gradient_of(
    case: Case, site: str, batch: Mapping[str, Tensor], names: list[str], create_graph: bool = False
) -> dict[str, Tensor]:
    """Gradient of the loss of a batch in some tensors, zero where the loss does not depend on one."""
    parameters = [case.workspace.tensors[name] for name in names]
    with sdpa_kernel(SDPBackend.MATH):  # other kernels have no second derivative
        loss = case.setup.task_of(site).loss(case.network(batch), batch)
        slopes = torch.autograd.grad(loss, parameters, create_graph=create_graph, allow_unused=True)
    pairs = zip(names, slopes, parameters, strict=True)
    return {name: torch.zeros_like(parameter) if slope is None else slope for name, slope, parameter in pairs}


def _excluded(case: Case) -> str:
    if case.unlabelled_updates:
        return case.unlabelled_updates
    batch = case.table(case.sites[0], TRAIN).batch(torch.arange(1))
    return "" if batch.get("image", torch.zeros(0)).ndim == 4 else "records have no single picture"


def _look(case: Case, seconds: float) -> Finding:
    del seconds
    staged = staged_part(case.workspace.model)
    kept = None if staged is None else staged[1].frozen_features
    if staged is not None:  # features that were kept know no gradient in the picture
        staged[1].frozen_features = None
    sent, alone = list[float](), list[float]()
    names, updates = case.sent_names(), list(case.replay[0].first.items())
    for number in range(RECORDS):
        site, (call, reply) = updates[number % len(updates)]
        case.load(call.message.tensors, site)
        others = [name for name in case.sites if name != site] or [site]
        mean = torch.cat([_some(case, name, VALIDATION, 50) for name in others]).mean(0, keepdim=True)
        public = _some(case, others[0], VALIDATION, 50)
        table, rng = case.table(site, TRAIN), generator(case.setup.seed, number, site, "pictures sought")
        order = torch.randperm(len(table), generator=rng)
        drawn = public[torch.randint(len(public), (TOGETHER,), generator=rng)]
        batch = table.batch(order[:1])
        truth = _prepared(case, batch["image"])
        wanted, blind = (gradient_of(case, site, {**batch, "image": x}, names) for x in (truth, drawn[:1]))
        rebuilt, control = (inverted(case, site, batch, goal, mean, STEPS) for goal in (wanted, blind))
        alone.append(explained(rebuilt, truth, mean) - explained(control, truth, mean))
        if number < len(updates):
            update = {name: -change for name, change in update_of(call, reply).items() if name in names}
            start = mean + 0.1 * torch.randn(TOGETHER, *mean.shape[1:], generator=rng)
            several = table.batch(order[:TOGETHER])
            blind = gradient_of(case, site, {**several, "image": drawn[: len(several["image"])]}, names)
            rebuilt, control = (inverted(case, site, several, goal, start, STEPS) for goal in (update, blind))
            every = _some(case, site, TRAIN, 500)
            for picture, other in zip(rebuilt, control, strict=True):
                sent.append(explained(picture[None], every, mean) - explained(other[None], every, mean))
    words = (
        "Rebuilt: 1 - squared error over that of the mean picture, minus the same of a search for other sites' "
        f"pictures; 0 is no leak. Of the first round, by a short search of {STEPS} steps: longer ones may find more."
    )
    measures = [mean_estimate("reconstruction", "pictures rebuilt from updates as sent", sent, "reconstruction")]
    if not case.noised:
        measures.append(mean_estimate("reconstruction_alone", "pictures rebuilt from one record's step", alone))
    if staged is not None:
        staged[1].frozen_features = kept
    return Finding(measures, [words])


def _some(case: Case, site: str, role: int, most: int) -> Tensor:
    """The first pictures of a site's records in a role."""
    table = case.table(site, role)
    return _prepared(case, table.batch(torch.arange(min(most, len(table))))["image"])


def explained(rebuilt: Tensor, truth: Tensor, mean: Tensor) -> float:
    """1 - error over the mean picture's, both to the nearest true picture."""
    return float(1 - nearest_errors(rebuilt, truth).mean() / nearest_errors(mean, truth).clamp_min(1e-12))


PROBE = Probe(
    "pictures", "Pictures from updates",
    "Sees what a site sends, knows its questions and answers, and has pictures of other sites.",
    _excluded, lambda case: 30.0, _look,
)  # fmt: skip
