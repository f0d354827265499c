"""Training speed of the mini ViLT on one thread: forward, backward and AdamW at batch 32."""

import sys
import time

import torch
from torch.nn import functional

from federations import vilt, vilt_tables
from measure import finish

STEPS = 60


def main() -> None:
    torch.set_num_threads(1)
    (table,), model = vilt_tables(1, 32 * STEPS), vilt()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def epoch() -> None:
        for batch in table.batches(32):
            loss = functional.cross_entropy(model(batch).logits, batch["label"])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    epoch()
    began = time.process_time()
    epoch()
    speed = 32 * STEPS / (time.process_time() - began)
    finish("mini_speed", 1.0, ratio=800 / speed, samples_per_cpu_second=speed, wanted=800)


if __name__ == "__main__":
    sys.exit(main())
