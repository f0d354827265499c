"""The smallest pair of objects of a job of FLARE's, which ``echo_floors.py`` hands in."""

import os
import time

from nvflare.collab import collab

from echo_floors import COUNT, SIZE, told


class EchoServer:
    @collab.main
    def lead(self) -> None:
        [site] = list(collab.clients)
        milliseconds = list[float]()
        for _ in range(int(os.environ[COUNT])):
            began = time.perf_counter()
            body = site(timeout=60.0).answer(bytes(SIZE))
            milliseconds.append(1000 * (time.perf_counter() - began))
            assert len(body) == SIZE
        told(milliseconds)


class EchoSite:
    @collab.publish
    def answer(self, body: bytes) -> bytes:
        return body
