"""Site of a federation across machines: from a recipe and a client's name to a site that answers requests.

After a federation ``private/run`` holds ``recipe.toml`` (with this site's data), ``models/global``,
``models/personal/<site>`` and a ``summary.json`` without results, so that :mod:`confed.inference.ask` and
:mod:`confed.inference.export` take it as any other run's.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from confed.deployment.manifest import MANIFEST, verified
from confed.deployment.policy import PolicyGuard, SitePolicy
from confed.deployment.provision import SITES, read_sites
from confed.deployment.server import common_ground
from confed.engines.perform import Setup
from confed.engines.remote.client import Site, client_named
from confed.federation.client import SignatureCheck, Signer
from confed.federation.client_info import ClientInfo
from confed.federation.file_names import file_name
from confed.federation.params import Params
from confed.federation.state import ClientState
from confed.federation.step_checkpoints import EVERY
from confed.privacy.secure_sum.signatures import ListedKeys, PublicKeys, VouchedKeys
from confed.recipes.recipe import Recipe, load_recipe
from confed.results.folder import RunFolder
from confed.runs.build import check_device, prepare
from confed.runs.grants import check_grants
from confed.runs.summary import versions
from confed.system.events import Note, Progress, ignore

KEPT = "run"  # the run folder's name in a site's private folder


def write_site_run(
    private: Path, recipe: Recipe, setup: Setup, client: ClientInfo, shared: Params, state: ClientState
) -> Path:
    """Write the run folder of a site when it is complete; one of another recipe is set aside as ``run-2`` ..."""
    target, unfinished = private / KEPT, private / f"{KEPT}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    folder = RunFolder.create(unfinished, recipe.to_toml())
    given = setup.algorithm.initial_private(shared)
    if setup.algorithm.global_model != "none":
        folder.write_tensors(folder.models / "global" / "trained.safetensors", {**shared, **given})
    if setup.keep_personal:
        private_tensors, personal_tensors = state.tensors.get("private", {}), state.tensors.get("personal")
        # As in the simulator: who never took part has what the server would send.
        personal = {**shared, **private_tensors, **given}
        if personal_tensors is not None:
            personal = {**private_tensors, **personal_tensors}
        folder.write_tensors(folder.models / "personal" / file_name(client.id) / "trained.safetensors", personal)
    folder.write_json(
        folder.summary,
        {
            "algorithm": recipe.sections["algorithm"]["name"],
            "label": setup.algorithm.title,
            "recipe": recipe.name,
            "seed": setup.seed,
            "rounds": setup.rounds,
            "clients": [client.id],
            "site": client.id,
            "global_model": setup.algorithm.global_model,
            "versions": versions(),
            "notes": ["models of one site of a federation across machines; results are in the server's run folder"],
        },
    )
    _make_room(target, folder.recipe.read_bytes())
    unfinished.replace(target)
    return target


def _make_room(target: Path, recipe: bytes) -> None:
    """Removes an earlier run folder of the same recipe, and sets aside that of another one."""
    if not target.exists():
        return
    before = target / "recipe.toml"
    if before.is_file() and before.read_bytes() != recipe:
        number = 2
        while (aside := target.with_name(f"{target.name}-{number}")).exists():
            number += 1
        target.replace(aside)
    else:
        shutil.rmtree(target)


def site_of(private: Path) -> tuple[Path, str] | None:
    """The run folder in a site's private folder, and the site's name; None where this is no such folder."""
    if not private.is_dir() or (private / "recipe.toml").is_file():
        return None
    summary = private / KEPT / "summary.json"
    if summary.is_file() and "site" in (content := json.loads(summary.read_text(encoding="utf-8"))):
        return private / KEPT, str(content["site"])
    if (private / "audit.jsonl").is_file() and (private / "state").is_dir():
        raise ValueError(
            f"{private} is a site's folder without final models yet: they come with the last evaluation of the run (a "
            "server that keeps a part of the model sends none without --whole)"
        )
    return None


ASK_FOR_IT = "`confed server --deliver` hands the final model of a finished run to late sites"


def site_recipe(
    source: str | Path, data: Sequence[str] = (), device: str | None = None, *, handed_out: bool = False
) -> Recipe:
    """The federation's recipe with the settings of this site."""
    overrides = [f"data.{given}" for given in data]
    if device is not None:
        overrides.append(f"run.device={device}")
    recipe = load_recipe(source, overrides)
    if handed_out:
        check_grants(recipe, str(source), Path(source).parent, given=overrides)
    if recipe.methods:
        raise ValueError(f"a federation runs one method, {recipe.name!r} is a study of several: {recipe.methods}")
    return recipe


def signer_by_list(
    recipe: Recipe, site: str, key: Path, members: Path | None, signed: Mapping[str, str] | None = None
) -> Signer | None:
    """Signer for secure aggregation by the sites' keys and the coordinator's list of them."""
    if recipe.construct("algorithm").secure_sum is None:
        return None
    from confed.engines.flower.supernode import read_key

    path = key.parent / SITES if members is None else members
    listed = signed if members is None else None
    if listed is None and not path.is_file():
        raise ValueError(
            "the recipe has secure aggregation, for which a site must know the others' keys: --members must name "
            f"the coordinator's list of sites and public keys ({SITES} of the federation); there is no file {path}"
        )
    signer = ListedKeys(read_key(key), read_sites(path) if listed is None else listed)
    if not signer.names(site):
        source = path if listed is None else "the coordinator's signed list"
        raise ValueError(
            f"{source} must have this site's own public key for {site!r}; ask the coordinator for a new list"
        )
    return signer


def signer_by_kit(recipe: Recipe, kit: Path) -> Signer | None:
    """Signer for secure aggregation by FLARE's certificates, which the federation's authority vouches for."""
    if recipe.construct("algorithm").secure_sum is None:
        return None
    listed = read_sites(kit / SITES) if (kit / SITES).is_file() else {}
    if (kit / MANIFEST).is_file():
        signed = verified(kit, (kit / "startup" / "rootCA.pem").read_bytes()).sites
        for client, flare in listed.items():
            # a client's name that the coordinator signed stands for that site and no other.
            if flare not in signed or (client in signed and flare != client) or list(listed.values()).count(flare) > 1:
                raise ValueError(
                    f"{kit / SITES} must name a different site for every client, among those that the coordinator "
                    f"signed ({', '.join(signed)}), got {flare!r} for {client!r}"
                )
    return VouchedKeys(kit / "startup", listed)


def signatures_by_list(recipe: Recipe, listed: Mapping[str, str]) -> SignatureCheck | None:
    """A server's check of the signatures in secure aggregation, by the coordinator's list; None without a sum."""
    return None if recipe.construct("algorithm").secure_sum is None else PublicKeys(listed)


def open_site(
    recipe: Recipe,
    client: str,
    private: Path,
    progress: Progress = ignore,
    *,
    policy: SitePolicy | None = None,
    signer: Signer | None = None,
    over: Callable[[], None] = lambda: None,
    checkpoint: str = EVERY,
) -> Site:
    """Client end of a federation, ready to answer requests."""
    policy = SitePolicy() if policy is None else policy
    policy.check_recipe(recipe)
    torch.set_num_threads(recipe.run.threads)
    check_device(recipe, alone=True)
    setup, run_data = prepare(recipe)
    info = client_named(setup, client)
    if not info.num_examples:
        raise ValueError(f"there are no training examples of client {client!r} here, so that it cannot take part")
    policy.check_records(setup, info)
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o700)

    def final(shared: Params, state: ClientState) -> str:
        return str(write_site_run(private, recipe, setup, info, shared, state))

    def ended() -> None:
        if not (private / KEPT).is_dir():
            progress(Note(f"no final model was handed to this site: {ASK_FOR_IT}"))
        over()

    out, audit = run_data.dataset.unreadable, private / "audit.jsonl"
    return Site(
        setup, info, private, common=common_ground(recipe, run_data), audit=audit, progress=progress,
        limit=policy.client_epsilon, evaluations=policy.on_evaluations, guard=PolicyGuard(policy, audit),
        signer=signer, over=ended, final=final, checkpoint=checkpoint,
        left_out={} if out is None else out.examples.get(client, {}),
    )  # fmt: skip
