# syntax=docker/dockerfile:1
# One image for a Ray head, a Ray worker and a job (cluster/docker/entrypoint.sh):
#   docker build -t lwray .
#   docker run --gpus all --shm-size 8g lwray job train configs/quickstart.toml
#
# torch's wheels bring their CUDA libraries, so the base adds only the driver's compatibility layer. It has no cuDNN on purpose:
# one on the system's library path can silently replace the one that torch was built with.
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM ${BASE} AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends make python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
# An empty lwray stands in for the source, so that this layer, the large one, is built again only for new dependencies.
COPY Makefile pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    mkdir lwray \
    && echo '__version__ = "0"' > lwray/__init__.py \
    && touch README.md \
    && make install VENV=/opt/lwray \
    && /opt/lwray/bin/pip install ".[gpu,s3]"
COPY lwray lwray
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/lwray/bin/pip install --no-deps --force-reinstall .

FROM ${BASE}
# g++ and Python.h: torch.compile and Triton compile at run time. wget: KubeRay's probes call it.
# The profile: a login shell, which KubeRay may start Ray from, would otherwise drop the PATH set below.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3 python3-dev wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 lwray \
    && echo "PATH=/opt/lwray/bin:\$PATH" > /etc/profile.d/lwray.sh
COPY --chmod=755 cluster/docker/entrypoint.sh /usr/local/bin/lwray-entrypoint
COPY --from=build /opt/lwray /opt/lwray
ENV PATH=/opt/lwray/bin:$PATH \
    PYTHONUNBUFFERED=1
# a number, so that Kubernetes' runAsNonRoot can tell that it is not root
USER 10001
WORKDIR /home/lwray
COPY configs configs
ENTRYPOINT ["lwray-entrypoint"]
CMD ["job", "--help"]
