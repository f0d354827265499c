"""Peak memory of FedDAT's divergence over a large vocabulary: all positions at once, and in parts.

``python benchmarks/mutual_distillation_memory.py`` starts a process for each of the two and prints bytes beyond the
logits of student and teacher, as multiples of one tensor of logits, with the time of one step.
"""

import resource
import subprocess
import sys
import time

import torch

from confed.losses.distillation import AT_ONCE, divergence

ROWS, TOKENS, VOCABULARY = 8, 32, 150_000


def measured(at_once: int) -> tuple[float, float]:
    """Bytes beyond the logits over those of the logits, and seconds."""
    torch.set_num_threads(1)
    shape = (ROWS, TOKENS, VOCABULARY)
    student, teacher = torch.randn(shape).requires_grad_(), torch.randn(shape)
    size = student.nbytes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.process_time()
    divergence(student, teacher, at_once=at_once).backward()
    seconds = time.process_time() - start
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / size, seconds


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*measured(int(sys.argv[1])))
    else:
        print(f"{ROWS} x {TOKENS} positions, vocabulary {VOCABULARY}")
        for name, at_once in (("at once", 10**12), ("in parts", AT_ONCE)):
            done = subprocess.run([sys.executable, __file__, str(at_once)], capture_output=True, text=True, check=True)
            ratio, seconds = map(float, done.stdout.split())
            print(f"{name:8}  {ratio:5.2f} tensors of logits beside the two  {seconds:5.2f} CPU seconds")
