# The core of autotune in vLLM's image, for `search --backend vllm` and the other verbs of engines.
#   docker build -f docker/vllm.Dockerfile -t autotune-vllm .
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" autotune-vllm search --backend vllm=MODEL --workload prompts.jsonl
ARG VLLM=v0.32.0
FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY autotune autotune
COPY profiles profiles
COPY search_spaces search_spaces
COPY drafts drafts
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM vllm/vllm-openai:${VLLM}
# Whatever vLLM has installed keeps its version: pip refuses to change it.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip list --format=freeze > /tmp/installed.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/installed.txt /wheels/*.whl \
    && rm /tmp/installed.txt \
    && useradd --uid 10001 --create-home autotune && install -d -o autotune /work
USER 10001
WORKDIR /work
ENTRYPOINT ["autotune"]
