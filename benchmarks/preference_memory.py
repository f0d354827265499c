"""Peak memory of FedP³'s sum over all pairs of 1,642 answers, batch 32, each figure in a fresh process."""

import json
import subprocess
import sys
import time

from measure import finish

ANSWERS, BATCH, LIMIT_MB = 1642, 32, 1500.0
LOSSES = ("none", "all", "sorted", "sampled", "filtered", "naive")


def child(model: str, loss: str) -> None:
    """Three training steps of a head on random features, or of the mini ViLT; prints peak and time per step."""
    import torch
    from torch.nn import functional

    from confed.engines.usage import peak_memory
    from confed.losses.preference import (
        forgotten,
        matchup,
        most_forgotten,
        pairwise_preference,
        sampled_preference,
        sorted_preference,
    )
    from confed.models import create_model

    def naive(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (matchup(t.softmax(1)) - matchup(s.softmax(1))).abs().sum(dim=(1, 2))

    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    losses = {
        "none": lambda s, t: s.sum(dim=1) * 0,
        "all": pairwise_preference,
        "sorted": sorted_preference,
        "sampled": lambda s, t: sampled_preference(s, t, 400, rng),
        "filtered": lambda s, t: pairwise_preference(s, t, most_forgotten(forgotten(s, t), 20)),
        "naive": naive,
    }
    teacher = 3 * torch.randn(BATCH, ANSWERS, generator=rng)
    label = torch.randint(ANSWERS, (BATCH,), generator=rng)
    if model == "vilt":
        net = create_model("vilt_mini", answers=ANSWERS, vocab_size=120, pretrained=False)
        batch = {
            "image": torch.randint(0, 256, (BATCH, 3, 64, 64), generator=rng).to(torch.uint8),
            "text": torch.randint(5, 120, (BATCH, 16), generator=rng),
            "text_mask": torch.ones(BATCH, 16, dtype=torch.int64),
        }
    else:
        net, batch = torch.nn.Linear(128, ANSWERS), torch.randn(BATCH, 128, generator=rng)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    before, seconds = peak_memory(), []
    for _ in range(3):
        began = time.process_time()
        output = net(batch)
        student = output if model == "head" else output.logits
        (functional.cross_entropy(student, label) + 0.003 * losses[loss](student, teacher).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began)
    print(json.dumps({"peak": peak_memory(), "before": before, "seconds": min(seconds)}))


def measure(model: str, loss: str) -> dict[str, float]:
    """A child's figures."""
    output = subprocess.run([sys.executable, __file__, "child", model, loss], check=True, capture_output=True)
    return json.loads(output.stdout)


def main() -> None:
    figures: dict[str, float] = {}
    for model in ("head", "vilt"):
        found = {loss: measure(model, loss) for loss in LOSSES}
        for loss, values in found.items():
            figures[f"{model}_{loss}_mb"] = values["peak"] / 2**20
            figures[f"{model}_{loss}_extra_mb"] = (values["peak"] - found["none"]["peak"]) / 2**20
            figures[f"{model}_{loss}_step_ms"] = 1000 * values["seconds"]
    finish("preference_memory", LIMIT_MB, ratio=figures["vilt_all_mb"], unit="MB, peak of the process", **figures)


if __name__ == "__main__":
    child(*sys.argv[2:4]) if sys.argv[1:2] == ["child"] else main()
