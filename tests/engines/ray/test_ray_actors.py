"""Clients on Ray: the bits of one process, nodes that are killed and join, and clusters that cannot be used."""

import re
from typing import Any

import pytest

from refusals import refuses

pytest.importorskip("ray")

from confed.engines.ray.crew import connected
from confed.recipes.recipe import load_recipe
from ray_scenarios import STATEFUL, scenario


def test_two_actors_give_the_bits_of_one_process_after_a_kill() -> None:
    found = scenario("local")
    assert found["ray"] == found["one"]
    assert found["one"]["errors"] == {}
    assert found["one"]["states"] == 5  # every client keeps something of its own
    assert found["described"]["exact"] is True
    assert [node["actors"] for node in found["described"]["nodes"]] == [2]
    killed = found["killed"]
    assert killed["errors"] == [None] * 5
    assert killed["lost"] == 1
    assert any(re.search("was lost .*; client 'client-.' is asked again elsewhere", text) for text in killed["said"])
    assert found["usage"]["cpu"] > 0
    assert found["usage"]["peak"] > 50 * 2**20


@pytest.mark.slow
def test_a_node_that_cannot_work_is_named_with_the_reason() -> None:
    found = scenario("refusals")
    assert re.search(r"node .* offers .* GiB of memory, an actor needs about 1073741824", found["memory"])
    assert found["gpu"] == "no node of the Ray cluster has GPUs for an actor"
    assert re.search(r"node .* could not prepare the run: FileNotFoundError: no folder /data/pictures", found["data"])
    assert re.search(r"node .* it has torch 2.*, this process 9\.9", found["version"])
    assert "other source files than this process" in found["source"]
    assert found["described"]["exact"] is False
    assert list(found["described"]["differing"]) == ["processor"]
    assert any("exact = false in summary.json" in text for text in found["said"])


@pytest.fixture(scope="module")
def several_nodes() -> dict[str, Any]:
    return scenario("nodes", 900)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", STATEFUL)
def test_four_actors_on_two_nodes_give_the_bits_of_one_process(several_nodes: dict[str, Any], method: str) -> None:
    found = several_nodes[method]
    assert found["ray"] == found["one"]
    assert found["one"]["errors"] == {}
    assert [node["actors"] for node in found["described"]["nodes"]] == [2, 2]
    assert found["described"]["exact"] is True


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_nodes_new_nodes_and_deadly_calls_are_survived() -> None:
    found = scenario("kills", 900)
    assert found["ray"] == found["one"]
    assert found["one"]["errors"] == {}
    assert found["described"]["actors_lost"] >= 1
    assert any("has joined" in text for text in found["said"])
    assert len(found["described"]["nodes"]) == 3
    assert list(found["deadly"]["errors"]) == ["2/client-1"]
    assert "3 actors died of this call" in found["deadly"]["errors"]["2/client-1"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_recipe_on_ray_writes_the_files_of_one_process() -> None:
    found = scenario("recipe", 900)
    assert found["differing"] == []
    assert found["compared"] == 6
    assert found["exact"] is True
    assert found["cpu"] > 5
    assert "no Ray cluster at run.address = 'x:1'" in found["refused"]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", r"no Ray cluster at run\.address = '127\.0\.0\.1:1': .*refused.*`ray start --head`"),
        ("127.0.0.1:100000", r"no Ray cluster at run\.address"),
        ("ray://127.0.0.1:10001", "must be HOST:PORT of a cluster's head"),
        ("somewhere", "must be HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address: str, why: str) -> None:
    with pytest.raises(ValueError, match=why), connected(address, 1):
        pass


def test_an_address_is_for_ray_only() -> None:
    with pytest.raises(ValueError, match=r"run\.address is that of a Ray cluster and needs run\.engine = 'ray'"):
        load_recipe("fedvqa_scenes", ["run.address=10.0.0.1:6379"])
    assert load_recipe("fedvqa_scenes", ["run.engine=ray", "run.address=auto"]).run.address == "auto"
    refuses(r"run\.engine", load_recipe, "fedvqa_scenes", ["run.engine=dask"])
