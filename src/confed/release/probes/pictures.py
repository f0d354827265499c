r"""Pictures rebuilt from updates: search for pictures whose gradient points where an update does.

Geiping, Bauermeister, Dröge and Moeller 2020, "Inverting gradients: how easy is it to break privacy in federated
learning?":  1 - cos(gradient of the loss at x, update) + lambda TV(x), by steps of Adam with the sign of the gradient
in x, from the mean picture of the attacker's. Of the tensors that sites send only: a head, LoRA, adapters or all.
Questions and answers are taken as known, so that this bounds such a search from above.

*As sent*: an update of a whole round with its epochs, from which :data:`TOGETHER` pictures are sought at once, each
compared with the site's picture nearest to it, as is the mean picture. *One record, one step*: what an update would
give away at worst. Where patches of pictures are embedded and positions learnt, the gradient of the embedding is
sum_p delta_p x_p^T, and the delta_p are those of the positions: the patches x_p of a single record follow by least
squares, exactly where they are no more than features (Lu, Zhang, Zhao, Mi and Cheng 2022, "APRIL: finding the Achilles'
heel on privacy for vision transformers"). The same of updates as sent works where one step was taken on one picture.

A search alone moves from the mean picture towards pictures as such, so that every figure is minus
that of the same search for the gradient of other sites' pictures.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from confed.analysis.case import EVERYBODY, TRAIN, VALIDATION, Case, update_of
from confed.federation.params import Params
from confed.federation.protocols import Batch
from confed.federation.randomness import generator
from confed.federation.specs import PreparesPictures
from confed.federation.stages import staged_part
from confed.release.probe import Estimate, Finding, Probe, mean_estimate

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


def closed_form(model: nn.Module, gradient: Params, shape: torch.Size) -> Tensor | None:
    """The picture (1, 3, H, W) of a gradient of one record; None where no patches or no positions are trained."""
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if isinstance(module, nn.Conv2d) and module.kernel_size == module.stride and weight in gradient:
            size = module.kernel_size[0]
            patches, width = shape[-2] // size * (shape[-1] // size), module.out_channels
            embeddings = name.rsplit(".", 2)[0] if name.count(".") > 1 else name
            for other, slope in gradient.items():
                of_pictures = other.startswith(embeddings) and "position" in other and "text" not in other
                if not of_pictures or slope.numel() not in (patches * width, (patches + 1) * width):
                    continue
                moved = slope.reshape(-1, width)[-patches:].double()
                rows = torch.linalg.lstsq(moved.T, gradient[weight].flatten(1).double()).solution
                return functional.fold(rows.T[None].float(), shape[-2:], size, stride=size)
    return None


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


@dataclass(frozen=True)
class Sought:
    """A site whose pictures are sought, and what the attacker has of other sites."""

    case: Case
    site: str
    mean: Tensor  # picture (1, 3, H, W)
    drawn: Tensor  # others' pictures, for whose gradient is searched as a baseline

    def gained(self, batch: Batch, wanted: Params, start: Tensor, truth: Tensor) -> list[float]:
        """What a search explains of each picture, above one for pictures of another site."""
        others = {**batch, "image": self.drawn[: len(batch["image"])]}
        blind = gradient_of(self.case, self.site, others, list(wanted))
        rebuilt = inverted(self.case, self.site, batch, wanted, start, STEPS)
        baseline = inverted(self.case, self.site, batch, blind, start, STEPS)
        return [
            self.explained(picture, truth) - self.explained(other, truth)
            for picture, other in zip(rebuilt, baseline, strict=True)
        ]

    def direct(self, wanted: Params, truth: Tensor) -> list[float]:
        """What the closed form explains, where there is one."""
        picture = closed_form(self.case.workspace.model, wanted, truth.shape)
        return [] if picture is None else [self.explained(picture[0], truth)]

    def explained(self, picture: Tensor, truth: Tensor) -> float:
        """1 - error over the mean picture's, both to the nearest true picture."""
        error, baseline = nearest_errors(picture[None], truth).mean(), nearest_errors(self.mean, truth).clamp_min(1e-12)
        return float(1 - error / baseline)


def _look(case: Case, seconds: float) -> Finding:
    del seconds
    staged = staged_part(case.workspace.model)
    kept = None if staged is None else staged[1].frozen_features
    if staged is not None:  # features that were kept know no gradient in the picture
        staged[1].frozen_features = None
    sent, alone, alone_direct = list[float](), list[float](), list[float]()
    names, updates = case.sent_names(), list(case.replay[0].first.items())
    for number in range(RECORDS):
        site, (call, reply) = updates[number % len(updates)]
        case.load({EVERYBODY: call.message.tensors}, site)
        others = [name for name in case.sites if name != site] or [site]
        mean = torch.cat([_some(case, name, VALIDATION, 50) for name in others]).mean(0, keepdim=True)
        public = _some(case, others[0], VALIDATION, 50)
        table, rng = case.table(site, TRAIN), generator(case.setup.seed, number, site, "pictures sought")
        order = torch.randperm(len(table), generator=rng)
        sought = Sought(case, site, mean, public[torch.randint(len(public), (TOGETHER,), generator=rng)])
        batch = table.batch(order[:1])
        truth = _prepared(case, batch["image"])
        wanted = gradient_of(case, site, {**batch, "image": truth}, names)
        alone += sought.gained(batch, wanted, mean, truth)
        alone_direct += sought.direct(wanted, truth)
        if number < len(updates):
            update = {name: -change for name, change in update_of(call, reply).items() if name in names}
            several, every = table.batch(order[:TOGETHER]), _some(case, site, TRAIN, 500)
            start = mean + 0.1 * torch.randn(len(several["image"]), *mean.shape[1:], generator=rng)
            sent += sought.gained(several, update, start, every)
    if staged is not None:
        staged[1].frozen_features = kept
    title = "pictures rebuilt from {}, {}"
    tried = [("", "updates as sent", "by search", sent)]
    if not case.noised:
        tried.append(("_alone", "one record's step", "by search", alone))
        tried.append(("_alone_direct", "one record's step", "in closed form", alone_direct))
    measures: list[Estimate] = []
    for kind, what, how, values in tried:
        limit = "" if "alone" in kind else "reconstruction"
        if values:
            measures.append(mean_estimate(f"reconstruction{kind}", title.format(what, how), values, limit))
    words = (
        "Rebuilt: 1 - squared error over that of the mean picture, of a search minus the same of one for other sites' "
        f"pictures; 0 is no leak. Of the first round, by a short search of {STEPS} steps: longer ones may find more."
    )
    return Finding(measures, [words])


def _some(case: Case, site: str, role: int, most: int) -> Tensor:
    """The first pictures of a site's records in a role."""
    table = case.table(site, role)
    return _prepared(case, table.batch(torch.arange(min(most, len(table))))["image"])


PROBE = Probe(
    "pictures", "Pictures from updates",
    "Sees what a site sends, knows its questions and answers, and has pictures of other sites.",
    _excluded, lambda case: 30.0, _look,
)  # fmt: skip
