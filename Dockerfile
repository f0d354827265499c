# confed in a container, for a user without root.
#
#   docker build -t confed --build-arg TORCH_INDEX=URL .
#   docker run --rm -v "$PWD:/work" confed run --out runs/first
#
# BASE is an image of Debian 12 with Python 3.11. A tag can change; a digest cannot, and whoever answers for an image
# writes it: --build-arg BASE=python:3.11-slim-bookworm@sha256:DIGEST. packaging/base makes one from Debian's packages.
#
# TORCH_INDEX is the package index of PyTorch with the build that you want, as PyTorch's site names it: the one for CPUs
# makes the smaller image, those for CUDA need NVIDIA's container toolkit (docker run --gpus all). Without it, pip's
# own index decides; on Linux that is a build with CUDA.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build

ARG EXTRAS=flower,privacy,watch
ARG TORCH_INDEX=

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/confed
ENV PATH=/opt/confed/bin:$PATH

WORKDIR /source
COPY constraints.txt ./
# PyTorch first and alone: its layer stays when the source changes.
RUN torch="$(grep '^torch==' constraints.txt)" \
  && pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch" -c constraints.txt

COPY pyproject.toml README.md LICENSE ./
COPY docs/papers.md docs/papers.md
COPY src src
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[$EXTRAS]" -c constraints.txt

FROM ${BASE}

RUN useradd --create-home --uid 1000 confed && mkdir /work && chown confed:confed /work

COPY --from=build /opt/confed /opt/confed
ENV PATH=/opt/confed/bin:$PATH OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
USER 1000
WORKDIR /work
ENTRYPOINT ["confed"]
CMD ["--help"]
