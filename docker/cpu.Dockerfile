# autotune with its runtime, for CPUs, and for engines that the image of a service adds.
#   docker build -f docker/cpu.Dockerfile -t autotune .
#   docker run --rm -v "$PWD:/work" autotune search --budget 6m
FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY autotune autotune
COPY profiles profiles
COPY search_spaces search_spaces
COPY drafts drafts
# The builds of torch for CPUs are in an index of their own: those of the package index bring CUDA.
RUN python -m venv /opt/autotune \
    && /opt/autotune/bin/pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && /opt/autotune/bin/pip install --no-cache-dir --constraint constraints.txt ".[runtime]"

FROM python:3.11-slim
RUN useradd --uid 10001 --create-home autotune && install -d -o autotune /work
COPY --from=build /opt/autotune /opt/autotune
ENV PATH=/opt/autotune/bin:$PATH
USER 10001
WORKDIR /work
ENTRYPOINT ["autotune"]
