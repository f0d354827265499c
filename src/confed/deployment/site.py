"""Site of a federation across machines: from a recipe and a client's name to a site that answers requests."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from confed.data.examples import FederatedDataset
from confed.deployment.manifest import MANIFEST, verified
from confed.deployment.provision import SITES, read_sites
from confed.deployment.server import common_ground
from confed.deployment.site_models import KEPT, write_site_run
from confed.engines.remote.client import Site, client_named
from confed.federation.client import SignatureCheck, Signer
from confed.federation.params import Params
from confed.federation.state import ClientState
from confed.privacy.evaluation_policy import EvaluationPolicy
from confed.privacy.secure_sum.signatures import Authority, ListedKeys, PublicKeys, VouchedKeys
from confed.recipes.recipe import Recipe, load_recipe
from confed.runs.build import check_device, prepare
from confed.runs.grants import check_grants
from confed.system.events import Note, Progress, ignore

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
            # A client's name that the coordinator signed stands for that site and no other.
            if flare not in signed or (client in signed and flare != client) or list(listed.values()).count(flare) > 1:
                raise ValueError(
                    f"{kit / SITES} must name a different site for every client, among those that the coordinator "
                    f"signed ({', '.join(signed)}), got {flare!r} for {client!r}"
                )
    return VouchedKeys(kit / "startup", listed)


def signatures_by_list(recipe: Recipe, listed: Mapping[str, str]) -> SignatureCheck | None:
    """A server's check of the signatures in secure aggregation, by the coordinator's list; None without a sum."""
    return None if recipe.construct("algorithm").secure_sum is None else PublicKeys(listed)


def signatures_by_kit(recipe: Recipe, kit: Path, names: Mapping[str, str]) -> SignatureCheck | None:
    """A server's check of the signatures in secure aggregation, by FLARE's certificates; None without a sum."""
    return None if recipe.construct("algorithm").secure_sum is None else Authority(kit / "startup", names)


def open_site(
    recipe: Recipe,
    client: str,
    private: Path,
    progress: Progress = ignore,
    *,
    limit: float | None = None,
    evaluations: str | None = None,
    signer: Signer | None = None,
    over: Callable[[], None] = lambda: None,
) -> Site:
    """Client end of a federation, ready to answer requests."""
    torch.set_num_threads(recipe.run.threads)
    check_device(recipe, alone=True)
    setup, run_data = prepare(recipe)
    info = client_named(setup, client)
    if not info.num_examples:
        raise ValueError(f"there are no training examples of client {client!r} here, so that it cannot take part")
    policy = None if evaluations is None else EvaluationPolicy.parse(evaluations)
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o700)

    def final(shared: Params, state: ClientState) -> str:
        return str(write_site_run(private, recipe, setup, info, shared, state))

    def ended() -> None:
        if not (private / KEPT).is_dir():
            progress(Note(f"no final model was handed to this site: {ASK_FOR_IT}"))
        over()

    dataset = run_data.dataset
    out = dataset.unreadable if isinstance(dataset, FederatedDataset) else None
    return Site(
        setup, info, private, common=common_ground(recipe, run_data), audit=private / "audit.jsonl", progress=progress,
        limit=limit, evaluations=policy, signer=signer, over=ended, final=final,
        left_out={} if out is None else out.examples.get(client, {}),
    )  # fmt: skip
