# A service in a container, on a CPU:
#
#     docker build -t slackwater .
#     docker run -p 127.0.0.1:8123:8123 -v slackwater:/state slackwater
#
# It prints a key and the dashboard's address. For a GPU build on an image that has CUDA
# (--build-arg BASE=...), run with --gpus all, and add `--device cuda` to the command.
ARG BASE=python:3.12-slim
FROM ${BASE} AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python3 -m pip wheel -q --no-deps -w /dist .

FROM ${BASE}
# Actions need an isolating backend; bubblewrap is the smallest.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /dist /dist
RUN python3 -m pip install -q --no-cache-dir -c /tmp/constraints.txt "$(echo /dist/*.whl)[serve,rl]" \
    && rm -rf /dist
RUN useradd --create-home slackwater && mkdir /state && chown slackwater /state
USER slackwater
VOLUME /state
EXPOSE 8123
# Callers name the service as they reach it: list those names with --allowed-host.
ENTRYPOINT ["slackwater"]
CMD ["up", "--host", "0.0.0.0", "--state", "/state", "--allowed-host", "localhost"]
