# Two images, each from its own target:
#   docker build --target operator -t trainingjob-operator .
#   docker build --target trainer  -t trainingjob-trainer  .
# What changes often comes last: after an edit of the sources only small layers are made anew.

ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS base
# The standard library may come without byte code, and a plain user cannot add it later: compiled
# here once, every start of Python is quicker.
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/python -c 'import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path("stdlib"), quiet=2, workers=0)' \
 && groupadd --gid 1000 app \
 && useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash app
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1

# Makes wheels of this project; the tool for that is pinned with the other requirements.
FROM base AS build
ARG PIP_CERT=""
ARG PIP_INDEX_URL=""
COPY requirements/trainer.txt /tmp/
RUN --mount=type=cache,target=/root/.cache/pip,id=pip \
    sed -n '/^setuptools==/,/[^\\]$/p' /tmp/trainer.txt > /tmp/setuptools.txt \
 && pip install --require-hashes -r /tmp/setuptools.txt

FROM build AS build-operator
COPY pyproject.toml README.md LICENSE /src/
COPY operator /src/operator
RUN mkdir /src/trainer && pip wheel --no-index --no-deps --no-build-isolation -w /dist /src

FROM base AS operator
ARG PIP_CERT=""
ARG PIP_INDEX_URL=""
COPY requirements/operator.txt /tmp/
RUN --mount=type=cache,target=/root/.cache/pip,id=pip \
    pip install --require-hashes -r /tmp/operator.txt
COPY --from=build-operator /dist /tmp/dist
RUN pip install --no-index --no-deps /tmp/dist/*.whl
ENV HOME=/home/app
WORKDIR /home/app
USER 1000:1000
ENTRYPOINT ["python", "-m", "trainingjob.engine"]

FROM build AS build-trainer
COPY pyproject.toml README.md LICENSE /src/
COPY trainer /src/trainer
RUN mkdir /src/operator && pip wheel --no-index --no-deps --no-build-isolation -w /dist /src

# KubeRay starts Ray by `/bin/bash -c "ulimit -n 65536; ray start …"`: no entrypoint of its own.
FROM base AS trainer
# torch.compile calls a compiler while the training runs.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
ARG PIP_CERT=""
ARG PIP_INDEX_URL=""
COPY requirements/trainer.txt /tmp/
RUN --mount=type=cache,target=/root/.cache/pip,id=pip \
    pip install --require-hashes -r /tmp/trainer.txt
COPY --from=build-trainer /dist /tmp/dist
# The scripts belong to the operator's half of the project, which is not in here.
RUN pip install --no-index --no-deps /tmp/dist/*.whl \
 && rm /opt/venv/bin/trainingjob /opt/venv/bin/kubectl-trainingjob
ENV HOME=/home/app
WORKDIR /home/app
USER 1000:1000
CMD ["python", "-m", "trainingjob_trainer"]
