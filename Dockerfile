# A server of language models on CPUs. Arguments are those of `paceline serve`:
#   docker build -t paceline .
#   docker run -p 8000:8000 -v paceline:/home/paceline/.cache paceline smollm2-135m
ARG BASE=python:3.13-slim-bookworm

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# dependencies first: a change of the sources does not fetch them again
COPY requirements/build.txt requirements/runtime.txt requirements/
RUN python3 -m venv /opt/paceline \
 && /opt/paceline/bin/pip install --no-cache-dir --disable-pip-version-check -r requirements/runtime.txt
RUN python3 -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --disable-pip-version-check -r requirements/build.txt
COPY CMakeLists.txt pyproject.toml README.md LICENSE ./
COPY paceline paceline
RUN /opt/build/bin/pip wheel . --no-build-isolation --no-deps --disable-pip-version-check --wheel-dir dist \
 && /opt/paceline/bin/pip install --no-cache-dir --no-deps --disable-pip-version-check dist/*.whl

FROM ${BASE}
COPY --from=build /opt/paceline /opt/paceline
# the cache exists and belongs to the user, so that a volume mounted there does, too
RUN useradd --create-home --uid 1000 paceline \
 && install -d -o paceline -g paceline /home/paceline/.cache
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1
USER paceline
WORKDIR /home/paceline
VOLUME /home/paceline/.cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# the model may have to be fetched first
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["paceline", "serve", "--host", "0.0.0.0"]
