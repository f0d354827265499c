"""Provisioning of a federation across machines: certificates, keys, a folder for every party, and instructions.

The authority that vouches for the server is made for this federation alone; sites trust it and no other. A site proves
who it is with its own key, whose public half is on the server's list. Private halves are made here for
convenience: a site that would rather not receive one makes its own with
:func:`confed.deployment.authority.make_key` and sends the public half.
The authority also signs what the parties rely on, the recipe, the card and the list of sites
(:mod:`confed.deployment.manifest`).
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from string import Template

from confed.datasets.card import Card, card_of, merged, read_card
from confed.datasets.card import digest_of as digest_of_card
from confed.deployment.authority import issue_server, make_authority, make_key, public_text, trusted
from confed.deployment.consent import check_consents
from confed.deployment.manifest import MANIFEST, Manifest, digest_of, same_key, sign, verified
from confed.deployment.policy import FILE as POLICY
from confed.federation.checkpoint import write_atomically
from confed.federation.file_names import Name
from confed.federation.reading import read_bounded
from confed.recipes.recipe import Recipe
from confed.runs.build import load_data
from confed.runs.dataset import load_dataset
from confed.system.private_keys import load_private
from confed.system.release import VERSION

CARD = "card"  # registered name of data at other sites; also the key of [data] for a card in whose terms data are put


def card_of_recipe(recipe: Recipe) -> Card:
    """The card of a recipe's data."""
    data = recipe.sections["data"]
    return card_of(load_dataset(json.dumps(data, default=str), recipe.run.seed), str(data["name"]))


def write_card(card: Card, out: Path) -> None:
    text = card.to_json().encode()
    if out.exists() and (not out.is_file() or out.read_bytes() != text):
        raise ValueError(f"{out} is there already, and no card is overwritten: give --out another name, or remove it")
    write_atomically(out, text)


def merge_cards(files: Sequence[Path]) -> Card:
    """One card for the data of several sites; see :func:`confed.datasets.card.merged`."""
    return merged([read_card(file) for file in files])


def with_card(recipe: Recipe, file: Path) -> Recipe:
    """A recipe for a server without data: the card takes the place of the section ``[data]``."""
    card, name = read_card(file), recipe.sections["data"]["name"]
    if name != card.data:
        raise ValueError(f"{file} is a card of the data {card.data!r}, and the recipe's are {name!r}")
    data = {"name": CARD, "file": str(file.resolve()), "digest": digest_of_card(file)}
    return replace(recipe, sections={**recipe.sections, "data": data})


AUTHORITY = "authority"
"""Folder of the authority's private key, beside those of the parties; the coordinator keeps it offline."""
SITES = "sites.json"  # the server's list: site -> its public key, in OpenSSH's format


@dataclass(frozen=True)
class Federation:
    sites: tuple[str, ...]  # names of the clients, one site each
    host: str  # how sites reach the server: a name or an address
    port: int
    recipe: str  # the resolved recipe, TOML
    days: int = 365  # how long certificates are good
    card: Path | None = None  # a card of the data (data_card), handed to all; None for none
    wheel: Path | None = None  # the wheel file of confed that sites install, handed to them; None for none
    authority: Path | None = None  # folder of an authority that is there already; None makes one for this federation

    def __post_init__(self) -> None:
        if not self.sites or len(set(self.sites)) != len(self.sites):
            raise ValueError(f"sites must be different names, got {list(self.sites)}")
        for name in self.sites:
            check_name(name)
        if not re.fullmatch(r"[A-Za-z0-9.:-]{1,253}", self.host):
            raise ValueError(f"host must be a name or an address, got {self.host!r}")
        if not 0 < self.port < 65536:
            raise ValueError(f"port must lie in 1 to 65535, got {self.port}")
        if self.days < 1:
            raise ValueError(f"certificates must be good for at least a day, got {self.days}")
        for what, path in (("card", self.card), ("wheel", self.wheel)):
            if path is not None and not path.is_file():
                raise ValueError(f"--{what} must be a file, found none at {path}")
        if self.wheel is not None and not re.fullmatch(r"confed_vl-[\w.+-]+\.whl", self.wheel.name):
            raise ValueError(
                f"--wheel must be a wheel file of confed, confed_vl-VERSION-....whl, got {self.wheel.name!r}"
            )


def check_name(name: str) -> None:
    """Check of the name of a site, a lead or an auditor."""
    if not re.fullmatch(r"[\w][\w.@+-]{0,63}", name):
        raise ValueError(f"a site's name has up to 64 letters, digits and _ . @ + -, got {name!r}")
    Name(name, "a site's name")
    if name.lower() == "server":
        raise ValueError(f"no site can be called {name!r}: so is the server's folder and process")


def provision(root: Path, federation: Federation) -> None:
    """Provisioning of the folders ``authority``, ``server``, ``sites/NAME`` and ``flower``; a fault is a ValueError."""
    check_empty(root)
    server = root / "server"
    server.mkdir(parents=True)
    vouching = root / AUTHORITY if federation.authority is None else federation.authority
    if federation.authority is None:  # sites go on trusting it when the server's certificate has to be made anew
        make_authority(vouching, 2 * federation.days)
    authority = issue_server(server, vouching, federation.host, federation.days)
    keys: dict[str, str] = {}
    for name in federation.sites:
        folder = root / "sites" / name
        folder.mkdir(parents=True)
        keys[name] = make_key(folder / "key")
        write_atomically(folder / "ca.crt", authority)
    # Members of secure aggregation know each other by the keys of the list alone.
    hand_out(root, federation, keys, keys, (vouching / "ca.key").read_bytes())
    flower = root / "flower"
    flower.mkdir()
    write_from_template(flower / "pyproject.toml", "flower.toml", federation)
    write_from_template(flower / "README.md", "flower.md", federation)
    (flower / "federation_app").mkdir()
    write_atomically(flower / "federation_app" / "__init__.py", b"")
    write_from_template(flower / "federation_app" / "app.py", "flower_app.txt", federation)
    write_atomically(flower / "federation_app" / "recipe.toml", federation.recipe.encode())


def check_empty(root: Path) -> None:
    """Check that nothing is in the folder of a new federation."""
    if root.exists() and any(root.iterdir()):
        raise ValueError(f"{root} is not empty; a federation needs a new folder")


def hand_out(
    root: Path,
    federation: Federation,
    listed: Mapping[str, str],
    keys: Mapping[str, str],
    private: bytes,
    form: str = "",
) -> None:
    """Distribution of recipe, list of sites, instructions, card, wheel file and signed manifest to all parties."""
    write_from_template(root / "server" / "README.md", f"{form}server.md", federation)
    for name in federation.sites:
        write_from_template(root / "sites" / name / "README.md", f"{form}site.md", federation, name)
        write_from_template(root / "sites" / name / POLICY, "policy.toml", federation, name)
    folders = [root / "server", *(root / "sites" / name for name in federation.sites)]
    for folder in folders:
        write_atomically(folder / "recipe.toml", federation.recipe.encode())
        write_sites(folder / SITES, listed)
        if federation.card is not None:
            write_atomically(folder / "card.json", federation.card.read_bytes())
        if federation.wheel is not None:
            shutil.copyfile(federation.wheel, folder / federation.wheel.name)
    wheel = {} if federation.wheel is None else {federation.wheel.name: digest_of(federation.wheel)}
    card = "" if federation.card is None else digest_of(federation.card)
    sign(Manifest(dict(keys), digest_of(root / "server" / "recipe.toml"), card, wheel, serial=1), private, folders)


def key_of_authority(server: Path) -> Path:
    """The authority's private key: in its own folder, or in the server's where an earlier version made it."""
    authority_key = server.parent / AUTHORITY / "ca.key"
    return authority_key if authority_key.is_file() or not (server / "ca.key").is_file() else server / "ca.key"


def sign_again(server: Path, private: Path, card: Path | None = None, serial: int | None = None) -> list[Path]:
    """New signature of a server's folder, and of the sites' folders beside it, after a change."""
    anchor = next((path for path in (server / "ca.crt", server / "startup" / "rootCA.pem") if path.is_file()), None)
    if anchor is None:
        raise ValueError(f"{server} must be the server's folder of a federation, it has neither ca.crt nor startup/")
    try:
        key = private.read_bytes()
        key = str(json.loads(key)["root_pri_key"]).encode() if private.suffix == ".json" else key
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{private} must hold the authority's private key: {error}") from error
    public = public_text(load_private(key, str(private)))
    if not any(same_key(public, public_text(certificate)) for certificate in trusted(anchor.read_bytes())):
        raise ValueError(f"{private} is not the key of an authority in {anchor}: nothing was signed")
    before = verified(server, anchor.read_bytes())
    # With FLARE the list has FLARE's names, and keys are those of the certificates that its kits were made with.
    keys = read_sites(server / SITES) if anchor.name == "ca.crt" else before.sites
    folders = [path for name in keys if (path := server.parent / "sites" / name).is_dir()]
    # A command that was killed may have signed for some sites only; the server comes last.
    signed = [verified(folder, anchor.read_bytes()).serial for folder in folders if (folder / MANIFEST).is_file()]
    newest = max([before.serial, *signed])
    number = newest + 1 if serial is None else serial
    if number <= newest:
        raise ValueError(f"--serial must be above {newest}, the number of the last manifest, got {number}")
    folders.append(server)
    if card is not None:
        check_consents(read_card(card), keys)
        for folder in folders:
            write_atomically(folder / "card.json", card.read_bytes())
    digest = before.card if card is None else digest_of(card)
    recipe = server / "recipe.toml"
    for folder in folders[:-1]:
        write_atomically(folder / "recipe.toml", recipe.read_bytes())
        write_sites(folder / SITES, read_sites(server / SITES))
    sign(Manifest(dict(keys), digest_of(recipe), digest, before.wheel, number), key, folders)
    return folders


def names_of_data(recipe: Recipe, card: Path | None = None) -> list[str] | None:
    """Names of the clients in a recipe's data or in a card; None where the data are not here."""
    if card is not None:
        return list(read_card(card).clients)
    try:
        return list(load_data(recipe).clients)
    except (ValueError, OSError):
        return None


def read_sites(path: Path) -> dict[str, str]:
    """The server's list of sites; a fault is a ValueError."""
    try:
        sites = json.loads(read_bounded(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} must hold the sites' names and public keys as JSON: {error}") from error
    if not isinstance(sites, dict) or not all(isinstance(key, str) for key in sites.values()):  # pyright: ignore
        raise ValueError(f"{path} must map each site's name to its public key")
    return {str(name): str(key) for name, key in sites.items()}  # pyright: ignore


def write_sites(path: Path, sites: Mapping[str, str]) -> None:
    """Write the server's list of sites."""
    write_atomically(path, json.dumps(sites, indent=1).encode())


def write_from_template(path: Path, template: str, federation: Federation, site: str = "") -> None:
    """Writes a file for a party from one of the templates in ``federation_kit``."""
    text = files("confed.deployment.templates").joinpath(template).read_text(encoding="utf-8")
    values = {"host": federation.host, "port": str(federation.port), "site": site}
    values["install"] = _installing(federation, "flare" if template.startswith("flare") else "flower")
    values |= {"sites": ", ".join(federation.sites), "count": str(len(federation.sites)), "days": str(federation.days)}
    write_atomically(path, Template(text).substitute(values).encode())


def _installing(federation: Federation, extra: str) -> str:
    """How a party installs confed: from a file whose digest it can compare, as there is no release on an index."""
    if federation.wheel is None:
        return (
            f"Install confed {VERSION}, the server's version, with the extra `{extra}`, from a wheel file that the "
            "coordinator\n   hands out with its SHA-256 (`pip wheel --no-deps .` in confed's source folder makes one): "
            f"`pip install 'FILE.whl[{extra}]'`.\n   Never by name: on the package index `confed` is another "
            "project."
        )
    name = federation.wheel.name
    return (
        f"Install `{name}`, which is in this folder. `sha256sum {name}` must print\n   "
        f"`{digest_of(federation.wheel)}`; then\n   `pip install './{name}[{extra}]'`. Never by name: on the package "
        "index `confed` is another project."
    )
