"""What the engines take for a message as large as a step of split learning, beside confed's step over them.

Processes of this machine. ``flower``: Flower's own SuperLink and SuperNode with the smallest pair of a ServerApp and a
ClientApp, whose process the SuperNode starts for each message. ``flower_line``: an echo over what confed makes of it,
which stays: Flower's Fleet API with TLS, keys, waiting requests, and one request each way. ``flare``: a job of FLARE's
with the smallest pair of Collab objects, over its own connection with TLS. ``step_flower`` and ``step_flare``: a step
of BiCSL with one site (``steps.py``); its overhead is the step's time less that of one in the simulator.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confed.deployment.demo import free_port
from confed.deployment.provision import SITES, Federation, provision, read_sites
from measure import finish
from steps import steps

SIZE = int(os.environ.get("ECHO_FLOORS_BYTES", "8829"))
"""Bytes of a message, one way: as of a step of ``steps.py``, unless the environment says another number."""

OUT = "ECHO_FLOORS_OUT"
"""Environment variable with the file for the milliseconds of each message."""

COUNT = "ECHO_FLOORS_COUNT"

WARM = 3
"""First messages that are not counted, where processes stay."""


@contextmanager
def running(commands: Sequence[Sequence[str]], folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Processes for as long as the ``with`` block lasts."""
    with (folder / "log.txt").open("ab") as log:
        started = [
            subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment, start_new_session=True)
            for command in commands
        ]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def waited(out: Path, folder: Path, seconds: float) -> list[float]:
    """What is in a file, once it is there."""
    began = time.monotonic()
    while not out.is_file():
        if time.monotonic() - began > seconds:
            raise RuntimeError(f"no answer in {seconds:g} s: {(folder / 'log.txt').read_text()[-2000:]}")
        time.sleep(0.2)
    return json.loads(out.read_text())


def told(milliseconds: list[float]) -> None:
    """Writes the file in one step."""
    out = Path(os.environ[OUT])
    out.with_suffix(".tmp").write_text(json.dumps(milliseconds))
    out.with_suffix(".tmp").rename(out)


# Flower ---------------------------------------------------------------------------------------------------------------

PROJECT = """
[project]
name = "echo-floor"
version = "1.0.0"
description = "an echo"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "echo_floor.app:server"
clientapp = "echo_floor.app:client"
"""

APP = """
import time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@client.query()
def answer(message, context):
    return Message(message.content, reply_to=message)


@server.main()
def main(grid, context):
    from echo_floors import SIZE, os, told, COUNT
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    milliseconds = []
    for _ in range(int(os.environ[COUNT])):
        record = RecordDict({"body": ConfigRecord({"body": bytes(SIZE)})})
        began = time.perf_counter()
        (reply,) = grid.send_and_receive([Message(record, dst_node_id=nodes[0], message_type="query")])
        milliseconds.append(1000 * (time.perf_counter() - began))
        assert len(reply.content["body"]["body"]) == SIZE
    told(milliseconds)
"""


def flower(count: int) -> list[float]:
    """Flower's own processes and its smallest applications."""
    with tempfile.TemporaryDirectory() as made:
        root, port = Path(made), free_port()
        (root / "app" / "echo_floor").mkdir(parents=True)
        (root / "app" / "pyproject.toml").write_text(PROJECT)
        (root / "app" / "echo_floor" / "__init__.py").touch()
        (root / "app" / "echo_floor" / "app.py").write_text(APP)
        (root / "home").mkdir()
        link = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        (root / "home" / "config.toml").write_text(link)
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ, "FLWR_HOME": str(root / "home"), "FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": path,
            OUT: str(root / "out.json"), COUNT: str(count),
        }  # fmt: skip
        programs = Path(sys.executable).parent
        commands = [
            [str(programs / "flower-superlink"), "--insecure", "--disable-runtime-dependency-installation",
             "--host", "127.0.0.1", "--port", str(port)],
            [str(programs / "flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{port}",
             "--port", str(free_port())],
        ]  # fmt: skip
        with running(commands, root, environment):
            given = [str(programs / "flwr"), "run", str(root / "app"), "here"]
            began, code = time.monotonic(), 1
            with (root / "log.txt").open("ab") as log:
                while code and time.monotonic() - began < 60:  # the SuperLink takes seconds to start
                    time.sleep(3)
                    code = subprocess.run(given, check=False, env=environment, stdout=log, stderr=log).returncode
            return waited(root / "out.json", root, 60 + 30 * count)


def flower_line(count: int) -> list[float]:
    """The same over confed's end of Flower's Fleet API, in a process that stays."""
    from confed.engines.flower.superlink import open_superlink
    from confed.engines.flower.supernode import read_public
    from confed.engines.flower.transport import FlowerTransport

    with tempfile.TemporaryDirectory() as made:
        root, port = Path(made) / "federation", free_port()
        provision(root, Federation(("site",), "localhost", port, ""))
        server = root / "server"
        names = {read_public(key): name for name, key in read_sites(server / SITES).items()}
        with open_superlink(
            names, "127.0.0.1", port, certificate=server / "server.crt", key=server / "server.key",
            waiting=server / "waiting",
        ) as (grid, _):  # fmt: skip
            transport = FlowerTransport(grid, names.get)
            site = [sys.executable, __file__, "--answer", str(root / "sites" / "site"), str(port)]
            milliseconds = list[float]()
            with running([site], root, dict(os.environ)):
                while not (there := transport.connections()):
                    time.sleep(0.1)
                for _ in range(count + WARM):
                    began = time.perf_counter()
                    sent = transport.send(next(iter(there)), "step", b"", bytes(SIZE), 60)
                    assert sent is not None
                    while (reply := transport.receive(sent)) is None:
                        transport.wait(1.0)
                    milliseconds.append(1000 * (time.perf_counter() - began))
                    assert len(reply[1]) == SIZE
        return milliseconds[WARM:]


def answer(folder: Path, port: str) -> None:
    """The site of :func:`flower_line`."""
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    from confed.engines.flower.supernode import SuperNode, read_key
    from confed.engines.flower.transport import pack, unpack

    app = ClientApp()

    @app.train("call")
    def _(message: Message, context: Context) -> Message:
        return Message(pack(*unpack(message)), reply_to=message)

    line = SuperNode(f"localhost:{port}", read_key(folder / "key"), (folder / "ca.crt").read_bytes())
    line.serve(app, threading.Event())


# FLARE ----------------------------------------------------------------------------------------------------------------


def flare(count: int) -> list[float]:
    """A job of FLARE's with the smallest objects at server and site."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    from confed.deployment.flare.provision import ADMIN, close_kit, provision_flare
    from confed.deployment.flare.server import flare_command
    from confed.engines.flare.transport import CONTROLLER, EXECUTOR, LEADER, MEMBER_OF_0_1, write_job

    with tempfile.TemporaryDirectory() as made:
        root = Path(made) / "federation"
        provision_flare(root, Federation(("site",), "localhost", free_port(), ""))
        close_kit(root / "server", (CONTROLLER, "echo_objects.EchoServer"))
        close_kit(root / "sites" / "site", (EXECUTOR, "echo_objects.EchoSite"))
        job = write_job(root / "job", ["site"], 1)
        for path in job.rglob("*.json"):
            text = path.read_text().replace(LEADER, "echo_objects.EchoServer")
            path.write_text(text.replace(MEMBER_OF_0_1, "echo_objects.EchoSite"))
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, OUT: str(root / "out.json"), COUNT: str(count + WARM)}
        with running(
            [flare_command(root / "server", "server"), flare_command(root / "sites" / "site", "client", "uid=site")],
            root,
            environment,
        ):
            admin: Any = None
            for _ in range(60):
                time.sleep(1)
                try:
                    admin = admin or new_secure_session(ADMIN, str(root / "server" / "admin"), timeout=5.0)
                    if admin.get_connected_client_list():
                        break
                except Exception:  # FLARE has some fifteen kinds of it for a server that is not there yet
                    continue
            admin.submit_job(str(job))
            milliseconds = waited(root / "out.json", root, 120)
            admin.close()
        return milliseconds[WARM:]


def main() -> None:
    """Prints milliseconds per message, the median and the least."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answer", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--messages", type=int, default=100)
    parser.add_argument("--flower-messages", type=int, default=4, help="of Flower's own, which take seconds")
    parser.add_argument("--rounds", type=int, default=4, help="of the steps")
    parser.add_argument("--without", nargs="*", default=(), help="names of measurements to leave out")
    given, _ = parser.parse_known_args()
    if given.answer:
        return answer(Path(given.answer[0]), given.answer[1])
    figures = dict[str, Any]()
    for name, echo, count in (
        ("flower", flower, given.flower_messages), ("flower_line", flower_line, given.messages),
        ("flare", flare, given.messages),
    ):  # fmt: skip
        if name not in given.without:
            milliseconds = echo(count)
            figures |= {f"{name}_ms": statistics.median(milliseconds), f"{name}_least": min(milliseconds)}
    for engine in ("flower", "flare"):
        if f"step_{engine}" not in given.without:
            found = steps(engine, rounds=given.rounds)
            figures |= {
                f"step_{engine}_ms": found["milliseconds_per_step"],
                f"step_{engine}_overhead": found["overhead_milliseconds"],
                f"step_{engine}_at_the_site": found["milliseconds_of_a_call_at_the_site"],
            }
    finish("echo floors", float("inf"), bytes=SIZE, **figures)


if __name__ == "__main__":
    main()
