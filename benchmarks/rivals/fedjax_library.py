"""Google's FedJAX: its for_each_client, compiled per step (``jit``), or all clients at once (``vmap``).

``vmap`` is a backend as FedJAX lets users write them: a client's epoch is one scan, mapped over the cohort. FedJAX's
third backend, ``pmap`` over devices, does not run with today's JAX.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
from fedjax.core.for_each_client import ForEachClientBackend

from work import Work, begun

jax.tree_map = jax.tree_util.tree_map  # which FedJAX calls and later versions of JAX no longer have


def scores(network: str, params: Any, batch: Any) -> Any:
    """The networks of ``networks.py`` in JAX."""
    if network == "linear":
        hidden = batch["x"]
    elif network == "cnn":
        hidden = batch["x"].reshape(-1, 1, 28, 28)
        for layer in ("first", "second"):
            hidden = jax.lax.conv(hidden, params[f"{layer}.weight"], (1, 1), "VALID")
            hidden = jnp.tanh(hidden + params[f"{layer}.bias"][:, None, None])
            sums = jax.lax.reduce_window(hidden, 0.0, jax.lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
            hidden = sums / 4
        hidden = hidden.reshape(len(hidden), -1)
    else:
        hidden = encoded(params, batch)
    return hidden @ params["head.weight"].T + params["head.bias"]


def encoded(params: Any, batch: Any, patch: int = 8, heads: int = 4) -> Any:
    """What ``MiniVL`` makes of a batch."""
    picture = batch["image"].astype(jnp.float32) / 127.5 - 1
    count, side = len(picture), 64 // patch
    tiles = picture.reshape(count, 3, side, patch, side, patch).transpose(0, 2, 4, 1, 3, 5).reshape(count, side**2, -1)

    def linear(name: str, x: Any) -> Any:
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    def normed(name: str, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return centred * scale * params[f"{name}.weight"] + params[f"{name}.bias"]

    words = params["words.weight"][batch["text"]]
    hidden = jnp.concatenate([words, linear("patches", tiles)], 1) + params["positions"]
    blocks = 1 + max(int(name.split(".")[1]) for name in params if name.startswith("blocks."))
    for block in (f"blocks.{number}" for number in range(blocks)):
        mixed = linear(f"{block}.qkv", normed(f"{block}.before", hidden))
        query, key, value = mixed.reshape(*hidden.shape[:2], 3, heads, -1).transpose(2, 0, 3, 1, 4)
        weights = jax.nn.softmax(query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5)
        hidden += linear(f"{block}.out", (weights @ value).transpose(0, 2, 1, 3).reshape(hidden.shape))
        inner = jax.nn.gelu(linear(f"{block}.up", normed(f"{block}.between", hidden)), approximate=False)
        hidden += linear(f"{block}.down", inner)
    return normed("norm", hidden).mean(1)


class AllAtOnce(ForEachClientBackend):
    """All clients of a round in one call; they have batches of the same shapes."""

    def __call__(self, client_init: Any, client_step: Any, client_final: Any) -> Any:
        def epoch(shared: Any, given: Any, batches: Any) -> Any:
            state, _ = jax.lax.scan(client_step, client_init(shared, given), batches)
            return client_final(shared, state)

        mapped = jax.jit(jax.vmap(epoch, in_axes=(None, 0, 0)))

        def run(shared: Any, clients: Iterable[Any]) -> Iterator[Any]:
            names, batches, inputs = zip(*((name, list(own), given) for name, own, given in clients), strict=True)
            stacked = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *map(_stacked, batches))
            outputs = mapped(shared, jnp.stack(inputs), stacked)
            for place, name in enumerate(names):
                yield name, jax.tree_util.tree_map(lambda leaf, place=place: leaf[place], outputs), []

        return run


def _stacked(batches: Any) -> Any:
    return jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *batches)


def federated(work: Work, way: str) -> Any:
    """A function from shared values and clients to each client's values after its epoch."""
    size = work.size
    sgd = size.optimizer == "sgd"
    optimizer = fedjax.optimizers.sgd(size.lr) if sgd else fedjax.optimizers.adam(size.lr)
    fixed = {name: array for name, array in work.initial.items() if not work.learns(name)}

    def loss(params: Any, batch: Any) -> Any:
        logged = jax.nn.log_softmax(scores(size.network, {**fixed, **params}, batch))
        return -jnp.take_along_axis(logged, batch["label"][:, None], 1).mean()

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        moments, params = optimizer.apply(jax.grad(loss)(params, batch), moments, params)
        return params, moments

    backend = AllAtOnce() if way == "vmap" else way
    with fedjax.for_each_client_backend(backend):
        return fedjax.for_each_client(
            lambda shared, given: (shared, optimizer.init(shared)), step, lambda shared, state: state[0]
        )


def main() -> None:
    """All rounds."""
    work, way = begun()
    run = federated(work, way)
    params = {name: jnp.asarray(array) for name, array in work.initial.items() if work.learns(name)}
    for round in range(work.size.rounds):
        clients = [(place, work.batches(round, place), jnp.zeros(())) for place in range(work.size.cohort)]
        results = ((output, 1.0) for _, output in run(params, clients))
        params = fedjax.tree_util.tree_mean(results)
        if not round:
            jax.block_until_ready(params)
            work.began()
    jax.block_until_ready(params)
    work.ended(params)


if __name__ == "__main__":
    main()
