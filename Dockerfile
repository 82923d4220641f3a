# The image of the server, the dashboard and workers without an accelerator: docs/servers.md, "On a server". One image
# for all three, so that they have the same code. A worker with a GPU is an image on top of it:
#   FROM nautile:local
#   RUN /opt/nautile/.venv/bin/python -m pip install --no-cache-dir "/opt/nautile[gpu]"    (as root)
FROM python:3.12-slim

ENV PATH=/opt/nautile/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NAUTILE_STORE=/store

# The runtime of OpenMP, which the embedded teacher is linked with; everything else comes with the packages.
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
# A new volume on /store takes over that folder's owner.
RUN useradd --create-home --uid 1000 nautile && install --directory --owner=nautile --group=nautile /store

WORKDIR /opt/nautile

# As `make` sets up .venv, without the tools of development: the installer and all packages by digest. Code that changes
# leaves these layers as they are.
COPY requirements/installer.lock requirements/production.lock requirements/
RUN python -m venv .venv
RUN .venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements/installer.lock
RUN .venv/bin/uv pip install --no-cache --compile-bytecode --python .venv/bin/python --no-deps --require-hashes -r requirements/production.lock

COPY . .
RUN .venv/bin/uv pip install --no-cache --python .venv/bin/python --no-deps --no-build-isolation --editable .
# The user cannot write here, so each process would compile what it imports.
RUN .venv/bin/python -m compileall -q common configs data model evals rl store tasks flows uses

USER nautile
ENTRYPOINT ["nautile"]
CMD ["--help"]
