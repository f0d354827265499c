"""Tables of the five papers with real weights and data on one GPU: what the small benchmarks cannot judge.

Prints, per claim that stands as "cannot be judged" in docs/results.md, what must lie in a data folder and the commands
to type; with ``--run`` it types them, in order, and goes on where it was interrupted (finished runs are reused).

    python benchmarks/papers_tables.py                                # all commands, each with what it needs
    python benchmarks/papers_tables.py feddat --data DIR              # those of one paper, with this data folder
    python benchmarks/papers_tables.py feddat --data DIR --run        # run them; 0 if all succeed

No figure in docs/ comes from here: none of this has been run. ``confed compare ... --plan`` estimates the cost of a
command beforehand. Rates and weights of losses are the papers' where they are printed; where they are not, `confed
tune` comes first, with the same budget for every row, and its choice is passed on with --tuned.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["JOBS", "Job"]


class Job(NamedTuple):
    """Commands that judge claims of a paper.

    Attributes:
        paper: "fedvqa", "bicsl", "feddat", "fedlgt" or "modalities".
        claims: what the commands judge.
        needs: what must lie below the data folder, and which weights are read from the model hub or a folder.
        commands: arguments of ``confed``, in which DATA is the data folder and OUT the folder for results.
    """

    paper: str
    claims: str
    needs: str
    commands: tuple[str, ...]


def _official(name: str, rows: str, seeds: int = 3) -> str:
    return f"compare {name} --methods {rows} --seeds {seeds} data.root=DATA --out OUT/{name}"


_FEDDAT = "clf_local,lora,adapter_local,adapter,adapter_equal,feddat,feddat_code,full"

JOBS: tuple[Job, ...] = (
    Job(
        "feddat",
        "table 2: Domain with ViLT; the gates with a centralised row; the released schedule",
        "aqua, vqa_abstract, vizwiz, cocoqa, coco and gqa as the dataset feddat_domain describes them; "
        "dandelin/vilt-b32-mlm",
        (
            _official("feddat_domain_official", _FEDDAT),
            # The schedule of the released code: a warm-up anew in every round over a horizon of 15 epochs.
            "compare feddat_domain_official --methods adapter,feddat,feddat_code --seeds 3 data.root=DATA "
            "local.schedule.horizon=15 --out OUT/feddat_domain_released",
            "compare OUT/feddat_domain_official --gates",
        ),
    ),
    Job(
        "feddat",
        "tables 2 and 3: Function, Scene and Task",
        "clove and Visual Genome's pictures; vqa_v2, coco, nlvr2, snli_ve, flickr30k and vcr; dandelin/vilt-b32-mlm",
        tuple(_official(f"feddat_{name}_official", _FEDDAT) for name in ("function", "scene", "task")),
    ),
    Job(
        "feddat",
        "figure 6: more clients",
        "as for Function",
        (
            "compare feddat_function_official data.shards=1,3,5 --methods adapter,feddat --seeds 3 data.root=DATA "
            "--out OUT/feddat_clients",
        ),
    ),
    Job(
        "feddat",
        "Domain and Function with built-in pictures and a backbone of middle size that knows no task (no files needed)",
        "nothing",
        (
            "weights pretrain vilt_mlm_middle --out OUT/vilt_mlm_middle.safetensors",
            "compare feddat_scene_equal data.preset=domain --methods all --seeds 5 model.name=vilt_mlm_middle "
            "model.pretrained=OUT/vilt_mlm_middle.safetensors data.train=2000 run.rounds=30 run.device=cuda "
            "--out OUT/feddat_domain_middle",
            "compare feddat_scene_equal --methods all --seeds 5 model.name=vilt_mlm_middle "
            "model.pretrained=OUT/vilt_mlm_middle.safetensors data.preset=function data.train=2000 run.rounds=30 "
            "run.device=cuda --out OUT/feddat_function_middle",
        ),
    ),
    Job(
        "fedvqa",
        "tables 8.2 and 8.3, figure 8.4: FedP³ on GQA in both scenarios, and the number N of 1,642 answers",
        "gqa_scenes, made by `confed data prepare gqa-scenes --gqa DIR --images DIR --weights r18.safetensors`; "
        "dandelin/vilt-b32-mlm",
        (
            "tune fedvqa_gqa_a --methods all --budget 6 --seed 100 data.root=DATA/gqa_scenes --out OUT/fedvqa_tuned",
            "compare fedvqa_gqa_a --methods all --seeds 5 --tuned OUT/fedvqa_tuned/tuned.toml "
            "data.root=DATA/gqa_scenes --out OUT/fedvqa_gqa_a",
            "compare fedvqa_gqa_b --methods all --seeds 5 --tuned OUT/fedvqa_tuned/tuned.toml "
            "data.root=DATA/gqa_scenes --out OUT/fedvqa_gqa_b",
            "compare fedvqa_gqa_a algorithm.top_n=5,10,20,50,200,1642 --methods fedp3 --seeds 3 "
            "data.root=DATA/gqa_scenes --out OUT/fedvqa_top_n",
        ),
    ),
    Job(
        "bicsl",
        "tables 1 and 2: seven models on VQA v2, each with rates of its own",
        "vqa_v2 after `confed data prepare vqa-v2 --root DATA/vqa_v2`",
        (
            "compare bicsl_vqa2_official --models all --seeds 3 data.root=DATA/vqa_v2 --out OUT/bicsl_vqa2",
        ),
    ),
    Job(
        "fedlgt",
        "table 3: COCO and VOC with label embeddings of CLIP",
        "coco with annotations, train2014 and val2014; VOCdevkit; microsoft/resnet-18, openai/clip-vit-base-patch32",
        (
            "data prepare label-embeddings coco OUT/coco.safetensors",
            "compare fedlgt_coco --methods all --seeds 3 data.root=DATA/coco "
            "model.embeddings=OUT/coco.safetensors --out OUT/fedlgt_coco",
            "data prepare label-embeddings voc OUT/voc.safetensors",
            "compare fedlgt_voc --methods all --seeds 3 data.root=DATA/VOCdevkit "
            "model.embeddings=OUT/voc.safetensors --out OUT/fedlgt_voc",
        ),
    ),
    Job(
        "modalities",
        "figures 3 to 7 at 30 and 60 rounds with searched rates; λ under strong distortions (no files needed)",
        "nothing",
        (
            "tune modalities_personal --methods local,fedavg_ft,late_fusion,lam_3,central --budget 6 --seed 100 "
            "--out OUT/modalities_tuned",
            "compare modalities_personal --methods all --seeds 10 --tuned OUT/modalities_tuned/tuned.toml "
            "run.rounds=60 --out OUT/modalities_60",
            "compare modalities_personal algorithm.lam=0.1,0.3,0.5,0.7,0.9 --methods lam_3 --seeds 5 "
            "data.distortion=1.0 data.train=400 --out OUT/modalities_lambda",
        ),
    ),
    Job(
        "modalities",
        "captions: one model for texts, pictures and both",
        "coco with dataset_coco.json (Karpathy's split), train2014 and val2014",
        (
            "compare captions_coco_mini --methods all --seeds 3 data.captions=dataset_coco.json "
            "data.root=DATA/coco data.clients=10 run.rounds=20 run.device=cuda --out OUT/captions_coco",
        ),
    ),
)  # fmt: skip


def main() -> int:
    """The number of commands that failed; 0 where they are printed only."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paper", nargs="?", choices=sorted({job.paper for job in JOBS}))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/papers"))
    parser.add_argument("--run", action="store_true")
    given = parser.parse_args()
    failed = 0
    for job in JOBS:
        if given.paper not in (None, job.paper):
            continue
        print(f"# {job.paper}: {job.claims}\n# needs: {job.needs}")
        for command in job.commands:
            arguments = command.replace("DATA", str(given.data)).replace("OUT", str(given.out)).split()
            print("confed " + " ".join(arguments), flush=True)
            if given.run:
                failed += subprocess.run([sys.executable, "-m", "confed.cli", *arguments], check=False).returncode != 0
        print()
    return failed


if __name__ == "__main__":
    sys.exit(main())
